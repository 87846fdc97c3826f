"""Environments with known answers, learned through `train` as a user would."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import BOTH
from helpers import MODULES, kept_batches, latest_run, new_agent, only_run, probe
from probe_envs import Bounded

import ppo_continuous

GAMMA = 0.9
SETTINGS = {"num_envs": 4, "num_steps": 32, "num_minibatches": 4, "update_epochs": 4}
SETTINGS |= {"total_timesteps": 128 * 60, "learning_rate": 5e-3, "gamma": GAMMA}
SETTINGS |= {"clip_vloss": False, "eval_episodes": 0}


def learned(name: str, env: str, flags: dict = SETTINGS, **kwargs: Any) -> tuple[Any, float]:
    """The agent that learned this probe environment, made with these keywords, and the score."""
    script = MODULES[name]
    args = script.Args(**probe(name, env, **kwargs) | flags)
    score = script.train(args)
    agent = new_agent(script, args)
    agent.load_state_dict(script.load_checkpoint(latest_run())["agent"])
    return agent, score


def values(agent: Any, *observations: float) -> list[float]:
    """What the agent makes of observations, in units of the raw rewards."""
    with torch.no_grad():
        estimates = agent.get_value(torch.tensor(observations)[:, None])
    return (estimates * agent.return_rms.std).tolist()


def actions(agent: Any, *observations: float) -> list:
    """What the agent would do, without noise."""
    return agent.act(np.array(observations, np.float32)[:, None]).squeeze().tolist()


@BOTH
def test_values(name: str) -> None:
    """A reward that is observed, and one that is followed by another."""
    agent, _ = learned(name, "Observed")
    assert values(agent, -1.0, 1.0) == pytest.approx([-1, 1], abs=0.1)
    agent, score = learned(name, "Overwriting", lengths=[2], terminates=True)
    assert values(agent, 0.0, 1.0) == pytest.approx([1 + GAMMA, 1], abs=0.1)
    assert score == 2


@BOTH
@pytest.mark.parametrize("observed", [False, True])
def test_best_actions(name: str, observed: bool) -> None:
    """The best action is found, the same for all observations or another for each."""
    agent, score = learned(name, "Acted", observed=observed)
    found = actions(agent, -1.0, 1.0)
    if name == "ppo":
        assert found == [0 if observed else 1, 1]
        assert values(agent, -1.0, 1.0) == pytest.approx([1, 1], abs=0.15)
        assert score > 0.9
    else:
        assert found == pytest.approx([-0.5 if observed else 0.5, 0.5], abs=0.1)
        assert agent.log_std.item() < -1.5


def test_deviation_has_a_floor_and_a_ceiling() -> None:
    """A best action that is the same everywhere draws it down, a bonus for entropy drives it up."""
    agent, _ = learned("ppo_continuous", "Acted", SETTINGS | {"log_std_min": -0.8})
    assert agent.log_std.item() == np.float32(-0.8)
    agent, _ = learned("ppo_continuous", "Acted", SETTINGS | {"log_std_max": 0.4, "ent_coef": 10})
    assert agent.log_std.item() == np.float32(0.4)


@BOTH
def test_truncation_is_not_termination(name: str) -> None:
    """What a time limit cuts is worth what would have followed: 1 / (1 - 0.9) = 10, and 0."""
    # With a cut taken for an end, 1 would be worth less than 1 + 0.9 + 0.81 + 0.729 = 3.44; with
    # the value of the next episode's first observation, about 10 x 3.44 / (3.44 + 6.56 / 2) ~ 5.
    # gymnasium's limit is what first episodes begin within.
    flags = SETTINGS | {"total_timesteps": 128 * 140}
    agent, score = learned(name, "Endless", flags, max_episode_steps=4)
    assert values(agent, -1.0, 1.0) == pytest.approx([0, 10], abs=1)
    # Reported are raw returns, of whole episodes.
    returns = MODULES[name].load_checkpoint(only_run())["last_returns"]
    assert {*returns} == {0.0, 4.0}
    assert score == pytest.approx(np.mean(returns))


def test_actions_are_bounded_for_the_environment_only() -> None:
    """The environment gets actions scaled and clipped to 2 .. 10 and -0.3 .. 0, learning not."""
    Bounded.received.clear()
    with kept_batches(ppo_continuous) as batches:
        agent, _ = learned("ppo_continuous", "Bounded")
    stored = torch.cat([batch.actions for batch in batches]).numpy()
    assert (np.abs(stored) > 1).mean() > 0.001
    low, high = np.array([2, -0.3]), np.array([10, 0])
    expected = (low + high) / 2 + (high - low) / 2 * stored.clip(-1, 1)
    np.testing.assert_allclose(np.stack(Bounded.received), expected, rtol=1e-5, atol=1e-6)
    assert actions(agent, 1.0) == pytest.approx([0.5, 1 / 3], abs=0.1)  # 8 and -0.1


def test_vector_entry_point() -> None:
    """A vector environment of the environment's own, that resets in the same step, is learned."""
    agent, score = learned("ppo", "Vector", SETTINGS | {"vectorization": "vector_entry_point"})
    assert actions(agent, -1.0, 1.0) == [0, 1]
    assert score > 0.9
