"""Searches over `train`, run as users do: hyper-parameters by Optuna, populations by Ray Tune."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import pytest
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo

NEEDS_RAY = pytest.mark.skipif(not find_spec("ray"), reason="needs pip install ray[tune]")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with ppo.py, and the probe environments to import."""
    shutil.copy(ROOT / "ppo.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))


def start(*words: Any) -> subprocess.Popen:
    """Start Python, in a group of processes of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, words)], start_new_session=True, **pipes)


def finish(process: subprocess.Popen, status: int = 0) -> str:
    """What it printed; of one that fails, its last line of errors."""
    stdout, stderr = process.communicate(timeout=900)
    assert process.returncode == status, stderr
    return stderr.splitlines()[-1] if status else stdout


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until it holds."""
    end = time.time() + 300
    while not condition():
        assert time.time() < end
        time.sleep(0.05)


def trials() -> list[optuna.trial.FrozenTrial]:
    """Of the study, once there is one."""
    if Path("tune/journal.log").exists():
        file = optuna.storages.journal.JournalFileBackend("tune/journal.log")
        with suppress(KeyError):
            storage = optuna.storages.JournalStorage(file)
            return optuna.load_study(study_name="tune", storage=storage).trials
    return []


def states() -> Counter:
    """How many trials are in which state."""
    return Counter(trial.state.name for trial in trials())


def suggest_by_number(*flags: str) -> None:
    """Write a tune.py that tries these, one after the other, whatever the parameter is."""
    text = (ROOT / "search/tune.py").read_text()
    first, last = text.index("    return f"), text.index("@dataclass")
    body = f'    trial.suggest_float("x", 0, 1)\n    return {flags}[trial.number]\n\n\n'
    Path("tune.py").write_text(text[:first] + body + text[last:])


def test_tune_prunes() -> None:
    """What is worse than five trials before is pruned after a tenth; a failure costs itself only.

    Rollouts have 512 steps. Every episode of Probe is worth 1, one of Observed 1 or -1.
    """
    probe, observed = "--env-id probe_envs:Probe-v0", "--env-id probe_envs:Observed-v0"
    suggest_by_number(*[probe] * 5, observed, "--env-id Missing-v0")
    flags = ["--total-timesteps", 1024, "--seeds", 3, 4, "--trials", 7, "--workers", 1]
    stdout = finish(start("tune.py", "ppo.py", *flags))
    assert [x.state.name for x in trials()] == ["COMPLETE"] * 5 + ["PRUNED", "FAIL"]
    assert [x.value for x in trials()[:5]] == [1.0] * 5
    assert trials()[0].intermediate_values == {50: 1.0, 100: 1.0, 150: 1.0, 200: 1.0}
    assert f"best, 1: python ppo.py --total-timesteps 1024 {probe}" in stdout
    (pruned,) = Path("tune/runs").glob("*__ppo-5__3__*")
    assert ppo.load_checkpoint(pruned)["global_step"] == 512
    assert not [*Path("tune/runs").glob("*__ppo-5__4__*")]
    for name in ("history", "importances"):
        assert Path(f"tune/{name}.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_tune_to_a_goal() -> None:
    """A trial's value is minus the steps to the goal, or its budget: also where no episode ends."""
    observed, car = "--env-id probe_envs:Observed-v0", "--env-id MountainCar-v0 --num-envs 16"
    suggest_by_number("--env-id probe_envs:Probe-v0", observed, car)
    flags = ["--total-timesteps", 2048, "--seeds", 1, "--trials", 3, "--workers", 1]
    finish(start("tune.py", "ppo.py", *flags, "--goal", 1))
    assert [x.value for x in trials()] == [-512, -2048, -2048]
    runs = [next(Path("tune/runs").glob(f"*__ppo-{i}__*")) for i in range(3)]
    assert [ppo.load_checkpoint(run)["global_step"] for run in runs] == [512, 2048, 2048]

    suggest_by_number(*["--env-id Missing-v0"] * 3)
    last = finish(start("tune.py", "ppo.py", *flags, "--folder", "other"), status=1)
    assert last == "tune.py: no trial was completed, see above and other/log-*.txt"


@pytest.mark.slow
def test_tune_is_killed() -> None:
    """The workers end with it. The same command goes on, and prints a command that does as well."""
    command = [ROOT / "search/tune.py", "ppo.py", "--env-kwargs", '{"max_episode_steps": 60}']
    command += ["--total-timesteps", 8192, "--seeds", 1, "--trials", 6]
    process = start(*command)
    wait_for(lambda: states()["COMPLETE"] >= 1 and states()["RUNNING"] == 2)
    process.kill()
    process.communicate(timeout=300)  # until the last worker has closed its output
    killed = states()["RUNNING"]
    assert 1 <= killed <= 2
    assert len(trials()) - killed < 6

    stdout = finish(start(*command))
    assert states()["RUNNING"] == killed
    assert 6 <= len(trials()) - killed <= 7  # as both workers may begin the last
    value, best = re.search(r"best, (\S+): python (.+)", stdout).groups()
    assert float(value) == pytest.approx(max(x.value or 0 for x in trials()), rel=1e-4)
    done = finish(start(*shlex.split(best)))
    assert float(re.search(r"return (\S+) over the last", done)[1]) == round(float(value), 1)

    refusal = finish(start(*command, "--gamma", 0.9), status=1)
    assert re.fullmatch("tune.py: tune has another search, .*8192.*: change the folder", refusal)
    finish(start(*command, "--learning-rat", 1, "--folder", "other"), status=2)
    assert not Path("other").exists()


@pytest.mark.slow
@NEEDS_RAY
def test_population() -> None:
    """Killed and resumed, all members train to the end, with the rates that exchanges gave them."""
    command = [ROOT / "search/population.py", "ppo.py", "--members", 4, "--exchanges", 5]
    command += ["--total-timesteps", 20_480, "--no-anneal-lr"]
    process = start(*command)
    wait_for(lambda: len([*Path("population").glob("*/checkpoint_000001")]) == 3)  # of 4
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    stdout = finish(start(*command))
    assert re.search(r"best, [\d.]+, with", stdout)
    done = finish(start(*shlex.split(re.search(r"^python (.+)$", stdout, re.MULTILINE)[1])))
    assert re.search(r"evaluated at \d.* over 10 episodes", done)
    rates, members = set(), [*Path("population").glob("train_member_*")]
    assert len(members) == 4
    for member in members:
        saved = sorted(member.glob("checkpoint_*"))
        steps = [ppo.load_checkpoint(x)["global_step"] for x in saved]
        assert steps == sorted(steps)
        assert steps[-1] == 20_480
        for folder in saved:
            rate = ppo.load_checkpoint(folder)["args"].learning_rate
            events = EventAccumulator(str(folder)).Reload().Scalars("charts/learning_rate")
            assert events[-1].value == pytest.approx(rate)
            rates.add(rate)
    assert len(rates) > 4

    refusal = finish(start(*command, "--gamma", 0.9), status=1)
    assert re.fullmatch("population.py: population has another one, .*: change the folder", refusal)


@pytest.mark.slow
@NEEDS_RAY
def test_population_of_equals() -> None:
    """Where all scores are the same, no member begins its part again; one that fails is replaced.

    The first to reach step 4,096, in the second of four parts, fails there. Its part lacks two of
    the 5 * 20 iterations then. Every episode of MountainCar is worth -200.
    """
    counted = f"""
from pathlib import Path
import ppo
from ppo import Args, load_checkpoint
failed, counts = Path("{Path.cwd()}/failed"), Path("{Path.cwd()}/counts")

def train(args, report):
    def count(global_step, mean_return):
        with counts.open("a") as file:
            file.write(".")
        if global_step == 4096 and not failed.exists():
            failed.touch()
            raise ValueError("fails once")
        return report(global_step, mean_return)

    return ppo.train(args, count)
"""
    Path("counted.py").write_text(counted)
    flags = ["--env-id", "MountainCar-v0", "--total-timesteps", 10_240]
    flags += ["--members", 5, "--exchanges", 4, "--folder", "equals"]
    stdout = finish(start(ROOT / "search/population.py", "counted.py", *flags))
    assert "best, -200, with" in stdout
    members = [*Path("equals").glob("train_member_*")]
    assert len(members) == 5
    for member in members:
        last = ppo.load_checkpoint(max(member.glob("checkpoint_*")))
        assert last["global_step"] == 10_240
        assert set(last["last_returns"]) == {-200}
    assert "fails once" in "".join(x.read_text() for x in Path("equals").glob("*/result.json"))
    assert len(Path("counts").read_text()) == 5 * 20 - 2
