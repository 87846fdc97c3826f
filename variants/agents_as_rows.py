"""Agents that share a policy as rows of a vector environment: games of PettingZoo's parallel API.

    pip install mpe2
    python ppo.py --vectorization vector_entry_point --num-envs 24 --total-timesteps 1000000 \
        --env-id variants.agents_as_rows:AgentsAsRows-v0 \
        --env-kwargs '{"game": "mpe2.simple_spread_v3:parallel_env", "max_cycles": 25}'

`game` is MODULE:FUNCTION, or MODULE:CLASS, and the other keys are its keywords. All agents must
have the same spaces, and see what tells them apart. `--num-envs` counts agents: 24 are eight games
of three. An evaluation plays one game at a time, and counts an episode for each agent. Videos
aren't made.

All episodes of a game end with it. Who leaves earlier sees zeros and gets nothing until then, which
is worth as much as an end ("death masking", arXiv:2103.01955).
"""

from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class AgentsAsRows(VectorEnv):
    """Rows are the agents of the first game, then those of the next; they reset in the same step.

    Raises `ValueError` if agents differ in their spaces, or rows don't divide into games.
    """

    def __init__(self, num_envs: int, game: str, **kwargs: Any) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        module, function = game.split(":")
        make = getattr(import_module(module), function)
        self.games = [make(**kwargs)]
        self.names = self.games[0].possible_agents
        size = len(self.names)
        if num_envs > 1 and num_envs % size:
            raise ValueError(f"{num_envs=} must be a multiple of the {size} agents of a game")
        self.games += [make(**kwargs) for _ in range(num_envs // size - 1)]
        self.num_envs = size * len(self.games)
        for spaces in (self.games[0].observation_space, self.games[0].action_space):
            if any(spaces(name) != spaces(self.names[0]) for name in self.names):
                raise ValueError(f"the agents of {game} have different spaces")
        self.seen = self.games[0].observation_space(self.names[0])
        self.single_observation_space = gym.spaces.flatten_space(self.seen)
        self.single_action_space = self.games[0].action_space(self.names[0])
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def rows(self, numbers: dict[str, Any]) -> np.ndarray:
        """Observations by agent as rows, zeros for who isn't there."""
        rows = np.zeros((len(self.names), *self.single_observation_space.shape), np.float32)
        for row, name in zip(rows, self.names, strict=True):
            if name in numbers:
                row[:] = gym.spaces.flatten(self.seen, numbers[name])
        return rows

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        seeds = [None if seed is None else seed + i for i in range(len(self.games))]
        resets = [game.reset(seed=seed) for game, seed in zip(self.games, seeds, strict=True)]
        return np.concatenate([self.rows(obs) for obs, _ in resets]), {}

    def step(self, actions: np.ndarray) -> tuple:
        obs = np.zeros(self.observation_space.shape, np.float32)
        final_obs = np.zeros_like(obs)
        rewards = np.zeros(self.num_envs, np.float32)
        ended = np.zeros(self.num_envs, bool)
        truncations = np.zeros_like(ended)
        for i, game in enumerate(self.games):
            rows = slice(i * len(self.names), (i + 1) * len(self.names))
            choices = dict(zip(self.names, actions[rows], strict=True))
            there = {name: choices[name] for name in game.agents}
            seen, earned, _, truncated, _ = game.step(there)
            obs[rows] = self.rows({name: seen[name] for name in game.agents})
            rewards[rows] = [earned.get(name, 0) for name in self.names]
            if not game.agents:
                ended[rows] = True
                truncations[rows] = [truncated.get(name, False) for name in self.names]
                final_obs[rows] = self.rows(seen)
                obs[rows] = self.rows(game.reset()[0])
        infos = {"final_obs": final_obs, "_final_obs": ended} if ended.any() else {}
        return obs, rewards, ended & ~truncations, truncations, infos

    def close_extras(self, **kwargs: Any) -> None:
        for game in self.games:
            game.close()


gym.register("AgentsAsRows-v0", vector_entry_point=AgentsAsRows)
