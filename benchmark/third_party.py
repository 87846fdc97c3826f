"""A third party's environment, wrapped so that its observations flatten: MiniGrid's picture only.

    PYTHONPATH=benchmark python ppo.py --env-id third_party:MiniGrid-Picture-v0

needs `pip install minigrid` (in benchmark/requirements.txt).
"""

from typing import Any

import gymnasium as gym
import minigrid  # noqa: F401, registers its environments
from minigrid.wrappers import ImgObsWrapper


def make(name: str = "MiniGrid-Empty-5x5-v0", **kwargs: Any) -> gym.Env:
    """One of MiniGrid's environments, without the mission's text, which doesn't flatten."""
    return ImgObsWrapper(gym.make(name, **kwargs))


gym.register("MiniGrid-Picture-v0", make)
