"""Environments of EnvPool and gymnasium's CartPole on arrays, against gymnasium's single ones."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import NEEDS_ENVPOOL, scalars
from gymnasium.envs.box2d.lunar_lander import heuristic
from helpers import refusal

import ppo
import ppo_continuous

SOURCES = ["native", pytest.param("envpool", marks=NEEDS_ENVPOOL)]


def fast_envs(envs: Any) -> Any:
    """The `FastEnvs` below the wrappers."""
    while not isinstance(envs, (ppo.FastEnvs, ppo_continuous.FastEnvs)):
        envs = envs.env
    return envs


@pytest.mark.parametrize("limit", [None, 10])
@pytest.mark.parametrize("source", SOURCES)
def test_like_single_environments(source: str, limit: int | None) -> None:
    """Each step is that of gymnasium's CartPole in the same state, and so are the ends.

    Poles that always are pushed one way fall in the 8th to 11th step: with a limit of 10 steps,
    some fall before it, some at it, some are cut. The reset follows within the step.
    """
    envs = ppo.make_envs(ppo.Args(vectorization=source), 32)
    if limit:
        fast_envs(envs).limit = limit
    single = gym.make("CartPole-v1").unwrapped
    obs, _ = envs.reset(seed=1)
    lengths, kinds, ended = np.zeros(32, int), set(), 0
    rng = np.random.default_rng(0)
    for t in range(1200):
        actions = np.ones(32, int) if limit else rng.integers(2, size=32)
        after, rewards, terminated, truncated, infos = envs.step(actions)
        lengths += 1
        assert after.dtype == np.float32
        for i in range(32):
            single.reset()
            single.state, single.steps_beyond_terminated = obs[i].astype(float), None
            expected, reward, failed, _, _ = single.step(int(actions[i]))
            cut = lengths[i] == (limit or 500)
            near = np.abs(np.abs(expected[[0, 2]]) - [2.4, 12 * np.pi / 180]).min() < 1e-5
            assert near or terminated[i] == failed
            assert truncated[i] == cut
            assert rewards[i] == reward
            kinds.add((bool(terminated[i]), bool(truncated[i])))
            if terminated[i] or truncated[i]:
                assert infos["final_obs"][i] == pytest.approx(expected, abs=1e-5)
                assert np.abs(after[i]).max() <= 0.05
                assert infos["_episode"][i]
                assert infos["episode"]["r"][i] == infos["episode"]["l"][i] == lengths[i]
                lengths[i], ended = 0, ended + 1
            else:
                assert after[i] == pytest.approx(expected, abs=1e-5)
                assert "_episode" not in infos or not infos["_episode"][i]
        obs = after
        if t > 60 and limit:
            break
    at_the_limit = {(True, True), (False, True)} if limit else set()
    assert kinds == {(False, False), (True, False)} | at_the_limit
    assert ended > 100
    envs.close()


@pytest.mark.parametrize("limit", [500, -1])
def test_native_limit(limit: int) -> None:
    """A pole that is balanced by a rule stands until the limit of steps; -1 is none."""
    env_kwargs = {"max_episode_steps": -1} if limit == -1 else {}
    envs = ppo.make_envs(ppo.Args(vectorization="native", env_kwargs=env_kwargs), 4)
    obs, _ = envs.reset(seed=1)
    for t in range(1, 601):
        obs, _, terminated, truncated, infos = envs.step((obs[:, 2] + obs[:, 3] > 0).astype(int))
        assert not terminated.any()
        at_limit = limit == 500 and t % 500 == 0
        assert truncated.tolist() == [at_limit] * 4
        if at_limit:
            assert infos["episode"]["l"].tolist() == [500] * 4
    envs.close()


@pytest.mark.parametrize("source", SOURCES)
def test_seeds(source: str) -> None:
    """The same seed gives the same run, bit for bit, another one another; no two copies agree."""

    def observed(seed: int) -> np.ndarray:
        env_seed = ppo.seed_everything(seed)
        envs = ppo.make_envs(ppo.Args(vectorization=source), 8)
        steps = [envs.reset(seed=env_seed)[0]]
        for t in range(100):
            steps.append(envs.step(np.full(8, t % 2))[0].copy())
        envs.close()
        return np.array(steps)

    first = observed(1)
    assert np.array_equal(first, observed(1))
    others = np.concatenate([first[0], observed(2)[0]])
    assert len(np.unique(others[:, 0])) == 16


@pytest.mark.parametrize("source", SOURCES)
def test_every_episode_counts(source: str) -> None:
    """Episodes follow one another without a gap: each step belongs to one, which is reported."""
    flags = {"env_id": "CartPole-v1", "num_envs": 8, "num_steps": 64, "total_timesteps": 1024}
    ppo.train(ppo.Args(**flags, vectorization=source, eval_episodes=0))
    lengths = scalars("charts/episodic_length")
    assert lengths == scalars("charts/episodic_return")
    assert len(lengths) > 20
    assert 1024 - 8 * 64 < sum(length for _, length in lengths) <= 1024


@NEEDS_ENVPOOL
def test_out_of_lockstep() -> None:
    """First episodes end all over Pendulum's 200 steps, unreported; then each takes 200."""
    envs = ppo_continuous.make_envs(
        ppo_continuous.Args(env_id="Pendulum-v1", vectorization="envpool"), 64
    )
    ppo_continuous.seed_everything(1)
    envs.reset()
    ends, reported = [[] for _ in range(64)], []
    for t in range(1, 601):
        _, _, terminated, truncated, infos = envs.step(np.zeros((64, 1)))
        assert not terminated.any()
        for i in np.flatnonzero(truncated):
            ends[i].append(t)
            if not np.isnan(infos["episode"]["r"][i]):
                reported.append(infos["episode"]["l"][i])
    firsts = [x[0] for x in ends]
    assert all(np.diff(x).tolist() == [200, 200] for x in ends)
    assert len(set(firsts)) > 40
    assert 0 < min(firsts) <= 20
    assert 180 < max(firsts) <= 200
    assert set(reported) == {200}
    assert len(reported) == 128 + firsts.count(200)
    envs.close()


@NEEDS_ENVPOOL
@pytest.mark.parametrize(
    ("env_id", "hidden"),
    [
        ("HalfCheetah-v5", 1),
        ("Hopper-v5", 1),
        ("Walker2d-v5", 1),
        ("Ant-v5", 2),
        ("Humanoid-v5", 2),
        ("Swimmer-v5", 2),
        ("InvertedPendulum-v5", 0),
        ("InvertedDoublePendulum-v5", 0),
    ],
)
def test_mujoco_is_gymnasiums(env_id: str, hidden: int) -> None:
    """From the same state, EnvPool's first 10 steps observe, pay and end as gymnasium's.

    An observation begins with the positions but for `hidden` ones, which don't matter, and the
    velocities. A double pendulum's has sines and cosines in place of its two angles.
    """
    ppo_continuous.seed_everything(1)  # EnvPool's seeds
    args = ppo_continuous.Args(env_id=env_id, vectorization="envpool")
    envs, single = ppo_continuous.make_envs(args, 1), gym.make(env_id)
    rng, steps = np.random.default_rng(0), 0
    low, high = single.action_space.low, single.action_space.high
    for _ in range(10):
        obs, _ = envs.reset()
        single.reset()
        model = single.unwrapped.model
        state = obs[0].astype(float)
        if env_id == "InvertedDoublePendulum-v5":
            state = np.array([state[0], *np.arctan2(state[1:3], state[3:5]), *state[5:]])
        positions = np.concatenate([np.zeros(hidden), state[: model.nq - hidden]])
        single.unwrapped.set_state(positions, state[model.nq - hidden :][: model.nv])
        for _ in range(10):
            action = rng.uniform(-1, 1, len(low)).astype(np.float32)
            obs, reward, terminated, truncated, infos = envs.step(action[None])
            after = infos["final_obs"] if terminated[0] else obs
            expected = single.step((low + high) / 2 + (high - low) / 2 * action)
            assert after[0] == pytest.approx(expected[0], rel=1e-2, abs=1e-2)
            assert reward[0] == pytest.approx(expected[1], rel=1e-2, abs=1e-2)
            assert (terminated[0], truncated[0]) == expected[2:4]
            steps += 1
            if terminated[0]:
                break
    assert steps > 50
    envs.close()


@NEEDS_ENVPOOL
def test_acrobot_is_gymnasiums() -> None:
    """From the same state, each step of EnvPool's is that of gymnasium's."""
    ppo.seed_everything(1)  # EnvPool's seeds
    envs = ppo.make_envs(ppo.Args(env_id="Acrobot-v1", vectorization="envpool"), 1)
    single = gym.make("Acrobot-v1")
    obs, _ = envs.reset()
    single.reset()
    rng = np.random.default_rng(0)
    for _ in range(100):
        cos1, sin1, cos2, sin2, *velocities = obs[0].astype(float)
        angles = np.arctan2([sin1, sin2], [cos1, cos2])
        single.unwrapped.state = np.concatenate([angles, velocities])
        action = rng.integers(3)
        obs, reward, terminated, truncated, _ = envs.step(np.array([[action]]))
        expected = single.step(action)
        assert obs[0] == pytest.approx(expected[0], abs=1e-3)
        assert (reward[0], terminated[0], truncated[0]) == expected[1:4]
    envs.close()


@NEEDS_ENVPOOL
def test_lunar_lander_is_gymnasiums() -> None:
    """gymnasium's own pilot gets the same returns, in about as many steps, over 100 episodes.

    States can't be set there, so means are compared: they differ by less than 4 standard errors.
    """
    found = {}
    for source in ("sync", "envpool"):
        args = ppo.Args(env_id="LunarLander-v3", vectorization=source)
        ppo.seed_everything(1)
        envs = ppo.make_envs(args, 20)
        pilot = SimpleNamespace(unwrapped=SimpleNamespace(continuous=False))
        obs, _ = envs.reset(seed=1)
        episodes, counts = [], np.zeros(20, int)
        while counts.min() < 5:
            actions = np.array([[heuristic(pilot, x)] for x in obs.astype(float)])
            obs, _, _, _, infos = envs.step(actions)
            for i in np.flatnonzero(infos.get("_episode", [])):
                counts[i] += 1
                if counts[i] <= 5:
                    episodes.append((infos["episode"]["r"][i], infos["episode"]["l"][i]))
        envs.close()
        found[source] = np.array(episodes)
    means = np.array([x.mean(0) for x in found.values()])
    errors = np.array([x.var(0) / len(x) for x in found.values()]).sum(0) ** 0.5
    assert found["envpool"].shape == (100, 2)
    assert means[0][0] > 150
    assert (np.abs(means[0] - means[1]) < 4 * errors).all()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--vectorization", "native", "--env-id", "Acrobot-v1"], "vector entry point"),
        (["--vectorization", "native", "--mask-actions"], "masks need --vectorization sync"),
        (["--vectorization", "envpool", "--env-id", "CartPole-v1"], "pip install envpool"),
        pytest.param(
            ["--vectorization", "envpool", "--env-id", "Taxi-v4"],
            "not supported",
            marks=NEEDS_ENVPOOL,
        ),
    ],
)
def test_sources_that_lack_it(flags: list[str], problem: str, tmp_path: Path) -> None:
    """An environment that a source lacks, or a source that isn't installed, ends in a sentence."""
    if "pip" in problem:
        (tmp_path / "envpool.py").write_text("raise ImportError('not installed')")
    assert problem in refusal("ppo", *flags, env=os.environ | {"PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize("source", SOURCES)
def test_video(source: str) -> None:
    """Videos are of gymnasium's single environment."""
    flags = {"total_timesteps": 512, "eval_episodes": 1, "capture_video": True}
    ppo.train(ppo.Args(**flags, vectorization=source))
    assert len(list(Path("runs").rglob("*.mp4"))) == 1
