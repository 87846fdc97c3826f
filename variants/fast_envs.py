"""Fast vector environments for ppo.py and ppo_continuous.py, through gymnasium's registry.

    python ppo.py --vectorization vector_entry_point --env-id variants.fast_envs:Arrays/CartPole-v1
    python ppo_continuous.py --vectorization vector_entry_point \
        --env-id variants.fast_envs:EnvPool/HalfCheetah-v5

The part before the colon is this module, found from the script's folder. Where both lie in one
folder, it is `fast_envs:EnvPool/HalfCheetah-v5`.

`EnvPool/ID` is EnvPool's version of gymnasium's ID, for each of `IDS` below, in C++ threads. It
needs `pip install envpool` (tested with 1.2.5). The keywords in --env-kwargs are EnvPool's, and so
is what `infos` has. It pays from 16 environments on for HalfCheetah, from 64 on for CartPole. Its
other ids, but for images and games of several players, are keywords of `EnvPool-v0`:

    python ppo_continuous.py --vectorization vector_entry_point \
        --env-id variants.fast_envs:EnvPool-v0 --env-kwargs '{"name": "MetaWorld/Reach-v3"}'

`Arrays/CartPole-v1` is gymnasium's CartPole, all environments in one array. It pays from 16 on.

The first episodes are cut at random steps, as `Stagger` in ppo_continuous.py does, so that not all
end together; an evaluation's, of one environment, aren't. `--env-kwargs '{"stagger": false}'` cuts
none, `{"max_episode_steps": 100}` sets the limit of all, -1 lifts it.

With `--vectorization sync` or `async`, and for videos, each id is gymnasium's own environment, but
for `EnvPool-v0`, which has none.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.spaces import Box, Dict, Discrete, Space, flatten_space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

# Not Humanoid-v4 and HumanoidStandup-v4: EnvPool's have no contact forces.
IDS = """
    CartPole-v0 CartPole-v1 Acrobot-v1 MountainCar-v0 MountainCarContinuous-v0 Pendulum-v1
    LunarLander-v3 LunarLanderContinuous-v3 BipedalWalker-v3 BipedalWalkerHardcore-v3
    Ant-v4 HalfCheetah-v4 Hopper-v4 InvertedDoublePendulum-v4 InvertedPendulum-v4 Reacher-v4
    Swimmer-v4 Walker2d-v4
    Ant-v5 HalfCheetah-v5 Hopper-v5 Humanoid-v5 HumanoidStandup-v5 InvertedDoublePendulum-v5
    InvertedPendulum-v5 Pusher-v5 Reacher-v5 Swimmer-v5 Walker2d-v5
"""
NO_LIMIT = 10**9


def float32(space: Space) -> Space:
    """The space, with float32 in place of float64."""
    if isinstance(space, Box):
        space = Box(space.low.astype(np.float32), space.high.astype(np.float32))
    return space


def flatten(space: Space, obs: Any) -> np.ndarray:
    """Rows of observations of this space, as `gym.spaces.flatten` makes each, (rows, size)."""
    if isinstance(space, Dict):
        return np.concatenate([flatten(space[name], obs[name]) for name in space], axis=1)
    if isinstance(space, Discrete):
        return np.eye(space.n, dtype=np.float32)[obs - space.start]
    return obs.reshape(len(obs), -1).astype(np.float32)  # a copy


class FastEnvs(VectorEnv):
    """Gives environments that can reset some of theirs a limit of steps and same-step resets.

    `make(rng)` makes them at each reset with a seed. Theirs would be another limit: EnvPool takes a
    failure at its limit for a truncation.
    """

    def __init__(
        self,
        make: Callable,
        observation_space: Space,
        action_space: Space,
        num_envs: int,
        max_episode_steps: int,
        stagger: bool,
    ) -> None:
        self.make = make
        self.envs = None
        self.num_envs = num_envs
        self.limit = NO_LIMIT if max_episode_steps == -1 else max_episode_steps
        self.stagger = stagger
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.flatten = partial(flatten, observation_space)
        self.single_observation_space = float32(flatten_space(observation_space))
        self.single_action_space = float32(action_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        if self.envs is None or seed is not None:
            self.envs = self.make(self.np_random)
        self.elapsed_steps = np.zeros(self.num_envs, int)
        if self.stagger and self.num_envs > 1:
            self.elapsed_steps = self.np_random.integers(self.limit, size=self.num_envs)
        obs, infos = self.envs.reset()
        return self.flatten(obs), infos

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminations, _, infos = self.envs.step(actions)
        obs = self.flatten(obs)
        self.elapsed_steps += 1
        truncations = self.elapsed_steps >= self.limit
        dones = terminations | truncations
        if dones.any():
            infos |= {"final_obs": obs.copy(), "_final_obs": dones}
            first_obs, _ = self.envs.reset(options={"reset_mask": dones})
            obs[dones] = self.flatten(first_obs)
            self.elapsed_steps[dones] = 0
        return obs, rewards, terminations, truncations, infos

    def close_extras(self, **kwargs: Any) -> None:
        self.envs = None  # ends EnvPool's threads


def make_pool(
    env_id: str, num_envs: int, max_episode_steps: int = -1, stagger: bool = True, **kwargs: Any
) -> FastEnvs:
    """EnvPool's environments, whose seeds can be given only where they are made."""
    import envpool

    kwargs |= {"num_envs": num_envs, "max_episode_steps": NO_LIMIT}
    spec = envpool.make_spec(env_id, **kwargs)

    def make(rng: np.random.Generator) -> VectorEnv:
        seeds = rng.integers(2**31, size=num_envs).tolist()
        return envpool.make_gymnasium(env_id, seed=seeds, **kwargs)

    spaces = (spec.gymnasium_observation_space, spec.gymnasium_action_space)
    return FastEnvs(make, *spaces, num_envs, max_episode_steps, stagger)


def make_any_pool(
    num_envs: int, name: str, max_episode_steps: int | None = None, **kwargs: Any
) -> FastEnvs:
    """EnvPool's environments of this name, with its limit, if no other one is given."""
    import envpool

    spec = envpool.make_spec(name)
    if len(spec.gymnasium_observation_space.shape or ()) == 3:
        raise gym.error.Error(f"{name} has images, which aren't flattened: see ppo_atari.py")
    limit = max_episode_steps or spec.config.max_episode_steps
    return make_pool(name, num_envs, limit, **kwargs)


class CartPoles(CartPoleVectorEnv):
    """gymnasium's CartPole on arrays, which can reset some."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        if options is None:
            return super().reset(seed=seed)
        mask = options["reset_mask"]
        self.state[:, mask] = self.np_random.uniform(self.low, self.high, (4, mask.sum()))
        self.prev_done[mask] = False  # or the next step would reset it again
        return self.state.T[mask], {}


def make_cartpoles(
    num_envs: int, max_episode_steps: int = -1, stagger: bool = True, **kwargs: Any
) -> FastEnvs:
    """CartPole on arrays."""
    envs = CartPoles(num_envs, NO_LIMIT, **kwargs)

    def make(rng: np.random.Generator) -> VectorEnv:
        envs.np_random = rng
        return envs

    spaces = (envs.single_observation_space, envs.single_action_space)
    return FastEnvs(make, *spaces, num_envs, max_episode_steps, stagger)


def make_single(env_id: str, stagger: bool = True, **kwargs: Any) -> gym.Env:
    """gymnasium's environment, without the wrappers that `gym.make` adds; nothing is staggered."""
    return gym.make(env_id, **kwargs).unwrapped


entry_points = {f"EnvPool/{env_id}": partial(make_pool, env_id) for env_id in IDS.split()}
for name, entry_point in (entry_points | {"Arrays/CartPole-v1": make_cartpoles}).items():
    env_id = name.split("/")[1]
    gym.register(
        name,
        partial(make_single, env_id),
        max_episode_steps=gym.spec(env_id).max_episode_steps,
        vector_entry_point=entry_point,
    )
gym.register("EnvPool-v0", vector_entry_point=make_any_pool)
