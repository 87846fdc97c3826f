"""Try settings of a script, of ppo_continuous.py with the flags that search.diff adds to it.

    python benchmark/search.py --tasks Ant-v5 Hopper-v5 "--flags=--obs-eps 0.1"
    python benchmark/search.py --script ppo.py --tasks Acrobot-v1 "--flags=--num-envs 16"

Every run is one process with --compile, and a row of benchmark/results/search.csv; what is there
already is not run again. Seeds from 101 on are for this only: no published row has them.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import tyro
from provenance import provenance
from run import MUJOCO, ROOT, append, read

LOCK = Lock()


@dataclass
class Args:
    """Try settings."""

    script: str = "ppo_continuous.py"
    tasks: tuple[str, ...] = tuple(MUJOCO)  # environments
    seeds: tuple[int, ...] = (101, 102)
    flags: str = ""  # of the script, in one string
    jobs: int = 2  # runs at once


def train(script: Path, env_id: str, seed: int, flags: str) -> None:
    """Train once, in the script's folder, and append what it reached."""
    words = [sys.executable, str(script), "--env-id", env_id, "--seed", str(seed), "--compile"]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        [*words, *flags.split()],
        cwd=script.parent,
        env=os.environ | one_thread,
        capture_output=True,
        text=True,
    )
    row = {"env_id": env_id, "seed": seed, "flags": flags}
    if done.returncode:
        raise RuntimeError(f"{row} failed:\n{done.stderr}")
    greedy = re.search(r"greedy return (\S+), std (\S+), over", done.stdout).groups()
    row["score"] = re.search(r"mean return (\S+) over", done.stdout)[1]
    row |= dict(zip(("greedy", "greedy_std"), greedy, strict=True))
    row["wall_clock_s"] = round(time.perf_counter() - start)
    print(row, flush=True)
    with LOCK:
        append("search.csv", [row | provenance()])


def main(args: Args) -> None:
    """Train what isn't on file."""
    keys = ("env_id", "seed", "flags")
    recorded = {tuple(row[key] for key in keys) for row in read("search.csv")}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        script = Path(folder, args.script)
        script.write_bytes((ROOT / args.script).read_bytes())
        if args.script == "ppo_continuous.py":
            with (ROOT / "benchmark/search.diff").open() as diff:
                subprocess.run(["patch", "-p0", "-F0"], cwd=folder, stdin=diff, check=True)
        runs = [
            pool.submit(train, script, env_id, seed, args.flags)
            for seed in args.seeds
            for env_id in args.tasks
            if (env_id, str(seed), args.flags) not in recorded
        ]
        for run in runs:
            run.result()


if __name__ == "__main__":
    main(tyro.cli(Args))
