"""Generalized advantage estimation in the training loop against its definition, term by term."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers import MODULES, Batch, kept_batches, watching
from probe_envs import Scripted

GAMMA, LAMBDA = 0.9, 0.7


def brute_force(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminations: np.ndarray,
    truncations: np.ndarray,
) -> list[float]:
    """Sum (gamma lambda)^k delta_{t+k} up to the first end, for one environment."""
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(len(rewards) - t):
            after = 0.0 if terminations[t + k] else next_values[t + k]
            total += (GAMMA * LAMBDA) ** k * (rewards[t + k] + GAMMA * after - values[t + k])
            if terminations[t + k] or truncations[t + k]:
                break
        advantages.append(total)
    return advantages


def compared(name: str, patterns: list[str], num_steps: int, recompute: bool) -> int:
    """Train where episodes end by these patterns; compare all that is learned from with sums.

    Three iterations: the second goes on with the episodes of the first, the third begins anew.
    Returns how many batches were compared: one an iteration, or, recomputed, one an epoch.
    """
    script, num_envs, latest = MODULES[name], len(patterns), [None]

    def see(agent: Any, batch: Batch, indices: torch.Tensor) -> None:
        if batch.advantages is latest[-1]:
            return
        latest.append(batch.advantages)
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
        np.testing.assert_allclose(batch.values, values.ravel(), rtol=1e-4, atol=1e-6)
        if name == "ppo_continuous":
            rewards = (rewards / agent.return_rms.std.item()).clip(-10, 10)
        arrays = rewards, values, next_values, terminations, truncations
        expected = [brute_force(*(x[:, i] for x in arrays)) for i in range(num_envs)]
        got = batch.advantages.view(num_steps, num_envs)
        np.testing.assert_allclose(got.T, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(batch.returns, batch.advantages + batch.values)

    Scripted.played.clear()
    kwargs = {"patterns": ",".join(patterns), "continuous": name == "ppo_continuous"}
    args = script.Args(
        env_id="probe_envs:Scripted-v0",
        env_kwargs=json.dumps(kwargs),
        num_envs=num_envs,
        num_steps=num_steps,
        total_timesteps=3 * num_envs * num_steps,
        num_minibatches=2,
        update_epochs=2,
        learning_rate=0.001,  # so that the epochs of an iteration have other values
        checkpoint_interval=2,
        eval_episodes=0,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        recompute_advantages=recompute,
        target_kl=None,
    )
    with watching(script, see):
        script.train(args)
    return len(latest) - 1


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_against_the_sum(name: str, recompute: bool) -> None:
    """Every pattern of terminations, truncations and both over four steps, side by side."""
    patterns = ["".join(ends) for ends in itertools.product("-tcb", repeat=4)]
    assert compared(name, patterns, 4, recompute) == (6 if recompute else 3)


def test_long_episodes() -> None:
    """Episodes of other lengths than the rollout's, which go on from one rollout to the next."""
    rng = np.random.default_rng(1)
    patterns = ["".join(rng.choice([*"------tcb"], 37)) for _ in range(5)]
    assert compared("ppo", patterns, 20, False) == 3


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
    script = MODULES["ppo"]
    monkeypatch.setattr(script.Agent, "get_value", lambda self, obs: obs[:, 0])
    sizes = {"num_envs": 1, "num_steps": 4, "num_minibatches": 1, "total_timesteps": 4}
    kwargs = {"env_id": "probe_envs:Told-v0", "env_kwargs": json.dumps({"end": end})}
    flags = {"gamma": GAMMA, "gae_lambda": LAMBDA, "eval_episodes": 0}
    with kept_batches(script) as batches:
        script.train(script.Args(**sizes, **flags, **kwargs))
    assert batches[0].obs[:, 0].tolist() == [3, 4, 3, 4]
    assert batches[0].advantages.tolist() == pytest.approx(2 * expected)
    assert batches[0].returns.tolist() == pytest.approx(2 * [expected[0] + 3, expected[1] + 4])
