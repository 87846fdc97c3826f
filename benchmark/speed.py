"""Compare our steps a second with Stable-Baselines3's: same settings, alternately, in one run.

    python -m venv /tmp/sb3
    /tmp/sb3/bin/pip install stable-baselines3 "gymnasium[mujoco]" mujoco==3.10.0 tensorboard
    python benchmark/speed.py --peer-python /tmp/sb3/bin/python

Nothing else should run on the machine meanwhile. Every round's figures are appended to
benchmark/results/speed.csv; the medians and their ratio are printed.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from provenance import provenance
from run import append

ROOT = Path(__file__).resolve().parent.parent
CASES = {"CartPole-v1": ("ppo.py", 150_000), "HalfCheetah-v5": ("ppo_continuous.py", 30_720)}


@dataclass
class Args:
    """Time our scripts and Stable-Baselines3, alternately."""

    peer_python: str  # the python of an environment with stable-baselines3
    rounds: int = 5  # alternations; the median counts


def output_of(*command: str | Path) -> str:
    """Run a command in an empty folder, and return what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout


def main(args: Args) -> None:
    """Run the rounds, append them to the results, and print medians."""
    rows = []
    for env_id, (script, steps) in CASES.items():
        for round_number in range(args.rounds):
            flags = f"--env-id {env_id} --total-timesteps {steps} --eval-episodes 0"
            ours = output_of(sys.executable, ROOT / script, *flags.split())
            ours = float(re.search(r"([\d,]+) steps/s", ours)[1].replace(",", ""))
            peer = output_of(args.peer_python, ROOT / "benchmark/sb3_ppo.py", env_id, str(steps))
            peer = float(peer.split()[-1])
            rows.append(
                {"env_id": env_id, "round": round_number, "ours": ours, "sb3": round(peer)}
                | {"ratio": round(ours / peer, 3)}
            )
            print(rows[-1], flush=True)
    append("speed.csv", [row | provenance() for row in rows])
    for env_id in CASES:
        mine, theirs = ([r[k] for r in rows if r["env_id"] == env_id] for k in ("ours", "sb3"))
        a, b = statistics.median(mine), statistics.median(theirs)
        print(f"{env_id}: ours {a:,.0f}, Stable-Baselines3 {b:,.0f} steps/s, ratio {a / b:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
