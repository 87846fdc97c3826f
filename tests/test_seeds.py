"""An experiment of two seeds, as users kill, resume and extend it."""

from pathlib import Path

import numpy as np
from conftest import ROOT
from helpers import command, scalars, wait_for


def test_seeds() -> None:
    """What was killed goes on, what is finished isn't run again, and a failure is shown."""
    flags = [ROOT / "ppo.py", "--folder", "mine", "--seeds", 1, 2, "--jobs", 1, "--num-steps", 32]
    flags += ["--total-timesteps", 7680, "--checkpoint-interval", 1, "--eval-episodes", 0]
    process = command("search/seeds", *flags)
    wait_for(process, "mine/*/runs/*/checkpoint.pt")
    process.kill()  # and its run with it
    process.communicate()
    command("search/seeds", *flags).communicate()
    again = command("search/seeds", *flags, "--env-ids", "CartPole-v1", "Missing-v0")
    stdout, stderr = again.communicate()
    assert again.returncode == 1 and "`Missing` doesn't exist" in stderr
    assert "finished" not in stdout  # nothing is run again
    assert len([*Path("mine").glob("*/runs/*/events*")]) == 3  # the killed run has two
    finals = []
    for run in Path("mine").glob("*/runs/*"):
        assert [x for x, _ in scalars("charts/SPS", run)] == [*range(512, 7681, 512)]
        returns = scalars("charts/episodic_return", run)
        finals.append(np.mean([x for step, x in returns if step > 0.9 * returns[-1][0]]))
    row = [f"{x:.2f}" for x in (np.mean(finals), np.std(finals, ddof=1))]
    assert stdout.split()[-6:] == ["CartPole-v1", "mine:", "ppo", "2", *row]
    assert Path("mine/curves.png").read_bytes()[1:4] == b"PNG"
    refusal = command("search/seeds", *flags, "--gamma", 0.9).communicate()[1]
    assert "has other flags or another script: change the folder" in refusal
