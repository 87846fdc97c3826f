"""Time a peer on the settings of our scripts, in an environment of its own: prints "SPS: n".

    python peers.py CartPole-v1 100000                         # Stable-Baselines3's PPO
    python peers.py "CartPole-v1 without velocities" 12800     # sb3-contrib's RecurrentPPO

Run by speed.py. Speeds are of all but the first iteration.
"""

import sys
import time

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

COMMON = {"gamma": 0.99, "gae_lambda": 0.95, "vf_coef": 0.5, "max_grad_norm": 0.5, "seed": 1}
CARTPOLE = {"n_steps": 128, "n_epochs": 4, "ent_coef": 0.01, "learning_rate": 2.5e-4}
HALFCHEETAH = {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4}
RECURRENT = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "learning_rate": 1e-3}
RECURRENT |= {"gamma": 0.98, "gae_lambda": 0.8, "clip_range": 0.2}


class Clock(BaseCallback):
    """Notes when the first rollout has been learned from."""

    start = None

    def _on_rollout_start(self) -> None:
        if self.num_timesteps and not self.start:
            self.start, self.steps = time.perf_counter(), self.num_timesteps

    def _on_step(self) -> bool:
        return True


def make(name: str, folder: str) -> PPO:
    """The peer with the settings of the script for an environment, "NAME" or "NAME, 64"."""
    env_id, number = name.split(",")[0], 64 if "64" in name else 4
    settings, policy, clip = CARTPOLE | {"batch_size": 32 * number}, "MlpPolicy", 0.2
    if env_id == "ALE/Breakout-v5":  # frames are skipped by its wrapper, as ours by ALE
        import ale_py

        gym.register_envs(ale_py)
        kwargs = {"frameskip": 1, "repeat_action_probability": 0.0}
        envs = VecFrameStack(make_atari_env(env_id, 8, seed=1, env_kwargs=kwargs), 4)
        settings, policy, clip = CARTPOLE | {"batch_size": 256}, "CnnPolicy", 0.1
    else:
        torch.set_num_threads(1)  # the fastest for a small network
        if env_id == "HalfCheetah-v5":
            envs, settings = VecNormalize(make_vec_env(env_id, 1, seed=1)), HALFCHEETAH
        else:
            envs = make_vec_env(env_id, number, seed=1)
    rate = settings["learning_rate"]
    settings = COMMON | settings | {"learning_rate": lambda left: left * rate}
    settings |= {"clip_range": clip, "clip_range_vf": clip}
    return PPO(policy, envs, **settings, device="cpu", tensorboard_log=folder)


def make_recurrent(folder: str) -> PPO:
    """RecurrentPPO with one LSTM, as ppo_recurrent.py has, on CartPole-v1 without velocities."""
    from sb3_contrib import RecurrentPPO

    def hide(env_id: str) -> gym.Env:
        env = gym.make(env_id)
        space = env.observation_space
        return gym.wrappers.TransformObservation(env, lambda obs: obs * [1, 0, 1, 0], space)

    torch.set_num_threads(1)
    envs = make_vec_env(hide, 8, seed=1, env_kwargs={"env_id": "CartPole-v1"})
    policy = {"lstm_hidden_size": 64, "enable_critic_lstm": False, "shared_lstm": True}
    policy |= {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    kwargs = COMMON | RECURRENT | {"policy_kwargs": policy, "tensorboard_log": folder}
    return RecurrentPPO("MlpLstmPolicy", envs, **kwargs, device="cpu")


if __name__ == "__main__":
    name, total_timesteps = sys.argv[1], int(sys.argv[2])
    model = make_recurrent("logs") if "without" in name else make(name, "logs")
    clock = Clock()
    model.learn(total_timesteps, callback=clock)
    seconds = time.perf_counter() - clock.start
    print(f"SPS: {(model.num_timesteps - clock.steps) / seconds:.0f}")
