"""Time the scripts of an older revision beside those that are here, alternately.

    python benchmark/before.py 7e00cb9

Each case is run eagerly and with --compile. A speed is of the second half of a run, as in speed.py.
Rows go to benchmark/results/before.csv, one for both runs of a round; the medians of the rounds'
ratios, and their range, are printed. Nothing else should run on the machine meanwhile.
"""

import io
import statistics
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from provenance import provenance
from run import CANONICAL, ROOT, append, label
from speed import measure

CASES = [  # environment, script, flags
    ("CartPole-v1", "ppo.py", "--total-timesteps 102400"),
    ("HalfCheetah-v5", "ppo_continuous.py", f"{CANONICAL} --total-timesteps 24576"),
    ("HalfCheetah-v5", "ppo_continuous.py", "--total-timesteps 65536"),
    ("ALE/Breakout-v5", "ppo_atari.py", "--total-timesteps 8192"),
]


@dataclass
class Args:
    """Time the scripts of a revision beside those that are here."""

    revision: Annotated[str, tyro.conf.Positional]  # of git, a commit or a tag
    rounds: int = 5  # alternations; the median counts
    env_id: str | None = None  # environment to time; all of them by default


def extract(revision: str, folder: str) -> None:
    """Put the files of a revision into a folder."""
    command = ["git", "-C", ROOT, "archive", revision]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        file.extractall(folder, filter="data")


def main(args: Args) -> None:
    """Run the rounds, append the rows and print the ratios."""
    runs = [
        (env_id, script, flags + compiled)
        for env_id, script, flags in CASES
        for compiled in ("", " --compile")
        if args.env_id in (None, env_id)
    ]
    ratios = {run: [] for run in runs}
    with tempfile.TemporaryDirectory() as folder:
        extract(args.revision, folder)
        for round_number in range(args.rounds):
            for run in runs:
                env_id, script, flags = run
                sides = [("steps_per_s_before", Path(folder)), ("steps_per_s", ROOT)]
                speeds = {}
                for side, scripts in sides if round_number % 2 == 0 else reversed(sides):
                    figures = measure(script, f"--env-id {env_id} {flags}", scripts=scripts)
                    speeds[side] = figures["steps_per_s"]
                row = {"env_id": env_id, "who": label(script, flags), "round": round_number}
                row |= {"revision": args.revision} | {side: speeds[side] for side, _ in sides}
                ratios[run].append(speeds["steps_per_s"] / speeds["steps_per_s_before"])
                row["ratio"] = round(ratios[run][-1], 3)
                print(row, flush=True)
                append("before.csv", [row | provenance()])
    for (env_id, script, flags), values in ratios.items():
        between = f"{min(values):.2f} .. {max(values):.2f}"
        print(f"{env_id} {label(script, flags)}: {statistics.median(values):.2f} x ({between})")


if __name__ == "__main__":
    main(tyro.cli(Args))
