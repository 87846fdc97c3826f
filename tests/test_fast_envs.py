"""variants/fast_envs.py against gymnasium's single environments, and vector ones of others."""

from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from gymnasium.vector.utils import concatenate, create_empty_array
from helpers import only_run, scalars, trained

import ppo
from variants import fast_envs

VECTOR = "vector_entry_point"
NEEDS_ENVPOOL = pytest.mark.skipif(not find_spec("envpool"), reason="needs pip install envpool")
SOURCES = ["Arrays", pytest.param("EnvPool", marks=NEEDS_ENVPOOL)]


def make(env_id: str, num_envs: int, **kwargs: Any) -> gym.vector.VectorEnv:
    """The vector environment of this name."""
    return gym.make_vec(f"variants.fast_envs:{env_id}", num_envs, VECTOR, **kwargs)


@pytest.mark.parametrize("limit", [500, 10])
@pytest.mark.parametrize("source", SOURCES)
def test_like_single_cartpoles(source: str, limit: int) -> None:
    """Each step is that of gymnasium's CartPole in the same state, and nothing changes later."""
    # Poles that always are pushed one way fall in the 8th to 11th step: with a limit of 10 steps,
    # some fall before it, some at it, some are cut.
    kwargs = f'{{"max_episode_steps": {limit}, "stagger": false}}'
    args = ppo.Args(f"variants.fast_envs:{source}/CartPole-v1", kwargs, vectorization=VECTOR)
    envs = ppo.make_envs(args, 32)
    single = gym.make("CartPole-v1").unwrapped
    obs, _ = envs.reset(seed=1)
    kept, lengths, kinds, ends = [], np.zeros(32, int), set(), 0
    rng = np.random.default_rng(0)
    for _ in range(60 if limit == 10 else 600):
        actions = np.ones(32, int) if limit == 10 else rng.integers(2, size=32)
        after, rewards, terminated, truncated, infos = envs.step(actions)
        ended, last = terminated | truncated, infos.get("final_obs", after)
        kept += [(x, x.copy()) for x in (after, last)]
        lengths += 1
        for i in range(32):
            single.reset()
            single.state = obs[i].astype(float)
            expected, reward, failed, _, _ = single.step(int(actions[i]))
            near = np.abs(np.abs(expected[[0, 2]]) - [2.4, 12 * np.pi / 180]).min() < 1e-5
            assert near or terminated[i] == failed
            assert rewards[i] == reward
            assert (last if ended[i] else after)[i] == pytest.approx(expected, abs=1e-5)
        assert after.dtype == np.float32
        assert np.array_equal(truncated, lengths == limit)
        assert np.array_equal(infos.get("_episode_stats", np.zeros(32, bool)), ended)
        if ended.any():
            assert np.abs(after[ended]).max() <= 0.05
            for x in "rl":
                assert np.array_equal(infos["episode_stats"][x][ended], lengths[ended])
        kinds |= {*zip(terminated.tolist(), truncated.tolist(), strict=True)}
        obs, lengths, ends = after, lengths * ~ended, ends + ended.sum()
    at_limit = {(True, True), (False, True)} if limit == 10 else set()
    assert kinds == {(False, False), (True, False)} | at_limit
    assert ends > 100
    assert all(np.array_equal(x, copy) for x, copy in kept)


@pytest.mark.parametrize("source", SOURCES)
def test_limit_and_stagger(source: str) -> None:
    """Balanced poles stand until the limit; first ones until a random step before; -1 is none."""

    def ends(num_envs: int, **kwargs: Any) -> list[list[int]]:
        """The steps, of 1200, in which each environment's episodes end."""
        envs = make(f"{source}/CartPole-v1", num_envs, **kwargs)
        obs, _ = envs.reset(seed=1)
        truncations = []
        for _ in range(1200):
            actions = (obs @ [0.1, 0.3, 1, 1] > 0).astype(int)
            obs, _, terminated, truncated, _ = envs.step(actions)
            assert not terminated.any()
            truncations.append(truncated)
        return [(1 + np.flatnonzero(x)).tolist() for x in np.array(truncations).T]

    assert ends(2, stagger=False) == [[500, 1000]] * 2
    assert ends(2, stagger=False, max_episode_steps=300) == [[300, 600, 900, 1200]] * 2
    assert ends(2, max_episode_steps=-1) == [[], []]
    assert ends(1) == [[500, 1000]]
    staggered = ends(16)
    firsts = [x[0] for x in staggered]
    assert min(firsts) < 150 < 350 < max(firsts) <= 500
    assert len(set(firsts)) > 10
    assert staggered == [list(range(x, 1201, 500)) for x in firsts]


@pytest.mark.parametrize("source", SOURCES)
def test_seeds(source: str) -> None:
    """The same seed gives the same run, bit for bit, another one another; no two copies agree."""
    envs = make(f"{source}/CartPole-v1", 8)

    def observed(envs: Any, seed: int | None) -> np.ndarray:
        first, _ = envs.reset(seed=seed)
        return np.array([first, *(envs.step(np.full(8, t % 2))[0] for t in range(100))])

    first = observed(envs, 1)
    others = [observed(envs, seed)[0] for seed in (2, None)]
    assert len(np.unique(np.concatenate([first[0], *others])[:, 0])) == 24
    assert np.array_equal(first, observed(envs, 1))
    assert np.array_equal(first, observed(make(f"{source}/CartPole-v1", 8), 1))
    envs.close()
    assert np.array_equal(first, observed(envs, 1))


@pytest.mark.parametrize("source", SOURCES)
def test_trains(source: str) -> None:
    """Each step belongs to an episode, which is reported; the video is of gymnasium's CartPole."""
    flags = {"env_id": f"variants.fast_envs:{source}/CartPole-v1", "vectorization": VECTOR}
    flags |= {"num_envs": 8, "num_steps": 64, "total_timesteps": 1024, "eval_episodes": 1}
    checkpoint = ppo.load_checkpoint(trained("ppo", **flags))
    lengths = checkpoint["last_returns"]  # 1 a step
    assert 20 < len(lengths) < 100
    assert 1024 - 8 * 64 < sum(lengths) <= 1024
    args = ppo.Args(**checkpoint["args"] | {"env_kwargs": '{"stagger": true}'})
    assert scalars("eval/return") == [(1024, ppo.evaluate(args, only_run()))]
    args.capture_video = True
    assert 1 <= ppo.evaluate(args, only_run()) <= 500
    assert [*only_run().rglob("*.mp4")]


def test_flatten() -> None:
    """Rows of observations become what gymnasium makes of each."""
    parts = {"box": Box(-1, 1, (2, 2)), "one": Discrete(5, start=2)}
    space = Dict(parts | {"more": Dict({"bits": MultiBinary(3), "number": Box(0, 9, ())})})
    rows = [space.sample() for _ in range(4)]
    batch = concatenate(space, rows, create_empty_array(space, 4))
    expected = [gym.spaces.flatten(space, x) for x in rows]
    np.testing.assert_array_equal(fast_envs.flatten(space, batch), expected)


@NEEDS_ENVPOOL
def test_another_id() -> None:
    """What gymnasium doesn't have is named by a keyword, and has EnvPool's limit."""
    envs = make("EnvPool-v0", 4, name="CartpoleBalance-v1", stagger=False)
    first, _ = envs.reset(seed=1)
    ends = [envs.step(envs.action_space.sample())[3] for _ in range(1000)]
    assert first.shape == (4, 5) and np.flatnonzero(np.any(ends, 1)).tolist() == [999]
    with pytest.raises(gym.error.Error, match="Pong-v5 has images"):
        make("EnvPool-v0", 4, name="Pong-v5")
