"""Generalized advantage estimation against its definition, term by term."""

import itertools

import numpy as np
import pytest

import ppo

GAMMA, LAMBDA = 0.9, 0.7


def advantages(
    rewards: np.ndarray, values: np.ndarray, next_values: np.ndarray, *ends: np.ndarray
) -> np.ndarray:
    """What the script makes of these arrays."""
    rollout = ppo.Rollout(None, None, rewards, *ends, None)
    args = ppo.Args(gamma=GAMMA, gae_lambda=LAMBDA)
    return ppo.compute_advantages(rollout, values, next_values, args)


def brute_force(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminations: np.ndarray,
    dones: np.ndarray,
) -> np.ndarray:
    """Sum (gamma lambda)^k delta_{t+k} up to the first end, for one environment."""
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(len(rewards) - t):
            after = 0.0 if terminations[t + k] else next_values[t + k]
            delta = rewards[t + k] + GAMMA * after - values[t + k]
            total += (GAMMA * LAMBDA) ** k * delta
            if dones[t + k]:
                break
        advantages.append(total)
    return np.array(advantages)


@pytest.mark.parametrize(
    "ends", itertools.product(["", "terminated", "truncated", "both"], repeat=4)
)
def test_against_the_sum(ends: tuple[str, ...]) -> None:
    """Every pattern of terminations, truncations and both over four steps."""
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 4, 1))
    terminations = np.array([[end in ("terminated", "both")] for end in ends])
    dones = np.array([[end != ""] for end in ends])
    steps = rewards, values, next_values, terminations, dones
    expected = brute_force(*(x[:, 0] for x in steps))
    np.testing.assert_allclose(advantages(*steps)[:, 0], expected, rtol=1e-12)


def test_environments_do_not_mix() -> None:
    """Environments side by side get what each gets alone."""
    rng = np.random.default_rng(1)
    rewards, values, next_values = rng.normal(size=(3, 20, 5))
    terminations, truncations = rng.random((2, 20, 5)) < 0.2
    steps = rewards, values, next_values, terminations, terminations | truncations
    together = advantages(*steps)
    for i in range(5):
        np.testing.assert_allclose(together[:, i], brute_force(*(x[:, i] for x in steps)))


def test_by_hand() -> None:
    """Two steps: the second terminates, so that its next value doesn't count."""
    rewards, values = np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]])
    terminations = np.array([[False], [True]])
    got = advantages(rewards, values, np.array([[4.0], [100.0]]), terminations, terminations)
    # delta_1 = 2 - 4 = -2; delta_0 = 1 + 0.9 * 4 - 3 = 1.6; 1.6 + 0.63 * -2 = 0.34
    np.testing.assert_allclose(got, [[0.34], [-2.0]])
