"""Generalized advantage estimation in the training loop against its definition, term by term."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers import MODULES, Batch, kept_batches, probe, trained, watching
from probe_envs import Scripted

import ppo

GAMMA, LAMBDA = 0.9, 0.7


def brute_force(deltas: np.ndarray, dones: np.ndarray) -> list[float]:
    """Sum (gamma lambda)^k delta_{t+k} up to the first end, for one environment."""
    advantages = []
    for t in range(len(deltas)):
        end = t + 1
        while end < len(deltas) and not dones[end - 1]:
            end += 1
        advantages.append(sum((GAMMA * LAMBDA) ** (k - t) * deltas[k] for k in range(t, end)))
    return advantages


def deviation() -> float:
    """The standard deviation of all discounted sums of rewards, which episodes begin anew."""
    sums = []
    for steps in Scripted.played:
        running_sum = 0.0
        for _, reward, _, terminated, truncated in steps:
            running_sum = GAMMA * running_sum + reward
            sums.append(running_sum)
            running_sum *= not (terminated or truncated)
    return float(np.std(sums))


def compared(name: str, patterns: list[str], num_steps: int) -> None:
    """Train where episodes end by these patterns, and compare all three iterations."""
    num_envs, seen = len(patterns), []

    def see(agent: Any, batch: Batch, indices: torch.Tensor) -> None:
        seen.append(batch)
        played = [steps[-num_steps:] for steps in Scripted.played]
        obs, rewards, next_obs, terminations, truncations = (
            np.array([[steps[t][i] for steps in played] for t in range(num_steps)])
            for i in range(5)
        )
        np.testing.assert_array_equal(batch.obs, obs.reshape(-1, 3))
        with torch.no_grad():
            values, next_values = (
                agent.get_value(torch.as_tensor(x)).double().numpy() for x in (obs, next_obs)
            )
        np.testing.assert_allclose(batch.values, values.ravel(), atol=1e-5)
        torch.testing.assert_close(batch.returns, batch.advantages + batch.values)
        rewards = (rewards / deviation()).clip(-10, 10)
        deltas = rewards + GAMMA * next_values * ~terminations - values
        dones = terminations | truncations
        expected = [brute_force(deltas[:, i], dones[:, i]) for i in range(num_envs)]
        got = batch.advantages.view(num_steps, num_envs)
        np.testing.assert_allclose(got.T, expected, rtol=1e-4, atol=1e-5)

    Scripted.played.clear()
    flags = probe(name, "Scripted", patterns=",".join(patterns))
    flags |= {"num_envs": num_envs, "num_steps": num_steps, "gamma": GAMMA, "gae_lambda": LAMBDA}
    flags |= {"total_timesteps": 3 * num_envs * num_steps, "num_minibatches": 2, "update_epochs": 2}
    with watching(MODULES[name], see, once=True):
        trained(name, **flags)
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_against_the_sum(name: str) -> None:
    """All patterns of four steps, side by side; and long episodes that go on in other rollouts."""
    compared(name, ["".join(ends) for ends in itertools.product("-tcb", repeat=4)], 4)
    rng = np.random.default_rng(1)
    compared(name, ["".join(rng.choice([*"------tcb"], 37)) for _ in range(5)], 20)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("terminates", "expected"),
    [
        # delta_1 = 4 - 2 = 2; delta_0 = 4 + 0.5 * 2 - 1 = 4; 4 + 0.25 * 2 = 4.5
        (True, [4.5, 2.0]),
        # The last one is worth 3: delta_1 = 4 + 0.5 * 3 - 2 = 3.5; 4 + 0.25 * 3.5 = 4.875
        (False, [4.875, 3.5]),
    ],
)
def test_by_hand(
    terminates: bool, expected: list, vectorization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, worth 1 and 2, with a reward of 1 each: the second terminates, or is cut."""
    # Discounted sums of rewards are 1 and 1.5, of a deviation of 0.25, so that 1 is scaled to 4.
    # The last observation is kept, although the reset overwrites it with one that is worth 1.
    monkeypatch.setattr(ppo.Agent, "get_value", lambda self, obs: obs[:, 0] + 1)
    flags = probe("ppo", "Overwriting", lengths=[2], terminates=terminates)
    flags |= {"num_envs": 1, "num_steps": 4, "num_minibatches": 1, "total_timesteps": 4}
    flags |= {"vectorization": vectorization}
    with kept_batches(ppo) as batches:
        trained("ppo", **flags, gamma=0.5, gae_lambda=0.5)
    assert batches[0].obs[:, 0].tolist() == [0, 1, 0, 1]
    assert batches[0].advantages.tolist() == pytest.approx(2 * expected)
    assert batches[0].returns.tolist() == pytest.approx(2 * [expected[0] + 1, expected[1] + 2])
