"""Simulators of many instances in PyTorch's tensors, for ppo_tensors.py: examples and adapters.

    python ppo_tensors.py --env-id tensor_envs:Pendulum
    python ppo_tensors.py --env-id tensor_envs:InvertedPendulum --num-envs 512
    python ppo_tensors.py --env-id tensor_envs:Jax --env-kwargs \
        '{"maker": "Brax", "name": "inverted_pendulum"}'
    python ppo_tensors.py --env-id tensor_envs:Gymnasium --num-envs 64 --num-steps 32 \
        --env-kwargs '{"env_id": "HalfCheetah-v5"}'

What a simulator must have is said at `make_envs` in ppo_tensors.py. MuJoCo Warp needs a MuJoCo of
its own version, so it gets a virtual environment of its own: pip install mujoco-warp==4.0.0
gymnasium torch tensorboard tyro tqdm. Those of JAX stay on JAX's device.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Step = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Pendulum:
    """gymnasium's Pendulum-v1 (its equations and rewards), in PyTorch alone."""

    obs_size = 3
    action_size = 1

    def __init__(
        self, num_envs: int, device: str, stagger: bool, max_episode_steps: int = 200
    ) -> None:
        self.num_envs = num_envs
        self.device = device
        self.stagger = stagger
        self.limit = max_episode_steps
        self.rng = torch.Generator(device)

    def first_state(self) -> Tensor:
        """Angles from -pi to pi, and speeds from -1 to 1, (num_envs, 2)."""
        state = torch.rand(self.num_envs, 2, generator=self.rng, device=self.device)
        return (2 * state - 1) * torch.tensor([math.pi, 1.0], device=self.device)

    def observe(self) -> Tensor:
        angle, speed = self.state.unbind(-1)
        return torch.stack([angle.cos(), angle.sin(), speed], -1)

    def reset(self, seed: int) -> Tensor:
        self.rng.manual_seed(seed)
        self.state = self.first_state()
        self.steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        if self.stagger:
            self.steps.random_(self.limit, generator=self.rng)
        return self.observe()

    def step(self, actions: Tensor) -> Step:
        torque = 2 * actions[:, 0]
        angle, speed = self.state.unbind(-1)
        error = (angle + math.pi) % (2 * math.pi) - math.pi
        rewards = -(error**2 + 0.1 * speed**2 + 0.001 * torque**2)
        speed = (speed + 0.05 * (15 * angle.sin() + 3 * torque)).clamp(-8, 8)
        self.state = torch.stack([angle + 0.05 * speed, speed], -1)
        self.steps += 1
        final_obs = self.observe()
        truncations = self.steps >= self.limit
        self.state = torch.where(truncations[:, None], self.first_state(), self.state)
        self.steps *= ~truncations
        return self.observe(), rewards, torch.zeros_like(truncations), truncations, final_obs

    def close(self) -> None:
        pass


class InvertedPendulum:
    """gymnasium's InvertedPendulum-v5 (its model, rewards and ends), in MuJoCo Warp."""

    obs_size = 4
    action_size = 1

    def __init__(
        self, num_envs: int, device: str, stagger: bool, max_episode_steps: int = 1000
    ) -> None:
        import gymnasium
        import mujoco
        import mujoco_warp
        import warp

        path = Path(gymnasium.__file__).parent / "envs/mujoco/assets/inverted_pendulum.xml"
        model = mujoco.MjModel.from_xml_path(str(path))
        self.device = warp.ScopedDevice(device)
        self.simulate = mujoco_warp.step
        with self.device:
            self.model = mujoco_warp.put_model(model)
            self.data = mujoco_warp.make_data(model, nworld=num_envs)
        # The simulator's own memory: what is written here is its state
        self.qpos = warp.to_torch(self.data.qpos)
        self.qvel = warp.to_torch(self.data.qvel)
        self.ctrl = warp.to_torch(self.data.ctrl)
        self.warmstart = warp.to_torch(self.data.qacc_warmstart)
        self.limit = max_episode_steps
        self.stagger = stagger
        self.rng = torch.Generator(device)

    def begin(self, which: Tensor) -> None:
        """Begin new episodes in these instances, (num_envs,) of bool."""
        for x in (self.qpos, self.qvel):
            noise = torch.rand(x.shape, generator=self.rng, device=x.device)
            x.copy_(torch.where(which[:, None], 0.02 * noise - 0.01, x))
        self.warmstart.masked_fill_(which[:, None], 0)
        self.steps.masked_fill_(which, 0)

    def observe(self) -> Tensor:
        return torch.cat([self.qpos, self.qvel], -1)  # a copy

    def reset(self, seed: int) -> Tensor:
        self.rng.manual_seed(seed)
        self.steps = torch.zeros(len(self.qpos), dtype=torch.int64, device=self.qpos.device)
        self.begin(torch.ones_like(self.steps, dtype=torch.bool))
        if self.stagger:
            self.steps.random_(self.limit, generator=self.rng)
        return self.observe()

    def step(self, actions: Tensor) -> Step:
        self.ctrl.copy_(3 * actions)
        with self.device:
            for _ in range(2):
                self.simulate(self.model, self.data)
        self.steps += 1
        final_obs = self.observe()
        terminations = ~(self.qpos[:, 1].abs() <= 0.2)  # true for nan
        truncations = self.steps >= self.limit
        self.begin(terminations | truncations)
        return self.observe(), (~terminations).float(), terminations, truncations, final_obs

    def close(self) -> None:
        pass


class Jax:
    """Those of jax_envs.py with continuous actions; `maker` is Gymnax, Brax or Functional."""

    def __init__(
        self,
        num_envs: int,
        device: str,
        stagger: bool,
        maker: str,
        max_episode_steps: int = 1000,
        **kwargs: Any,
    ) -> None:
        from jax_envs import MAKERS, compiled

        self.begin, self.advance, obs_space, action_space = compiled(
            MAKERS[maker], num_envs, max_episode_steps, tuple(sorted(kwargs.items()))
        )
        self.obs_size = obs_space.shape[0]
        self.action_size = action_space.shape[0]
        self.low = torch.as_tensor(action_space.low, device=device)
        self.high = torch.as_tensor(action_space.high, device=device)
        self.num_envs = num_envs
        self.limit = max_episode_steps
        self.stagger = stagger

    def reset(self, seed: int) -> Tensor:
        import jax

        key, first_key, steps_key = jax.random.split(jax.random.key(seed), 3)
        state, obs = self.begin(first_key)
        steps = jax.random.randint(steps_key, self.num_envs, 0, self.limit if self.stagger else 1)
        self.carry = (key, state, steps)
        return torch.from_dlpack(obs)

    def step(self, actions: Tensor) -> Step:
        import jax

        actions = self.low + (self.high - self.low) * (actions + 1) / 2
        self.carry, arrays = self.advance(self.carry, jax.dlpack.from_dlpack(actions))
        return tuple(torch.from_dlpack(x) for x in arrays)

    def close(self) -> None:
        pass


class Gymnasium:
    """gymnasium's environments with vectors and bounded actions, through NumPy; not staggered."""

    def __init__(
        self, num_envs: int, device: str, stagger: bool, env_id: str, **kwargs: Any
    ) -> None:
        import gymnasium as gym
        from gymnasium.wrappers import FlattenObservation, RescaleAction

        def wrap(env: gym.Env) -> gym.Env:
            return RescaleAction(FlattenObservation(env), -1, 1)

        kwargs["vector_kwargs"] = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        self.envs = gym.make_vec(env_id, num_envs, "sync", wrappers=[wrap], **kwargs)
        self.obs_size = self.envs.single_observation_space.shape[0]
        self.action_size = self.envs.single_action_space.shape[0]
        self.device = device

    def reset(self, seed: int) -> Tensor:
        obs, _ = self.envs.reset(seed=seed)
        return torch.as_tensor(obs, dtype=torch.float32, device=self.device)

    def step(self, actions: Tensor) -> Step:
        obs, rewards, terminations, truncations, infos = self.envs.step(actions.numpy(force=True))
        final_obs = obs.copy()
        if "final_obs" in infos:
            ended = infos["_final_obs"]
            final_obs[ended] = np.stack(infos["final_obs"][ended])
        obs, rewards, final_obs = (x.astype(np.float32) for x in (obs, rewards, final_obs))
        arrays = (obs, rewards, terminations, truncations, final_obs)
        return tuple(torch.as_tensor(x, device=self.device) for x in arrays)

    def close(self) -> None:
        self.envs.close()
