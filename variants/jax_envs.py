"""Simulators written in JAX, as a vector environment: all instances step in one compiled call.

    pip install jax flax six seaborn && pip install --no-deps gymnax
    python ppo.py --vectorization vector_entry_point --num-envs 256 --num-steps 32 \
        --total-timesteps 300000 --env-id variants.jax_envs:Gymnax-v0 \
        --env-kwargs '{"name": "CartPole-v1", "max_episode_steps": 500}'

(gymnax asks for an older gymnasium, whose statistics miss a step of each episode but the first.)

`Gymnax-v0`, `Brax-v0` and `Functional-v0` (gymnasium's own) take a `name` in that package, the
package's keywords, and `max_episode_steps`, 1000 if not given. The first episodes are cut at random
steps, so that not all end together; `{"stagger": false}` cuts none. Tried: gymnax 1.0.1's CartPole,
Brax 0.14.2's inverted_pendulum, gymnasium's PendulumFunctional. Videos aren't made.

Another package is a function like those below. Limits and resets are in the compiled step, which is
compiled once in a process for each number of instances; an evaluation has one.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box, Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jax.flatten_util import ravel_pytree


@cache
def compiled(make: Callable, num_envs: int, limit: int, kwargs: tuple) -> tuple:
    """All instances' reset and step, compiled, and the spaces of one.

    `make(**kwargs)` returns `reset(key)`, which returns a state and an observation; `step(key,
    state, action)`, which returns those, a reward and a termination; and the space of actions. Both
    are pure functions of one instance.
    """
    reset_one, step_one, action_space = make(**dict(kwargs))
    size = jax.eval_shape(lambda: ravel_pytree(reset_one(jax.random.key(0))[1])[0]).shape
    flatten = jax.vmap(lambda obs: ravel_pytree(obs)[0].astype(jnp.float32))

    def begin(key: Any) -> tuple:
        state, obs = jax.vmap(reset_one)(jax.random.split(key, num_envs))
        return state, flatten(obs)

    def advance(carry: tuple, actions: Any) -> tuple:
        key, state, elapsed = carry
        key, reset_key, step_key = jax.random.split(key, 3)
        keys = jax.random.split(step_key, num_envs)
        state, obs, rewards, terminations = jax.vmap(step_one)(keys, state, actions)
        last_obs, terminations = flatten(obs), terminations.astype(bool)
        truncations = elapsed + 1 >= limit
        dones = terminations | truncations

        def choose(first: Any, now: Any) -> Any:
            return jnp.where(dones.reshape(-1, *[1] * (now.ndim - 1)), first, now)

        state, obs = jax.tree.map(choose, begin(reset_key), (state, last_obs))
        elapsed = jnp.where(dones, 0, elapsed + 1)
        return (key, state, elapsed), (obs, rewards, terminations, truncations, last_obs)

    return jax.jit(begin), jax.jit(advance), Box(-np.inf, np.inf, size, np.float32), action_space


class JaxEnvs(VectorEnv):
    """Instances of a pure environment, with a limit of steps and same-step resets."""

    def __init__(
        self,
        num_envs: int,
        make: Callable,
        max_episode_steps: int = 1000,
        stagger: bool = True,
        **kwargs: Any,
    ) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = num_envs
        self.limit = max_episode_steps
        self.stagger = stagger and num_envs > 1
        self.begin, self.advance, *spaces = compiled(
            make, num_envs, max_episode_steps, tuple(sorted(kwargs.items()))
        )
        self.single_observation_space, self.single_action_space = spaces
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        key, first_key = jax.random.split(jax.random.key(self.np_random.integers(2**32)))
        elapsed = np.zeros(self.num_envs, np.int32)
        if self.stagger:
            elapsed = self.np_random.integers(self.limit, size=self.num_envs, dtype=np.int32)
        state, obs = self.begin(first_key)
        self.carry = (key, state, elapsed)
        return np.array(obs), {}

    def step(self, actions: np.ndarray) -> tuple:
        self.carry, arrays = self.advance(self.carry, actions)
        *arrays, last_obs = map(np.array, arrays)  # copies
        dones = arrays[2] | arrays[3]
        infos = {"final_obs": last_obs, "_final_obs": dones} if dones.any() else {}
        return *arrays, infos


def make_gymnax(name: str, **kwargs: Any) -> tuple[Callable, Callable, Space]:
    """gymnax's environments. Their own limits of steps are lifted."""
    import gymnax
    from gymnax.environments.spaces import gymnax_space_to_gym_space

    env, params = gymnax.make(name, **kwargs)

    def reset(key: Any) -> tuple:
        obs, state = env.reset_env(key, params)
        return state, obs

    def step(key: Any, state: Any, action: Any) -> tuple:
        obs, state, reward, terminated, _ = env.step_env(key, state, action, params)
        return state, obs, reward, terminated

    return reset, step, gymnax_space_to_gym_space(env.action_space(params))


def make_brax(name: str, **kwargs: Any) -> tuple[Callable, Callable, Space]:
    """Brax's."""
    from brax import envs

    env = envs.get_environment(name, **kwargs)

    def reset(key: Any) -> tuple:
        state = env.reset(key)
        return state, state.obs

    def step(key: Any, state: Any, action: Any) -> tuple:
        state = env.step(state, action)
        return state, state.obs, state.reward, state.done

    return reset, step, Box(-1, 1, (env.action_size,), np.float32)


def make_functional(name: str, **kwargs: Any) -> tuple[Callable, Callable, Space]:
    """gymnasium's own, like `gymnasium.envs.phys2d.cartpole:CartPoleFunctional`."""
    module, function = name.split(":")
    env = getattr(import_module(module), function)(**kwargs)

    def reset(key: Any) -> tuple:
        state = env.initial(key)
        return state, env.observation(state, key)

    def step(key: Any, state: Any, action: Any) -> tuple:
        after = env.transition(state, action, key)
        reward = env.reward(state, action, after, key)
        return after, env.observation(after, key), reward, env.terminal(after, key)

    return reset, step, env.action_space


MAKERS = {"Gymnax": make_gymnax, "Brax": make_brax, "Functional": make_functional}
for name, make in MAKERS.items():
    gym.register(f"{name}-v0", vector_entry_point=partial(JaxEnvs, make=make))
