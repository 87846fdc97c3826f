"""CartPole, Pendulum and LunarLander with zeros in place of velocities.

PYTHONPATH=benchmark python ppo.py --env-id third_party:CartPole-NoVelocity-v0
"""

from typing import Any

import gymnasium as gym
import numpy as np


def make(name: str, velocities: tuple[int, ...], **kwargs: Any) -> gym.Env:
    """An environment whose observations have zeros at some indices."""
    env = gym.make(name, **kwargs)
    seen = np.ones(env.observation_space.shape, np.float32)
    seen[list(velocities)] = 0
    return gym.wrappers.TransformObservation(env, lambda obs: obs * seen, env.observation_space)


VELOCITIES = {"CartPole-v1": (1, 3), "Pendulum-v1": (2,), "LunarLander-v3": (2, 3, 5)}
for name, velocities in VELOCITIES.items():
    kwargs = {"name": name, "velocities": velocities}
    gym.register(f"{name[:-3]}-NoVelocity-v0", make, kwargs=kwargs)
