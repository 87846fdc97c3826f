"""Learn CartPole-v1 and HalfCheetah-v5 as fast as we know how to, timed from the process's start.

    python benchmark/fast.py

Seeds one after another, each in a process of its own. What counts is when the mean return of
the last 100 training episodes first reached a threshold, imports and compilation (from a warm
cache) included; for CartPole also how many seeds are at 475 when they end, and when that is. In the
medians a seed that never got there counts as later than all others. Rows go to
benchmark/results/fast.csv. Nothing else should run on the machine meanwhile.
"""

import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from provenance import provenance
from run import ROOT, append, events_of

RECIPES = {  # environment: script, flags, thresholds
    "CartPole-v1": (
        "ppo.py",
        "--num-envs 32 --num-steps 64 --num-minibatches 8 --update-epochs 5 --learning-rate 5e-3 "
        "--gamma 0.98 --gae-lambda 0.93 --ent-coef 0 --no-clip-vloss --total-timesteps 81920 "
        "--eval-episodes 0",
        [475],
    ),
    "HalfCheetah-v5": (
        "ppo_continuous.py",
        "--compile --no-anneal-lr --learning-rate 1e-3 --no-stagger --target-kl None "
        "--max-grad-norm 0.5 --total-timesteps 300000 --eval-episodes 0",
        [1500, 3000],
    ),
}


def learn(command: str, thresholds: list[int]) -> dict[str, float | str]:
    """Run a command in an empty folder: its score, its seconds, and those until each threshold."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        script, *flags = command.split()
        words = [sys.executable, str(ROOT / script), *flags]
        subprocess.run(words, cwd=folder, capture_output=True, check=True)
        seconds = time.time() - start
        (run,) = Path(folder, "runs").iterdir()
        events = events_of(run)
        episodes = events.Scalars("charts/episodic_return")
    means = np.convolve([x.value for x in episodes], np.full(100, 0.01), "valid")
    steps = np.array([x.step for x in episodes])
    last = np.flatnonzero(np.append(steps[1:] > steps[:-1], True))  # of those that end together
    last = last[last >= 99]
    row = {"score": round(float(means[-1]), 1), "seconds": round(seconds, 2)}
    for threshold in thresholds:
        reached = last[means[last - 99] >= threshold]
        when = round(episodes[reached[0]].wall_time - start, 2) if len(reached) else ""
        row[f"seconds_to_{threshold}"] = when
    return row


@dataclass
class Args:
    """Time the recipes."""

    env_id: str | None = None  # environment to learn; all of them by default
    seeds: int = 10  # runs of each


def main(args: Args) -> None:
    """Run the seeds, append the rows and print the medians."""
    columns = [f"seconds_to_{x}" for _, _, thresholds in RECIPES.values() for x in thresholds]
    recipes = {args.env_id: RECIPES[args.env_id]} if args.env_id else RECIPES
    for env_id, (script, recipe, thresholds) in recipes.items():
        rows = []
        for seed in range(1, args.seeds + 1):
            command = f"{script} --env-id {env_id} {recipe} --seed {seed}"
            key = {"env_id": env_id, "seed": seed} | dict.fromkeys(columns, "")
            rows.append(key | learn(command, thresholds) | {"command": f"python {command}"})
            print(rows[-1], flush=True)
            append("fast.csv", [rows[-1] | provenance()])
        solved = [row["seconds"] if row["score"] >= thresholds[-1] else "" for row in rows]
        times = {f"{thresholds[-1]} at the end": solved}
        times |= {f"{x} at first": [r[f"seconds_to_{x}"] for r in rows] for x in thresholds}
        for what, seconds in times.items():
            median = statistics.median(x or math.inf for x in seconds)
            count = sum(x != "" for x in seconds)
            print(f"{env_id}, {what}: {count} of {args.seeds}, median {median:.2f} s")


if __name__ == "__main__":
    main(tyro.cli(Args))
