"""Generalized advantage estimation in the training loop against its definition, term by term."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from conftest import watching
from probe_envs import Scripted

import ppo
import ppo_continuous

GAMMA, LAMBDA = 0.9, 0.7


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


def check_run(
    script: Any, patterns: list[str], num_steps: int, monkeypatch: Any, **flags: Any
) -> int:
    """Train where episodes end by these patterns; compare all that is learned from with sums.

    Returns how many batches were compared: one an iteration, or, recomputed, one an epoch.
    """
    num_envs, compared, scaled, latest = len(patterns), [], [], [None, None]
    scale_rewards = script.Agent.scale_rewards

    def keep(agent: Any, rewards: np.ndarray, ends: np.ndarray, gamma: float) -> np.ndarray:
        assert gamma == GAMMA
        scaled.append((rewards.copy(), scale_rewards(agent, rewards, ends, gamma).copy(), ends))
        return scaled[-1][1]

    def value(agent: Any, rows: list[np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            values = agent.get_value(torch.as_tensor(np.concatenate(rows)))
        return values.view(num_steps, num_envs).double().numpy()

    def see(agent: Any, batch: Any, indices: torch.Tensor) -> None:
        if batch is latest[0]:
            return
        first_of_iteration = latest[1] != len(scaled)
        latest[:] = batch, len(scaled)
        played = [steps[-num_steps:] for steps in Scripted.played]
        assert {len(steps) for steps in Scripted.played} == {num_steps * len(scaled)}
        # Of each step, along the first dimension, and each environment.
        obs, rewards, next_obs, terminated, truncated = (
            [np.stack([steps[t][i] for steps in played]) for t in range(num_steps)]
            for i in range(5)
        )
        rewards, terminated, truncated = map(np.stack, (rewards, terminated, truncated))
        np.testing.assert_array_equal(batch.obs, np.concatenate(obs))
        np.testing.assert_array_equal(scaled[-1][0], rewards.astype(np.float32))
        ends = terminated | truncated
        ends[-1] |= len(scaled) == 3  # the last checkpoint is an end of all episodes
        np.testing.assert_array_equal(scaled[-1][2], ends)
        values, next_values = value(agent, obs), value(agent, next_obs)
        if first_of_iteration or script.Args(**arguments).recompute_advantages:
            torch.testing.assert_close(batch.values.double(), torch.as_tensor(values).flatten())
        arrays = scaled[-1][1], values, next_values, terminated, terminated | truncated
        expected = np.stack([brute_force(*(x[:, i] for x in arrays)) for i in range(num_envs)], 1)
        got = batch.advantages.view(num_steps, num_envs)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(batch.returns, batch.advantages + batch.values)
        compared.append(first_of_iteration)

    Scripted.played.clear()
    monkeypatch.setattr(script.Agent, "scale_rewards", keep)
    arguments = {
        "env_id": "probe_envs:Scripted-v0",
        "env_kwargs": {"patterns": ",".join(patterns), "continuous": script is ppo_continuous},
        "num_envs": num_envs,
        "num_steps": num_steps,
        "total_timesteps": 3 * num_envs * num_steps,
        "num_minibatches": 2,
        "update_epochs": 2,
        "learning_rate": 0.01,  # so that the epochs of an iteration have other values
        "checkpoint_interval": 0,
        "eval_episodes": 0,
        "gamma": GAMMA,
        "gae_lambda": LAMBDA,
    } | flags
    with watching(script, see):
        script.train(script.Args(**arguments))
    assert sum(compared) == 3
    return len(compared)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("script", [ppo, ppo_continuous])
def test_against_the_sum(script: Any, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pattern of terminations, truncations and both over four steps, in an environment each.

    Three iterations, of which the second goes on with the episodes of the first.
    """
    patterns = ["".join(ends) for ends in itertools.product("-tcb", repeat=4)]
    flags = {"recompute_advantages": recompute}
    assert check_run(script, patterns, 4, monkeypatch, **flags) == (6 if recompute else 3)


def test_environments_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments side by side, with long episodes, get what each gets alone."""
    rng = np.random.default_rng(1)
    patterns = ["".join(rng.choice([*"------tcb"], 37)) for _ in range(5)]
    check_run(ppo, patterns, 20, monkeypatch)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        # delta_1 = 2 - 4 = -2; delta_0 = 1 + 0.9 * 4 - 3 = 1.6; 1.6 + 0.63 * -2 = 0.34
        ("terminated", [0.34, -2.0]),
        # The last observation is worth 5: delta_1 = 2 + 0.9 * 5 - 4 = 2.5; 1.6 + 0.63 * 2.5 = 3.175
        ("truncated", [3.175, 2.5]),
    ],
)
def test_by_hand(end: str, expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, where an observation is worth itself: the second terminates, or is cut."""
    monkeypatch.setattr(ppo.Agent, "get_value", lambda self, obs: obs[:, 0])
    seen = []
    sizes = {"num_envs": 1, "num_steps": 4, "num_minibatches": 1, "update_epochs": 1}
    flags = {"gamma": GAMMA, "gae_lambda": LAMBDA, "total_timesteps": 4, "eval_episodes": 0}
    kwargs = {"env_id": "probe_envs:Told-v0", "env_kwargs": {"end": end}}
    with watching(ppo, lambda agent, batch, indices: seen.append(batch)):
        ppo.train(ppo.Args(**sizes, **flags, **kwargs))
    assert seen[0].obs[:, 0].tolist() == [3, 4, 3, 4]
    assert seen[0].advantages.tolist() == pytest.approx(2 * expected)
    assert seen[0].returns.tolist() == pytest.approx(2 * [expected[0] + 3, expected[1] + 4])
