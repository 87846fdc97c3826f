"""variants/jax_envs.py on an environment whose every number is known, and on one of gymnasium's."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from helpers import scalars, trained

jax = pytest.importorskip("jax", reason="needs pip install jax")
from variants import jax_envs  # noqa: E402 - imports jax


def make_counter(length: int) -> tuple[Callable, Callable, gym.spaces.Space]:
    """Counts from a random number on; action 1 ends an episode from `length` steps on."""

    def reset(key: Any) -> tuple:
        start = jax.random.randint(key, (), 100, 200)
        return {"start": start, "steps": 0}, {"now": start, "steps": 0}

    def step(key: Any, state: dict, action: Any) -> tuple:
        state = {"start": state["start"], "steps": state["steps"] + 1}
        ends = (state["steps"] >= length) & (action == 1)
        now = state["start"] + state["steps"]
        return state, {"now": now, "steps": state["steps"]}, 2.0 * state["steps"], ends

    return reset, step, gym.spaces.Discrete(2)


def test_every_number() -> None:
    """Ends, limits, last and first observations, rewards; resets are random, seeds repeat."""
    envs = jax_envs.JaxEnvs(3, make_counter, max_episode_steps=5, stagger=False, length=3)
    assert envs.single_observation_space.shape == (2,)
    for _ in range(2):
        obs, _ = envs.reset(seed=1)
        first = obs.copy()
        assert len({*obs[:, 0]}) == 3 and not obs[:, 1].any()
        for t in range(1, 16):
            obs, rewards, terminated, truncated, infos = envs.step(np.array([0, 1, 0]))
            steps = np.array([(t - 1) % 5, (t - 1) % 3, (t - 1) % 5]) + 1
            ended = steps == [5, 3, 5]
            assert rewards.tolist() == (2 * steps).tolist()
            assert terminated.tolist() == [False, ended[1], False]
            assert truncated.tolist() == [ended[0], False, ended[2]]
            last = infos["final_obs"] if ended.any() else obs
            assert last[:, 1].tolist() == steps.tolist()
            assert (last[:, 0] - steps).min() >= 100
            assert obs[:, 1].tolist() == np.where(ended, 0, steps).tolist()
        again, _ = envs.reset(seed=1)
        assert np.array_equal(again, first)


def test_first_episodes_are_cut() -> None:
    """Each at another step; an evaluation's isn't."""
    envs = jax_envs.JaxEnvs(64, make_counter, max_episode_steps=50, length=999)
    envs.reset(seed=1)
    cut = [envs.step(np.zeros(64, int))[3].sum() for _ in range(50)]
    assert sum(cut) == 64 and max(cut) < 10
    envs = jax_envs.JaxEnvs(1, make_counter, max_episode_steps=50, length=999)
    envs.reset(seed=1)
    assert [envs.step(np.zeros(1, int))[3].item() for _ in range(50)] == [False] * 49 + [True]


def test_trains() -> None:
    """gymnasium's own CartPole in JAX, through the script."""
    name = "gymnasium.envs.phys2d.cartpole:CartPoleFunctional"
    flags = {"env_id": "variants.jax_envs:Functional-v0", "vectorization": "vector_entry_point"}
    flags |= {"env_kwargs": f'{{"name": "{name}", "max_episode_steps": 100}}', "num_envs": 32}
    trained("ppo", **flags | {"total_timesteps": 65536, "num_steps": 32, "num_minibatches": 16})
    assert scalars("charts/episodic_return")[-1][1] > 60
