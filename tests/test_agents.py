"""The agents' distributions and statistics, against torch's and numpy's own."""

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BOTH, SCRIPTS
from helpers import MODULES, SHORT, kept_batches, new_agent, probe, trained, watching
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import ppo

# Of 6, 17 and 4 x 84 x 84 observations; of 3 choices, 6 numbers, and 4 choices.
ENV_IDS = {"ppo": "Acrobot-v1", "ppo_continuous": "HalfCheetah-v5", "ppo_atari": "ALE/Breakout-v5"}


def make(name: str, **flags: Any) -> tuple[Any, torch.Tensor]:
    """An agent whose policy is far from uniform, and observations for it."""
    torch.manual_seed(0)
    agent = new_agent(MODULES[name], MODULES[name].Args(env_id=ENV_IDS[name], **flags))
    head = agent.actor if name == "ppo_atari" else agent.actor[-1]
    head.weight.data.normal_(std=0.3)
    if name == "ppo_atari":
        return agent, torch.randint(256, (7, 4, 84, 84), dtype=torch.uint8)
    if name == "ppo_continuous":
        agent.log_std.data.normal_(std=0.3)
    obs = 3 * torch.randn(500, agent.actor[0].in_features) + 7
    agent.obs_rms.update(obs)
    obs[0] += 1000  # is clipped
    return agent, obs[:7]


def policy(agent: Any, obs: torch.Tensor) -> Any:
    """The distribution of actions, from the network's layers."""
    with torch.no_grad():
        if hasattr(agent, "network"):
            with torch.autocast("cpu", torch.bfloat16, enabled=agent.bf16):
                features = agent.network(obs / 255).float()
            return Categorical(logits=agent.actor(features))
        normalized = (obs - agent.obs_rms.mean) / agent.obs_rms.std
        output = agent.actor(normalized.clamp(-10, 10))
        if hasattr(agent, "log_std"):
            return Independent(Normal(output, agent.log_std.exp()), 1)
        return Categorical(logits=output)


@pytest.mark.parametrize(
    ("name", "flags"), [*((name, {}) for name in SCRIPTS), ("ppo_atari", {"bf16": True})]
)
def test_distributions(name: str, flags: dict) -> None:
    """Log-probabilities, entropies and modes are those of torch's distributions."""
    agent, obs = make(name, **flags)
    expected = policy(agent, obs)
    actions = expected.sample()
    logprobs, entropy, values = agent.evaluate_actions(obs, actions)
    close = {"rtol": 0.02, "atol": 0.02} if flags else {}  # bfloat16 is another one elsewhere
    torch.testing.assert_close(logprobs, expected.log_prob(actions), **close)
    torch.testing.assert_close(entropy, expected.entropy(), **close)
    torch.testing.assert_close(values, agent.get_value(obs))
    assert logprobs.shape == values.shape == (7,)
    assert logprobs.dtype == values.dtype == torch.float32
    modes = agent.act(obs.numpy())
    if name == "ppo_continuous":
        assert modes.dtype == np.float32
        np.testing.assert_allclose(modes, expected.mean, rtol=1e-4, atol=1e-5)
    else:
        assert modes.tolist() == expected.probs.argmax(-1).tolist()
        assert len({*modes.tolist()}) > 1 or name == "ppo_atari"


@BOTH
def test_samples(name: str) -> None:
    """Sampled, actions come as often as they should, with the mean and deviation they should."""
    agent, obs = make(name)
    n = 100_000
    actions = agent.act(obs[1:2].repeat(n, 1).numpy(), np.random.default_rng(0))
    expected = policy(agent, obs[1:2])
    if name == "ppo":
        shares = np.bincount(actions, minlength=3) / n
        assert abs(shares - expected.probs[0].numpy()).max() < 4 * 0.5 / n**0.5
        assert (shares > 0.01).sum() > 1
    else:
        deviations = (actions - expected.mean[0].numpy()) / expected.stddev[0].numpy()
        assert abs(deviations.mean(0)).max() < 4 / n**0.5
        np.testing.assert_allclose(np.cov(deviations.T), np.eye(6), atol=0.02)
        assert (abs(deviations) < 1).mean() == pytest.approx(math.erf(0.5**0.5), abs=0.01)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_acts_is_what_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its updates, not after, an iteration's agent would act as it did, with ratios of 1."""
    script, acted, drifts = MODULES[name], [], []
    act = script.Agent.act

    def keep(agent: Any, obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        acted.append((obs.copy(), deepcopy(rng)))
        return act(agent, obs, rng)

    def see(agent: Any, batch: Any, indices: torch.Tensor) -> None:
        with torch.no_grad():
            logprobs, _, _ = agent.evaluate_actions(batch.obs, batch.actions)
        drifts.append((logprobs - batch.logprobs).abs().max().item())
        if len(drifts) % per_iteration == 1:
            again = np.concatenate([act(agent, *inputs) for inputs in acted[-args.num_steps :]])
            np.testing.assert_array_equal(again, batch.actions)

    monkeypatch.setattr(script.Agent, "act", keep)
    args = script.Args(**SHORT[name] | {"target_kl": None, "update_epochs": 2})
    per_iteration = args.num_minibatches * args.update_epochs
    with watching(script, see):
        script.train(args)
    firsts, lasts = drifts[::per_iteration], drifts[per_iteration - 1 :: per_iteration]
    assert len(firsts) == args.total_timesteps / args.num_envs / args.num_steps
    assert max(firsts) < 1e-4
    assert min(lasts) > 1e-3


def test_running_statistics() -> None:
    """Batches of any size give the mean and variance of all that was seen, far from 0 too."""
    rng = np.random.default_rng(0)
    scale = {"loc": [100, -3, 0, 101325.3], "scale": [1, 0.1, 50, 1]}
    batches = [rng.normal(**scale, size=(n, 4)).astype(np.float32) for n in (7, 1, 500, 64)]
    rms = ppo.RunningMeanStd(4)
    for batch in batches:
        rms.update(torch.tensor(batch))
    seen = np.concatenate(batches).astype(np.float64)
    np.testing.assert_allclose(rms.mean, seen.mean(0), rtol=1e-4)
    np.testing.assert_allclose(rms.std, seen.std(0), rtol=5e-3)
    assert rms.count == len(seen)
    expected = ((seen - seen.mean(0)) / seen.std(0)).clip(-10, 10)
    np.testing.assert_allclose(rms(torch.tensor(seen).float()), expected, rtol=0.1, atol=0.05)
    assert rms(torch.tensor([[1e6] * 4, [-1e6] * 4])).tolist() == [[10.0] * 4, [-10.0] * 4]


@pytest.mark.parametrize("at", [1, 10, 29])
def test_a_wild_observation(at: int) -> None:
    """One of a million among 60,000 of about 1 blinds nobody; what is larger for good is seen."""
    rms, samples = ppo.RunningMeanStd(2), torch.randn(30, 2048, 2)
    samples[at, 0, 0] = 1e6
    for batch in samples:
        rms.update(batch)
    normalized = rms(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    assert (normalized[1] - normalized[0] > 1).all()  # it would be 2, and 0.0003 with the sample
    for batch in 1e6 * torch.randn(30, 2048, 2):
        rms.update(batch)
    assert (rms.std > 1e5).all()


@BOTH
def test_observations_are_normalized_alike(name: str) -> None:
    """Statistics are of all observations, change after the last gradient step, and are saved."""
    counts, script = [], MODULES[name]
    see = watching(script, lambda agent, *_: counts.append(agent.obs_rms.count.item()))
    with kept_batches(script) as batches, see:
        run = trained(name)
    assert [*dict.fromkeys(counts)] == [0, 512, 1024, 1536]
    seen = torch.cat([batch.obs for batch in batches]).numpy().astype(np.float64)
    saved = script.load_checkpoint(run)["agent"]
    assert saved["obs_rms.count"] == len(seen) == 2048
    np.testing.assert_allclose(saved["obs_rms.mean"], seen.mean(0), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(saved["obs_rms.std"], seen.std(0), rtol=1e-3)


@BOTH
def test_scaled_rewards_are_clipped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns that are always 1 have no deviation to divide by: 10 is the most."""
    # Where all values are 0, advantages are what rewards are scaled to.
    monkeypatch.setattr(MODULES[name].Agent, "get_value", lambda self, obs: 0 * obs[:, 0])
    with kept_batches(MODULES[name]) as batches:
        trained(name, **probe(name, "Probe"), total_timesteps=512)
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
