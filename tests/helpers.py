"""Runs as users start, watch, stop and resume them."""

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT, SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MODULES = {name: __import__(name) for name in SCRIPTS}
# A run of each script that takes a moment: four iterations, or two.
SHORT = {
    "ppo": {"total_timesteps": 2048, "num_envs": 4, "num_steps": 128, "num_minibatches": 4},
    "ppo_continuous": {"env_id": "Pendulum-v1", "total_timesteps": 2048, "num_envs": 2},
    "ppo_atari": {"total_timesteps": 256, "num_envs": 2, "num_steps": 64, "device": "cpu"},
}
SHORT["ppo"] |= {"update_epochs": 4}
SHORT["ppo_continuous"] |= {"num_steps": 256, "num_minibatches": 8}
SHORT["ppo_atari"] |= {"num_threads": 1, "env_kwargs": '{"max_num_frames_per_episode": 200}'}
SHORT = {name: flags | {"eval_episodes": 0} for name, flags in SHORT.items()}
# What `update` gets, by name
Batch = namedtuple("Batch", "obs actions logprobs advantages returns values")


def load(script: Path) -> ModuleType:
    """A file as a module of its own."""
    spec = spec_from_file_location(script.stem, script)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def probe(name: str, env: str, **kwargs: Any) -> dict[str, str]:
    """Flags for a probe environment with these keywords, and actions that the script can choose."""
    kwargs |= {"continuous": True} if name == "ppo_continuous" else {}
    return {"env_id": f"probe_envs:{env}-v0", "env_kwargs": json.dumps(kwargs)}


def only_run() -> Path:
    """The folder of the only run."""
    (folder,) = Path("runs").iterdir()
    return folder


def latest_run() -> Path:
    """The folder of the run that began last."""
    return max(Path("runs").iterdir(), key=lambda folder: folder.name.split("__")[-1])


def all_scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of all scalars of a run, by name."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in tags}


def scalars(tag: str, run: Path | None = None) -> list[tuple[int, float]]:
    """The steps and values of a scalar in the only run, or in the one named; [] if it has none."""
    return all_scalars(run or only_run()).get(tag, [])


def content(run: Path) -> dict[str, Any]:
    """What a run saved, and all its scalars but the clock's."""
    saved = torch.load(run / "checkpoint.pt", weights_only=True) | all_scalars(run)
    del saved["args"], saved["charts/SPS"]
    return saved


def assert_same(a: Any, b: Any) -> None:
    """Equal bit for bit, where nan is nan."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def new_agent(script: ModuleType, args: Any) -> Any:
    """An agent for these arguments, as a run begins with one."""
    envs = script.make_envs(args, 1)
    envs.close()
    own = [getattr(args, x) for x in ("log_std_init", "bf16", "hidden_size") if hasattr(args, x)]
    return script.Agent(envs, *own)


def trained(name: str, report: Callable | None = None, **flags: Any) -> Path:
    """The folder of a short run with these flags."""
    MODULES[name].train(MODULES[name].Args(**SHORT[name] | flags), report)
    return latest_run()


def go_on(script: ModuleType, run: Path, report: Callable | None = None, **flags: Any) -> float:
    """Resume a run of this process, with other flags than its own, in another second."""
    # TensorBoard sorts files by names: the second, then how many there are, unsorted from 10 on.
    time.sleep(1.1)
    args = script.load_checkpoint(run)["args"] | flags
    return script.train(script.Args(**args | {"resume": str(run)}), report)


def crash(iteration: int) -> Callable:
    """A report that raises ZeroDivisionError at the end of this iteration, before it is saved."""
    iterations = itertools.count(1)

    def report(step: int, score: float) -> None:
        if next(iterations) == iteration:
            raise ZeroDivisionError

    return report


@contextlib.contextmanager
def watching(script: ModuleType, see: Callable, once: bool = False) -> Iterator[None]:
    """Let `see` look at agent, batch and indices before every gradient step, or once a batch."""
    update, latest = script.update, [None]

    def watched(agent: Any, optimizer: Any, batch: Any, indices: torch.Tensor, args: Any) -> dict:
        if not once or batch is not latest[0]:
            # The batches of variants have other parts.
            see(agent, Batch(*batch) if len(batch) == len(Batch._fields) else batch, indices)
        latest[0] = batch
        return update(agent, optimizer, batch, indices, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "update", watched)
        yield


@contextlib.contextmanager
def kept_batches(script: ModuleType) -> Iterator[list[Batch]]:
    """The batches that are learned from: one an iteration; a recipe may have one an epoch."""
    kept = []

    def see(agent: Any, batch: Batch, indices: torch.Tensor) -> None:
        kept.append(Batch(*(x.clone() for x in batch)))  # the next rollout overwrites some

    with watching(script, see, once=True):
        yield kept


def command(name: str, *flags: Any, **options: Any) -> subprocess.Popen:
    """Start a script as a user does."""
    arguments = [sys.executable, str(ROOT / f"{name}.py"), *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, **pipes | options)


def wait_for(process: subprocess.Popen, pattern: str) -> None:
    """Wait until the process has written such a file."""
    while not [*Path().glob(pattern)]:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
