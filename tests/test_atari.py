"""The accounting of lives and games, against the same games replayed without our code."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import SHORT, kept_batches, new_agent, only_run, scalars, trained

import ppo_atari

RAW = {"vectorization_mode": "vector_entry_point", "autoreset_mode": "SameStep"}
RAW |= {"repeat_action_probability": 0.0, "reward_clipping": False}


class Recorder(gym.vector.VectorWrapper):
    """Keeps seeds, actions, and copies of all that a step gives."""

    def __init__(self, env: gym.vector.VectorEnv) -> None:
        super().__init__(env)
        self.seeds, self.played = [], defaultdict(list)

    def reset(self, *, seed: Any = None, **kwargs: Any) -> tuple:
        self.seeds.append(seed)
        return self.env.reset(seed=seed, **kwargs)

    def step(self, actions: np.ndarray) -> tuple:
        obs, *others, infos = self.env.step(actions)
        self.played["actions"].append(actions.copy())
        self.played["obs"].append(obs.copy())
        self.played["final_obs"].append(infos["final_obs"].copy() if "final_obs" in infos else None)
        return obs, *others, infos


def test_lives_and_games(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay of a run's actions: what is observed and learned from, and what is reported.

    Where all values are 1, and gamma is and lambda is 0, an advantage is the reward's sign, less 1
    at a termination: of a life as of a game. Raw whole games are reported. The game gets fire after
    a lost life. Observations are ALE's own, the screens last.
    """
    made, make_envs, forward = [], ppo_atari.make_envs, ppo_atari.Agent.forward

    def ones(agent: Any, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, values = forward(agent, obs)
        return logits, torch.ones_like(values)

    def make(*args: Any) -> Recorder:
        made.append(Recorder(make_envs(*args)))
        return made[-1]

    monkeypatch.setattr(ppo_atari.Agent, "forward", ones)
    monkeypatch.setattr(ppo_atari, "make_envs", make)
    flags = {
        "env_id": "ALE/SpaceInvaders-v5",
        "num_steps": 320,
        "total_timesteps": 1280,
        "update_epochs": 1,
        "seed": 3,
    }
    args = ppo_atari.Args(**SHORT["ppo_atari"] | flags, gamma=1, gae_lambda=0)
    with kept_batches(ppo_atari) as batches:
        score = ppo_atari.train(args)
    played = made[1].played
    assert [env.seeds for env in made[:1]] == [[]]
    assert {batch.obs.dtype for batch in batches} == {torch.uint8}

    envs = gym.make_vec(args.env_id, 2, **RAW)
    obs, info = envs.reset(seed=made[1].seeds[0])
    before, advantages, games, deaths, most = [], [], [], 0, 0
    totals, lengths, lost = np.zeros(2), np.zeros(2), np.zeros(2, bool)
    for t, actions in enumerate(played["actions"]):
        before.append(obs.transpose(0, 2, 3, 1))
        lives = info["lives"].copy()
        obs, raw, over, cut, info = envs.step(np.where(lost, ale_py.Action.FIRE.value, actions))
        lost = (info["lives"] < lives) & ~over
        deaths, most = deaths + lost.sum(), max(most, raw.max())
        advantages.append(np.sign(raw) - (over | lost))
        totals, lengths = totals + raw, lengths + 1
        np.testing.assert_array_equal(played["obs"][t], obs.transpose(0, 2, 3, 1))
        assert not cut.any()
        for i in np.flatnonzero(over):
            last = info["final_obs"][i].transpose(1, 2, 0)
            np.testing.assert_array_equal(played["final_obs"][t][i], last)
            games.append((2 * (t + 1), totals[i], lengths[i]))
            totals[i] = lengths[i] = 0
    envs.close()
    np.testing.assert_array_equal(torch.cat([x.obs for x in batches]), np.concatenate(before))
    expected = np.concatenate(advantages)
    np.testing.assert_allclose(torch.cat([x.advantages for x in batches]), expected, atol=1e-6)
    returns, steps = scalars("charts/episodic_return"), scalars("charts/episodic_length")
    reported = [(step, x, n) for (step, x), (_, n) in zip(returns, steps, strict=True)]
    assert len(games) >= 2
    assert deaths >= 2 * len(games)  # of three lives
    assert most > 1
    assert reported == games
    assert score == pytest.approx(np.mean([total for _, total, _ in games]))


class ExtraLives(gym.vector.VectorWrapper):
    """Games with six lives more, which the next ones don't have."""

    def reset(self, **kwargs: Any) -> tuple:
        obs, infos = self.env.reset(**kwargs)
        self.extra = np.full(self.num_envs, 6)
        return obs, infos | {"lives": infos["lives"] + self.extra}

    def step(self, actions: np.ndarray) -> tuple:
        *results, infos = self.env.step(actions)
        self.extra[results[2] | results[3]] = 0
        return *results, infos | {"lives": infos["lives"] + self.extra}


def test_a_time_limit_truncates() -> None:
    """A game cut by the limit on its frames is truncated, and its last screen is kept.

    It is no lost life, even where the next game begins with fewer lives.
    """
    limit = json.dumps({"max_num_frames_per_episode": 400})
    envs = ppo_atari.make_envs(ppo_atari.Args(env_kwargs=limit), 2)
    envs.env = ExtraLives(envs.env)
    obs, _ = envs.reset(seed=0)
    steps, truncations = 0, np.zeros(2, bool)
    while not truncations.any():
        last, steps = obs, steps + 1
        obs, _, terminations, truncations, infos = envs.step(np.zeros(2, np.int64))
    envs.close()
    i = int(truncations.argmax())
    assert not terminations[i]
    assert not infos["life_lost"][i]
    # The next game's first screens are other ones, and the older ones are those of the last step.
    np.testing.assert_array_equal(infos["final_obs"][i][..., :3], last[i][..., 1:])
    assert not np.array_equal(infos["final_obs"][i], obs[i])
    assert infos["episode"]["l"][i] == steps <= 100


@pytest.mark.parametrize(
    ("game", "after"), [("ALE/Breakout-v5", 1), ("ALE/MsPacman-v5", 0), ("ALE/Freeway-v5", 0)]
)
def test_fire_is_pressed_where_there_is_fire(game: str, after: int) -> None:
    """After a lost life the game gets fire, if it has it, and else what it was told."""
    envs = ppo_atari.make_envs(ppo_atari.Args(env_id=game), 1)
    recorder = Recorder(envs.env)
    envs.env = recorder
    envs.reset(seed=0)
    losses = 0
    for _ in range(300):
        lost = envs.lost[0]
        losses += lost
        envs.step(np.zeros(1, np.int64))
        assert recorder.played["actions"][-1] == [after if lost else 0]
    envs.close()
    assert losses or game == "ALE/Freeway-v5"  # which has no lives


def test_sticky_actions_are_off_by_default() -> None:
    """The same actions from the same start give the same screens; sticky actions give others."""
    screens = []
    for probability in (0.0, 0.0, 0.5):
        args = ppo_atari.Args(repeat_action_probability=probability)
        envs = ppo_atari.make_envs(args, 2)
        envs.reset(seed=3)
        rng = np.random.default_rng(0)
        screens.append(np.stack([envs.step(rng.integers(4, size=2))[0] for _ in range(60)]))
        envs.close()
    np.testing.assert_array_equal(*screens[:2])
    assert (screens[0] != screens[2]).any()


def test_large_rollouts() -> None:
    """More than 1024 frames, which go through the network in pieces, give what all at once do."""
    torch.manual_seed(0)
    agent = new_agent(ppo_atari, ppo_atari.Args())
    obs = torch.randint(256, (1030, 84, 84, 4), dtype=torch.uint8)
    with torch.no_grad():
        features = agent.network(obs.permute(0, 3, 1, 2) / 255)
        logits, values = agent(obs)
        torch.testing.assert_close(logits, agent.actor(features), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(values, agent.critic(features)[:, 0], rtol=1e-3, atol=1e-4)


def test_bf16() -> None:
    """The CNN in bfloat16 gives nearly the same, in floats, and trains."""
    agent, other = (new_agent(ppo_atari, ppo_atari.Args(bf16=x)) for x in (False, True))
    other.load_state_dict(agent.state_dict())
    obs = torch.randint(256, (9, 84, 84, 4), dtype=torch.uint8)
    for x, y in zip(agent(obs), other(obs), strict=True):
        assert y.dtype == torch.float32
        assert not torch.equal(x, y)
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
    trained("ppo_atari", bf16=True, total_timesteps=128, update_epochs=1)
    assert math.isfinite(scalars("losses/value_loss")[0][1])


def test_video() -> None:
    """An evaluation's games are filmed, one file each, and played as without a camera."""
    short = json.dumps({"max_num_frames_per_episode": 400})
    trained("ppo_atari", total_timesteps=128, update_epochs=1, env_kwargs=short)
    args = replace(ppo_atari.load_checkpoint(only_run())["args"], eval_episodes=2)
    plain = ppo_atari.evaluate(args, only_run())
    assert ppo_atari.evaluate(replace(args, capture_video=True), only_run()) == plain
    (folder,) = only_run().glob("videos-*")
    assert len([*folder.iterdir()]) == 2
    assert all(path.suffix == ".mp4" and path.stat().st_size > 1000 for path in folder.iterdir())
    envs = ppo_atari.make_envs(args, 1)
    obs, _ = envs.reset(seed=0)
    (picture,) = envs.render()
    envs.close()
    assert picture.shape == (168, 168, 3)
    np.testing.assert_array_equal(picture[1::2, ::2, 1], obs[0, ..., -1])
