"""Time the scripts: beside others, by number and source of environments.

    pip install -r benchmark/requirements.txt envpool==1.2.5
    python benchmark/speed.py peers --sb3 /tmp/sb3 --cleanrl /tmp/cleanrl --leanrl /tmp/leanrl
    python benchmark/speed.py solved --cleanrl /tmp/cleanrl --rounds 3 --limit 400
    python benchmark/speed.py sources
    python benchmark/speed.py slow
    python benchmark/speed.py gpu

/tmp/sb3 is a virtual environment, /tmp/cleanrl and /tmp/leanrl have one beside a repository:

    python -m venv /tmp/sb3
    /tmp/sb3/bin/pip install sb3-contrib==2.9.2 torch==2.13.0 "gymnasium[mujoco]" mujoco==3.10.0 \
        tensorboard ale-py==0.12.1 opencv-python-headless
    git clone https://github.com/vwxyzjn/cleanrl /tmp/cleanrl/repo  # measured: commit fe8d8a0
    python -m venv /tmp/cleanrl/venv
    /tmp/cleanrl/venv/bin/pip install torch==2.13.0 gymnasium==0.29.1 "numpy<2" tyro tensorboard \
        mujoco==3.10.0 imageio opencv-python-headless ale-py==0.8.1 "shimmy[atari]==1.3.0" \
        box2d==2.3.10 pygame
    cp .venv/lib/python3.11/site-packages/ale_py/roms/breakout.bin \
        /tmp/cleanrl/venv/lib/python3.11/site-packages/ale_py/roms  # this ale-py has no games
    git clone https://github.com/meta-pytorch/LeanRL /tmp/leanrl/repo  # measured: commit 20bfe67
    python -m venv /tmp/leanrl/venv
    /tmp/leanrl/venv/bin/pip install torch==2.13.0 tensordict==0.13.0 gymnasium==0.29.1 "numpy<2" \
        mujoco==3.10.0 tyro tqdm wandb imageio tensorboard

Nothing else should run on the machine. All of a case take turns. `solved` has scripts at their own
defaults: seconds from a process's start until the mean of the last 100 episodes' returns is at a
figure, in results/solved.csv. The other tables have steps a second at equal hyper-parameters, in
results/speed.csv: ours are timed in the second half of a run, Stable-Baselines3's after its first
iteration, the rest as they print it, so that neither imports nor compilation count.
"""

import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ale_py  # noqa: F401 - registers the games
import gymnasium as gym
import numpy as np
import torch
import tyro
from run import LISTS, ROOT, append, events_of, label, provenance

# bfloat16 says nothing about a script on a processor without units for it.
BF16 = ["--bf16", "--bf16 --compile"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else []
CLEANRL_HALFCHEETAH = "ppo_continuous_action.py --env-id HalfCheetah-v4"
LEANRL_HALFCHEETAH = "ppo_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --no-cuda"
LEANRL_HALFCHEETAH += " --compile --total-timesteps 40960"
ARRAYS, ENVPOOL = (
    f"--vectorization vector_entry_point --env-id variants.fast_envs:{source}/"
    for source in ("Arrays", "EnvPool")
)
CARTPOLE, HALFCHEETAH = "ppo.py --env-id CartPole-v1", "ppo_continuous.py --env-id HalfCheetah-v5"
BREAKOUT = "ppo_atari.py --env-id ALE/Breakout-v5 --total-timesteps 8192"
CANONICAL, CLEANRL = (LISTS["settings"][x] for x in ("canonical", "cleanrl"))
# ppo.py's and ppo_continuous.py's defaults, for who has others; these have no KL target.
LIKE_PPO = "--num-envs 16 --num-minibatches 16 --update-epochs 10 --learning-rate 1e-3"
LIKE_PPO += " --gamma 0.999 --gae-lambda 0.97 --no-norm-adv --no-clip-vloss --ent-coef 0.0005"
LIKE_CONTINUOUS = "--num-envs 64 --num-steps 32 --learning-rate 4e-4 --max-grad-norm 5"
LIKE_CONTINUOUS += " --no-norm-adv --no-clip-vloss"
NO_KL = "--target-kl None"
MEMORY = "variants/ppo_recurrent.py --mask-velocity --total-timesteps 12800 --num-envs 8"
MEMORY += " --num-steps 32 --num-minibatches 1 --update-epochs 20 --learning-rate 1e-3"
MEMORY += " --gamma 0.98 --gae-lambda 0.8 --norm-adv --no-clip-vloss --ent-coef 0"
PEERS = {  # case: our script, its runs, Stable-Baselines3's steps, CleanRL's script
    "CartPole-v1": (
        f"{CARTPOLE} {CLEANRL} --total-timesteps 102400",
        ["", "--compile"],
        25_600,
        "ppo.py --total-timesteps 25600",
    ),
    "CartPole-v1, 64": (
        f"{CARTPOLE} {CLEANRL} --num-envs 64 --total-timesteps 819200",
        ["--compile", f"--compile {ARRAYS}CartPole-v1", f"--compile {ENVPOOL}CartPole-v1"],
        81_920,
        "ppo.py --num-envs 64 --total-timesteps 163840",
    ),
    "CartPole-v1, defaults": (
        CARTPOLE,
        ["", "--compile"],
        40_960,
        f"ppo.py {LIKE_PPO} --total-timesteps 40960",
    ),
    "HalfCheetah-v5": (
        f"{HALFCHEETAH} {CANONICAL} --total-timesteps 24576",
        ["", "--compile"],
        16_384,
        f"{CLEANRL_HALFCHEETAH} --total-timesteps 16384",
    ),
    "HalfCheetah-v5, defaults": (
        f"{HALFCHEETAH} --total-timesteps 65536",
        [
            "",
            "--compile",
            NO_KL,
            f"{NO_KL} --compile",
            f"--compile {ENVPOOL}HalfCheetah-v5",
        ],
        32_768,
        f"{CLEANRL_HALFCHEETAH} {LIKE_CONTINUOUS} --total-timesteps 32768",
    ),
    "CartPole-v1 without velocities": (MEMORY, [""], 12_800, None),
    "ALE/Breakout-v5": (
        BREAKOUT,
        ["", "--compile", *BF16],
        8192,
        "ppo_atari.py --env-id BreakoutNoFrameskip-v4 --total-timesteps 8192",
    ),
}
LANDER = f"ppo.py --env-id LunarLander-v3 {LISTS['settings']['lunar_lander']}"
CAR = f"ppo.py --env-id MountainCar-v0 {LISTS['settings']['mountain_car']}"
SOLVED = {  # task: the return that solves it, our script, and CleanRL's at its own defaults
    "CartPole": (475, CARTPOLE, "ppo.py --env-id CartPole-v1"),
    "LunarLander": (200, LANDER, "ppo.py --env-id LunarLander-v2"),
    "HalfCheetah": (1443, HALFCHEETAH, CLEANRL_HALFCHEETAH),
    "MountainCar": (-110, CAR, "ppo.py --env-id MountainCar-v0"),
    "Hopper": (
        2000,
        "ppo_continuous.py --env-id Hopper-v5",
        "ppo_continuous_action.py --env-id Hopper-v4",
    ),
}
# Trains our script, and prints the mean of the last 100 returns after each iteration.
DRIVER = """
import importlib, sys, tyro

script = importlib.import_module(sys.argv[1])
script.train(
    tyro.cli(script.Args, args=sys.argv[2:]),
    lambda step, mean: print(f"global_step={step}, mean_return={mean}", flush=True),
)
"""
NUMBERS = [1, 4, 16, 64, 256]
SOURCES = {  # environment: script, sources, steps in a rollout, steps in a minibatch
    "CartPole-v1": (
        "ppo.py",
        {"sync": "--env-id ", "arrays": ARRAYS, "EnvPool": ENVPOOL},
        128,
        128,
    ),
    "HalfCheetah-v5": ("ppo_continuous.py", {"sync": "--env-id ", "EnvPool": ENVPOOL}, 32, 64),
}
GPU = {  # case: our script, its runs
    "ALE/Breakout-v5, 8": (
        "ppo_atari.py --device cuda --total-timesteps 16384",
        ["", "--compile", "--bf16 --compile"],
    ),
    "ALE/Breakout-v5, 64": (
        "ppo_atari.py --device cuda --num-envs 64 --total-timesteps 65536",
        ["", "--bf16 --compile"],
    ),
    "HalfCheetah-v5, defaults": (
        "ppo_continuous.py --device cuda --total-timesteps 16384",
        ["", "--compile"],
    ),
}
Timed = Callable[[], dict[str, float]]  # a run, which returns its figures


@dataclass
class Args:
    """Measure speed."""

    table: tyro.conf.Positional[Literal["peers", "solved", "sources", "slow", "gpu"]]
    only: str = ""  # cases whose name begins with this
    rounds: int = 5  # alternations, with a seed each in "solved"; the median counts
    sb3: Path | None = None  # the virtual environment of Stable-Baselines3
    cleanrl: Path | None = None  # the folder of CleanRL's
    limit: float = math.inf  # seconds after which a run of "solved" is given up
    leanrl: Path | None = None  # the folder of LeanRL's


def ours(command: str) -> dict[str, float]:
    """Run a script in an empty folder: its speed, its first iteration and its peak memory."""
    words = [sys.executable, *f"{ROOT}/{command} --eval-episodes 0".split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmark")}
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silence:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=silence, stderr=subprocess.PIPE
        )
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError(f"{' '.join(words)} failed:\n{errors.decode()}")
        (run,) = Path(folder, "runs").iterdir()
        iterations = events_of(run).Scalars("charts/SPS")
    middle, last = iterations[len(iterations) // 2 - 1], iterations[-1]
    return {
        "steps_per_s": round((last.step - middle.step) / (last.wall_time - middle.wall_time)),
        "first_iteration_s": round(iterations[0].step / iterations[0].value, 2),
        "peak_mib": round(usage.ru_maxrss / 1024),
    }


def peer(*words: Any) -> dict[str, float]:
    """Run somebody else's script in an empty folder: the speed that it prints last."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(x) for x in words]
        environment = os.environ | {"WANDB_MODE": "disabled"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    speed = int(re.findall(r"(?:SPS|speed): +(\d+)", done.stdout + done.stderr)[-1])
    return {"steps_per_s": speed, "first_iteration_s": "", "peak_mib": ""}


def alternate(table: str, case: str, runs: dict[str, Timed], rounds: int) -> None:
    """Time runs, by name, in turn, and append a row for each."""
    for turn in range(rounds):
        for who, run in runs.items():
            row = {"table": table, "case": case, "who": who, "round": turn} | run()
            print(row, flush=True)
            append("speed.csv", [row | provenance()])


def peers(args: Args) -> dict[str, dict[str, Timed]]:
    """Ours beside Stable-Baselines3's, CleanRL's and LeanRL's."""
    cases = {}
    for case, (command, variants, sb3_steps, cleanrl) in PEERS.items():
        runs = cases[case] = {}
        if args.sb3 and sb3_steps:
            script = ROOT / "benchmark/peers.py"
            python = args.sb3.absolute() / "bin/python"
            runs["Stable-Baselines3"] = partial(peer, python, script, case, sb3_steps)
        if args.cleanrl and cleanrl:
            root = args.cleanrl.absolute()
            words = f"{root}/venv/bin/python {root}/repo/cleanrl/{cleanrl} --no-cuda".split()
            runs["CleanRL"] = partial(peer, *words)
        if args.leanrl and case == "HalfCheetah-v5":
            root = args.leanrl.absolute()
            words = f"{root}/venv/bin/python {root}/repo/leanrl/{LEANRL_HALFCHEETAH}".split()
            runs["LeanRL"] = partial(peer, *words)
        for flags in variants:
            runs[label(command.split()[0], flags)] = partial(ours, f"{command} {flags}")
    return cases


def until(goal: float, words: list[str], limit: float) -> dict[str, float | str]:
    """Run a script in an empty folder until the last 100 returns' mean is `goal`, or to its end.

    After `limit` seconds it is given up. Where it didn't get there, no seconds are returned.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    returns, steps = deque(maxlen=100), 0
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        for line in process.stdout:
            if found := re.match(r"global_step=(\d+), (\w+)_return=\[?([^]\s]+)", line):
                steps, kind, number = int(found[1]), found[2], float(found[3])
                returns.append(number)
                mean = number if kind == "mean" else np.mean(returns)
                seconds = time.perf_counter() - start
                if mean >= goal or seconds > limit:
                    process.kill()
                    return {"seconds": round(seconds, 1) if mean >= goal else "", "steps": steps}
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} failed")
    return {"seconds": "", "steps": steps}


def solved(args: Args) -> None:
    """Time ours, eager and compiled, and CleanRL's from the start until a task is solved."""
    for case, (goal, command, peer) in SOLVED.items():
        script, *flags = command.replace(".py", "", 1).split()
        mine = [sys.executable, "-c", DRIVER, script, *flags, "--eval-episodes", "0"]
        runs = {"ours": mine, "ours, compiled": [*mine, "--compile"]}
        if args.cleanrl:
            root = args.cleanrl.absolute()
            words = f"{root}/venv/bin/python {root}/repo/cleanrl/{peer} --no-cuda".split()
            runs["CleanRL's"] = words
        for seed in range(1, args.rounds + 1):
            for who, words in runs.items() if case.startswith(args.only) else ():
                row = {"case": case, "goal": goal, "who": who, "seed": seed}
                row |= until(goal, [*words, "--seed", str(seed)], args.limit)
                print(row, flush=True)
                append("solved.csv", [row | provenance()])


def sources(args: Args) -> dict[str, dict[str, Timed]]:
    """Sources of environments by their number, compiled."""
    cases = {}
    for env_id, (script, choices, num_steps, minibatch_size) in SOURCES.items():
        for number in NUMBERS:
            batch_size = number * num_steps
            flags = f"--num-envs {number} --num-steps {num_steps} --compile"
            flags += f" --num-minibatches {max(1, batch_size // minibatch_size)}"
            flags += f" --total-timesteps {batch_size * max(6, 40_000 // batch_size)}"
            cases[f"{env_id}, {number}"] = {
                who: partial(ours, f"{script} {flags} {source}{env_id}")
                for who, source in choices.items()
            }
    return cases


class Slow(gym.Env):
    """Computes for so many milliseconds at each step; episodes have 100 steps."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, milliseconds: float) -> None:
        self.seconds = milliseconds / 1000

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Keep the core busy, for as much of its own time."""
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        self.steps += 1
        return np.zeros(4, np.float32), 0.0, False, self.steps == 100, {}


gym.register("Slow-v0", Slow)


def slow(args: Args) -> dict[str, dict[str, Timed]]:
    """Eight environments that compute for a while, one after another and in processes."""
    flags = f"{CLEANRL} --num-envs 8 --num-steps 32 --total-timesteps"
    return {
        f"{milliseconds} ms": {
            source: partial(
                ours,
                f'ppo.py --env-id speed:Slow-v0 --env-kwargs {{"milliseconds":{milliseconds}}}'
                f" {flags} {8 * 32 * parts} --vectorization {source}",
            )
            for source in ("sync", "async")
        }
        for milliseconds, parts in {1: 16, 5: 16, 20: 6}.items()
    }


def games(number: int) -> dict[str, float]:
    """ALE's vector environment alone, with random actions."""
    options = {"autoreset_mode": "SameStep", "repeat_action_probability": 0.0}
    envs = gym.make_vec("ALE/Breakout-v5", number, "vector_entry_point", **options)
    envs.reset(seed=1)
    actions = np.random.default_rng(1).integers(4, size=(200, number))
    for t in range(50):
        envs.step(actions[t])
    start = time.time()
    for t in range(50, 200):
        envs.step(actions[t])
    speed = round(150 * number / (time.time() - start))
    return {"steps_per_s": speed, "first_iteration_s": "", "peak_mib": ""}


def gpu(args: Args) -> dict[str, dict[str, Timed]]:
    """On a GPU, which Atari's script takes by itself, beside the games without a learner."""
    cases = {
        case: {
            label(command.split()[0], flags): partial(ours, f"{command} {flags}")
            for flags in variants
        }
        for case, (command, variants) in GPU.items()
    }
    for number in (8, 64):
        cases[f"ALE/Breakout-v5, {number}"]["the games alone"] = partial(games, number)
    return cases


def main(args: Args) -> None:
    """Measure a table."""
    if args.table == "solved":
        return solved(args)
    tables = {"peers": peers, "sources": sources, "slow": slow, "gpu": gpu}
    for case, runs in tables[args.table](args).items():
        if case.startswith(args.only):
            alternate(args.table, case, runs, args.rounds)


if __name__ == "__main__":
    main(tyro.cli(Args))
