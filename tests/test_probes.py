"""Environments with known answers, learned through `train` as a user would."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import kept_batches, scalars
from probe_envs import Bounded

import ppo
import ppo_continuous

GAMMA = 0.9
SETTINGS = {
    "num_envs": 4,
    "num_steps": 32,
    "num_minibatches": 4,
    "update_epochs": 4,
    "learning_rate": 3e-3,
    "gamma": GAMMA,
    "total_timesteps": 128 * 100,
    "clip_vloss": False,
}
CONTINUOUS = {"env_kwargs": {"continuous": True}}


def values(agent: Any, *observations: float) -> list[float]:
    """What the agent makes of observations, in units of the raw rewards."""
    with torch.no_grad():
        estimates = agent.get_value(torch.tensor(observations)[:, None])
    scale = agent.return_statistics.var.sqrt() if hasattr(agent, "return_statistics") else 1.0
    return (estimates * scale).tolist()


def actions(agent: Any, *observations: float) -> np.ndarray:
    """What the agent would do, without noise."""
    with torch.no_grad():
        return agent.get_action(torch.tensor(observations)[:, None]).numpy()


def test_constant_reward(train_agent: Callable) -> None:
    """Every observation is worth 1."""
    agent, score = train_agent(ppo, env_id="probe_envs:Probe-v0", **SETTINGS)
    assert values(agent, -1.0, 1.0) == pytest.approx([1, 1], abs=0.02)
    assert score == 1.0


@pytest.mark.parametrize("script", [ppo, ppo_continuous])
def test_reward_of_the_observation(script: Any, train_agent: Callable) -> None:
    """An observation is worth itself."""
    kwargs = CONTINUOUS if script is ppo_continuous else {}
    agent, _ = train_agent(script, env_id="probe_envs:Observed-v0", **SETTINGS, **kwargs)
    assert values(agent, -1.0, 1.0) == pytest.approx([-1, 1], abs=0.05)


@pytest.mark.parametrize("script", [ppo, ppo_continuous])
def test_discounted_reward(script: Any, train_agent: Callable) -> None:
    """A reward one step away is worth gamma times as much."""
    kwargs = CONTINUOUS if script is ppo_continuous else {}
    agent, score = train_agent(script, env_id="probe_envs:Delayed-v0", **SETTINGS, **kwargs)
    assert values(agent, 0.0, 1.0) == pytest.approx([GAMMA, 1], abs=0.05)
    assert score == 1.0


def test_better_action(train_agent: Callable) -> None:
    """The better of two actions is found, and -1 .. 1 is worth what it gives."""
    agent, score = train_agent(ppo, env_id="probe_envs:Acted-v0", **SETTINGS)
    assert actions(agent, -1.0, 1.0).ravel().tolist() == [1, 1]
    assert values(agent, -1.0, 1.0) == pytest.approx([1, 1], abs=0.1)
    assert score > 0.9


def test_better_action_as_observed(train_agent: Callable) -> None:
    """The better of two actions is found for each observation."""
    agent, score = train_agent(ppo, env_id="probe_envs:ActedAsObserved-v0", **SETTINGS)
    assert actions(agent, -1.0, 1.0).ravel().tolist() == [0, 1]
    assert score > 0.9


@pytest.mark.parametrize(
    ("env_id", "best"), [("Acted-v0", [0.5, 0.5]), ("ActedAsObserved-v0", [-0.5, 0.5])]
)
def test_best_continuous_action(env_id: str, best: list[float], train_agent: Callable) -> None:
    """The best of a range of actions is found."""
    agent, _ = train_agent(ppo_continuous, env_id=f"probe_envs:{env_id}", **SETTINGS, **CONTINUOUS)
    assert actions(agent, -1.0, 1.0).ravel() == pytest.approx(best, abs=0.1)


@pytest.mark.parametrize("state_std", [False, True])
def test_deviation_has_a_floor(state_std: bool, train_agent: Callable) -> None:
    """A best action that is the same everywhere draws the deviation down, to log_std_min."""
    flags = SETTINGS | CONTINUOUS | {"env_id": "probe_envs:Acted-v0", "state_std": state_std}
    lowest = []
    for log_std_min in (-20, -0.8):
        agent, _ = train_agent(ppo_continuous, log_std_min=log_std_min, **flags)
        with torch.no_grad():
            log_std = agent.get_distribution(torch.tensor([[-1.0], [1.0]]))[1]
        lowest.append(log_std.min().item())
    assert lowest[0] < -1
    assert lowest[1] == pytest.approx(-0.8, abs=0.1)
    assert lowest[1] >= np.float32(-0.8)


@pytest.mark.parametrize("script", [ppo, ppo_continuous])
def test_truncation_is_not_termination(script: Any, train_agent: Callable) -> None:
    """What a time limit cuts is worth what would have followed: 1 / (1 - 0.9) = 10, and 0.

    With a cut taken for an end, 1 would be worth less than 1 + 0.9 + 0.81 + 0.729 = 3.44; with
    the value of the next episode's first observation, about 10 x 3.44 / (3.44 + 6.56 / 2) ~ 5.
    """
    kwargs = {"max_episode_steps": 4}  # gymnasium's limit, which first episodes begin within
    kwargs = {"env_kwargs": kwargs | ({"continuous": True} if script is ppo_continuous else {})}
    settings = SETTINGS | {"total_timesteps": 128 * 250}
    agent, score = train_agent(script, env_id="probe_envs:Endless-v0", **settings, **kwargs)
    assert values(agent, 1.0) == pytest.approx([10], abs=1)
    assert values(agent, -1.0) == pytest.approx([0], abs=1)
    assert 0 < score < 4


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("multi_discrete", [2, 3, 4]),
        ("multi_discrete_2d", [2, 3, 4, 2]),
        ("multi_binary", [2, 2, 2, 2]),
        ("discrete", [3]),
    ],
)
def test_several_choices(kind: str, sizes: list[int], train_agent: Callable) -> None:
    """MultiDiscrete, MultiBinary and shifted Discrete actions are learned, each choice of them."""
    settings = SETTINGS | {"total_timesteps": 128 * 150}
    agent, score = train_agent(
        ppo, env_id="probe_envs:Choices-v0", env_kwargs={"kind": kind}, **settings
    )
    highest = [size - 1 for size in sizes]
    assert actions(agent, -1.0, 1.0).tolist() == [[0] * len(sizes), highest]
    assert score > 0.9
    biases = agent.actor[-1].bias.view(len(sizes), max(sizes))  # learning leaves the padding alone
    for row, size in zip(biases.tolist(), sizes, strict=True):
        assert set(row[size:]) <= {-1e8}
        assert max(map(abs, row[:size])) < 10


def test_masked_actions_are_never_taken(train_agent: Callable) -> None:
    """The better of two valid actions is learned; the environment breaks at an invalid one."""
    settings = SETTINGS | {"env_id": "probe_envs:Masked-v0", "total_timesteps": 128 * 150}
    _, score = train_agent(ppo, mask_actions=True, eval_episodes=20, **settings)
    assert score > 0.93 * 5 * (1 + 2 + 3 + 2 + 3 + 3) / 6  # the six pairs of valid actions
    with pytest.raises(AssertionError, match="was masked"):
        train_agent(ppo, **settings)


@pytest.mark.parametrize("flags", [{}, {"squash": True}, {"state_std": True}])
def test_actions_are_bounded_for_the_environment_only(
    flags: dict[str, Any], train_agent: Callable
) -> None:
    """The environment gets actions within its bounds; what is learned from is not bounded."""
    Bounded.received.clear()
    flags = flags | {"env_id": "probe_envs:Bounded-v0", "recompute_advantages": False}
    with kept_batches(ppo_continuous) as batches:
        agent, _ = train_agent(ppo_continuous, **SETTINGS, **flags)
    stored = torch.cat([batch.actions for batch in batches]).numpy()
    assert (np.abs(stored) > 1).mean() > 0.001
    low, high = np.array([2, -0.3]), np.array([10, 0])
    bound = np.tanh if agent.squash else lambda x: x.clip(-1, 1)
    expected = (low + high) / 2 + (high - low) / 2 * bound(stored)
    np.testing.assert_allclose(np.stack(Bounded.received), expected, rtol=1e-5, atol=1e-6)
    # And the best action, 8 and -0.1, is found: 0.5 and 1 / 3 of the way from the middle.
    assert bound(actions(agent, 1.0)[0]) == pytest.approx([0.5, 1 / 3], abs=0.1)


def test_bonus_for_entropy(train_agent: Callable) -> None:
    """With a bonus of 1, rewards of -1 and 1 are best played by their softmax; evaluated, by 1."""
    flags = SETTINGS | {"env_id": "probe_envs:Acted-v0", "norm_adv": False, "ent_coef": 1.0}
    agent, score = train_agent(ppo, eval_episodes=100, **flags)
    logprobs, _, _ = agent.evaluate_actions(torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1).long())
    assert logprobs.exp().tolist() == pytest.approx([1 / (1 + np.exp(-2))] * 2, abs=0.06)
    assert score < 0.95
    assert scalars("eval/return")[0][1] == 1
    assert scalars("eval/return_std")[0][1] == 0
