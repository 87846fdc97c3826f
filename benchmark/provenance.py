"""Where a result comes from: the commit, the machine and the versions that it was made with."""

import platform
import subprocess
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch


def cpu_name() -> str:
    """Number of cores, name, and the widest vectors that PyTorch uses (clouds hide the model)."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if "model name" in line]
    name = f"{len(names)} x {names[0]}" if names else platform.processor()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


@cache
def provenance() -> dict[str, str]:
    """Columns to put beside a result; a commit with changes, but to the results, ends in +."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent.parent), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changes = git("status", "--porcelain", "--", ".", ":!benchmark/results")
    return {
        "commit": git("rev-parse", "--short=10", "HEAD") + "+" * bool(changes),
        "date": str(date.today()),
        "machine": cpu_name(),
        "torch": version("torch"),
        "gymnasium": version("gymnasium"),
    }
