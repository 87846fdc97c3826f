"""Compare a population with as many members that are independent, and with the defaults.

    pip install -r benchmark/requirements.txt "ray[tune]==2.60.0"
    python benchmark/searches.py

Each repetition trains 8 members of search/population.py on LunarLanderContinuous-v3, 8 with random
hyper-parameters, and 8 at the defaults, and evaluates the best of each, by its training, over 100
episodes. Rows go to results/searches.csv; what is there already is not run again.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from run import ROOT, append, provenance, read

MEMBERS, REPETITIONS, TASK = 8, 3, "LunarLanderContinuous-v3"
# Fewer environments than by default, as a tenth of the steps should be several episodes of each.
FLAGS = f"--env-id {TASK} --total-timesteps 204800 --num-envs 8 --num-steps 256"


def output(folder: Path, *words: Any) -> str:
    """What a Python program prints in a folder."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout


def greedy(run: Path) -> float:
    """The mean greedy return of a run over 100 episodes."""
    words = [ROOT / "ppo_continuous.py", "--evaluate", run, "--eval-episodes", 100]
    return float(re.search(r"evaluated at (\S+)", output(run, *words))[1])


def population(folder: Path, *flags: str) -> tuple[float, Path]:
    """Train a population; the best member's training return, and its run."""
    words = [ROOT / "search/population.py", ROOT / "ppo_continuous.py", *shlex.split(FLAGS)]
    text = output(folder, *words, "--members", MEMBERS, "--folder", folder / "members", *flags)
    return float(re.search(r"^best, (\S+), with", text, re.MULTILINE)[1]), folder / "members/best"


def defaults(folder: Path, first_seed: int) -> tuple[float, Path]:
    """Train members at the defaults; the best one's training return, and its run."""

    def train(seed: int) -> tuple[float, Path]:
        words = [ROOT / "ppo_continuous.py", *shlex.split(FLAGS), "--seed", seed]
        text = output(folder, *words, "--eval-episodes", 0)
        score, run = re.search(r"^return (\S+) over .*; (\S+)$", text, re.MULTILINE).groups()
        return float(score), folder / run

    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(train, range(first_seed, first_seed + MEMBERS)))


def main() -> None:
    """Run the repetitions that are missing."""
    recorded = {(row["who"], row["seed"]) for row in read("searches.csv") if row["env_id"] == TASK}
    for repetition in range(1, REPETITIONS + 1):
        for who in ("population", "random", "defaults"):
            if (who, str(repetition)) in recorded:
                continue
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                if who == "defaults":
                    training, run = defaults(folder, 100 * repetition)
                else:
                    training, run = population(folder, *["--no-mutate"] * (who == "random"))
                row = {"env_id": TASK, "who": who, "seed": repetition, "training": training}
                row |= {"greedy": greedy(run), "flags": FLAGS}
            print(row, flush=True)
            append("searches.csv", [row | provenance()])


if __name__ == "__main__":
    main()
