"""Searches over `train`, run as users do: hyper-parameters by Optuna, populations by Ray Tune."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import pytest
from conftest import ROOT
from helpers import command, scalars, wait_for

import ppo

NEEDS_RAY = pytest.mark.skipif(not find_spec("ray"), reason="needs pip install ray[tune]")
TUNE, POPULATION = ROOT / "search/tune.py", ROOT / "search/population.py"


@pytest.fixture(autouse=True)
def here(folder: Path) -> None:
    """Have ppo.py in the folder."""
    shutil.copy(ROOT / "ppo.py", folder)


def finished(*words: Any, status: int = 0) -> str:
    """What Python printed; where it should fail, its last line of errors."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == status, done.stderr
    return done.stderr.splitlines()[-1] if status else done.stdout


def trials() -> list[optuna.trial.FrozenTrial]:
    """Of the study."""
    file = optuna.storages.journal.JournalFileBackend("tune/journal.log")
    storage = optuna.storages.JournalStorage(file)
    return optuna.load_study(study_name="tune", storage=storage).trials


# A script that trains in one environment after the other, by rollouts of 512 steps.
TRIALS = """
from dataclasses import replace
import ppo
from ppo import Args

def train(args, report):
    env_id = {}[int(args.exp_name.split("-")[1])]
    return ppo.train(replace(args, env_id=env_id, num_envs=16, num_steps=32), report)
"""
# Every episode of the first is worth 1, one of the second 1 or -1.
PROBE, OBSERVED = "probe_envs:Probe-v0", "probe_envs:Observed-v0"


def test_tune_prunes() -> None:
    """What is worse than five trials before is pruned, and a failure costs itself only."""
    Path("trials.py").write_text(TRIALS.format([PROBE] * 5 + ["Missing-v0", OBSERVED]))
    flags = ["--total-timesteps", 1024, "--seeds", 3, 4, "--trials", 7, "--workers", 1]
    stdout = finished(TUNE, "trials.py", *flags)
    assert [x.state.name for x in trials()] == ["COMPLETE"] * 5 + ["FAIL", "PRUNED"]
    assert [x.value for x in trials()[:5]] == [1.0] * 5
    assert trials()[0].intermediate_values == {50: 1.0, 100: 1.0, 150: 1.0, 200: 1.0}
    assert "best, 1: python trials.py --total-timesteps 1024 --num-envs " in stdout
    first, pruned = (next(Path("tune/runs").glob(f"*__ppo-{i}__3__*")) for i in (0, 6))
    assert ppo.load_checkpoint(first)["args"]["gamma"] == trials()[0].params["gamma"]
    assert ppo.load_checkpoint(pruned)["global_step"] == 512
    assert not [*Path("tune/runs").glob("*__ppo-6__4__*")]
    for name in ("history", "importances"):
        assert Path(f"tune/{name}.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_tune_to_a_goal() -> None:
    """A trial's value is minus the steps to the goal, or its budget: also where no episode ends."""
    Path("trials.py").write_text(TRIALS.format([PROBE, OBSERVED, "MountainCar-v0"]))
    flags = ["--total-timesteps", 2048, "--seeds", 1, "--trials", 3, "--workers", 1]
    finished(TUNE, "trials.py", *flags, "--goal", 1)
    assert [x.value for x in trials()] == [-512, -2048, -2048]
    runs = [next(Path("tune/runs").glob(f"*__ppo-{i}__*")) for i in range(3)]
    assert [ppo.load_checkpoint(run)["global_step"] for run in runs] == [512, 2048, 2048]


@pytest.mark.slow
def test_tune_is_killed() -> None:
    """The workers end with it. The same command goes on, and prints a command that does as well."""
    flags = ["ppo.py", "--env-kwargs", '{"max_episode_steps": 60}', "--total-timesteps", 8192]
    flags += ["--seeds", 1, "--trials", 6]
    process = command("search/tune", *flags)
    wait_for(process, "tune/runs/*__ppo-2__*/events*")  # the third trial, of two workers
    process.kill()
    process.communicate(timeout=300)  # until the last worker has closed its output
    killed = [x.state.name for x in trials()].count("RUNNING")
    assert 1 <= killed <= 2
    assert len(trials()) - killed < 6

    stdout = finished(TUNE, *flags)
    assert [x.state.name for x in trials()].count("RUNNING") == killed
    assert 6 <= len(trials()) - killed <= 7  # as both workers may begin the last
    value, best = re.search(r"best, (\S+): python (.+)", stdout).groups()
    assert float(value) == pytest.approx(max(x.value or 0 for x in trials()), rel=1e-4)
    done = finished(*shlex.split(best))
    assert float(re.search(r"return (\S+) over the last", done)[1]) == round(float(value), 1)

    refusal = finished(TUNE, *flags, "--gamma", 0.9, status=1)
    assert re.fullmatch("tune.py: tune has another search, .*8192.*: change the folder", refusal)
    finished(TUNE, *flags, "--learning-rat", 1, "--folder", "other", status=2)
    assert not Path("other").exists()


@pytest.mark.slow
@NEEDS_RAY
def test_population() -> None:
    """Killed and resumed, all members train to the end, with the rates that exchanges gave them."""
    flags = ["ppo.py", "--members", 4, "--exchanges", 5, "--total-timesteps", 20_480]
    flags += ["--no-anneal-lr"]
    process = command("search/population", *flags, start_new_session=True)
    wait_for(process, "population/*_00002_*/checkpoint_000001")  # of the third one
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    stdout = finished(POPULATION, *flags)
    assert re.search(r"best, [\d.]+, with", stdout)
    done = finished(*shlex.split(re.search(r"^python (.+)$", stdout, re.MULTILINE)[1]))
    assert re.search(r"evaluated at \d.* over 10 episodes", done)
    rates, members = set(), [*Path("population").glob("train_member_*")]
    assert len(members) == 4
    for member in members:
        folders = sorted(member.glob("checkpoint_*"))
        saved = [ppo.load_checkpoint(folder) for folder in folders]
        steps = [x["global_step"] for x in saved]
        assert steps == sorted(steps) and steps[-1] == 20_480
        of_member = [x["args"]["learning_rate"] for x in saved]
        logged = [scalars("charts/learning_rate", folder)[-1][1] for folder in folders]
        assert logged == pytest.approx(of_member)
        rates.update(of_member)
    assert len(rates) > 4

    refusal = finished(POPULATION, *flags, "--gamma", 0.9, status=1)
    assert re.fullmatch("population.py: population has another one, .*: change the folder", refusal)
