"""Runs as users start, stop and resume them."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import MODULES, ROOT, SHORT, only_run


def command(name: str, *flags: Any, **options: Any) -> subprocess.Popen:
    """Start a script as a user does."""
    arguments = [sys.executable, str(ROOT / f"{name}.py"), *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, **pipes, **options)


def wait_for(process: subprocess.Popen, pattern: str) -> None:
    """Wait until the process has written such a file."""
    while not [*Path().glob(pattern)]:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def refusal(name: str, *flags: Any, **options: Any) -> str:
    """The only sentence of a command that fails as it should."""
    process = command(name, *flags, **options)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 2, stderr
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith(f"{name}.py: ")
    return stderr.splitlines()[-1]


def trained(name: str, **kwargs: Any) -> Path:
    """The folder of a short run in a new folder of its own."""
    before = {*Path("runs").iterdir()} if Path("runs").exists() else set()
    MODULES[name].train(MODULES[name].Args(**(SHORT[name] | kwargs)))
    (folder,) = {*Path("runs").iterdir()} - before
    return folder


def go_on(script: Any, run: Path, **flags: Any) -> float:
    """Resume a run of this process, with other flags than its own, in another second.

    TensorBoard sorts files by their names, which have the second and, unsorted from 10 on, how many
    the process wrote.
    """
    time.sleep(1.1)
    args = script.load_checkpoint(run)["args"]
    return script.train(replace(args, **flags | {"resume": str(run)}))


def crashed(name: str, iterations: int, **kwargs: Any) -> tuple[Path, dict[str, Any]]:
    """The folder and the checkpoint of a short run that crashed after so many iterations."""
    reports, script = [], MODULES[name]

    def report(step: int, score: float) -> None:
        reports.append(step)
        if len(reports) == iterations:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script.train(script.Args(**SHORT[name] | kwargs), report)
    path = only_run() / "checkpoint.pt"
    return only_run(), script.load_checkpoint(path.parent) if path.exists() else {}
