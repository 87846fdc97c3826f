"""What the tests share: every test runs in a folder of its own."""

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["ppo", "ppo_continuous", "ppo_atari"]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
NEEDS_RAY = pytest.mark.skipif(not find_spec("ray"), reason="needs pip install ray[tune]")
NEEDS_ENVPOOL = pytest.mark.skipif(not find_spec("envpool"), reason="needs pip install envpool")
# A run of each script that takes a moment.
SHORT = {
    "ppo": {"env_id": "CartPole-v1", "total_timesteps": 2048},
    "ppo_continuous": {
        "env_id": "Pendulum-v1",
        "total_timesteps": 2048,
        "num_envs": 2,
        "num_steps": 256,
    },
    "ppo_atari": {"total_timesteps": 256, "num_envs": 2, "num_steps": 64, "num_threads": 1},
}
# Of each variant, the script that it varies.
VARIANTS = {"ppo_recurrent": "ppo", "ppo_continuous_recurrent": "ppo_continuous"}
SHORT |= {name: SHORT[base] | {"sequence_length": 8} for name, base in VARIANTS.items()}
SHORT = {name: args | {"eval_episodes": 0} for name, args in SHORT.items()}
MODULES = {name: __import__(name) for name in [*SCRIPTS, *VARIANTS]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train_agent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, float]]:
    """A function that trains, and returns the trained agent and the score."""

    def run(script: ModuleType, **kwargs: Any) -> tuple[Any, float]:
        agents = []
        with monkeypatch.context() as patch:
            make = script.Agent
            patch.setattr(script, "Agent", lambda *x: agents.append(make(*x)) or agents[-1])
            score = script.train(script.Args(**{"eval_episodes": 0, **kwargs}))
        return agents[0], score

    return run


@contextlib.contextmanager
def watching(script: ModuleType, see: Callable[[Any, Any, torch.Tensor], Any]) -> Iterator[None]:
    """Let `see` look at agent, batch and indices before every gradient step."""
    update = script.update

    def watched(agent: Any, optimizer: Any, batch: Any, indices: torch.Tensor, args: Any) -> dict:
        see(agent, batch, indices)
        return update(agent, optimizer, batch, indices, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "update", watched)
        yield


@contextlib.contextmanager
def kept_batches(script: ModuleType) -> Iterator[list[Any]]:
    """Copies of the batches that are learned from: one an iteration; recomputed, one an epoch."""
    kept, latest = [], [None]

    def see(agent: Any, batch: Any, indices: torch.Tensor) -> None:
        if batch is not latest[0]:
            latest[0] = batch
            kept.append(type(batch)(*(x.clone() for x in batch)))

    with watching(script, see):
        yield kept


def scalars(tag: str, run: Path | None = None) -> list[tuple[int, float]]:
    """The steps and values of a scalar in the only run below this folder, or in the one named."""
    events = EventAccumulator(str(run or only_run()), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Whether two agents are equal, bit for bit."""
    other = b.state_dict()
    return all(torch.equal(x, other[name]) for name, x in a.state_dict().items())


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
