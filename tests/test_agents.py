"""The agents' distributions and statistics, against torch's and numpy's own."""

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU, SCRIPTS
from helpers import MODULES, SHORT, kept_batches, new_agent, probe, scalars, trained, watching
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import ppo_continuous

# Of 6, 17 and 84 x 84 x 4 observations; of 3 choices, 6 numbers, and 4 choices.
ENV_IDS = {"ppo": "Acrobot-v1", "ppo_continuous": "HalfCheetah-v5", "ppo_atari": "ALE/Breakout-v5"}


def make(name: str, **flags: Any) -> tuple[Any, torch.Tensor]:
    """An agent whose policy is far from uniform, and observations for it."""
    torch.manual_seed(0)
    agent = new_agent(MODULES[name], MODULES[name].Args(env_id=ENV_IDS[name], **flags))
    head = agent.actor if name == "ppo_atari" else agent.actor[-1]
    head.weight.data.normal_(std=0.3)
    if name == "ppo_atari":
        return agent, torch.randint(256, (7, 84, 84, 4), dtype=torch.uint8)
    if name == "ppo_continuous":
        agent.log_std.data.normal_(std=0.3)
        obs = 3 * torch.randn(500, 17) + 7
        agent.obs_rms.update(obs)
        obs[0] += 1000  # is clipped
        return agent, obs[:7]
    return agent, torch.randn(7, 6)


def policy(agent: Any, obs: torch.Tensor) -> Any:
    """The distribution of actions, from the network's layers."""
    with torch.no_grad():
        if hasattr(agent, "log_std"):
            normalized = (obs - agent.obs_rms.mean) / (agent.obs_rms.var + 1e-8).sqrt()
            mean = agent.actor[1:](normalized.clamp(-10, 10))
            return Independent(Normal(mean, agent.log_std.exp()), 1)
        if hasattr(agent, "network"):
            with torch.autocast("cpu", torch.bfloat16, enabled=agent.dtype == torch.bfloat16):
                obs = agent.network(obs.permute(0, 3, 1, 2) / 255).float()
        return Categorical(logits=agent.actor(obs))


class Doubled(nn.Linear):
    """A linear layer with another forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def hooked(layer: nn.Module) -> nn.Module:
    """The layer, with a hook that changes what it gives."""
    layer.register_forward_hook(lambda module, args, output: output + 2 * output.square())
    return layer


def changed_input(layer: nn.Module) -> nn.Module:
    """The layer, with a hook that changes what it gets, as PyTorch's pruning has one."""
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return layer


LAYERS = {
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Linear(8, 4)),
    "other": lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)),
    "subclass": lambda: nn.Sequential(nn.Tanh(), Doubled(5, 4), nn.Tanh()),
    "hooked layers": lambda: nn.Sequential(hooked(nn.Linear(5, 4)), hooked(nn.Tanh())),
    "changed input": lambda: nn.Sequential(nn.Linear(5, 4), changed_input(nn.Linear(4, 4))),
    "hooked network": lambda: nn.Sequential(hooked(nn.Sequential(nn.Linear(5, 4)))),
    "one layer": lambda: nn.Linear(5, 4),
    "no layer": nn.Sequential,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("make_actor", LAYERS.values(), ids=LAYERS)
def test_layers(make_actor: Callable, device: str) -> None:
    """A policy of any layers acts on arrays as they do on tensors, and stays on its device."""
    torch.manual_seed(0)
    agent = new_agent(ppo_continuous, ppo_continuous.Args("Pendulum-v1"))
    agent.actor = make_actor()
    agent.to(device)
    obs = torch.randn(7, 5)
    with torch.no_grad():
        expected = agent.actor(obs.to(device)).cpu().numpy()
    acted = agent.make_act()(obs.numpy(), 0.0)
    assert acted.dtype == np.float32
    np.testing.assert_allclose(acted, expected, rtol=1e-5, atol=1e-6)
    assert {x.device.type for x in agent.parameters()} == {device}


@pytest.mark.parametrize(
    ("name", "bf16"), [*((name, False) for name in SCRIPTS), (SCRIPTS[2], True)]
)
def test_distributions(name: str, bf16: bool) -> None:
    """Log-probabilities, entropies and modes are those of torch's distributions."""
    agent, obs = make(name, **({"bf16": True} if bf16 else {}))
    expected = policy(agent, obs)
    actions = expected.sample()
    logprobs, entropy, values = agent.evaluate_actions(obs, actions)
    torch.testing.assert_close(logprobs, expected.log_prob(actions))
    torch.testing.assert_close(entropy, expected.entropy())
    torch.testing.assert_close(values, agent.get_value(obs))
    assert logprobs.shape == values.shape == (7,)
    assert logprobs.dtype == values.dtype == torch.float32
    modes = agent.make_act()(obs.numpy(), 0.0)
    if name == "ppo_continuous":
        np.testing.assert_allclose(modes, expected.mean, rtol=1e-4, atol=1e-5)
    else:
        assert modes.tolist() == expected.probs.argmax(-1).tolist()
        assert len({*modes.tolist()}) > 1 or name == "ppo_atari"


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_samples(name: str) -> None:
    """With noise, actions come as often as they should, with the mean and deviation they should."""
    agent, obs = make(name)
    n, rng = 100_000, np.random.default_rng(0)
    noise = agent.sample_noise(rng, n)
    assert noise.dtype == np.float32
    assert agent.sample_noise(rng, 3, 2).shape == (3, 2, *noise.shape[1:])
    actions = agent.make_act()(obs[:1].repeat(n, 1).numpy(), noise)
    expected = policy(agent, obs[:1])
    if name == "ppo":
        shares = np.bincount(actions, minlength=3) / n
        assert abs(shares - expected.probs[0].numpy()).max() < 4 * 0.5 / n**0.5
    else:
        deviations = (actions - expected.mean[0].numpy()) / expected.stddev[0].numpy()
        assert abs(deviations.mean(0)).max() < 4 / n**0.5
        np.testing.assert_allclose(np.cov(deviations.T), np.eye(6), atol=0.02)
        assert (abs(deviations) < 1).mean() == pytest.approx(math.erf(0.5**0.5), abs=0.01)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_acts_is_what_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its updates, not after, an iteration's agent would act as it did, with ratios of 1."""
    script, noises, drifts = MODULES[name], [], []
    sample_noise = script.Agent.sample_noise

    def keep(agent: Any, *shape: Any) -> np.ndarray:
        noises.append(sample_noise(agent, *shape))
        return noises[-1]

    def see(agent: Any, batch: Any, indices: torch.Tensor) -> None:
        with torch.no_grad():
            logprobs, _, _ = agent.evaluate_actions(batch.obs, batch.actions)
        drifts.append((logprobs - batch.logprobs).abs().max().item())
        if len(drifts) % per_iteration == 1:
            noise = noises[-1].reshape(len(batch.obs), -1)
            acted = agent.make_act()(batch.obs.numpy(), noise)
            wrong = ~np.isclose(acted, batch.actions, rtol=1e-4, atol=1e-4)
            assert wrong.mean() < 0.01  # rounding may decide between two choices

    monkeypatch.setattr(script.Agent, "sample_noise", keep)
    args = script.Args(**SHORT[name] | {"target_kl": None, "update_epochs": 2})
    per_iteration = args.num_minibatches * args.update_epochs
    with watching(script, see):
        script.train(args)
    firsts, lasts = drifts[::per_iteration], drifts[per_iteration - 1 :: per_iteration]
    assert len(firsts) == len(noises) == args.total_timesteps / args.num_envs / args.num_steps
    assert max(firsts) < 1e-4
    assert min(lasts) > 1e-3


def test_running_statistics() -> None:
    """Batches of any size give the mean and variance of all that was seen, far from 0 too."""
    rng = np.random.default_rng(0)
    scale = {"loc": [100, -3, 0, 101325.3], "scale": [1, 0.1, 50, 1]}
    batches = [rng.normal(**scale, size=(n, 4)).astype(np.float32) for n in (1, 7, 500, 64)]
    rms = ppo_continuous.RunningMeanStd(4)
    for batch in batches:
        rms.update(torch.tensor(batch))
    seen = np.concatenate(batches).astype(np.float64)
    np.testing.assert_allclose(rms.mean, seen.mean(0), rtol=1e-4)
    np.testing.assert_allclose(rms.var, seen.var(0), rtol=1e-2)
    assert rms.count == len(seen)
    expected = ((seen - seen.mean(0)) / seen.std(0)).clip(-10, 10)
    np.testing.assert_allclose(rms(torch.tensor(seen).float()), expected, rtol=0.1, atol=0.05)
    assert rms(torch.tensor([[1e6] * 4, [-1e6] * 4])).tolist() == [[10.0] * 4, [-10.0] * 4]


def test_observations_are_normalized_alike() -> None:
    """Statistics are of all observations, change after the last gradient step, and are saved."""
    counts, script = [], ppo_continuous
    see = watching(script, lambda agent, *_: counts.append(agent.obs_rms.count.item()))
    with kept_batches(script) as batches, see:
        run = trained("ppo_continuous", recompute_advantages=False)
    assert [*dict.fromkeys(counts)] == [0, 512, 1024, 1536]
    seen = torch.cat([batch.obs for batch in batches]).numpy().astype(np.float64)
    saved = script.load_checkpoint(run)["agent"]
    for module in ("obs_rms", "actor.0", "critic.0"):
        assert saved[f"{module}.count"] == len(seen) == 2048
        np.testing.assert_allclose(saved[f"{module}.mean"], seen.mean(0), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(saved[f"{module}.var"], seen.var(0), rtol=1e-3)


def test_evaluation_normalizes_alike() -> None:
    """An evaluation plays what the saved policy plays by hand, its statistics as they were."""
    run = trained("ppo_continuous", eval_episodes=3)
    args = ppo_continuous.load_checkpoint(run)["args"]
    agent = new_agent(ppo_continuous, args)
    ppo_continuous.load_checkpoint(run, agent)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("Pendulum-v1"))
    obs, _ = env.reset(seed=args.seed)
    for _ in range(600):
        mean = policy(agent, torch.tensor(obs[None])).mean[0].numpy()
        obs, _, _, is_over, _ = env.step(2 * mean.clip(-1, 1))
        if is_over:
            obs, _ = env.reset()
    assert len(env.return_queue) == 3
    assert scalars("eval/return")[0][1] == pytest.approx(np.mean(env.return_queue), rel=1e-3)


def test_scaled_rewards_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns that are always 1 have no deviation to divide by: 10 is the most."""
    # Where all values are 0, advantages are what rewards are scaled to.
    monkeypatch.setattr(ppo_continuous.Agent, "get_value", lambda self, obs: 0 * obs[:, 0])
    with kept_batches(ppo_continuous) as batches:
        trained("ppo_continuous", **probe("ppo_continuous", "Probe"), total_timesteps=512)
    assert {*batches[0].advantages.tolist()} == {10.0}


def is_orthogonal(layer: nn.Module, gain: float) -> bool:
    """Whether all singular values of the weights are this; biases must be 0."""
    values = torch.linalg.svdvals(layer.weight.detach().flatten(1))
    return torch.allclose(values, torch.tensor(gain), rtol=1e-4) and not layer.bias.any()


@pytest.mark.parametrize("name", SCRIPTS)
def test_initial_weights(name: str) -> None:
    """Orthogonal, of gain sqrt(2), 0.01 for the actor's head and 1 for the critic's (detail 2)."""
    script = MODULES[name]
    agent = new_agent(script, script.Args(env_id=ENV_IDS[name]))
    networks = [agent.network] if name == "ppo_atari" else [agent.actor[:-1], agent.critic[:-1]]
    layers = [x for net in networks for x in net if isinstance(x, nn.Linear | nn.Conv2d)]
    assert len(layers) == 4
    assert all(is_orthogonal(layer, 2**0.5) for layer in layers)
    heads = (agent.actor, agent.critic)
    actor, critic = heads if name == "ppo_atari" else (x[-1] for x in heads)
    assert is_orthogonal(actor, 0.01)
    assert is_orthogonal(critic, 1.0)
    if name == "ppo_continuous":
        assert agent.log_std.tolist() == [-0.5] * 6
