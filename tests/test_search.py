"""Searches over `train`: of hyper-parameters by Optuna, and of populations by Ray Tune."""

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from conftest import NEEDS_RAY, ROOT

import ppo

SHORT = ["--total-timesteps", "4096"]


def command(variant: Any, script: Any, *flags: Any, **options: Any) -> subprocess.Popen:
    """Start a search as a user does, in a group of processes of its own."""
    arguments = [sys.executable, ROOT / "variants" / variant, ROOT / script, *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, start_new_session=True, **pipes, **options)


def finished(process: subprocess.Popen) -> str:
    """What it printed."""
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    return stdout


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until it holds."""
    end = time.time() + 200
    while not condition():
        assert time.time() < end
        time.sleep(0.1)


def trials() -> list[optuna.trial.FrozenTrial]:
    """Of the study in this folder."""
    if not Path("journal.log").exists():
        return []
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend("journal.log")
    )
    try:
        return optuna.load_study(study_name="ppo", storage=storage).trials
    except KeyError:
        return []


def states() -> Counter:
    """How many trials are in which state."""
    return Counter(trial.state.name for trial in trials())


def test_tune() -> None:
    """A search that is killed and resumed has all its trials, and its best command runs as printed.

    One more worker is killed, which costs its trial; trials that learn nothing are pruned.
    """
    flags = [*SHORT, "--seeds", 1, 2]
    process = command("tune.py", "ppo.py", *flags, "--trials", 8)
    wait_for(lambda: states()["COMPLETE"] >= 1 and states()["RUNNING"] == 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    killed = [trial for trial in trials() if trial.state.name == "RUNNING"]
    assert 0 < len(killed) <= 2

    process = command("tune.py", "ppo.py", *flags, "--trials", 8)
    wait_for(lambda: len(trials()) > len(killed) + 1 and states()["RUNNING"] == len(killed) + 2)
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(max(map(int, workers.stdout.split())), signal.SIGKILL)
    stdout = finished(process)
    assert states()["FAIL"] == 0
    assert states()["RUNNING"] == len(killed) + 1
    assert 8 <= len(trials()) <= 9
    value, best = re.search(r"best, (\S+): python (.+)", stdout).groups()
    scores = [trial.value for trial in trials() if trial.state.name == "COMPLETE"]
    assert float(value) == pytest.approx(max(scores), rel=1e-5)
    for name in ("history", "importances"):
        assert Path(f"{name}.png").read_bytes()[1:4] == b"PNG"

    # As printed, it does what the first seed of the best trial did.
    done = subprocess.run([sys.executable, *shlex.split(best)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (trial,) = [trial for trial in trials() if trial.value == max(scores)]
    reports = trial.intermediate_values
    last = reports[max(step for step in reports if step <= 100)]
    assert float(re.search(r"mean return (\S+) over", done.stdout)[1]) == round(last, 1)

    other = command("tune.py", "ppo.py", *flags, "--trials", 20, "--max-grad-norm", 1e-12)
    _, stderr = other.communicate(timeout=100)
    assert other.returncode == 2
    assert re.search("another search, .*4096.*, is here: change the folder", stderr)

    script = (ROOT / "variants/tune.py").read_text()
    Path("tune.py").write_text(script.replace("--num-envs {", "--max-grad-norm 1e-12 --num-envs {"))
    process = command(Path.cwd() / "tune.py", "ppo.py", *flags, "--trials", len(trials()) + 6)
    finished(process)
    assert states()["PRUNED"] >= 1
    pruned = [trial for trial in trials() if trial.state.name == "PRUNED"]
    assert all(trial.last_step >= 10 for trial in pruned)


def test_tune_to_a_goal() -> None:
    """A trial's value is minus the steps to the goal; one that fails costs itself only."""
    text = (ROOT / "variants" / "tune.py").read_text()
    start, end = text.index("    return f"), text.index("@dataclass")
    choice = 'trial.suggest_categorical("env", ["CartPole-v1", "Missing-v0"])'
    text = text[:start] + f"    return f'--env-id {{{choice}}}'\n\n\n" + text[end:]
    Path("tune.py").write_text(text)
    flags = ["--goal", "25", "--trials", "12", "--seeds", "1", "2", *SHORT]
    process = subprocess.run(
        [sys.executable, "tune.py", ROOT / "ppo.py", *flags],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    for trial in trials():
        if trial.params["env"] == "Missing-v0":
            assert trial.state.name == "FAIL"
        else:
            assert -4096 < trial.value < 0
    assert states()["FAIL"] > 0
    assert re.search(r"best, -\d+: python \S+/ppo.py .*--env-id CartPole-v1", process.stdout)


def test_tune_to_a_goal_that_is_never_reached() -> None:
    """A trial is worth its budget then, whatever its rollouts round that to; nan is no return.

    No episode of MountainCar ends within 180 steps, so nothing is known by which to prune.
    """
    flags = ["--env-id", "MountainCar-v0", "--goal", 0, "--trials", 7, "--seeds", 1]
    flags += ["--total-timesteps", 2880, "--jobs", 1]
    finished(command("tune.py", "ppo.py", *flags))
    assert [trial.value for trial in trials()] == [-2880] * 7
    assert states() == {"COMPLETE": 7}


def test_tune_where_all_trials_fail() -> None:
    """One sentence, after the reasons."""
    flags = ["--env-id", "Missing-v0", "--trials", 2, "--jobs", 1]
    process = command("tune.py", "ppo.py", *flags)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert stderr.splitlines()[-1] == "tune.py: no trial was completed, see above and log-*.txt"
    assert "cannot make Missing-v0" in stderr


def test_tune_says_what_is_wrong() -> None:
    """A wrong flag ends the search before it begins."""
    process = command("tune.py", "ppo.py", "--learning-rat", "1")
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "learning-rat" in stderr
    assert not Path("journal.log").exists()


@NEEDS_RAY
def test_population() -> None:
    """Killed and resumed, all members train to the end; copies go on from what they copied.

    Learning rates change at exchanges, and are what the members trained with.
    """
    flags = ["--members", 4, "--exchanges", 8, "--total-timesteps", 40_960, "--no-anneal-lr"]
    process = command("population.py", "ppo.py", *flags)
    wait_for(lambda: len([*Path("population").glob("*/checkpoint_000002")]) >= 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    stdout = finished(command("population.py", "ppo.py", *flags))
    assert re.search(r"best, [\d.]+, with", stdout)
    evaluation = re.search(r"^python (.+)$", stdout, re.MULTILINE)[1]
    done = subprocess.run([sys.executable, *shlex.split(evaluation)], capture_output=True)
    assert re.search(rb"greedy return \d", done.stdout)
    rates = set()
    for member in Path("population").glob("train_member_*"):
        checkpoints = sorted(member.glob("checkpoint_*"))
        saved = [ppo.load_checkpoint(path) for path in checkpoints]
        assert saved[-1]["iteration"] == 80
        assert [x["iteration"] for x in saved] == sorted(x["iteration"] for x in saved)
        for x in saved:
            rate = x["optimizer"]["param_groups"][0]["lr"].item()
            assert rate == pytest.approx(x["args"].learning_rate)
            rates.add(rate)
    assert len(rates) > 4


@NEEDS_RAY
def test_population_of_equals() -> None:
    """Where all scores are the same, no member begins its part again; one that fails is replaced.

    The first to reach step 4,096, in the second of four parts, fails there.
    """
    counted = f"""
        import sys
        from pathlib import Path

        sys.path.insert(0, "{ROOT}")
        import ppo
        from ppo import Args, load_checkpoint

        def train(args, report):
            def count(*arguments):
                with open("{Path.cwd()}/iterations", "a") as file:
                    file.write(".")
                if arguments[0] == 4096 and not Path("{Path.cwd()}/failed").exists():
                    Path("{Path.cwd()}/failed").touch()
                    raise ValueError("fails once")
                report(*arguments)

            ppo.train(args, count)
        """
    Path("counted.py").write_text(textwrap.dedent(counted))
    flags = ["--env-id", "MountainCar-v0", "--total-timesteps", 10_240]
    flags += ["--members", 5, "--exchanges", 4]
    finished(command("population.py", Path.cwd() / "counted.py", *flags))
    for member in Path("population").glob("train_member_*"):
        last = ppo.load_checkpoint(max(member.glob("checkpoint_*")))
        assert last["iteration"] == 20
        assert last["last_returns"] == [-200] * 48
    assert Path("failed").exists()
    assert len(Path("iterations").read_text()) == 100 - 2  # it lacked two of its part


def test_population_without_ray(tmp_path: Path) -> None:
    """One sentence with the command."""
    (tmp_path / "ray.py").write_text("raise ImportError('not installed')")
    process = command("population.py", "ppo.py", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 2
    assert stderr.splitlines() == ['population.py: pip install "ray[tune]" (not installed)']
