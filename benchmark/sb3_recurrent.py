"""Train sb3-contrib's RecurrentPPO on tasks that need a memory; print its speed and its returns.

Run by memory.py, in an environment of its own that has sb3-contrib installed:

    python sb3_recurrent.py CartPole-v1 100000 SEED [one]

with one LSTM for actor and critic, as ours has, or one for each, as is its default, and otherwise
with the settings of rl-baselines3-zoo 2.9.0 (hyperparams/ppo_lstm.yml) for the tasks without
velocities, observations and rewards normalized as it does; with ours (run.py) for POPGym's, whose
observations are one-hot.
"""

import json
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import popgym  # noqa: F401, registers its environments
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

VELOCITIES = {"CartPole-v1": [1, 3], "LunarLander-v3": [2, 3, 5]}
POLICY = {
    "ortho_init": False,
    "activation_fn": torch.nn.ReLU,
    "lstm_hidden_size": 64,
    "enable_critic_lstm": "one" not in sys.argv,
    "shared_lstm": "one" in sys.argv,
    "net_arch": {"pi": [64], "vf": [64]},
}
SETTINGS = {  # the first: how many environments
    "CartPole-v1": (
        8,
        {
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "learning_rate": lambda remaining: remaining * 0.001,
            "clip_range": lambda remaining: remaining * 0.2,
        },
    ),
    "LunarLander-v3": (
        32,
        {
            "n_steps": 512,
            "batch_size": 128,
            "gae_lambda": 0.98,
            "gamma": 0.999,
            "n_epochs": 4,
            "ent_coef": 0.01,
        },
    ),
}
RECALL = {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "ent_coef": 0.01}
RECALL["learning_rate"] = lambda remaining: remaining * 1e-3
for name in ("RepeatPrevious", "RepeatFirst"):
    SETTINGS[f"popgym-{name}Easy-v0"] = (16, RECALL | {"gamma": 0.99})


def make(env_id: str) -> gym.Env:
    """The environment, without velocities."""
    env = gym.make(env_id)
    if env_id not in VELOCITIES:
        return env
    seen = np.ones(env.observation_space.shape, np.float32)
    seen[VELOCITIES[env_id]] = 0
    return gym.wrappers.TransformObservation(env, lambda obs: obs * seen, env.observation_space)


class Clock(BaseCallback):
    """Notes when the first rollout has been learned from."""

    def _on_rollout_start(self) -> None:
        if self.num_timesteps and not hasattr(self, "start"):
            self.start, self.steps = time.perf_counter(), self.num_timesteps

    def _on_step(self) -> bool:
        return True


def main() -> None:
    """Train for so many steps, time all but the first iteration, and evaluate greedily."""
    env_id, total_timesteps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)  # the fastest for a small network
    num_envs, settings = SETTINGS[env_id]
    normalize = {"norm_obs": env_id in VELOCITIES, "gamma": settings["gamma"]}
    envs = VecNormalize(
        make_vec_env(make, num_envs, seed=seed, env_kwargs={"env_id": env_id}), **normalize
    )
    model = RecurrentPPO(
        "MlpLstmPolicy", envs, policy_kwargs=POLICY, device="cpu", seed=seed, **settings
    )
    clock = Clock()
    model.learn(total_timesteps, callback=clock)
    speed = (model.num_timesteps - clock.steps) / (time.perf_counter() - clock.start)
    single: Any = VecNormalize(
        make_vec_env(make, 1, seed=seed + 1000, env_kwargs={"env_id": env_id}), **normalize
    )
    single.training, single.norm_reward = False, False
    if env_id in VELOCITIES:
        single.obs_rms = envs.obs_rms
    mean, std = evaluate_policy(model, single, n_eval_episodes=10, deterministic=True)
    score = float(np.mean([x["r"] for x in model.ep_info_buffer]))  # of the last 100 episodes
    found = {"steps": model.num_timesteps, "steps_per_s": speed, "score": score}
    print(json.dumps(found | {"greedy": mean, "greedy_std": std}))


if __name__ == "__main__":
    main()
