"""Solve CartPole-v1 as fast as we know how to, and time it from the start of the process.

    python benchmark/fast.py

Ten seeds, one after another, each in a process of its own; solved means that the mean return of the
last 100 training episodes is at least 475. Rows go to benchmark/results/fast.csv. Nothing else
should run on the machine meanwhile.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from provenance import provenance
from run import append

ROOT = Path(__file__).resolve().parent.parent
RECIPE = (
    "--num-envs 32 --num-steps 64 --num-minibatches 8 --update-epochs 5 --learning-rate 5e-3 "
    "--gamma 0.98 --gae-lambda 0.93 --ent-coef 0 --no-clip-vloss --total-timesteps 81920 "
    "--eval-episodes 0"
)


def main() -> None:
    """Run the seeds, append the rows and print how many were solved in which time."""
    rows = []
    for seed in range(1, 11):
        command = f"ppo.py --env-id CartPole-v1 {RECIPE} --seed {seed}"
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            words = [sys.executable, str(ROOT / "ppo.py"), *command.split()[1:]]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
            seconds = time.perf_counter() - start
        score = float(re.search(r"return (\S+) over", done.stdout)[1])
        row = {"env_id": "CartPole-v1", "seed": seed, "score": score}
        rows.append(row | {"seconds": round(seconds, 2), "command": f"python {command}"})
        print(f"seed {seed}: {score} in {seconds:.2f} s", flush=True)
    append("fast.csv", [row | provenance() for row in rows])
    solved = sum(row["score"] >= 475 for row in rows)
    print(f"solved {solved} of 10, median {statistics.median(r['seconds'] for r in rows):.2f} s")


if __name__ == "__main__":
    main()
