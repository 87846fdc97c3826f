"""Measure what a checkpoint costs: its seconds, its bytes, and its share of a default run's time.

    PYTHONPATH=. python benchmark/checkpoint.py

A short run of each script writes a checkpoint after every second iteration. The cost is the time
from flushing the events to the finished file, and that of making and resetting the environments
anew, which follows; the share is that of one such cost in the time that the iterations between two
scheduled checkpoints take at the default interval. Rows go to benchmark/results/checkpoint.csv.
"""

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import gymnasium as gym
from provenance import provenance
from run import append
from torch.utils.tensorboard import SummaryWriter

import ppo
import ppo_atari
import ppo_continuous

CASES: list[tuple[ModuleType, dict[str, Any]]] = [
    (ppo, {"total_timesteps": 102_400}),
    (ppo_continuous, {"total_timesteps": 40_960}),
    (ppo_atari, {"total_timesteps": 20_480, "env_id": "ALE/Pong-v5", "num_threads": 1}),
]


def measure(script: ModuleType, flags: dict[str, Any]) -> dict[str, Any]:
    """Train, and return the medians of what its checkpoints took."""
    begins, ends, resets = [], [], []
    flush, replace, make_envs = SummaryWriter.flush, os.replace, script.make_envs

    def timed_flush(writer: SummaryWriter) -> None:
        begins.append(time.perf_counter())
        flush(writer)

    def timed_replace(path: Path, target: Path) -> None:
        replace(path, target)
        ends.append(time.perf_counter())

    def timed_make_envs(*args: Any) -> gym.vector.VectorEnv:
        start = time.perf_counter()
        return Timed(make_envs(*args), start)

    class Timed(gym.vector.VectorWrapper):
        def __init__(self, envs: gym.vector.VectorEnv, start: float) -> None:
            super().__init__(envs)
            self.start = start

        def reset(self, **kwargs: Any) -> tuple[Any, dict]:
            result = self.env.reset(**kwargs)
            resets.append(time.perf_counter() - self.start)
            return result

    args = script.Args(checkpoint_interval=2, eval_episodes=0, **flags)
    with contextlib.ExitStack() as patches, tempfile.TemporaryDirectory() as folder:
        patches.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        patches.enter_context(mock.patch.object(SummaryWriter, "flush", timed_flush))
        patches.enter_context(mock.patch.object(os, "replace", timed_replace))
        patches.enter_context(mock.patch.object(script, "make_envs", timed_make_envs))
        script.train(args)
        (path,) = Path("runs").glob("*/checkpoint.pt")
        size = path.stat().st_size
    saves = [end - begin for begin, end in zip(begins, ends, strict=False)]
    # The first reset is apart from its make_envs: the rest of the set-up lies between them.
    save, reset = statistics.median(saves), statistics.median(resets[1:])
    # Between the ends of two checkpoints lie two iterations, a reset and a save.
    gaps = [b - a for a, b in itertools.pairwise(ends[:-1])]
    iteration = (statistics.median(gaps) - save - reset) / 2
    interval = script.Args().checkpoint_interval
    return {
        "script": f"{script.__name__}.py",
        "env_id": args.env_id,
        "bytes": size,
        "save_ms": round(1000 * save, 2),
        "reset_ms": round(1000 * reset, 2),
        "iteration_ms": round(1000 * iteration, 2),
        "default_interval": interval,
        "share_percent": round(100 * (save + reset) / (interval * iteration), 3),
    }


if __name__ == "__main__":
    rows = [measure(*case) | provenance() for case in CASES]
    append("checkpoint.csv", rows)
    for row in rows:
        print(row)
