"""The recipes for torchrun: two processes do what one does on all of the data, and are one run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import SHORT, assert_same, content, go_on, latest_run, load, watching
from test_recipes import patched
from torch import distributed as dist

# Runs of four iterations and fewer than 100 episodes. A minibatch is all of a rollout, as processes
# shuffle theirs apart; gradients are clipped, and target_kl ends updates.
FLAGS = {"num_minibatches": 1, "update_epochs": 10, "target_kl": 2e-4, "norm_adv": True}
FLAGS |= {"max_grad_norm": 0.1, "eval_episodes": 1}
RUNS = {
    "ppo": {"num_steps": 32, "total_timesteps": 512},
    "ppo_continuous": {"num_envs": 4, "num_steps": 64, "total_timesteps": 1024},
    "ppo_atari": {"env_id": "ALE/Pong-v5", "num_steps": 16, "total_timesteps": 128},
}
RUNS = {name: SHORT[name] | FLAGS | flags for name, flags in RUNS.items()}
RUNS["ppo_atari"] |= {"eval_episodes": 0}


def torchrun(*arguments: Any) -> tuple[int, str]:
    """The exit status and stderr of two processes of this file."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command += [__file__, *map(str, arguments)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as job:
        try:
            _, stderr = job.communicate(timeout=300)
        finally:
            job.terminate()
    return job.returncode, stderr


def train(script: ModuleType, flags: dict[str, Any]) -> tuple:
    """A run stopped by its report halfway, and resumed: numbers drawn, scores and weights."""
    act, draws, agents = script.Agent.act, [], []

    def act_alike(agent: Any, obs: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        """Without noise, which processes draw apart; off means, where the gradient would be 0."""
        draws.append(rng.random() if rng else None)
        actions = act(agent, obs)
        return actions if actions.ndim == 1 else actions + 0.5 * np.sin(10 * obs[:, :1])

    script.Agent.act = act_alike
    half = flags["total_timesteps"] // 2
    is_last = os.environ.get("RANK") != "0"  # the report of the second process ends both
    first = script.train(script.Args(**flags), lambda step, score: is_last and step == half)
    with watching(script, lambda agent, *_: agents.append(agent)):
        second = go_on(script, latest_run())
    return draws, (first, second), agents[0].state_dict()


def fail(script: ModuleType, flags: dict[str, Any], how: str) -> None:
    """A run in whose third iteration the second process gets a reward of nan, or is killed."""
    make_envs, num_calls = script.make_envs, [0]

    def reward(rewards: np.ndarray) -> np.ndarray:
        num_calls[0] += 1
        if num_calls[0] == 2 * flags["num_steps"] + 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return np.nan * rewards
        return rewards

    def make_broken_envs(*args: Any) -> gym.vector.VectorEnv:
        return gym.wrappers.vector.TransformReward(make_envs(*args), reward)

    if os.environ["RANK"] == "1":
        script.make_envs = make_broken_envs
    script.train(script.Args(**flags))


@pytest.mark.parametrize("name", RUNS)
def test_two_processes(name: str) -> None:
    """Two processes make the run that one makes, resumed too, up to rounding; one writes it."""
    _, scores, _ = train(load(patched(name)), RUNS[name])
    expected = content(latest_run())
    assert max(x for _, x in expected["losses/grad_norm"]) > 0.1
    counts = [x for _, x in expected["losses/minibatches"]]
    assert len(counts) == 4 and 1 < min(counts) < max(counts)

    status, stderr = torchrun(patched(name, f"torchrun_{name}"), json.dumps(RUNS[name]))
    assert status == 0, stderr
    ours = content(latest_run())
    assert len([*Path("runs").iterdir()]) == 2
    for saved in (ours, expected):
        saved["last_returns"].sort()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5, equal_nan=True)
    (draws, *results), (other_draws, *other_results) = map(torch.load, ("0.pt", "1.pt"))
    assert_same(results, other_results)
    assert results[0] == pytest.approx(scores, nan_ok=True)
    assert draws[0] != other_draws[0]


@pytest.mark.parametrize("how", ["nan", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_process_fails(how: str) -> None:
    """All end, and the checkpoint is the one before."""
    script, flags = patched("ppo", "torchrun_ppo"), RUNS["ppo"] | {"checkpoint_interval": 1}
    status, stderr = torchrun(script, json.dumps(flags), how)
    assert status != 0
    assert how == "killed" or "FloatingPointError: nan, infinite or huge rewards" in stderr
    assert load(script).load_checkpoint(latest_run())["global_step"] == 256


if __name__ == "__main__":  # in each of the two processes
    path, flags, *how = sys.argv[1:]
    dist.init_process_group("gloo")
    if how:
        fail(load(Path(path)), json.loads(flags), *how)
    torch.save(train(load(Path(path)), json.loads(flags)), f"{os.environ['RANK']}.pt")
