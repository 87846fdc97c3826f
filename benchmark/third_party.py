"""Tasks: zeros in place of velocities; flat mazes of MiniGrid's; a point mass that may fly away.

PYTHONPATH=benchmark python ppo.py --env-id third_party:CartPole-NoVelocity-v0
PYTHONPATH=benchmark python ppo.py --env-id third_party:MiniGrid-DoorKey-5x5-Flat-v0
"""

from typing import Any

import gymnasium as gym
import numpy as np


def hide(name: str, velocities: tuple[int, ...], **kwargs: Any) -> gym.Env:
    """An environment whose observations have zeros at some indices."""
    env = gym.make(name, **kwargs)
    seen = np.ones(env.observation_space.shape, np.float32)
    seen[list(velocities)] = 0
    return gym.wrappers.TransformObservation(env, lambda obs: obs * seen, env.observation_space)


def flatten(name: str, **kwargs: Any) -> gym.Env:
    """A maze of MiniGrid's whose observations are the 7 x 7 x 3 numbers of what is in view."""
    import minigrid.wrappers

    env = minigrid.wrappers.ImgObsWrapper(gym.make(name, **kwargs))
    return gym.wrappers.FlattenObservation(env)


class PointMass(gym.Env):
    """Acceleration moves a mass in a plane without bounds; its squared distance from 0 is the cost.

    Doing nothing has a return of -125; -2 times the position less 2.5 times the speed has -4.8.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Begin at rest, at most 1 from the origin in each direction."""
        super().reset(seed=seed)
        self.position, self.speed = self.np_random.uniform(-1, 1, 2), np.zeros(2)
        return np.concatenate([self.position, self.speed], dtype=np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """A tenth of a second."""
        self.speed = self.speed + 0.1 * action
        self.position = self.position + 0.1 * self.speed
        cost = (self.position**2).sum() + 0.01 * (action**2).sum()
        obs = np.concatenate([self.position, self.speed], dtype=np.float32)
        return obs, -float(cost), False, False, {}


gym.register("PointMass-v0", PointMass, max_episode_steps=200)
VELOCITIES = {"CartPole-v1": (1, 3), "Pendulum-v1": (2,), "LunarLander-v3": (2, 3, 5)}
for name, velocities in VELOCITIES.items():
    kwargs = {"name": name, "velocities": velocities}
    gym.register(f"{name[:-3]}-NoVelocity-v0", hide, kwargs=kwargs)
for name in ("MiniGrid-Empty-8x8", "MiniGrid-DoorKey-5x5"):
    gym.register(f"{name}-Flat-v0", flatten, kwargs={"name": f"{name}-v0"})
