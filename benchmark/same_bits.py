"""Compare short runs of an older revision's scripts with those that are here, bit for bit.

    python benchmark/same_bits.py c0a4103

Weights, optimizer and greedy returns must be equal: where they are, figures of that revision are
this one's, too. Rows go to benchmark/results/same_bits.csv. Exit status 1 if a run differs.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import tyro
from before import extract
from provenance import provenance
from run import ROOT, append

# With checkpoints that cut episodes, compiled and eager, at the defaults and with one environment.
CASES = {
    "ppo.py": [
        "--checkpoint-interval 5 --total-timesteps 8192",
        "--compile --target-kl 0.002 --total-timesteps 4096",
    ],
    "ppo_continuous.py": [
        "--env-id Hopper-v5 --compile --checkpoint-interval 2 --total-timesteps 8192",
        "--env-id Hopper-v5 --num-envs 1 --num-steps 2048 --total-timesteps 6144",
    ],
    "ppo_atari.py": ["--num-threads 1 --checkpoint-interval 1 --total-timesteps 2048"],
    "variants/ppo_recurrent.py": [
        "--mask-velocity --checkpoint-interval 5 --total-timesteps 5120",
    ],
    "variants/ppo_continuous_recurrent.py": [
        "--env-id Pendulum-v1 --mask-velocity --checkpoint-interval 1 --total-timesteps 4096",
    ],
}


def end_of_run(script: Path, flags: str) -> tuple[list[torch.Tensor], str]:
    """What a run in an empty folder ends with: its tensors, and the line of its evaluation."""
    command = [sys.executable, script, *flags.split(), "--eval-episodes", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        (path,) = Path(folder).glob("runs/*/checkpoint.pt")
        checkpoint = torch.load(path, weights_only=True)
    tensors = list(checkpoint["agent"].values())
    for state in checkpoint["optimizer"]["state"].values():
        tensors += [torch.as_tensor(x) for x in state.values()]
    return tensors, next(line for line in done.stdout.splitlines() if "greedy" in line)


def main(revision: Annotated[str, tyro.conf.Positional]) -> None:
    """Run all cases with both, and record which are the same."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        extract(revision, folder)
        for script, cases in CASES.items():
            for flags in cases:
                before, now = (end_of_run(x / script, flags) for x in (Path(folder), ROOT))
                pairs = zip(before[0], now[0], strict=True)
                same = before[1] == now[1] and all(torch.equal(x, y) for x, y in pairs)
                rows.append({"revision": revision, "script": script, "flags": flags, "same": same})
                print(rows[-1], flush=True)
    append("same_bits.csv", [row | provenance() for row in rows])
    sys.exit(not all(row["same"] for row in rows))


if __name__ == "__main__":
    tyro.cli(main)
