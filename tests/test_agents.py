"""The agents' distributions and statistics, against torch's and numpy's own."""

import json
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU, SCRIPTS
from helpers import MODULES, SHORT, kept_batches, new_agent, scalars, trained, watching
from probe_envs import Scripted
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import ppo
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
@pytest.mark.parametrize("layers", LAYERS)
def test_in_numpy(layers: str, device: str) -> None:
    """A network of any layers gives the same for arrays, and stays on its device."""
    torch.manual_seed(0)
    network = LAYERS[layers]().to(device)
    obs = torch.randn(7, 5)
    with torch.no_grad():
        expected = network(obs.to(device)).cpu().numpy()
    got = ppo_continuous.in_numpy(network)(obs.numpy())
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert {x.device.type for x in network.parameters()} <= {device}


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
    """At an iteration's first minibatch all ratios are 1, and the agent, with the noise of the
    rollout, would act as it did there; after the last minibatch neither is so.
    """
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
    outliers = torch.tensor([[1e6] * 4, [-1e6] * 4])
    assert rms(outliers).tolist() == [[10.0] * 4, [-10.0] * 4]
    assert ppo_continuous.in_numpy(rms)(outliers.numpy()).tolist() == [[10.0] * 4, [-10.0] * 4]


def test_observations_are_normalized_alike() -> None:
    """Statistics are of all environments' observations, change only after an iteration's last
    gradient step, and are saved with the weights, for the actor and the critic.
    """
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
    script, flags = ppo_continuous, {"num_envs": 4, "eval_episodes": 3}
    run = trained("ppo_continuous", **flags)
    args = script.load_checkpoint(run)["args"]
    agent = new_agent(script, args)
    script.load_checkpoint(run, agent)
    env, returns = gym.make("Pendulum-v1"), []
    obs, _ = env.reset(seed=args.seed)
    for _ in range(3):
        total, is_over = 0.0, False
        while not is_over:
            mean = policy(agent, torch.tensor(obs[None])).mean[0].numpy()
            obs, reward, _, is_over, _ = env.step(2 * mean.clip(-1, 1))
            total += reward
        returns.append(total)
        obs, _ = env.reset()
    assert scalars("eval/return", run)[0][1] == pytest.approx(np.mean(returns), rel=1e-3)
    assert script.evaluate(args, run) == pytest.approx(np.mean(returns), rel=1e-3)


def test_scaled_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards are divided by the deviation of all discounted returns, which episodes restart.

    Where all values are 0 and lambda is, advantages are what rewards are scaled to.
    """
    script = ppo_continuous
    monkeypatch.setattr(script.Agent, "get_value", lambda self, obs: 0 * obs[:, 0])
    kwargs = {"patterns": "--t----c-b---,-----------c", "continuous": True}
    args = script.Args(
        env_id="probe_envs:Scripted-v0",
        env_kwargs=json.dumps(kwargs),
        total_timesteps=96,
        num_envs=2,
        num_steps=16,
        num_minibatches=1,
        update_epochs=1,
        gamma=0.8,
        gae_lambda=0.0,
        eval_episodes=0,
    )
    Scripted.played.clear()
    with kept_batches(script) as batches:
        script.train(args)
    played = Scripted.played[-2:]
    returns, discounted = [], [0.0, 0.0]
    for i, batch in enumerate(batches):
        expected = []
        for t in range(16 * i, 16 * i + 16):
            for env in (0, 1):
                _, reward, _, terminated, truncated = played[env][t]
                discounted[env] = 0.8 * discounted[env] + reward
                returns.append(discounted[env])
                expected.append(reward)
                discounted[env] *= not (terminated or truncated)
        np.testing.assert_allclose(batch.advantages, expected / np.std(returns), rtol=1e-3)
    assert len(batches) == 3


def test_scaled_rewards_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns that are always 1 have no deviation to divide by: 10 is the most."""
    monkeypatch.setattr(ppo_continuous.Agent, "get_value", lambda self, obs: 0 * obs[:, 0])
    flags = SHORT["ppo_continuous"] | {"env_id": "probe_envs:Probe-v0", "total_timesteps": 512}
    with kept_batches(ppo_continuous) as batches:
        kwargs = json.dumps({"continuous": True})
        ppo_continuous.train(ppo_continuous.Args(**flags, env_kwargs=kwargs))
    assert {*batches[0].advantages.tolist()} == {10.0}


def is_orthogonal(layer: nn.Module, gain: float) -> bool:
    """Whether the weights' rows or columns are, and have this length; biases must be 0."""
    weight = layer.weight.flatten(1)
    gram = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
    same = torch.allclose(gram, gain**2 * torch.eye(len(gram)), rtol=0, atol=1e-4 * gain)
    return same and not layer.bias.any()


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


@pytest.mark.parametrize(
    ("script", "env_id", "kwargs", "told"),
    [
        (ppo, "Choices", {"kind": "multi_discrete"}, "see recipes/multi_discrete.diff"),
        (ppo, "Choices", {"kind": "multi_binary"}, "see recipes/multi_discrete.diff"),
        (ppo, "Choices", {"kind": "discrete"}, r"Discrete\(3, start=7\), not 0 to n - 1"),
        (ppo, "Unusable", {"kind": "dict"}, "actions Dict"),
        (ppo, "Probe", {"continuous": True}, "ppo_continuous.py for a Box"),
        (ppo_continuous, "Probe", {}, r"Discrete\(2\), not a vector within bounds"),
        (ppo_continuous, "Unusable", {"kind": "scalar"}, "not a vector within bounds"),
        (ppo_continuous, "Unusable", {"kind": "matrix"}, "not a vector within bounds"),
        (ppo_continuous, "Unusable", {"kind": "unbounded"}, "not a vector within bounds"),
        (ppo_continuous, "Unusable", {"kind": "half"}, "not a vector within bounds"),
    ],
)
def test_refused_actions(script: Any, env_id: str, kwargs: dict, told: str) -> None:
    """Actions that a script can't choose are refused, with what to do instead."""
    args = script.Args(env_id=f"probe_envs:{env_id}-v0", env_kwargs=json.dumps(kwargs))
    with pytest.raises(script.UsageError, match=told):
        script.make_envs(args, 2)


def test_next_step_resets_are_refused() -> None:
    """gymnasium's own CartPole for arrays resets in the next step, which would be learned from."""
    with pytest.raises(ppo.UsageError, match="doesn't reset in the same step"):
        ppo.make_envs(ppo.Args(vectorization="vector_entry_point"), 2)
