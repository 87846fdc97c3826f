"""Train with several seeds on several tasks, and draw the learning curves with bootstrap intervals,
beside those of other folders: pip install pandas seaborn

    python search/seeds.py ppo.py --env-ids CartPole-v1 Acrobot-v1 --folder seeds/ppo
    python search/seeds.py my_ppo.py --seeds 1 2 3 --folder seeds/mine --total-timesteps 200000
    python search/seeds.py --folder seeds/mine --beside seeds/ppo ~/cleanrl/runs    # draw only

The folder gets curves.png, returns.csv, and a folder with log and run for each task and seed. The
same command goes on with what was stopped, also with more tasks or seeds. CleanRL's scripts run,
too, by the --python of their venv; they save no checkpoints, so what was stopped begins again.
"""

import logging
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAG = "charts/episodic_return"
PARTS = 50  # of a curve, each with the mean of its returns


@dataclass
class Options:
    """Train with several seeds. What isn't a flag here is one of the script's."""

    folder: Path  # for all output
    script: tyro.conf.Positional[Path | None] = None  # to train with; without one, only draw
    env_ids: tuple[str, ...] = ("CartPole-v1",)  # the tasks
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # of each task
    jobs: int = 2  # runs at once
    python: Path = Path(sys.executable)  # runs the script
    beside: tuple[Path, ...] = ()  # folders to draw, too: of this program, or CleanRL's runs


def train(options: Options, flags: list[str], env_id: str, seed: int) -> bool:
    """Run the script in a folder of its own, or go on there; return whether it is finished."""
    folder = options.folder / f"{env_id}-{seed}".replace("/", "-").replace(":", "-")
    if (folder / "finished").exists():
        return True
    # On Linux, a run ends with this program, even if that is killed, and meets no resumed one.
    words = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    words += [options.python.absolute(), options.script.absolute()]
    words += ["--env-id", env_id, "--seed", str(seed), *flags]
    checkpoint = next(folder.glob("runs/*/checkpoint.pt"), None)
    if checkpoint:
        words += ["--resume", checkpoint.parent.relative_to(folder)]
    else:
        shutil.rmtree(folder, ignore_errors=True)  # of a run without a checkpoint
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # for scripts that set no threads
    with (folder / "log.txt").open("a") as log:
        done = subprocess.run(words, cwd=folder, env=environment, stdout=log, stderr=log)
    end = "\n".join((folder / "log.txt").read_text().splitlines()[-10:])
    # "Nothing to train": it was stopped in its last evaluation.
    if done.returncode and not (checkpoint and "nothing to train" in end):
        print(f"{env_id}, seed {seed}: failed, see {folder}/log.txt:\n{end}", file=sys.stderr)
        return False
    (folder / "finished").touch()
    print(f"{env_id}, seed {seed}: finished", flush=True)
    return True


def returns_of(folder: Path) -> pd.DataFrame:
    """The logged returns of a folder's runs: of two with the same task, name and seed, the last."""
    frames = []
    runs = sorted({path.parent for path in folder.rglob("*__*__*__*/events.out*")})
    for run in {run.name.rpartition("__")[0]: run for run in runs}.values():
        place = run.parent.parent  # with log.txt, if it's a run of this program
        stopped = (place / "log.txt").exists() and not (place / "finished").exists()
        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        if stopped or TAG not in events.Tags()["scalars"]:
            print(f"left out, as it isn't finished or has no episode: {run}", file=sys.stderr)
            continue
        task, name, seed, _ = run.name.rsplit("__", 3)
        values = [(x.step, x.value) for x in events.Scalars(TAG)]
        frame = pd.DataFrame(values, columns=["step", "return"])
        frames.append(frame.assign(task=task, curve=f"{folder}: {name}", seed=int(seed)))
    if not frames:
        sys.exit(f"seeds.py: {folder} has nothing to draw")
    return pd.concat(frames)


def draw(returns: pd.DataFrame, path: Path) -> None:
    """A panel for each task, with the means over the seeds and their 95% bootstrap intervals."""
    frames = []
    for (task, curve), group in returns.groupby(["task", "curve"]):
        last = group["step"].max()
        ends = np.ceil(PARTS * group["step"] / last) * last / PARTS
        means = group.pivot_table("return", "seed", ends)
        means = means.ffill(axis=1, limit_area="inside")  # where no episode ended in a part
        frames.append(means.stack().rename("return").reset_index().assign(task=task, curve=curve))
    curves = pd.concat(frames)
    axes = {"x": "step", "y": "return", "hue": "curve", "col": "task", "height": 3}
    axes |= {"aspect": 1.4, "col_wrap": min(3, curves["task"].nunique())}
    axes["facet_kws"] = {"sharex": False, "sharey": False}
    grid = seaborn.relplot(curves, kind="line", errorbar=("ci", 95), seed=0, **axes)
    grid.set_titles("{col_name}")
    grid.savefig(path, dpi=120)


def main() -> None:
    """Train, draw, and print a table."""
    options, flags = tyro.cli(Options, return_unknown_args=True)
    folder, finished = options.folder, [True]
    for missing in (x for x in options.beside if not x.is_dir()):
        sys.exit(f"seeds.py: there is no folder {missing}")
    if options.script:
        experiment = f"{options.script.name} {shlex.join(flags)}\n\n{options.script.read_text()}"
        file = folder / "experiment.txt"
        kept = [*folder.glob("*/finished"), *folder.glob("*/runs/*/checkpoint.pt")]
        if kept and file.read_text() != experiment:
            sys.exit(f"seeds.py: {file} has other flags or another script: change the folder")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(experiment)
        runs = [(env_id, seed) for seed in options.seeds for env_id in options.env_ids]
        with ThreadPoolExecutor(options.jobs) as pool:
            finished = list(pool.map(lambda run: train(options, flags, *run), runs))
    returns = pd.concat(map(returns_of, [folder, *options.beside]), ignore_index=True)
    names = ["task", "curve", "seed"]
    last = returns.groupby(names)["step"].transform("max")
    finals = returns[returns["step"] > 0.9 * last].groupby(names)["return"].mean()
    finals.to_csv(folder / "returns.csv")
    draw(returns, folder / "curves.png")
    print("Mean return in the last tenth of a run's steps: mean and deviation over the seeds\n")
    table = finals.groupby(["task", "curve"]).agg(seeds="count", mean="mean", std="std")
    print(table.round(2).to_string())
    sys.exit(0 if all(finished) else 1)


if __name__ == "__main__":
    logging.getLogger("tensorboard").setLevel("ERROR")  # no word on each resumed run
    main()
