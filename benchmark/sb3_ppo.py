"""Time Stable-Baselines3's PPO on the settings of our scripts; print its steps a second.

Run by speed.py, in an environment of its own that has stable-baselines3 installed:

    python sb3_ppo.py CartPole-v1 100000
"""

import sys
import tempfile
import time

import ale_py
import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

gym.register_envs(ale_py)

CARTPOLE = {
    "n_steps": 128,
    "batch_size": 128,
    "n_epochs": 4,
    "ent_coef": 0.01,
    "learning_rate": 2.5e-4,
}
HALFCHEETAH = {
    "n_steps": 2048,
    "batch_size": 64,
    "n_epochs": 10,
    "ent_coef": 0.0,
    "learning_rate": 3e-4,
}
BREAKOUT = {
    "n_steps": 128,
    "batch_size": 256,
    "n_epochs": 4,
    "ent_coef": 0.01,
    "learning_rate": 2.5e-4,
}


def main() -> None:
    """Train for the given number of steps, after a warm-up of one iteration."""
    env_id, total_timesteps = sys.argv[1], int(sys.argv[2])
    env_id, num_envs = env_id.split(",")[0], 64 if "64" in env_id else 4
    if env_id == "ALE/Breakout-v5":  # frames are skipped by its wrapper, as ours by ALE
        kwargs = {"frameskip": 1, "repeat_action_probability": 0.0}
        envs = VecFrameStack(make_atari_env(env_id, 8, seed=1, env_kwargs=kwargs), 4)
        settings = BREAKOUT
    else:
        torch.set_num_threads(1)  # the fastest for a small network
    if env_id == "CartPole-v1":
        envs, settings = make_vec_env(env_id, num_envs, seed=1), CARTPOLE
        settings["batch_size"] = 32 * num_envs
    elif env_id == "HalfCheetah-v5":
        envs, settings = VecNormalize(make_vec_env(env_id, 1, seed=1)), HALFCHEETAH
    rate, clip = settings.pop("learning_rate"), 0.1 if env_id == "ALE/Breakout-v5" else 0.2
    with tempfile.TemporaryDirectory() as folder:
        model = PPO(
            "CnnPolicy" if env_id == "ALE/Breakout-v5" else "MlpPolicy",
            envs,
            **settings,
            learning_rate=lambda remaining: remaining * rate,
            gamma=0.99,
            gae_lambda=0.95,
            clip_range=clip,
            clip_range_vf=clip,
            vf_coef=0.5,
            max_grad_norm=0.5,
            device="cpu",
            tensorboard_log=folder,
        )
        model.learn(envs.num_envs * settings["n_steps"])
        start = time.perf_counter()
        model.learn(total_timesteps, reset_num_timesteps=False)
        print(
            (model.num_timesteps - envs.num_envs * settings["n_steps"])
            / (time.perf_counter() - start)
        )


if __name__ == "__main__":
    main()
