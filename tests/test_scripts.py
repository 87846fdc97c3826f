"""The scripts as files: what they share, need and name, and what each does alone in a folder."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS
from helpers import MODULES, only_run, scalars
from packaging.requirements import Requirement
from report import PAGES, renewed

# What differs by intent; test_size.py holds by how much.
DIFFERENT = {"Args", "make_envs", "Agent", "evaluate", "train"}
EVERYWHERE = {"UsageError", "layer_init", "update", "set_up_torch", "load_checkpoint", "main"}


def definitions(name: str) -> dict[str, str]:
    """The source of the functions and classes at the top level of a script, and of its end."""
    source, found = (ROOT / f"{name}.py").read_text(), {}
    for node in ast.parse(source).body:
        text = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
        match node:
            case ast.FunctionDef(name=key) | ast.ClassDef(name=key):
                found[key] = text
            case ast.If():
                found["main"] = text
    return found


def test_same_job_same_text() -> None:
    """Whatever has the same name in two scripts is the same text, but for what is named here."""
    scripts = [definitions(name) for name in SCRIPTS]
    for name in {name for script in scripts for name in script} - DIFFERENT:
        texts = {script[name] for script in scripts if name in script}
        assert len(texts) == 1, f"{name} differs between scripts"
    assert set.intersection(*map(set, scripts)) == EVERYWHERE | DIFFERENT
    # Evaluations differ in how an agent is made, and in the keyword that limits episodes.
    assert set(scripts[1]) - set(scripts[0]) == {"Stagger"}
    intended = r"Agent\(.*?\)|not all ended.*"
    assert len({re.sub(intended, "", script["evaluate"]) for script in scripts}) == 1


def test_same_flag_same_help() -> None:
    """Flags of the same name have the same type and the same help; only defaults differ."""
    texts = defaultdict(set)
    for name in SCRIPTS:
        pattern = r"^    (\w+): (.+?) = (?:.+?|\(\s+.+?)  # (.+)$"
        found = re.findall(pattern, definitions(name)["Args"], re.MULTILINE)
        # Every flag has its help.
        assert [field for field, *_ in found] == [*MODULES[name].Args.__dataclass_fields__]
        for field, *rest in found:
            texts[field].add(tuple(rest))
    # An MLP is fastest in one thread; games are made by ALE.
    different = {"env_id", "env_kwargs", "num_threads"}
    assert {x for x in texts if len(texts[x]) > 1} == different


NEEDS = {"torch", "gymnasium", "numpy", "tensorboard", "tyro", "tqdm", "moviepy"}
OWN = {"ppo": set(), "ppo_continuous": {"mujoco"}, "ppo_atari": {"ale-py"}}
EXTRAS = {"ppo": {"box2d", "classic-control"}, "ppo_atari": set()}
EXTRAS["ppo_continuous"] = EXTRAS["ppo"] | {"mujoco"}


def test_requirements() -> None:
    """Each script asks for what it needs alone, by the pins of requirements.txt."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").open()]
    pinned = {x.name: x for x in map(Requirement, filter(None, lines))}
    assert set(pinned) == NEEDS.union(*OWN.values())
    assert pinned["gymnasium"].extras == set.union(*EXTRAS.values())
    assert all(re.fullmatch(r"==[\d.]+", str(x.specifier)) for x in pinned.values())
    for name in SCRIPTS:
        source = (ROOT / f"{name}.py").read_text()
        (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", source, re.MULTILINE)
        metadata = tomllib.loads(re.sub("^# ?", "", block, flags=re.MULTILINE))
        assert metadata["requires-python"] == ">=3.11,<3.14"
        needs = {x.name: x for x in map(Requirement, metadata["dependencies"])}
        assert set(needs) == NEEDS | OWN[name]
        assert needs["gymnasium"].extras == EXTRAS[name]
        assert all(x.specifier == pinned[need].specifier for need, x in needs.items())


ALONE = {
    "ppo": ["--total-timesteps", "4096"],
    "ppo_continuous": ["--env-id", "InvertedPendulum-v5", "--total-timesteps", "2048"],
    "ppo_atari": ["--total-timesteps", "1024", "--num-threads", "1", "--update-epochs", "1"],
}
# Games of 100 steps
ALONE["ppo_atari"] += ["--device", "cpu", "--env-kwargs", '{"max_num_frames_per_episode": 400}']


@pytest.mark.parametrize("name", SCRIPTS)
def test_alone_in_an_empty_folder(name: str, folder: Path) -> None:
    """A copy of one script runs, says where and what it reached, and logs episodes' returns."""
    shutil.copy(ROOT / f"{name}.py", folder)
    arguments = [sys.executable, f"{name}.py", *ALONE[name]]
    environment = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    first, *evaluated, last = done.stdout.splitlines()
    assert first == f"training in {only_run()}"
    number = r"-?\d+\.\d"
    assert re.fullmatch(rf"return {number} over the last \d+ episodes; {only_run()}", last)
    assert re.fullmatch(rf"evaluated at {number} \+- {number} over 10 episodes", *evaluated)
    assert len(scalars("charts/episodic_return")) > 0
    assert "Traceback" not in done.stderr


TRACKED = """
import os, ppo
for seed in (1, 2):
    ppo.train(ppo.Args(track=True, seed=seed, total_timesteps=4096, update_epochs=1))
os._exit(0)  # wandb's own end of the second run takes 10 seconds
"""


def test_track(folder: Path) -> None:
    """Weights & Biases, offline, gets a run's scalars; the next one in the process is another."""
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    environment |= {"PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", TRACKED]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    runs = sorted(Path("runs").iterdir())
    records = [*folder.glob("wandb/offline-run-*/run-*.wandb")]
    assert {file.stem for file in records} == {f"run-{run.name}" for run in runs}
    (first,) = [file for file in records if file.stem == f"run-{runs[0].name}"]
    for tag in ("charts/episodic_return", "losses/approx_kl"):
        assert first.read_bytes().count(tag.encode()) >= len(scalars(tag, runs[0])) == 2


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_the_reports(name: str) -> None:
    """The tables in the READMEs are what benchmark/report.py makes of the files of results."""
    text = (ROOT / name).read_text()
    assert text.count("<!-- table: ") > 0
    assert renewed(text) == text


def test_ci_runs_the_commands_of_the_readme() -> None:
    """.ci/run has the two commands under Start, and ends where one of them fails."""
    start = (ROOT / "README.md").read_text().split("\n## ")[1]
    commands = re.findall(r"^    (.+)$", start, re.MULTILINE)
    assert len(commands) == 2
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [x for x in lines if "pip install" in x] == [f"{x} || exit 1" for x in commands]
