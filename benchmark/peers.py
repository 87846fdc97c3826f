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
# Our defaults, which don't clip values.
CARTPOLE_16 = CARTPOLE | {"batch_size": 128, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.999}
CARTPOLE_16 |= {"gae_lambda": 0.97, "ent_coef": 0.0005}
CARTPOLE_16 |= {"normalize_advantage": False, "clip_range_vf": None}
HALFCHEETAH_64 = HALFCHEETAH | {"n_steps": 32, "learning_rate": 4e-4, "max_grad_norm": 5.0}
HALFCHEETAH_64 |= {"normalize_advantage": False, "clip_range_vf": None}
RECURRENT = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "learning_rate": 1e-3}
RECURRENT |= {"gamma": 0.98, "gae_lambda": 0.8, "clip_range": 0.2}
CASES = {  # number of environments, whether they are normalized, settings
    "CartPole-v1": (4, False, CARTPOLE | {"batch_size": 128}),
    "CartPole-v1, 64": (64, False, CARTPOLE | {"batch_size": 2048}),
    "CartPole-v1, defaults": (16, True, CARTPOLE_16),
    "HalfCheetah-v5": (1, True, HALFCHEETAH),
    "HalfCheetah-v5, defaults": (64, True, HALFCHEETAH_64),
    "ALE/Breakout-v5": (8, False, CARTPOLE | {"batch_size": 256}),
}


class Clock(BaseCallback):
    """Notes when the first rollout has been learned from."""

    start = None

    def _on_rollout_start(self) -> None:
        if self.num_timesteps and not self.start:
            self.start, self.steps = time.perf_counter(), self.num_timesteps

    def _on_step(self) -> bool:
        return True


def make(case: str, folder: str) -> PPO:
    """The peer with the settings of the script in a case."""
    number, is_normalized, settings = CASES[case]
    env_id, policy, clip = case.split(",")[0], "MlpPolicy", 0.2
    if env_id == "ALE/Breakout-v5":  # frames are skipped by its wrapper, as ours by ALE
        import ale_py

        gym.register_envs(ale_py)
        kwargs = {"frameskip": 1, "repeat_action_probability": 0.0}
        envs = VecFrameStack(make_atari_env(env_id, number, seed=1, env_kwargs=kwargs), 4)
        policy, clip = "CnnPolicy", 0.1
    else:
        torch.set_num_threads(1)  # the fastest for a small network
        envs = make_vec_env(env_id, number, seed=1)
    rate = settings["learning_rate"]
    settings = COMMON | {"clip_range": clip, "clip_range_vf": clip} | settings
    settings["learning_rate"] = lambda left: left * rate
    envs = VecNormalize(envs) if is_normalized else envs
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
