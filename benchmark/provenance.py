"""Where a result comes from: the commit, the machine and the versions that it was made with."""

import platform
import subprocess
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path


def cpu_name() -> str:
    """The processor's name and number of cores."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if "model name" in line]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


@cache
def provenance() -> dict[str, str]:
    """Columns to put beside a result; a commit with uncommitted changes ends in +."""
    root = Path(__file__).parent
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=10", "--dirty=+"]
    return {
        "commit": subprocess.run(command, capture_output=True, text=True).stdout.strip(),
        "date": str(date.today()),
        "machine": cpu_name(),
        "torch": version("torch"),
        "gymnasium": version("gymnasium"),
    }
