"""Train the list of runs behind the tables of results, and record what they reached.

    python benchmark/run.py --only CartPole-v1 Acrobot-v1 --jobs 2

Every run is one process of the script, with the command that is recorded beside its result in
benchmark/results/runs.csv; its learning curve goes to benchmark/results/curves.csv, as the mean
return of the episodes that ended in each fiftieth of the steps. What is recorded there already is
not run again, and what was stopped on the way goes on from its checkpoint in runs/benchmark. The
wall-clock time, from the first event on, means little where several jobs share a machine.
"""

import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Literal

import numpy as np
import tyro
from provenance import provenance
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark/results"
CLASSIC = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3"]
MUJOCO = ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "Swimmer-v5"]
MUJOCO += ["Reacher-v5", "InvertedPendulum-v5", "InvertedDoublePendulum-v5"]
ATARI = ["ALE/Breakout-v5", "ALE/Pong-v5"]
# The settings of Huang et al., which ppo_continuous.py had as its defaults at first.
CANONICAL = "--num-envs 1 --num-steps 2048 --no-recompute-advantages --norm-adv"
CANONICAL += " --clip-vloss --max-grad-norm 0.5 --target-kl None --log-std-init 0 --log-std-min -20"
CANONICAL += " --learning-rate 3e-4 --checkpoint-interval 50"
TEN, FIVE, THREE = range(1, 11), range(1, 6), range(1, 4)
FRESH = range(34, 44)  # no choice of ppo_continuous.py's defaults has seen these seeds


def compiled(task: str) -> str:
    """The flags of a compiled run at the defaults; where episodes are short, it evaluates more."""
    more = " --eval-episodes 100" if task in ("Reacher-v5", "Pusher-v5") else ""
    return f"--compile --eval-checkpoints{more}"


MAIN = [  # script, environment, seeds, further flags
    *(("ppo.py", task, FIVE, "") for task in CLASSIC),
    *(("ppo_continuous.py", task, FRESH, compiled(task)) for task in MUJOCO),
    *(("ppo_atari.py", task, [1], "--bf16") for task in ATARI),
]
# The defaults but for one.
CHANGES = ["--no-stagger", "--target-kl None", "--max-grad-norm 0.5", "--checkpoint-interval 0"]
CHANGES += ["--learning-rate 3e-4", CANONICAL]
ABLATED = ["HalfCheetah-v5", "Hopper-v5", "Ant-v5", "Swimmer-v5"]
PENDULUMS = ["InvertedPendulum-v5", "InvertedDoublePendulum-v5"]
NO_FLOOR = "--log-std-min -20"  # no floor under the standard deviation
ABLATION = [
    ("ppo_continuous.py", task, FRESH[:5], f"{compiled(task)} {change}")
    for changes, tasks in ((CHANGES, ABLATED), ([NO_FLOOR], PENDULUMS))
    for change in changes
    for task in tasks
]
# Tasks by which no default was chosen, run once.
UNSEEN = ["Pusher-v5", "HumanoidStandup-v5", "LunarLanderContinuous-v3", "BipedalWalker-v3"]
UNSEEN += ["Pendulum-v1"]
HELD_OUT = [("ppo_continuous.py", task, FRESH[:5], compiled(task)) for task in UNSEEN]
LARGER = "--compile --num-envs 16 --num-minibatches 8 --update-epochs 10 --learning-rate 1e-3"
SHORT = "--total-timesteps 200000"
# What variants/tune.py found for LunarLander-v3; its seeds and those of the comparison are others.
FOUND = "--compile --num-envs 8 --num-steps 64 --num-minibatches 8 --update-epochs 17"
FOUND += " --learning-rate 1.86e-3 --gamma 0.999 --gae-lambda 0.98 --ent-coef 0.001 --no-clip-vloss"
# Episodes of a fifth of the length: five times as many starts to learn from.
MORE_STARTS = "--env-kwargs max_episode_steps 200"
EXPERIMENTS = [
    ("ppo_continuous.py", PENDULUMS[1], FRESH[:5], f"{compiled(PENDULUMS[1])} {MORE_STARTS}"),
    ("ppo.py", "LunarLander-v3", range(16, 26), FOUND),
    ("ppo.py", "LunarLander-v3", TEN, f"{LARGER} --gamma 0.999 --gae-lambda 0.98 --no-clip-vloss"),
    ("ppo.py", "LunarLander-v3", FIVE, f"{LARGER} --gamma 0.999 --gae-lambda 0.98"),
    ("ppo.py", "Acrobot-v1", FIVE, f"{LARGER} --no-clip-vloss --ent-coef 0 {SHORT}"),
    ("ppo.py", "CartPole-v1", THREE, SHORT),
    ("ppo.py", "FrozenLake-v1", THREE, "--env-kwargs is_slippery False --total-timesteps 100000"),
    ("ppo.py", "Taxi-v4", THREE, "--num-envs 16 --learning-rate 1e-3"),
    ("ppo.py", "Taxi-v4", THREE, "--num-envs 16 --learning-rate 1e-3 --mask-actions"),
    ("ppo.py", "third_party:MiniGrid-Picture-v0", THREE, "--total-timesteps 50000"),
]
# What needs a memory, with one and without.
PENDULUM = "--gamma 0.95 --learning-rate 1e-3 --num-minibatches 16 --total-timesteps 600000"
PENDULUM += " --eval-episodes 100"
POLES = "--num-envs 8 --update-epochs 10 --learning-rate 2e-3 --gamma 0.98 --gae-lambda 0.8"
POLES += " --ent-coef 0 --total-timesteps 300000"
LANDER = f"{LARGER} --gamma 0.999 --gae-lambda 0.98 --no-clip-vloss --vf-coef 0.001"
LANDER += " --total-timesteps 300000"
RECALL = f"{LARGER} --no-clip-vloss --total-timesteps 300000"
UNUSED = [6, 7, 8, 9, 10]  # seeds that other settings weren't tried on, either
MEMORY = [
    ("variants/ppo_continuous_recurrent.py", "Pendulum-v1", UNUSED, f"--mask-velocity {PENDULUM}"),
    ("ppo_continuous.py", "third_party:Pendulum-NoVelocity-v0", UNUSED, PENDULUM),
    ("variants/ppo_recurrent.py", "CartPole-v1", UNUSED, f"--mask-velocity {POLES}"),
    ("ppo.py", "third_party:CartPole-NoVelocity-v0", UNUSED, POLES),
    ("variants/ppo_recurrent.py", "LunarLander-v3", THREE, f"--mask-velocity {LANDER}"),
    ("ppo.py", "third_party:LunarLander-NoVelocity-v0", THREE, LANDER),
    ("variants/ppo_recurrent.py", "popgym:popgym-RepeatPreviousEasy-v0", THREE, RECALL),
    ("ppo.py", "popgym:popgym-RepeatPreviousEasy-v0", THREE, RECALL),
    ("variants/ppo_recurrent.py", "popgym:popgym-RepeatFirstEasy-v0", THREE, RECALL),
    ("ppo.py", "popgym:popgym-RepeatFirstEasy-v0", THREE, RECALL),
    *(
        ("benchmark/memories.py", task, THREE, f"--memory gru {flags}")
        for task, flags in {
            "CartPole-v1": f"--mask-velocity {POLES}",
            "popgym:popgym-RepeatPreviousEasy-v0": RECALL,
        }.items()
    ),
]
# The same with environments of another source.
SOURCES = [
    ("ppo.py", "CartPole-v1", FIVE, "--total-timesteps 100000"),
    ("ppo.py", "CartPole-v1", FIVE, "--total-timesteps 100000 --vectorization native"),
    *(
        ("ppo_continuous.py", task, seeds, f"{compiled(task)}{source}")
        for task, seeds in {
            "HalfCheetah-v5": FRESH[:5],
            "Hopper-v5": FRESH[:5],
            "Ant-v5": FRESH,
        }.items()
        for source in ("", " --vectorization envpool")
    ),
]
# The recipes, and the script without them.
BRIEF = "--total-timesteps 100000"
RECIPES = [
    ("ppo.py", "CartPole-v1", FIVE, f"--learning-rate 2.5e-4 {BRIEF}"),
    *(
        (f"recipes/{name}.diff", "CartPole-v1", FIVE, BRIEF)
        for name in ("relu_layernorm", "rnd", "cosine_lr", "smooth_l1", "adaptive_kl")
    ),
    ("ppo.py", "CartPole-v1", FIVE, f"--learning-rate 2.5e-3 {BRIEF}"),
    ("recipes/adaptive_kl.diff", "CartPole-v1", FIVE, f"--learning-rate 2.5e-3 {BRIEF}"),
    ("recipes/early_stop.diff", "CartPole-v1", FIVE, "--stop-at 475"),
    ("recipes/rnd.diff", "MountainCar-v0", THREE, ""),
    ("recipes/log_info.diff", "HalfCheetah-v5", THREE, BRIEF),
    ("recipes/dict_obs.diff", "probe_envs:Signs-v0", FIVE, "--total-timesteps 20000"),
]
# What a new version of the scripts is compared on, with the rows of the one before.
CHECK = [
    ("ppo.py", "CartPole-v1", FIVE, ""),
    *(
        ("ppo_continuous.py", task, FRESH[:5], "--compile --eval-checkpoints")
        for task in ("HalfCheetah-v5", "Hopper-v5", "Ant-v5")
    ),
    ("ppo_atari.py", "ALE/Pong-v5", [1], "--bf16 --total-timesteps 500000"),
]
RUNS = {
    "main": MAIN,
    "ablation": ABLATION,
    "held-out": HELD_OUT,
    "experiments": EXPERIMENTS,
    "memory": MEMORY,
    "sources": SOURCES,
    "recipes": RECIPES,
    "check": CHECK,
}
LOCK = Lock()


@dataclass
class Args:
    """Train the recorded runs that are missing."""

    only: list[str] = field(default_factory=list)  # environments; all if none is named
    flags: str | None = None  # runs with exactly these flags; any if left out
    table: Literal[tuple(RUNS)] | None = None  # runs of one table only
    jobs: int = 1  # runs at once
    into: str = "runs.csv"  # file of the results; curves go to the one with "curves" in its name


def label(script: str, flags: str) -> str:
    """A script with flags, in short."""
    return f"{script} {flags.replace(CANONICAL, '(canonical)')}".strip()


def read(name: str) -> list[dict[str, str]]:
    """The rows of a results file, none if it doesn't exist."""
    path = RESULTS / name
    return list(csv.DictReader(path.open())) if path.exists() else []


def events_of(folder: Path) -> EventAccumulator:
    """What a run has written for TensorBoard, all of it."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def append(name: str, rows: list[dict]) -> None:
    """Append rows to a results file, under a header."""
    path = RESULTS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    if not new and [*read(name)[0]] != [*rows[0]]:
        raise ValueError(f"{path} has other columns: move it away")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def curve(returns: list[ScalarEvent], steps: int) -> Iterator[dict[str, float]]:
    """The mean return and number of the episodes in each fiftieth of a run."""
    part = steps / 50
    for i in range(50):
        values = [x.value for x in returns if i * part < x.step <= (i + 1) * part]
        if values:
            mean = round(float(np.mean(values)), 2)
            yield {"step": round((i + 1) * part), "return": mean, "episodes": len(values)}


def train(script: str, env_id: str, seed: int, flags: str, into: str) -> None:
    """Run a script or a recipe in a folder of its own, or go on there; record it in `into`."""
    recipe = ROOT / script if script.endswith(".diff") else None
    changed = recipe.read_text().split("\n--- ")[1].split()[0] if recipe else script
    arguments = f"--env-id {env_id} --seed {seed} {flags}".strip()
    patched = f"my_{changed}" if recipe else changed
    command = f"patch -o {patched} {changed} {script} && " * bool(recipe)
    command += f"python {patched} {arguments}"
    version = f"{command} {provenance()['commit']}"  # no run goes on with another version
    folder = ROOT / "runs/benchmark" / hashlib.sha1(version.encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(ROOT / changed), *arguments.split()]
    if recipe:
        words[1] = str(folder / patched)
        subprocess.run(["patch", "-s", "-o", words[1], ROOT / changed, recipe], check=True)
    started = [x.parent for x in folder.glob("runs/*/checkpoint.pt")]
    if started:
        words += ["--resume", str(started[0].relative_to(folder))]
    modules = {"third_party": "benchmark", "probe_envs": "tests"}  # of environments
    paths = [path for module, path in modules.items() if env_id.startswith(f"{module}:")]
    environment = os.environ | {"PYTHONPATH": ":".join(str(ROOT / path) for path in paths)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr}")
    print(done.stdout.strip(), flush=True)
    score, episodes, run = re.search(
        r"return (\S+) over the last (\d+) episodes; (\S+)", done.stdout
    ).groups()
    events = events_of(folder / run)
    speed, returns = (events.Scalars(f"charts/{x}") for x in ("SPS", "episodic_return"))
    greedy = [round(x.value, 1) for x in events.Scalars("eval/return")]
    spread = re.findall(r"^evaluated at \S+ ± (\S+)", done.stdout, re.MULTILINE)
    times = sorted(x.wall_time for x in (*speed, *events.Scalars("eval/return")))
    gaps = np.diff([events.FirstEventTimestamp(), *times])
    key = {"script": script, "env_id": env_id, "flags": flags, "seed": seed}
    row = {"score": score, "episodes": episodes, "steps": speed[-1].step}
    row |= {"greedy": greedy[-1], "greedy_std": spread[-1]}
    row["evaluations"] = " ".join(str(x) for x in greedy)  # the last at the end
    row["wall_clock_s"] = round(gaps[gaps < 600].sum(), 1)  # without long pauses
    settings = "".join(f"PYTHONPATH={path} " for path in paths)
    row["command"] = command.replace("python ", f"{settings}python ", 1)
    with LOCK:
        append(into, [key | row | provenance()])
        curves = into.replace("runs", "curves")
        append(curves, [key | point for point in curve(returns, speed[-1].step)])
    shutil.rmtree(folder)


def main(args: Args) -> None:
    """Train what is missing, and print mean and spread of each environment."""
    keys = ("script", "env_id", "flags", "seed")
    recorded = {tuple(row[key] for key in keys) for row in read(args.into)}
    runs = [run for name in ([args.table] if args.table else RUNS) for run in RUNS[name]]
    jobs = [
        (script, env_id, seed, flags)
        for seed in sorted({seed for _, _, seeds, _ in runs for seed in seeds})
        for script, env_id, seeds, flags in runs
        if seed in seeds
        and (not args.only or env_id in args.only)
        and args.flags in (None, flags)
        and (script, env_id, flags, str(seed)) not in recorded
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda job: train(*job, args.into), dict.fromkeys(jobs)))
    for script, env_id, _, flags in runs:
        key = {"script": script, "env_id": env_id, "flags": flags}
        rows = [row for row in read(args.into) if key.items() <= row.items()]
        scores = [float(row["score"]) for row in rows]
        if scores:
            spread = np.std(scores, ddof=1) if len(scores) > 1 else 0.0
            figures = f"{np.mean(scores):.1f} ± {spread:.1f}, {len(scores)} seeds"
            print(f"{script} {env_id} {flags}: {figures}")


if __name__ == "__main__":
    main(tyro.cli(Args))
