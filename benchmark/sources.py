"""Measure sources of environments: speed and memory by their number, and slow ones in processes.

    pip install -r benchmark/requirements.txt envpool==1.2.5
    python benchmark/sources.py

Nothing else should run on the machine meanwhile. Sources take turns; the median of the rounds
counts. Rows go to benchmark/results/sources.csv, the plot to sources.png; those of environments
that sleep, in processes against one after another, to slow.csv.
"""

import os
import statistics
import time
from collections import defaultdict
from contextlib import closing
from typing import Any

import gymnasium as gym
import matplotlib.pyplot as plt
import numpy as np
from provenance import provenance
from run import RESULTS, append, read
from speed import measure

ROUNDS = 3
NUMBERS = [1, 4, 16, 64, 256]
SOURCES = {  # script, environment, sources, steps in a rollout
    "CartPole-v1": ("ppo.py", ["sync", "native", "envpool"], 128),
    "HalfCheetah-v5": ("ppo_continuous.py", ["sync", "envpool"], 32),
}
MILLISECONDS = [1, 5, 20]


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


def numbers() -> None:
    """Steps a second and memory by the number of environments, compiled."""
    for env_id, (script, sources, num_steps) in SOURCES.items():
        rows = []
        for turn in range(ROUNDS):
            for number in NUMBERS:
                batch = number * num_steps
                steps = batch * max(6, 40_000 // batch)
                # Minibatches of the default sizes, 128 and 64 steps, so that only sources differ.
                parts = max(1, batch // (128 if script == "ppo.py" else 64))
                flags = f"--env-id {env_id} --num-envs {number} --num-steps {num_steps} --compile"
                flags += f" --num-minibatches {parts} --total-timesteps {steps}"
                for source in sources:
                    figures = measure(script, f"{flags} --vectorization {source}")
                    row = {"env_id": env_id, "source": source, "num_envs": number, "round": turn}
                    rows.append(row | figures)
                    print(rows[-1], flush=True)
        append("sources.csv", [row | provenance() for row in rows])


def alone(milliseconds: int, source: str) -> dict[str, float]:
    """The speed of gymnasium's vector environment by itself, with nothing to learn or log."""
    actions, steps = np.zeros(8, np.int64), 1000 // milliseconds
    with closing(gym.make_vec("Slow-v0", 8, source, milliseconds=milliseconds)) as envs:
        envs.reset(seed=0)
        start = time.perf_counter()
        for _ in range(steps):
            envs.step(actions)
        seconds = time.perf_counter() - start
    return {"steps_per_s": round(8 * steps / seconds), "first_iteration_s": "", "peak_mib": ""}


def slow() -> None:
    """Eight environments that compute for a while, one after another and in processes."""
    rows = []
    os.environ["PYTHONPATH"] = str(RESULTS.parent)
    for turn in range(ROUNDS):
        for milliseconds in MILLISECONDS:
            steps = 8 * 32 * (16 if milliseconds < 20 else 6)
            flags = f"--env-id sources:Slow-v0 --env-kwargs milliseconds {milliseconds}"
            flags += f" --num-envs 8 --num-steps 32 --total-timesteps {steps}"
            for source in ("sync", "async"):
                figures = {
                    source: measure("ppo.py", f"{flags} --vectorization {source}"),
                    f"{source} alone": alone(milliseconds, source),
                }
                for who, found in figures.items():
                    row = {"milliseconds": milliseconds, "source": who, "round": turn}
                    rows.append(row | found)
                    print(rows[-1], flush=True)
    append("slow.csv", [row | provenance() for row in rows])


def plot() -> None:
    """Draw sources.png from the medians of the last rows of sources.csv."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), sharex=True, layout="constrained")
    machine = read("sources.csv")[-1]["machine"]
    for column, env_id in enumerate(SOURCES):
        found = defaultdict(lambda: defaultdict(list))
        for row in read("sources.csv"):
            if row["env_id"] == env_id and row["machine"] == machine:
                found[row["source"]][int(row["num_envs"])].append(row)
        for axis, key in zip(axes[:, column], ["steps_per_s", "peak_mib"], strict=True):
            for source, rows in found.items():
                medians = [statistics.median(float(x[key]) for x in rows[n]) for n in rows]
                axis.plot(list(rows), medians, "o-", label=source)
            axis.set_xscale("log", base=2)
            axis.set_xticks(NUMBERS, [str(x) for x in NUMBERS])
            axis.set_ylim(0)
            axis.grid(alpha=0.3)
        axes[0, column].set_title(f"{env_id}, --compile", fontsize=10)
        axes[1, column].set_xlabel("environments")
        axes[0, column].legend(fontsize=9)
    axes[0, 0].set_ylabel("steps a second")
    axes[1, 0].set_ylabel("peak memory, MiB")
    figure.savefig(RESULTS / "sources.png", dpi=110)


if __name__ == "__main__":
    numbers()
    slow()
    plot()
