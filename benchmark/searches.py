"""Run the searches of variants/, each killed with SIGKILL in the middle and run again, and compare.

    pip install -r benchmark/requirements.txt optuna==5.0.0 "ray[tune]==2.60.0"
    python benchmark/searches.py --only tune          # Optuna on CartPole-v1 and LunarLander-v3
    python benchmark/searches.py --only population    # Ray Tune on LunarLanderContinuous-v3

What Optuna finds is trained again beside the documented commands, on seeds that it didn't see:
tuned.csv. Its trials go to trials.csv. A population is compared with as many independent members
with random hyper-parameters, and with as many at the defaults: population.csv has the greedy return
of the best member of each. All files are in benchmark/results; what is there already is not run
again. The wall-clock time of a search is that of both its parts.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import optuna
import tyro
from fast import RECIPES
from provenance import provenance
from run import LARGER, ROOT, append, read

sys.path.insert(0, str(ROOT))
import ppo
import ppo_continuous

LUNAR = f"--env-id LunarLander-v3 {LARGER} --gamma 0.999 --gae-lambda 0.98 --no-clip-vloss"
CARTPOLE = f"--env-id CartPole-v1 {RECIPES['CartPole-v1'][1]}"
# Environment: flags of the search, goal of it, seeds to compare on, the documented command.
SEARCHES = {
    "CartPole-v1": ("--goal 475 --total-timesteps 100000", 475, range(11, 21), CARTPOLE),
    "LunarLander-v3": (
        "--seeds 1 2 --total-timesteps 200000 --compile --no-clip-vloss --num-minibatches 8",
        None,
        range(11, 16),
        f"{LUNAR} --total-timesteps 200000",
    ),
}
MEMBERS, STEPS, TASK = 8, 204_800, "LunarLanderContinuous-v3"
# Fewer environments than by default, as a tenth of the steps should be several episodes of each.
TRAIN = f"--env-id {TASK} --total-timesteps {STEPS} --num-envs 8 --num-steps 256"


@dataclass
class Args:
    """Run the searches."""

    only: Literal["tune", "population"] | None = None  # part to do; both by default
    env_id: str | None = None  # environment to tune on; both by default
    trials: int = 40  # of Optuna
    repetitions: int = 3  # of the populations


def killed_once(command: list[Any], folder: Path, is_halfway: Callable[[], bool]) -> str:
    """Run a command, kill it and all its processes halfway, and run it again; what it printed."""
    words = [sys.executable, *map(str, command)]
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(
            words, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        while not is_halfway() and process.poll() is None:
            time.sleep(1)
        if process.poll() is not None:
            raise RuntimeError(f"{command} ended before it was killed: {folder / 'log.txt'}")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        done = subprocess.run(
            words, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True, check=True
        )
    return done.stdout


def trials_of(folder: Path) -> list[optuna.trial.FrozenTrial]:
    """What the study in a folder has."""
    with suppress(KeyError, FileNotFoundError):
        file = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
        storage = optuna.storages.JournalStorage(file)
        return optuna.load_study(study_name="ppo", storage=storage).trials
    return []


def learn(job: tuple[str, int, float | None]) -> dict[str, float | str]:
    """Train with flags and a seed: the steps to the goal, if there is one, and the score."""
    flags, seed, goal = job
    args = replace(tyro.cli(ppo.Args, args=flags.split()), seed=seed, eval_episodes=0)
    steps = []

    def report(global_step: int, mean_return: float) -> None:
        if goal is not None and mean_return >= goal:
            steps.append(global_step)

    score = ppo.train(args, report)
    return {"seed": seed, "score": round(score, 1), "steps_to_goal": steps[0] if steps else ""}


def tune(env_id: str, trials: int) -> None:
    """Search, and train with what was found and with what is documented."""
    flags, goal, seeds, documented = SEARCHES[env_id]
    start = time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [ROOT / "variants/tune.py", ROOT / "ppo.py", "--env-id", env_id, *flags.split()]
        stdout = killed_once(
            [*command, "--trials", trials],
            folder,
            lambda: sum(x.state.is_finished() for x in trials_of(folder)) >= trials // 2,
        )
        seconds = round(time.time() - start)
        found, rows = trials_of(folder), []
        for x in found:
            row = {"env_id": env_id, "trial": x.number, "state": x.state.name, "value": x.value}
            row["seconds"] = round(x.duration.total_seconds(), 1) if x.duration else ""
            chosen = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in x.params.items())
            rows.append(row | {"flags": chosen} | provenance())
        append("trials.csv", rows)
        for plot in ("history", "importances"):
            shutil.move(folder / f"{plot}.png", ROOT / f"benchmark/results/{plot}-{env_id}.png")
        print(stdout, f"{env_id}: {seconds} s", flush=True)
        settings = {"found": stdout.split("ppo.py ")[1].strip(), "documented": documented}
        rows = []
        with chdir(folder), ProcessPoolExecutor(2) as pool:
            for who, words in settings.items():
                for row in pool.map(learn, [(words, seed, goal) for seed in seeds]):
                    rows.append({"env_id": env_id, "who": who} | row | {"flags": words})
                    rows[-1]["search_s"] = seconds if who == "found" else ""
                    print(rows[-1], flush=True)
    append("tuned.csv", [row | provenance() for row in rows])


def train_default(seed: int) -> float:
    """Train at the defaults, in a folder named as the seed, and return the score."""
    Path(str(seed)).mkdir()
    args = tyro.cli(ppo_continuous.Args, args=TRAIN.split())
    with chdir(str(seed)):
        return ppo_continuous.train(replace(args, seed=seed, eval_episodes=0))


def greedy(run: Path) -> float:
    """The greedy return of a run, over 100 episodes."""
    args = replace(ppo_continuous.load_checkpoint(run)["args"], eval_episodes=100)
    return round(ppo_continuous.evaluate(args, run)["eval/return"], 1)


def population(repetition: int) -> None:
    """Train all three kinds of members, with as many steps, and evaluate the best of each."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for who, flags in {"population": [], "random": ["--no-mutate"]}.items():
            start = time.time()
            command = [ROOT / "variants/population.py", ROOT / "ppo_continuous.py", *TRAIN.split()]
            command += ["--members", MEMBERS, "--folder", folder / who, *flags]
            checkpoints = f"{who}/*/checkpoint_*"  # 10 of each member
            stdout = killed_once(
                command, folder, lambda x=checkpoints: len([*folder.glob(x)]) >= 5 * MEMBERS
            )
            print(stdout, flush=True)
            words = shlex.split(re.search(r"^python (.+)$", stdout, re.MULTILINE)[1])
            score = float(re.search(r"best, (\S+), with", stdout)[1])
            found[who] = score, greedy(Path(words[-1])), time.time() - start
        start = time.time()
        seeds = [100 * repetition + i for i in range(MEMBERS)]
        with chdir(folder), ProcessPoolExecutor(2) as pool:
            scores = list(pool.map(train_default, seeds))
        best = max(range(MEMBERS), key=scores.__getitem__)
        (run,) = (folder / str(seeds[best]) / "runs").iterdir()
        found["defaults"] = scores[best], greedy(run), time.time() - start
    rows = [
        {"repetition": repetition, "who": who, "score": round(score, 1), "greedy": x}
        | {"seconds": round(took)}
        for who, (score, x, took) in found.items()
    ]
    print(*rows, sep="\n", flush=True)
    append("population.csv", [row | provenance() for row in rows])


def main(args: Args) -> None:
    """Do the parts that were asked for."""
    if args.only in (None, "tune"):
        recorded = {row["env_id"] for row in read("tuned.csv")}
        for env_id in [args.env_id] if args.env_id else SEARCHES:
            if env_id not in recorded:
                tune(env_id, args.trials)
    if args.only in (None, "population"):
        recorded = {int(row["repetition"]) for row in read("population.csv")}
        for repetition in range(1, args.repetitions + 1):
            if repetition not in recorded:
                population(repetition)


if __name__ == "__main__":
    main(tyro.cli(Args))
