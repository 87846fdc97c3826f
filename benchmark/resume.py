"""Kill training runs at random moments, resume them, and see that they go on to their end.

    python benchmark/resume.py
    python benchmark/resume.py --exact    # with recipes/exact_resume.diff, bit for bit

Each case is trained once undisturbed, and then with SIGKILLs, at random moments of up to half the
time that it took; every second one waits until a checkpoint is being written. After each kill, the
checkpoint must load, be at most `checkpoint_interval` iterations behind the last event, and be what
the run goes on from. At the end, each iteration must be in the events once. By `--exact`, weights,
optimizer states, and scalars but the clock's must be the undisturbed run's. Kills are rows of
benchmark/results/resume.csv. Where any of this fails, the exit status is 1.
"""

import contextlib
import logging
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from run import ROOT, append, events_of, provenance

CASES = [
    "ppo.py --env-id CartPole-v1 --total-timesteps 200000",
    "ppo_continuous.py --env-id HalfCheetah-v5 --total-timesteps 200000",
    "ppo_atari.py --env-id ALE/Pong-v5 --total-timesteps 20480 --num-steps 32 --num-threads 1",
]
logging.getLogger("tensorboard").setLevel(logging.ERROR)  # a resumed run is no news
RECIPE = "recipes/exact_resume.diff"


@dataclass
class Args:
    """Kill, resume and look."""

    kills: int = 20  # kills of each case
    exact: bool = False  # patch the scripts with recipes/exact_resume.diff, and compare all bits
    shortest: float = 3.0  # least seconds of a process before it is killed; starting takes some
    seed: int = 1  # of the moments
    only: str = ""  # cases whose command contains this


def load(run: Path) -> dict[str, Any]:
    """A run's checkpoint."""
    return torch.load(run / "checkpoint.pt", weights_only=True)


def scalars_of(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of a run's scalars, by name; of the clock's, the steps."""
    events = events_of(run)
    tags = events.Tags()["scalars"]
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    return scalars | {"charts/SPS": [(step, 0) for step, _ in scalars.get("charts/SPS", [])]}


def content(run: Path, is_exact: bool) -> dict[str, Any]:
    """What must be equal: the iterations in the events or, exactly, all that is there."""
    scalars = scalars_of(run)
    return scalars | load(run) if is_exact else {"steps": scalars["charts/SPS"]}


def iterations_of(args: dict[str, Any], steps: int) -> int:
    """How many whole iterations so many steps are."""
    return steps // (args["num_envs"] * args["num_steps"])


def differences(a: Any, b: Any, name: str = "") -> list[str]:
    """The names of what is unequal in two nested structures; nan equals nan."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted({*a, *b}, key=str)
        return [x for key in keys for x in differences(a.get(key), b.get(key), f"{name}/{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [x for i, pair in pairs for x in differences(*pair, f"{name}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) else [name]
    both_nan = all(isinstance(x, float) and math.isnan(x) for x in (a, b))
    return [] if a == b or both_nan else [name]


def written(folder: Path) -> int:
    """When an unfinished checkpoint was last changed, 0 if there is none."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.glob("runs/*/checkpoint.tmp"):
            return path.stat().st_mtime_ns
    return 0


def is_killed(process: subprocess.Popen, seconds: float | None, folder: Path, wait: bool) -> bool:
    """Kill a process after a time, if that is to `wait` when it next writes a checkpoint.

    Returns whether it was killed, as it may end before. Raises `CalledProcessError` if it failed.
    """
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        before = written(folder)
        while wait and written(folder) == before and process.poll() is None:
            pass
        process.kill()
        status = process.wait()
    if status not in (0, -signal.SIGKILL):
        raise subprocess.CalledProcessError(status, process.args)
    return status != 0


def train(words: list[str], folder: Path, moments: list[float]) -> tuple[Path, list[dict]]:
    """Train by processes that are killed after so many seconds each, and a last one that is not.

    Returns the run and, for each kill, the steps of the last event and of the checkpoint.
    """
    kills = []
    for seconds in [*moments, None]:
        run = next((x.parent for x in folder.glob("runs/*/checkpoint.pt")), None)
        if run:
            saved = load(run)
            left = saved["args"]["total_timesteps"] - saved["global_step"]
            if not iterations_of(saved["args"], left):  # it was killed when all was done
                break
        else:  # begin anew
            shutil.rmtree(folder / "runs", ignore_errors=True)
        before = written(folder)
        resumed = [*words[:2], "--resume", str(run)] if run else words
        process = subprocess.Popen(resumed, cwd=folder, stdout=subprocess.DEVNULL)
        if not is_killed(process, seconds, folder, wait=len(kills) % 2 == 1):
            break
        kill = {"after_s": round(seconds, 1), "while_writing": written(folder) not in (0, before)}
        kill |= {"time": time.time(), "event": 0, "checkpoint": 0}
        for run in folder.glob("runs/*"):
            kill["event"] = max((step for step, _ in scalars_of(run)["charts/SPS"]), default=0)
            if (run / "checkpoint.pt").exists():
                kill["checkpoint"] = load(run)["global_step"]
        kills.append(kill)
        print(f"  {kill}", flush=True)
    return next(folder.glob("runs/*")), kills


def disturb(words: list[str], folder: Path, args: Args) -> list[dict[str, Any]]:
    """Train undisturbed and disturbed; the kills, with what each cost and how its run ended."""

    def new_run(moments: list[float]) -> tuple[Path, list[dict]]:
        return train(words, Path(tempfile.mkdtemp(dir=folder)), moments)

    rng, kills = random.Random(args.seed), []
    start = time.perf_counter()
    whole, _ = new_run([])
    longest = max(args.shortest, (time.perf_counter() - start) / 2)
    saved, expected = load(whole), content(whole, args.exact)
    while left := args.kills - len(kills):
        run, made = new_run([rng.uniform(args.shortest, longest) for _ in range(left)])
        different = differences(expected, content(run, args.exact))
        iterations = events_of(run).Scalars("charts/SPS")
        for kill in made:
            moment, lost = kill.pop("time"), kill["event"] - kill["checkpoint"]
            kill["resumed"] = max((x.step for x in iterations if x.wall_time < moment), default=0)
            kill["behind"] = iterations_of(saved["args"], lost)
            kill["interval"] = saved["args"]["checkpoint_interval"]
            kill["return"] = round(float(np.mean(load(run)["last_returns"])), 1)
            kill["undisturbed"] = round(float(np.mean(saved["last_returns"])), 1)
            kill["different"] = " ".join(different[:5])
        kills += made
    return kills


def main(args: Args) -> int:
    """Run the cases, and append their kills to the results; return how many fail."""
    failed = 0
    for case in CASES:
        if args.only not in case:
            continue
        name, *flags = f"{case} --eval-episodes 0".split()
        with tempfile.TemporaryDirectory() as folder:
            script, patching = ROOT / name, ""
            if args.exact:
                script = Path(folder, f"my_{name}")
                patch = ["patch", "-s", "-o", script, ROOT / name, ROOT / RECIPE]
                subprocess.run(patch, check=True)
                flags += ["--checkpoint-interval", "20"]  # it has rarer ones, as they cut episodes
                patching = f"patch -o {script.name} {name} {RECIPE} && "
            command = f"{patching}python {script.name} {' '.join(flags)}"
            print(command, flush=True)
            kills = disturb([sys.executable, str(script), *flags], Path(folder), args)
        rows = [{"command": command, "seed": args.seed} | kill | provenance() for kill in kills]
        append("resume.csv", rows)
        failed += sum(
            x["resumed"] != x["checkpoint"] or x["behind"] > x["interval"] or x["different"] != ""
            for x in kills
        )
        most, writing = max(x["behind"] for x in kills), sum(x["while_writing"] for x in kills)
        print(f"  {len(kills)} kills, {writing} while writing, at most {most} iterations lost")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(tyro.cli(Args))))
