"""Runs as users start, watch, stop and resume them."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ROOT, SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MODULES = {name: __import__(name) for name in SCRIPTS}
# A run of each script that takes a moment: four iterations, or two.
SHORT = {
    "ppo": {"total_timesteps": 2048},
    "ppo_continuous": {
        "env_id": "Pendulum-v1",
        "total_timesteps": 2048,
        "num_envs": 2,
        "num_steps": 256,
        "num_minibatches": 8,
    },
    "ppo_atari": {
        "total_timesteps": 256,
        "num_envs": 2,
        "num_steps": 64,
        "num_threads": 1,
        "device": "cpu",
    },
}
SHORT = {name: flags | {"eval_episodes": 0} for name, flags in SHORT.items()}


class Batch(NamedTuple):
    """What `update` gets, by name."""

    obs: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor


def load(script: Path) -> ModuleType:
    """A file as a module of its own."""
    spec = spec_from_file_location(script.stem, script)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def only_run() -> Path:
    """The folder of the only run."""
    (folder,) = Path("runs").iterdir()
    return folder


def scalars(tag: str, run: Path | None = None) -> list[tuple[int, float]]:
    """The steps and values of a scalar in the only run, or in the one named; [] if it has none."""
    events = EventAccumulator(str(run or only_run()), size_guidance={"scalars": 0})
    events.Reload()
    has_tag = tag in events.Tags()["scalars"]
    return [(event.step, event.value) for event in events.Scalars(tag)] if has_tag else []


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Whether two agents are equal, bit for bit."""
    other = b.state_dict()
    return all(torch.equal(x, other[name]) for name, x in a.state_dict().items())


def new_agent(script: ModuleType, args: Any) -> Any:
    """An agent for these arguments, as a run begins with one."""
    envs = script.make_envs(args, 1)
    envs.close()
    own = {"ppo_continuous": "log_std_init", "ppo_atari": "bf16"}
    return script.Agent(envs, *(getattr(args, x) for name, x in own.items() if hasattr(args, x)))


def train_agent(script: ModuleType, **kwargs: Any) -> tuple[Any, float]:
    """Train; return the trained agent, from its file, and the score."""
    before = {*Path("runs").glob("*")}
    args = script.Args(**{"eval_episodes": 0, **kwargs})
    score = script.train(args)
    (folder,) = {*Path("runs").iterdir()} - before
    agent = new_agent(script, args)
    script.load_checkpoint(folder, agent)
    return agent, score


def trained(name: str, **kwargs: Any) -> Path:
    """The folder of a short run in a new folder of its own."""
    before = {*Path("runs").glob("*")}
    MODULES[name].train(MODULES[name].Args(**(SHORT[name] | kwargs)))
    (folder,) = {*Path("runs").iterdir()} - before
    return folder


def go_on(script: ModuleType, run: Path, **flags: Any) -> float:
    """Resume a run of this process, with other flags than its own, in another second.

    TensorBoard sorts files by their names, which have the second and, unsorted from 10 on, how many
    the process wrote.
    """
    time.sleep(1.1)
    args = script.load_checkpoint(run)["args"]
    return script.train(replace(args, **flags | {"resume": str(run)}))


def crashed(name: str, iterations: int, **kwargs: Any) -> tuple[Path, dict[str, Any]]:
    """The folder and the checkpoint of a short run that crashed after so many iterations.

    The crash comes before the checkpoint of that iteration.
    """
    reports, script = [], MODULES[name]

    def report(step: int, score: float) -> None:
        reports.append(step)
        if len(reports) == iterations:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script.train(script.Args(**SHORT[name] | kwargs), report)
    path = only_run() / "checkpoint.pt"
    return only_run(), script.load_checkpoint(path.parent) if path.exists() else {}


@contextlib.contextmanager
def watching(script: ModuleType, see: Callable[[Any, Batch, torch.Tensor], Any]) -> Iterator[None]:
    """Let `see` look at agent, batch and indices before every gradient step."""
    update = script.update

    def watched(agent: Any, optimizer: Any, batch: Any, indices: torch.Tensor, args: Any) -> dict:
        see(agent, Batch(*batch), indices)
        return update(agent, optimizer, batch, indices, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "update", watched)
        yield


@contextlib.contextmanager
def kept_batches(script: ModuleType) -> Iterator[list[Batch]]:
    """Copies of the batches that are learned from: one an iteration; recomputed, one an epoch."""
    kept, latest = [], [None]

    def see(agent: Any, batch: Batch, indices: torch.Tensor) -> None:
        if batch.advantages is not latest[0]:
            latest[0] = batch.advantages
            kept.append(Batch(*(x.clone() for x in batch)))

    with watching(script, see):
        yield kept


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
