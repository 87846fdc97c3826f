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


def compared(name: str, patterns: list[str], num_steps: int, recompute: bool = False) -> int:
    """Train where episodes end by these patterns, and compare; return the number of batches."""
    # The second iteration goes on with the episodes of the first, the third begins anew.
    num_envs, seen = len(patterns), []

    def see(agent: Any, batch: Batch, indices: torch.Tensor) -> None:
        if seen and batch.advantages is seen[-1].advantages:
            return
        seen.append(batch)
        played = [steps[-num_steps:] for steps in Scripted.played[-num_envs:]]
        obs, rewards, next_obs, terminations, truncations = (
            np.array([[steps[t][i] for steps in played] for t in range(num_steps)])
            for i in range(5)
        )
        np.testing.assert_array_equal(batch.obs, obs.reshape(-1, 3))
        with torch.no_grad():
            values, next_values = (
                agent.get_value(torch.as_tensor(x)).double().numpy() for x in (obs, next_obs)
            )
        np.testing.assert_allclose(batch.returns - batch.advantages, values.ravel(), atol=1e-5)
        if name == "ppo_continuous":
            rewards = (rewards / deviation()).clip(-10, 10)
        deltas = rewards + GAMMA * next_values * ~terminations - values
        dones = terminations | truncations
        expected = [brute_force(deltas[:, i], dones[:, i]) for i in range(num_envs)]
        got = batch.advantages.view(num_steps, num_envs)
        np.testing.assert_allclose(got.T, expected, rtol=1e-4, atol=1e-5)
        first = seen[-2] if recompute and len(seen) % 2 == 0 else batch
        torch.testing.assert_close(first.returns, first.advantages + batch.values)

    Scripted.played.clear()
    flags = probe(name, "Scripted", patterns=",".join(patterns)) | {"checkpoint_interval": 2}
    flags |= {"num_envs": num_envs, "num_steps": num_steps, "gamma": GAMMA, "gae_lambda": LAMBDA}
    flags |= {"total_timesteps": 3 * num_envs * num_steps, "num_minibatches": 2, "update_epochs": 2}
    flags |= {"recompute_advantages": recompute, "target_kl": None}
    with watching(MODULES[name], see):
        trained(name, **flags, learning_rate=0.001)  # so that values differ between epochs
    return len(seen)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_against_the_sum(name: str, recompute: bool) -> None:
    """Every pattern of terminations, truncations and both over four steps, side by side."""
    patterns = ["".join(ends) for ends in itertools.product("-tcb", repeat=4)]
    assert compared(name, patterns, 4, recompute) == (6 if recompute else 3)


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_long_episodes(name: str) -> None:
    """Episodes of other lengths than the rollout's, which go on from one rollout to the next."""
    rng = np.random.default_rng(1)
    patterns = ["".join(rng.choice([*"------tcb"], 37)) for _ in range(5)]
    assert compared(name, patterns, 20) == 3


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("terminates", "expected"),
    [
        # delta_1 = 1 - 4 = -3; delta_0 = 1 + 0.9 * 4 - 3 = 1.6; 1.6 + 0.63 * -3 = -0.29
        (True, [-0.29, -3.0]),
        # The last observation is worth 5: delta_1 = 1 + 0.9 * 5 - 4 = 1.5; 1.6 + 0.63 * 1.5 = 2.545
        (False, [2.545, 1.5]),
    ],
)
def test_by_hand(
    terminates: bool, expected: list, vectorization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, worth 3 and 4, with a reward of 1 each: the second terminates, or is cut."""
    # The last observation is kept, although the reset overwrites it with one that is worth 3.
    monkeypatch.setattr(ppo.Agent, "get_value", lambda self, obs: obs[:, 0] + 3)
    flags = probe("ppo", "Overwriting", lengths=[2], terminates=terminates)
    flags |= {"num_envs": 1, "num_steps": 4, "num_minibatches": 1, "total_timesteps": 4}
    flags |= {"vectorization": vectorization}
    with kept_batches(ppo) as batches:
        trained("ppo", **flags, gamma=GAMMA, gae_lambda=LAMBDA)
    assert batches[0].obs[:, 0].tolist() == [0, 1, 0, 1]
    assert batches[0].advantages.tolist() == pytest.approx(2 * expected)
    assert batches[0].returns.tolist() == pytest.approx(2 * [expected[0] + 3, expected[1] + 4])
