"""The accounting of lives and games, against the same games replayed without our code."""

from typing import Any
from unittest import mock

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import SHORT, kept_batches, new_agent, scalars, trained

import ppo_atari


def test_lives_and_games(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's actions in ALE's own games: what is observed, learned from and reported is theirs."""
    forward = ppo_atari.Agent.forward

    def ones(agent: Any, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, values = forward(agent, obs)
        return logits, torch.ones_like(values)

    monkeypatch.setattr(ppo_atari.Agent, "forward", ones)
    flags = {"env_id": "ALE/SpaceInvaders-v5", "env_kwargs": "{}", "seed": 3, "update_epochs": 1}
    flags |= {"num_steps": 320, "total_timesteps": 1280, "gamma": 1, "gae_lambda": 0}
    # As all values and gamma are 1, and lambda is 0, an advantage is the reward's sign, less 1 at a
    # termination: of a life as of a game.
    with kept_batches(ppo_atari) as batches:
        run = trained("ppo_atari", **flags)
    assert {batch.obs.dtype for batch in batches} == {torch.uint8}
    played = torch.cat([batch.actions for batch in batches]).view(-1, 2).numpy()

    raw = {"autoreset_mode": "SameStep", "repeat_action_probability": 0.0, "reward_clipping": False}
    envs = gym.make_vec(flags["env_id"], 2, "vector_entry_point", **raw)
    obs, info = envs.reset(seed=3)
    before, advantages, games, deaths, most = [], [], {640: [], 1280: []}, 0, 0
    totals, lengths, lost = np.zeros(2), np.zeros(2), np.zeros(2, bool)
    for t, actions in enumerate(played):
        before.append(obs)
        lives = info["lives"].copy()
        obs, raw, over, cut, info = envs.step(np.where(lost, ale_py.Action.FIRE.value, actions))
        lost = (info["lives"] < lives) & ~over
        deaths, most = deaths + lost.sum(), max(most, raw.max())
        advantages.append(np.sign(raw) - (over | lost))
        totals, lengths = totals + raw, lengths + 1
        assert not cut.any()
        for i in np.flatnonzero(over):
            games[640 if t < 320 else 1280].append((totals[i], lengths[i]))
            totals[i] = lengths[i] = 0
    envs.close()
    np.testing.assert_array_equal(torch.cat([x.obs for x in batches]), np.concatenate(before))
    expected = np.concatenate(advantages)
    np.testing.assert_allclose(torch.cat([x.advantages for x in batches]), expected, atol=1e-6)
    every = games[640] + games[1280]
    assert len(every) >= 2
    assert deaths >= 2 * len(every)  # of three lives
    assert most > 1
    means = [(step, *np.mean(ended, 0)) for step, ended in games.items() if ended]
    for i, tag in (1, "charts/episodic_return"), (2, "charts/episodic_length"):
        assert scalars(tag) == [(mean[0], pytest.approx(mean[i])) for mean in means]
    assert ppo_atari.load_checkpoint(run)["last_returns"] == [total for total, _ in every]


def test_a_time_limit_truncates() -> None:
    """A game cut by the limit on its frames loses no life, and its last screen is kept."""
    envs = ppo_atari.make_envs(ppo_atari.Args(**SHORT["ppo_atari"]), 2)  # 200 frames
    obs, _ = envs.reset(seed=0)
    steps, truncations = 0, np.zeros(2, bool)
    while not truncations.any():
        last, steps = obs.copy(), steps + 1
        envs.lives = np.full(2, 9)  # more than the next game begins with
        obs, _, terminations, truncations, infos = envs.step(np.zeros(2, np.int64))
        np.testing.assert_array_equal(terminations, ~truncations)
    envs.close()
    i = int(truncations.argmax())
    # The next game's first screens are other ones, and the older ones are those of the last step.
    np.testing.assert_array_equal(infos["final_obs"][i][:3], last[i][1:])
    assert not np.array_equal(infos["final_obs"][i], obs[i])
    assert infos["episode_stats"]["l"][i] == steps <= 50


@pytest.mark.parametrize(
    ("game", "after"), [("ALE/Breakout-v5", 1), ("ALE/MsPacman-v5", 0), ("ALE/Freeway-v5", 0)]
)
def test_fire_is_pressed_where_there_is_fire(game: str, after: int) -> None:
    """After a lost life the game gets fire, if it has it, and else what it was told."""
    envs = ppo_atari.make_envs(ppo_atari.Args(env_id=game), 1)
    envs.env.step = step = mock.Mock(wraps=envs.env.step)
    envs.reset(seed=0)
    lost = [False]
    for _ in range(300):
        _, _, terminations, _, infos = envs.step(np.zeros(1, np.int64))
        lost.append(terminations[0] and "episode_stats" not in infos)
    envs.close()
    pressed = [call.args[0][0] for call in step.call_args_list]
    assert pressed == [after * x for x in lost[:-1]]
    assert any(lost) or game == "ALE/Freeway-v5"  # which has no lives


def test_bf16() -> None:
    """The CNN in bfloat16 trains, and gives nearly the same as in floats, which are its outputs."""
    agent, other = (new_agent(ppo_atari, ppo_atari.Args(bf16=x)) for x in (False, True))
    run = trained("ppo_atari", bf16=True, total_timesteps=128, update_epochs=1)
    for x in (agent, other):
        x.load_state_dict(ppo_atari.load_checkpoint(run)["agent"])
    obs = torch.randint(256, (9, 4, 84, 84), dtype=torch.uint8)
    for x, y in zip(agent(obs), other(obs), strict=True):
        assert y.dtype == torch.float32 and not torch.equal(x, y)
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


def test_pictures() -> None:
    """What is filmed are the last screens that the agent sees, of twice their size."""
    envs = ppo_atari.RenderScreens(ppo_atari.make_envs(ppo_atari.Args(), 1))
    envs.reset(seed=0)
    obs, *_ = envs.step(np.ones(1, np.int64))
    (picture,) = envs.render()
    envs.close()
    np.testing.assert_array_equal(picture[1::2, ::2, 1], obs[0, -1])
    assert picture.shape == (168, 168, 3)
