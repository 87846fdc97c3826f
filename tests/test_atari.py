"""The accounting of lives and games, against the same games replayed without our code."""

import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import ale_py  # noqa: F401 - registers the games
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import kept_batches, scalars

import ppo_atari

AGENT = Path(ppo_atari.__file__).parent / "benchmark/agents/breakout"
GAME = {
    "eval_episodes": 0,
    "env_id": "ALE/Breakout-v5",
    "num_envs": 2,
    "num_threads": 1,
    "update_epochs": 1,
}


def test_lives_and_games(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost life and the end of a game are terminations; raw whole games are what is reported."""
    played, scaled = defaultdict(list), []
    make_envs, scale_rewards = ppo_atari.make_envs, ppo_atari.Agent.scale_rewards

    class Recorder(gym.vector.VectorWrapper):
        def reset(self, *, seed: int, **kwargs: Any) -> Any:
            played["seed"].append(seed)
            return self.env.reset(seed=seed, **kwargs)

        def step(self, actions: np.ndarray) -> Any:
            result = self.env.step(actions)
            for name, x in zip(("terminations", "truncations"), result[2:4], strict=True):
                played[name].append(x.copy())
            played["actions"].append(actions.copy())
            return result

    def keep(agent: Any, rewards: np.ndarray, dones: np.ndarray, gamma: float) -> np.ndarray:
        scaled.append(scale_rewards(agent, rewards, dones, gamma))
        ends = np.stack(played["terminations"][-len(dones) :])
        np.testing.assert_array_equal(dones[:-1], ends[:-1])
        return scaled[-1]

    monkeypatch.setattr(ppo_atari, "make_envs", lambda *args: Recorder(make_envs(*args)))
    monkeypatch.setattr(ppo_atari.Agent, "scale_rewards", keep)
    score = ppo_atari.train(ppo_atari.Args(total_timesteps=2048, **GAME))
    rewards, terminations = np.concatenate(scaled), np.stack(played["terminations"])
    assert not np.any(played["truncations"])

    envs = gym.make_vec(  # the games alone: no lives, no clipping, no statistics
        "ALE/Breakout-v5",
        2,
        vectorization_mode="vector_entry_point",
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        repeat_action_probability=0.0,
        reward_clipping=False,
    )
    _, info = envs.reset(seed=played["seed"][0])
    assert len(played["seed"]) == 1
    games, totals, lengths, lost = [], np.zeros(2), np.zeros(2), np.zeros(2, bool)
    for t, actions in enumerate(played["actions"]):
        lives = info["lives"].copy()
        _, raw, over, truncated, info = envs.step(np.where(lost, 1, actions))  # 1 serves the ball
        lost = (info["lives"] < lives) & ~over
        totals, lengths = totals + raw, lengths + 1
        np.testing.assert_array_equal(rewards[t], np.sign(raw))
        np.testing.assert_array_equal(terminations[t], over | (info["lives"] < lives))
        assert not truncated.any()
        for i in np.flatnonzero(over):
            games.append((2 * (t + 1), totals[i], lengths[i]))
            totals[i] = lengths[i] = 0
    returns, steps = scalars("charts/episodic_return"), scalars("charts/episodic_length")
    reported = [(step, x, n) for (step, x), (_, n) in zip(returns, steps, strict=True)]
    assert len(games) >= 4
    assert terminations.sum() >= 4 * len(games)  # five lives a game
    assert reported == games
    assert score == pytest.approx(np.mean([total for _, total, _ in games]))


def test_a_time_limit_truncates() -> None:
    """A game cut by the limit on its frames is truncated, and its last screen is kept."""
    limit = {"max_num_frames_per_episode": 400}
    envs = ppo_atari.make_envs(ppo_atari.Args(**GAME, env_kwargs=limit), 2)
    obs, _ = envs.reset(seed=0)
    for _ in range(100):
        last = obs
        obs, _, terminations, truncations, info = envs.step(np.zeros(2, np.int64))
        if truncations.any():
            break
    envs.close()
    assert truncations.any()
    assert not (terminations & truncations).any()
    i = int(truncations.argmax())
    assert info["final_obs"][i].shape == (84, 84, 4)
    # The next game's first screens are other ones, and the older ones are those of the last step.
    assert np.array_equal(info["final_obs"][i][..., :3], last[i][..., 1:])
    assert info["episode"]["l"][i] <= 100


class Games(gym.vector.VectorEnv):
    """Three games of which each step loses a life, and which cuts the first of them."""

    num_envs = 3
    screens = np.zeros((3, 4, 84, 84), np.uint8)

    def __init__(self, game: str) -> None:
        self.ale = gym.make_vec(game).unwrapped.ale
        self.actions = []

    def reset(self, **kwargs: Any) -> Any:
        self.lives = np.array([6, 6, 6])
        return self.screens, {"lives": self.lives.copy()}

    def step(self, actions: np.ndarray) -> Any:
        self.actions.append(actions.tolist())
        self.lives -= [1, 1, 0]
        no, cut = np.zeros(3, bool), np.array([True, False, False])
        last = np.array([None] * 3)  # objects, as of gymnasium's own vector environments
        last[0] = np.full_like(self.screens[0], 7)
        info = {"lives": self.lives.copy(), "final_obs": last}
        return self.screens, np.zeros(3), no, cut, info


@pytest.mark.parametrize("whole_games", [False, True])
def test_a_time_limit_after_an_extra_life(whole_games: bool) -> None:
    """A cut game is no termination, although the next one begins with fewer lives."""
    envs = ppo_atari.EpisodicLife(Games("ALE/Breakout-v5"), whole_games)
    envs.reset()
    _, _, terminations, truncations, info = envs.step(np.zeros(3, np.int64))
    assert terminations.tolist() == [False, not whole_games, False]
    assert truncations.tolist() == [True, False, False]
    assert info["final_obs"].shape == (3, 84, 84, 4)
    assert info["final_obs"][:2].mean((1, 2, 3)).tolist() == [7, 0]


@pytest.mark.parametrize("whole_games", [False, True])
@pytest.mark.parametrize(
    ("game", "second"), [("ALE/Breakout-v5", [3, 1, 3]), ("ALE/MsPacman-v5", [3, 3, 3])]
)
def test_fire_after_a_lost_life(game: str, second: list[int], whole_games: bool) -> None:
    """Fire is pressed after a lost life, not after the end of a game; where the game has it."""
    envs = ppo_atari.EpisodicLife(Games(game), whole_games)
    for _ in range(2):
        envs.reset()
        for _ in range(2):
            envs.step(np.full(3, 3))
    assert envs.env.actions == [[3, 3, 3], second] * 2


def test_the_screens_come_last() -> None:
    """Observations are ALE's, with the four screens along the last dimension, the newest last."""
    envs = ppo_atari.make_envs(ppo_atari.Args(**GAME), 2)
    seen, (obs, _) = [], envs.reset(seed=0)
    for _ in range(8):
        seen.append(obs[..., -1])
        obs = envs.step(np.array([1, 3]))[0]
    assert obs.shape == envs.observation_space.shape == (2, 84, 84, 4)
    assert obs.flags.c_contiguous
    assert envs.single_observation_space.contains(obs[0])
    assert any((screen != seen[0]).any() for screen in seen)
    np.testing.assert_array_equal(obs[..., :3], np.stack(seen[-3:], -1))
    envs.close()


def test_sticky_actions_are_off_by_default() -> None:
    """The same actions from the same start give the same screens; sticky actions give others."""
    screens = {}
    for probability in (0.0, 0.5):
        args = ppo_atari.Args(**GAME, repeat_action_probability=probability)
        for attempt in range(2):
            envs = ppo_atari.make_envs(args, 2)
            envs.reset(seed=3)
            rng = np.random.default_rng(0)
            seen = [envs.step(rng.integers(4, size=2))[0].copy() for _ in range(60)]
            screens[probability, attempt] = np.stack(seen)
            envs.close()
    np.testing.assert_array_equal(screens[0.0, 0], screens[0.0, 1])
    np.testing.assert_array_equal(screens[0.5, 0], screens[0.5, 1])
    assert (screens[0.0, 0] != screens[0.5, 0]).any()


def test_final_screens_and_lost_lives() -> None:
    """Where a life is lost, and nothing is reset, the final observation is the one that follows."""
    envs = ppo_atari.make_envs(ppo_atari.Args(**GAME), 2)
    envs.reset(seed=0)
    lost = over = 0
    for _ in range(300):
        obs, _, terminations, truncations, info = envs.step(np.array([0, 3]))
        assert terminations.any() == ("_final_obs" in info)
        assert not truncations.any()
        if "_final_obs" in info:
            np.testing.assert_array_equal(info["_final_obs"], terminations)
            for i in np.flatnonzero(terminations):
                is_over = "_episode" in info and bool(info["_episode"][i])
                over, lost = over + is_over, lost + (not is_over)
                assert np.array_equal(info["final_obs"][i], obs[i]) == (not is_over)
    envs.close()
    assert over >= 1
    assert lost >= 4 * over


def test_games_with_a_video(folder: Path) -> None:
    """Games that are recorded are played the same; they end with the last life, and are shown."""
    args = ppo_atari.Args(**GAME | {"eval_episodes": 1})
    plain, shown = ppo_atari.make_envs(args, 1), ppo_atari.make_envs(args, 1, folder / "videos")
    lost = over = 0
    observed = plain.reset(seed=0)[0], shown.reset(seed=0)[0]
    for t in range(400):
        np.testing.assert_array_equal(*observed)
        (picture,) = shown.render()
        assert picture.dtype == np.uint8
        assert picture.shape == (336, 336, 3)
        newest = observed[0][0, :, :, -1]
        for i, j, color in np.ndindex(4, 4, 3):
            assert np.array_equal(picture[i::4, j::4, color], newest)
        actions = np.array([t // 7 % 4])
        (*first, info), (*second, shown_info) = plain.step(actions), shown.step(actions)
        observed = first[0], second[0]
        is_over = "_episode" in info
        lost, over = lost + (first[2][0] and not is_over), over + is_over
        assert (first[1], first[3]) == (second[1], second[3])
        assert bool(second[2][0]) == is_over == ("_episode" in shown_info)
        if is_over:
            assert info["episode"]["r"] == shown_info["episode"]["r"]
    plain.close()
    shown.close()
    assert over >= 1
    assert lost >= 4 * over
    assert [path.suffix for path in (folder / "videos").iterdir()] == [".mp4"]


def test_observations_are_bytes() -> None:
    """Screens are stored as bytes, and scaled to 0 .. 1 only in the network."""
    with kept_batches(ppo_atari) as batches:
        ppo_atari.train(ppo_atari.Args(total_timesteps=64, num_steps=32, **GAME))
    assert {batch.obs.dtype for batch in batches} == {torch.uint8}
    assert batches[0].obs.max() > 1


def test_agent_of_the_repository(folder: Path) -> None:
    """The trained agent of the repository plays from its file alone; untrained ones get 0 or 1."""
    shutil.copy(AGENT / "checkpoint.pt", folder)
    args = ppo_atari.load_checkpoint(folder)["args"]
    args = replace(args, env_kwargs={"max_num_frames_per_episode": 2000}, eval_episodes=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for one another where other tests run
    result = ppo_atari.evaluate(replace(args, bf16=False), folder)
    torch.set_num_threads(threads)
    assert result["eval/return"] > 10
