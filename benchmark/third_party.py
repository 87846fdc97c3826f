"""Environments behind a wrapper: MiniGrid's pictures, which flatten, and poles without velocities.

    PYTHONPATH=benchmark python ppo.py --env-id third_party:MiniGrid-Picture-v0

needs `pip install minigrid` (in benchmark/requirements.txt).
"""

from typing import Any

import gymnasium as gym
import minigrid  # noqa: F401, registers its environments
import numpy as np
from minigrid.wrappers import ImgObsWrapper


def make(name: str = "MiniGrid-Empty-5x5-v0", **kwargs: Any) -> gym.Env:
    """One of MiniGrid's environments, without the mission's text, which doesn't flatten."""
    return ImgObsWrapper(gym.make(name, **kwargs))


def make_without_velocity(name: str, velocities: tuple[int, ...], **kwargs: Any) -> gym.Env:
    """An environment whose observations have zeros in place of velocities."""
    env = gym.make(name, **kwargs)
    seen = np.ones(env.observation_space.shape, np.float32)
    seen[list(velocities)] = 0
    return gym.wrappers.TransformObservation(env, lambda obs: obs * seen, env.observation_space)


gym.register("MiniGrid-Picture-v0", make)
VELOCITIES = {"CartPole-v1": (1, 3), "Pendulum-v1": (2,), "LunarLander-v3": (2, 3, 5)}
for name, velocities in VELOCITIES.items():
    kwargs = {"name": name, "velocities": velocities}
    gym.register(f"{name[:-3]}-NoVelocity-v0", make_without_velocity, kwargs=kwargs)
