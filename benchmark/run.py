"""Train the runs of a table of runs.toml, and record what they reach.

    pip install -r benchmark/requirements.txt
    python benchmark/run.py main --jobs 2

Every run is one process of a script, with the command that is recorded beside its result in
benchmark/results/runs.csv. Its learning curve goes to curves.csv: the mean return in each fiftieth
of the steps, in which iterations count alike, however many episodes ended in them. What is on file
is not run again, and what was stopped on the way goes on from its checkpoint in runs/benchmark. The
wall-clock time, from the first event on, means little where several jobs share a machine.

The table `cleanrl` trains CleanRL's own scripts, in a folder that speed.py says how to make. Their
events are episodes.
"""

import csv
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from string import Template
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark/results"
LISTS = tomllib.loads((ROOT / "benchmark/runs.toml").read_text())
HUANG = {f"({x})": LISTS["settings"][x] for x in ("canonical", "cleanrl")}  # of Huang et al. (2022)
MODULES = {"third_party": "benchmark", "probe_envs": "tests"}  # of environments, and where they are
LOCK = Lock()


@dataclass
class Args:
    """Train the runs that are not on file."""

    table: tyro.conf.Positional[str]  # of runs.toml
    only: list[str] = field(default_factory=list)  # environments; all if none is named
    jobs: int = 1  # runs at once
    cleanrl: Path = Path("/tmp/cleanrl")  # the folder of CleanRL's


class Run(NamedTuple):
    """What identifies a row of runs.csv, but for its seed."""

    script: str
    env_id: str
    flags: str


def label(script: str, flags: str) -> str:
    """A script with flags, in short."""
    for name, settings in HUANG.items():
        flags = flags.replace(settings, name)
    return f"{script} {flags}".strip()


def runs_of(*tables: str) -> dict[Run, range]:
    """The runs of tables of runs.toml, and their seeds."""
    settings = {
        name: Template(x).safe_substitute(LISTS["settings"])
        for name, x in LISTS["settings"].items()
    }
    return {
        Run(entry["script"], env_id, Template(flags).substitute(settings)): range(
            entry["seeds"][0], entry["seeds"][1] + 1
        )
        for table in tables
        for entry in LISTS[table]
        for flags in entry.get("flags", [""])
        for env_id in entry["env_ids"]
    }


@cache
def provenance() -> dict[str, str]:
    """The columns that say where a row is from.

    A commit with changes, but to results, ends in +. Clouds hide a processor's model, so the widest
    vectors that PyTorch uses stand beside its name.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", ROOT, *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = re.findall(r"model name\s*: (.+)", info) or [platform.processor()]
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    changes = git("status", "--porcelain", "--", ".", ":!benchmark/results")
    return {
        "commit": git("rev-parse", "--short=10", "HEAD") + "+" * bool(changes),
        "date": str(date.today()),
        "machine": f"{len(names)} x {names[0]}, {torch.backends.cpu.get_cpu_capability()}{gpu}",
        "torch": version("torch"),
        "gymnasium": version("gymnasium"),
    }


def read(name: str) -> list[dict[str, str]]:
    """The rows of a results file, none if it doesn't exist."""
    path = RESULTS / name
    return list(csv.DictReader(path.open())) if path.exists() else []


def append(name: str, rows: list[dict]) -> None:
    """Append rows to a results file, under a header."""
    path = RESULTS / name
    new = not path.exists()
    if not new and path.open().readline().strip().split(",") != [*rows[0]]:
        raise ValueError(f"{path} has other columns: move it away")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def events_of(folder: Path) -> EventAccumulator:
    """What a run has written for TensorBoard, all of it."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def curve(returns: list[ScalarEvent], steps: int) -> Iterator[dict[str, float]]:
    """The mean return in each fiftieth of a run in which an episode ended."""
    part = steps / 50
    for i in range(50):
        values = [x.value for x in returns if i * part < x.step <= (i + 1) * part]
        if values:
            yield {"step": round((i + 1) * part), "return": round(float(np.mean(values)), 2)}


def record(row: dict, returns: list[ScalarEvent], origin: dict[str, str]) -> None:
    """Append a run's row, and its learning curve."""
    key = {x: row[x] for x in (*Run._fields, "seed")}
    points = curve(returns, row["steps"])
    with LOCK:
        append("runs.csv", [row | origin])
        append("curves.csv", [key | point for point in points])


def train_peer(run: Run, seed: int, root: Path) -> None:
    """Run CleanRL's script from the start, and record its training."""
    repository = root.resolve() / "repo"
    flags = f"--env-id {run.env_id} --seed {seed} {run.flags}".strip()
    words = [repository.parent / "venv/bin/python", repository / run.script, *flags.split()]
    ask = "from importlib.metadata import version as v; print(v('torch'), v('gymnasium'))"
    questions = [words[0], "-c", ask], ["git", "-C", repository, "rev-parse", "--short=10", "HEAD"]
    versions, commit = (subprocess.check_output(x, text=True).strip() for x in questions)
    origin = provenance() | dict(zip(("torch", "gymnasium"), versions.split(), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*words, "--no-cuda"], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{words} failed:\n{done.stderr}")
        events = events_of(next(Path(folder).glob("runs/*")))
    returns, speeds = (events.Scalars(f"charts/{x}") for x in ("episodic_return", "SPS"))
    last_returns = [x.value for x in returns[-100:]]
    row = run._asdict() | {"seed": seed, "score": round(float(np.mean(last_returns)), 3)}
    row |= {"episodes": len(last_returns), "steps": speeds[-1].step}
    row |= {"greedy": "", "greedy_std": "", "evaluations": ""}  # it has none
    row["wall_clock_s"] = round(speeds[-1].wall_time - events.FirstEventTimestamp(), 1)
    row["command"] = f"python {run.script} {flags} --no-cuda"
    print(f"{row['command']}: {row['score']}", flush=True)
    record(row, returns, origin | {"commit": f"CleanRL {commit}"})


def train(run: Run, seed: int) -> None:
    """Run a script or a recipe in a folder of its own, or go on there, and record it."""
    recipe = ROOT / run.script if run.script.endswith(".diff") else None
    changed = (
        re.search(r"^--- (\S+)", recipe.read_text(), re.MULTILINE)[1] if recipe else run.script
    )
    patched = f"my_{changed}" if recipe else changed
    arguments = f"--env-id {run.env_id} --seed {seed} {run.flags}".strip()
    command = f"patch -o {patched} {changed} {run.script} && " * bool(recipe)
    command += f"python {patched} {arguments}"
    key = f"{command} {provenance()['commit']}"  # no run goes on with another version
    folder = ROOT / "runs/benchmark" / hashlib.sha1(key.encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(folder / patched if recipe else ROOT / changed)]
    words += shlex.split(arguments)
    if recipe:
        subprocess.run(["patch", "-s", "-o", words[1], ROOT / changed, recipe], check=True)
    if started := next(folder.glob("runs/*/checkpoint.pt"), None):
        words += ["--resume", str(started.parent.relative_to(folder))]
    paths = [path for module, path in MODULES.items() if run.env_id.startswith(f"{module}:")]
    environment = os.environ | {"PYTHONPATH": ":".join(str(ROOT / path) for path in paths)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr}")
    print(done.stdout.strip(), flush=True)
    (finished,) = folder.glob("runs/*/checkpoint.pt")
    last_returns = torch.load(finished, weights_only=True)["last_returns"]
    events = events_of(finished.parent)
    speeds, returns = (events.Scalars(f"charts/{x}") for x in ("SPS", "episodic_return"))
    greedy = [round(x.value, 3) for x in events.Scalars("eval/return")]
    spread = re.findall(r"^(?:evaluated at \S+ \+- (\S+)|not all ended)", done.stdout, re.MULTILINE)
    times = sorted(x.wall_time for x in (*speeds, *events.Scalars("eval/return")))
    gaps = np.diff([events.FirstEventTimestamp(), *times])
    steps = speeds[-1].step
    row = run._asdict() | {"seed": seed, "score": round(float(np.mean(last_returns)), 3)}
    row |= {"episodes": len(last_returns), "steps": steps}
    row |= {"greedy": greedy[-1], "greedy_std": spread[-1]}
    row["evaluations"] = " ".join(str(x) for x in greedy)  # the last at the end
    row["wall_clock_s"] = round(gaps[gaps < 600].sum(), 1)  # without long pauses
    settings = "".join(f"PYTHONPATH={path} " for path in paths)
    row["command"] = command.replace("python ", f"{settings}python ", 1)
    record(row, returns, provenance())
    shutil.rmtree(folder)


def main(args: Args) -> None:
    """Train what is missing, seed by seed."""
    recorded = {tuple(row[x] for x in (*Run._fields, "seed")) for row in read("runs.csv")}
    jobs = [
        (run, seed)
        for run, seeds in runs_of(args.table).items()
        for seed in seeds
        if not args.only or run.env_id in args.only
        if (*run, str(seed)) not in recorded
    ]
    work = partial(train_peer, root=args.cleanrl) if args.table == "cleanrl" else train
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(work, *zip(*sorted(jobs, key=lambda job: job[1]), strict=True)))


if __name__ == "__main__":
    main(tyro.cli(Args))
