"""Environments with known answers, learned through `train` as a user would."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers import MODULES, kept_batches, scalars, train_agent
from probe_envs import Bounded

GAMMA = 0.9
SETTINGS = {
    "num_envs": 4,
    "num_steps": 32,
    "num_minibatches": 4,
    "update_epochs": 4,
    "learning_rate": 5e-3,
    "gamma": GAMMA,
    "total_timesteps": 128 * 60,
    "clip_vloss": False,
}
BOTH = pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])


def learned(name: str, probe: str, kwargs: dict | None = None, **flags: Any) -> tuple[Any, float]:
    """The agent that learned this environment, and the score."""
    kwargs = {"continuous": True} if kwargs is None and name == "ppo_continuous" else kwargs or {}
    env = {"env_id": f"probe_envs:{probe}-v0", "env_kwargs": json.dumps(kwargs)}
    return train_agent(MODULES[name], **SETTINGS | env | flags)


def values(agent: Any, *observations: float) -> list[float]:
    """What the agent makes of observations, in units of the raw rewards."""
    with torch.no_grad():
        estimates = agent.get_value(torch.tensor(observations)[:, None])
    scale = agent.return_rms.std if hasattr(agent, "return_rms") else 1.0
    return (estimates * scale).tolist()


def actions(agent: Any, *observations: float) -> list:
    """What the agent would do, without noise."""
    return agent.make_act()(np.array(observations, np.float32)[:, None], 0.0).squeeze().tolist()


@pytest.mark.parametrize(
    ("name", "probe", "observed", "worth"),
    [
        ("ppo", "Probe", (-1.0, 1.0), [1, 1]),
        ("ppo", "Observed", (-1.0, 1.0), [-1, 1]),
        ("ppo", "Delayed", (0.0, 1.0), [GAMMA, 1]),
        ("ppo_continuous", "Observed", (-1.0, 1.0), [-1, 1]),
        ("ppo_continuous", "Delayed", (0.0, 1.0), [GAMMA, 1]),
    ],
)
def test_values(name: str, probe: str, observed: tuple[float, ...], worth: list[float]) -> None:
    """A constant reward, one that is observed, and one that comes a step later."""
    agent, score = learned(name, probe)
    assert values(agent, *observed) == pytest.approx(worth, abs=0.1)
    assert score == 1.0 or probe == "Observed"


@BOTH
@pytest.mark.parametrize(
    ("probe", "discrete", "continuous"),
    [("Acted", [1, 1], [0.5, 0.5]), ("ActedAsObserved", [0, 1], [-0.5, 0.5])],
)
def test_best_actions(name: str, probe: str, discrete: list, continuous: list) -> None:
    """The best action is found, the same for all observations or another for each."""
    agent, score = learned(name, probe)
    found = actions(agent, -1.0, 1.0)
    if name == "ppo":
        assert found == discrete
        assert values(agent, -1.0, 1.0) == pytest.approx([1, 1], abs=0.15)
        assert score > 0.9
    else:
        assert found == pytest.approx(continuous, abs=0.1)
        assert agent.log_std.item() < -1.5


def test_deviation_has_a_floor() -> None:
    """A best action that is the same everywhere draws the deviation down, to log_std_min."""
    agent, _ = learned("ppo_continuous", "Acted", log_std_min=-0.8)
    assert agent.log_std.item() == np.float32(-0.8)
    assert np.exp(-0.8) == pytest.approx(scalars("charts/policy_std")[-1][1])


@BOTH
def test_truncation_is_not_termination(name: str) -> None:
    """What a time limit cuts is worth what would have followed: 1 / (1 - 0.9) = 10, and 0.

    With a cut taken for an end, 1 would be worth less than 1 + 0.9 + 0.81 + 0.729 = 3.44; with
    the value of the next episode's first observation, about 10 x 3.44 / (3.44 + 6.56 / 2) ~ 5.
    """
    kwargs = {"max_episode_steps": 4}  # gymnasium's limit, which first episodes begin within
    kwargs |= {"continuous": True} if name == "ppo_continuous" else {}
    agent, score = learned(name, "Endless", kwargs, total_timesteps=128 * 140)
    assert values(agent, -1.0, 1.0) == pytest.approx([0, 10], abs=1)
    assert 0 < score < 4


def test_actions_are_bounded_for_the_environment_only() -> None:
    """The environment gets actions scaled and clipped to 2 .. 10 and -0.3 .. 0, learning doesn't.

    What is stored is what was sampled; the best actions, 8 and -0.1, are 0.5 and 1 / 3.
    """
    Bounded.received.clear()
    with kept_batches(MODULES["ppo_continuous"]) as batches:
        agent, _ = learned("ppo_continuous", "Bounded", {}, recompute_advantages=False)
    stored = torch.cat([batch.actions for batch in batches]).numpy()
    assert (np.abs(stored) > 1).mean() > 0.001
    low, high = np.array([2, -0.3]), np.array([10, 0])
    expected = (low + high) / 2 + (high - low) / 2 * stored.clip(-1, 1)
    np.testing.assert_allclose(np.stack(Bounded.received), expected, rtol=1e-5, atol=1e-6)
    assert actions(agent, 1.0) == pytest.approx([0.5, 1 / 3], abs=0.1)


def test_bonus_for_entropy() -> None:
    """With a bonus of 1, rewards of -1 and 1 are best played by their softmax; evaluated, by 1."""
    flags = {"norm_adv": False, "ent_coef": 1.0, "eval_episodes": 20}
    agent, score = learned("ppo", "Acted", **flags)
    logprobs, _, _ = agent.evaluate_actions(torch.tensor([[-1.0], [1.0]]), torch.ones(2).long())
    assert logprobs.exp().tolist() == pytest.approx([1 / (1 + np.exp(-2))] * 2, abs=0.06)
    assert score < 0.95
    assert scalars("eval/return")[0][1] == 1


def test_vector_entry_point() -> None:
    """A vector environment of the environment's own, that resets in the same step, is learned."""
    agent, score = train_agent(
        MODULES["ppo"],
        **SETTINGS | {"env_id": "probe_envs:Vector-v0", "vectorization": "vector_entry_point"},
    )
    assert actions(agent, -1.0, 1.0) == [0, 1]
    assert score > 0.9
