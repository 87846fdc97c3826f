"""CartPole, Pendulum and LunarLander with zeros in place of velocities; flat mazes of MiniGrid's.

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


VELOCITIES = {"CartPole-v1": (1, 3), "Pendulum-v1": (2,), "LunarLander-v3": (2, 3, 5)}
for name, velocities in VELOCITIES.items():
    kwargs = {"name": name, "velocities": velocities}
    gym.register(f"{name[:-3]}-NoVelocity-v0", hide, kwargs=kwargs)
for name in ("MiniGrid-Empty-8x8", "MiniGrid-DoorKey-5x5"):
    gym.register(f"{name}-Flat-v0", flatten, kwargs={"name": f"{name}-v0"})
