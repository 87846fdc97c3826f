"""variants/agents_as_rows.py: games of agents, of whom some leave before the others."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from helpers import scalars, trained

from variants.agents_as_rows import AgentsAsRows


class Game:
    """a leaves after two steps, b after three, when c is cut; 1 is for the side that is seen."""

    possible_agents = ("a", "b", "c")

    def observation_space(self, agent: str) -> Box:
        return Box(-1, 1, (1,), np.float32)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def observe(self) -> dict[str, np.ndarray]:
        self.sides = {name: self.rng.integers(2) for name in self.agents}
        return {name: np.float32([2 * side - 1]) for name, side in self.sides.items()}

    def reset(self, seed: int | None = None) -> tuple[dict, dict]:
        self.rng = self.rng if seed is None else np.random.default_rng(seed)
        self.agents, self.steps = [*self.possible_agents], 0
        return self.observe(), {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert [*actions] == self.agents
        self.steps += 1
        earned = {name: float(actions[name] == self.sides[name]) for name in actions}
        terminated = {name: self.steps == {"a": 2, "b": 3}.get(name) for name in actions}
        truncated = {name: name == "c" and self.steps == 3 for name in actions}
        obs = self.observe()
        self.agents = [x for x in self.agents if not terminated[x] and not truncated[x]]
        return obs, earned, terminated, truncated, {}

    def close(self) -> None:
        pass


def test_two_games_by_hand() -> None:
    """Who has left sees zeros and gets nothing; all end with the game, and are back at once."""
    envs = AgentsAsRows(6, "test_agents_as_rows:Game")
    obs, _ = envs.reset(seed=1)
    assert not np.array_equal(obs[:3], obs[3:])
    for step in range(6):
        is_left = [step % 3 == 2, False, False] * 2
        assert (obs[:, 0] == 0).tolist() == is_left
        obs, rewards, terminations, truncations, infos = envs.step((obs[:, 0] > 0).astype(int))
        assert rewards.tolist() == [1.0 - x for x in is_left]
        ends = step % 3 == 2
        assert terminations.tolist() == [ends, ends, False] * 2
        assert truncations.tolist() == [False, False, ends] * 2
        if ends:  # with the last that each has seen
            assert infos["_final_obs"].all()
            assert (infos["final_obs"][:, 0] == 0).tolist() == is_left
    with pytest.raises(ValueError, match="multiple of the 3 agents"):
        AgentsAsRows(4, "test_agents_as_rows:Game")


def test_the_optimum_is_learned() -> None:
    """Episodes of a, b and c are worth 2, 3 and 3 at best, half of it by chance."""
    flags = {"env_id": "variants.agents_as_rows:AgentsAsRows-v0", "num_envs": 24, "num_steps": 32}
    flags |= {"vectorization": "vector_entry_point", "eval_episodes": 7, "learning_rate": 5e-3}
    flags |= {"env_kwargs": '{"game": "test_agents_as_rows:Game"}', "total_timesteps": 15_000}
    trained("ppo", **flags)
    assert scalars("eval/return")[0][1] == pytest.approx((2 + 3 + 3) / 3)
    assert {x for _, x in scalars("charts/episodic_length")} == {3}
