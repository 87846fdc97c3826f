"""Kill training runs at random moments, resume them, and compare them with undisturbed ones.

    python benchmark/resume.py

Each case is trained once undisturbed, and then with `kills` SIGKILLs, at random moments of up to
half the time that it took, which are printed with the checkpoint at hand: at least one must have
had one. The final weights, optimizer states, and all logged scalars but the clock's must be equal,
bit for bit; one that is not ends the script with status 1. Rows go to benchmark/results/resume.csv.
"""

import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from run import ROOT, append, events_of, provenance

CASES = [
    "ppo.py --env-id CartPole-v1 --total-timesteps 200000 --checkpoint-interval 20",
    "ppo.py --env-id LunarLander-v3 --total-timesteps 60000 --checkpoint-interval 10",
    *(
        f"ppo_continuous.py --env-id {task} --total-timesteps 40960 --checkpoint-interval 16"
        " --num-envs 4 --num-steps 128 --num-minibatches 8"
        for task in ("HalfCheetah-v5", "BipedalWalker-v3")
    ),
    "ppo_atari.py --env-id ALE/Pong-v5 --total-timesteps 12288 --num-threads 1 --num-steps 64"
    " --checkpoint-interval 2",
    "variants/ppo_recurrent.py --env-id CartPole-v1 --total-timesteps 60000"
    " --checkpoint-interval 20",
]


@dataclass
class Args:
    """Kill, resume and compare."""

    kills: int = 20  # kills of each case
    shortest: float = 3.0  # least seconds of a process before it is killed; starting takes some
    seed: int = 1  # of the moments
    only: str = ""  # cases whose command contains this


def content(folder: Path) -> tuple[dict[str, Any], dict[str, list[tuple[int, float]]]]:
    """A run's last checkpoint, and its scalars without the clock's."""
    events = events_of(folder)
    tags = set(events.Tags()["scalars"]) - {"charts/SPS"}
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    saved["args"].pop("resume")  # the folder, where it was resumed
    return saved, scalars


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


def disturbed_run(
    script: str, flags: list[str], folder: Path, kills: int, moment: Callable[[], float]
) -> tuple[Path, list[str]]:
    """Train in `folder` with up to `kills` kills; return the run's folder and the kills made.

    `moment` draws how many seconds a process gets.
    """
    made = []
    while True:
        checkpoint = next(folder.glob("runs/*/checkpoint.pt"), None)
        begin = ["--resume", str(checkpoint.parent)] if checkpoint else flags
        process = subprocess.Popen([sys.executable, ROOT / script, *begin], cwd=folder)
        try:
            seconds = moment() if len(made) < kills else None
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            checkpoint, step = next(folder.glob("runs/*/checkpoint.pt"), None), 0
            if checkpoint:
                saved, _ = content(checkpoint.parent)
                step, given = saved["global_step"], saved["args"]
            made.append(f"after {seconds:.2f} s, checkpoint of step {step}")
            print(f"  killed {made[-1]}", flush=True)
            if step and step + given["num_envs"] * given["num_steps"] > given["total_timesteps"]:
                return checkpoint.parent, made  # it was killed when all was done
            continue
        if process.returncode:
            sys.exit(f"{script} {' '.join(begin)} ended with status {process.returncode}")
        return next(folder.glob("runs/*/checkpoint.pt")).parent, made


def main(args: Args) -> int:
    """Run the cases, and append them to the results; return how many differed."""
    rows = []
    for command in CASES:
        if args.only not in command:
            continue
        print(command, flush=True)
        rng = random.Random(args.seed)
        script, *flags = f"{command} --eval-episodes 0".split()
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            whole, _ = disturbed_run(script, flags, Path(folder), 0, float)
            longest = max(args.shortest, (time.perf_counter() - start) / 2)
            moment = partial(rng.uniform, args.shortest, longest)
            expected, kills, different = content(whole), [], []
            while len(kills) < args.kills:
                with tempfile.TemporaryDirectory() as other:
                    left = args.kills - len(kills)
                    run, made = disturbed_run(script, flags, Path(other), left, moment)
                    kills += made
                    different += differences(expected, content(run))
        if all(kill.endswith("step 0") for kill in kills):
            sys.exit("every kill fell before the first checkpoint: give the case more steps")
        command = " ".join(["python", script, *flags])
        rows.append({"command": command, "seed": args.seed, "kills": len(kills)})
        rows[-1] |= {"different": " ".join(different), "moments": "; ".join(kills)}
        print(f"  {len(kills)} kills, different: {different or 'nothing'}", flush=True)
        append("resume.csv", [rows[-1] | provenance()])
    return sum(bool(row["different"]) for row in rows)


if __name__ == "__main__":
    sys.exit(bool(main(tyro.cli(Args))))
