"""The recipes for torchrun: several processes do what one does, and are one run."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# Runs of four iterations, with a scheduled checkpoint after two, of which target_kl cuts epochs.
SHORT = {
    "ppo": {"total_timesteps": 1024, "num_steps": 64, "eval_episodes": 1, "target_kl": 0.001},
    "ppo_continuous": {
        "env_id": "Pendulum-v1",
        "total_timesteps": 1600,
        "num_envs": 4,
        "num_steps": 100,
        "num_minibatches": 4,
        "eval_episodes": 0,
        "target_kl": 0.01,
    },
    "ppo_atari": {
        "env_id": "ALE/Pong-v5",
        "total_timesteps": 128,
        "num_envs": 2,
        "num_steps": 16,
        "update_epochs": 1,
        "eval_episodes": 0,
        "num_threads": 1,
        "device": "cpu",
    },
}
SHORT = {name: flags | {"checkpoint_interval": 2} for name, flags in SHORT.items()}


def patched(name: str, *recipes: str) -> Path:
    """The script with these recipes, one after another, as users apply them; fuzz is an error."""
    path = ROOT / f"{name}.py"
    for number, recipe in enumerate(recipes):
        new = Path(f"{'my' * (number + 1)}_{name}.py")
        patch = ["patch", "-F0", "-o", new, path, ROOT / "recipes" / f"{recipe}.diff"]
        subprocess.run(patch, check=True, capture_output=True)
        path = new
    return path


def load(script: Path) -> ModuleType:
    """A file as a module of its own."""
    spec = spec_from_file_location(script.stem, script)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    """The steps and values of a scalar."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


@contextlib.contextmanager
def torchrun(script: Path, *flags: Any) -> Iterator[subprocess.Popen]:
    """Two processes, which end with the block."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, script, *map(str, flags)], env=environment, **pipes) as job:
        try:
            yield job
        finally:
            job.terminate()


JOB = """
from pathlib import Path
import numpy as np
import torch
import {one} as one
import {many} as many

torch.set_num_threads(1)
flags, agents, updates = {flags}, [], []

# An update on a half, as the unpatched script's on the whole: the advantages of the halves differ
args = one.Args(**flags | {{"norm_adv": True, "max_grad_norm": 0.1}})
envs = one.make_envs(args, args.num_envs)
inputs = {{"ppo_continuous": [-0.5], "ppo_atari": [False]}}.get("{name}", [])
rng, size = np.random.default_rng(1), 24
torch.manual_seed(1)
agent, other = one.Agent(envs, *inputs), many.Agent(envs, *inputs)
other.load_state_dict(agent.state_dict())
envs.single_observation_space.seed(1)
obs = np.stack([envs.single_observation_space.sample() for _ in range(size)])
actions = torch.tensor(agent.make_act()(obs, agent.sample_noise(rng, size)))
obs = torch.tensor(obs)
with torch.no_grad():
    logprobs, _, values = agent.evaluate_actions(obs, actions)
advantages, returns = torch.randn(size).sort().values, values + torch.randn(size)
values, logprobs = values + torch.randn(size), logprobs + 0.3 * torch.randn(size)
batch = obs, actions, logprobs, advantages, returns, values

def step(script, agent, indices):
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(1e-4))
    metrics = script.update(agent, optimizer, batch, indices, args)
    return metrics, [x.grad for x in agent.parameters()]

whole = step(one, agent, torch.arange(size))
if hasattr(one, "RunningMeanStd"):
    one_rms, many_rms = one.RunningMeanStd(), many.RunningMeanStd()
    one_rms.update(returns)

def train(report=None, **more):  # before the first step, the group of processes begins
    make, update = many.Agent, many.update
    many.Agent = lambda *inputs: agents.append(make(*inputs)) or agents[-1]
    many.update = lambda *inputs: updates.append(1) or update(*inputs)
    score = many.train(many.Args(**flags | more), report)
    many.Agent, many.update = make, update
    result = score, len(updates), agents[0].state_dict()
    agents.clear()
    updates.clear()
    return result

uninterrupted = train()
indices = torch.arange(size).chunk(2)[many.RANK]
half = step(many, other, indices)
torch.testing.assert_close(half, whole, rtol=1e-3, atol=1e-6)
assert whole[0]["losses/grad_norm"] > 0.1, "it is clipped"
if hasattr(one, "RunningMeanStd"):
    many_rms.update(returns[indices])
    torch.testing.assert_close(many_rms.state_dict(), one_rms.state_dict())

# One that the report of the second process ends, at a scheduled checkpoint, and that is resumed
end = flags["total_timesteps"] // 2
train(lambda step, _: many.RANK == 1 and step == end)
assert many.load_checkpoint(max(Path("runs").iterdir()))["global_step"] == end
resumed = train(resume=str(max(Path("runs").iterdir())))
torch.save((uninterrupted, resumed), f"{{many.RANK}}.pt")
"""


@pytest.mark.parametrize(
    ("name", "recipes"),
    [
        ("ppo", []),
        ("ppo_continuous", []),
        pytest.param("ppo_atari", [], marks=pytest.mark.slow),
        pytest.param("ppo", ["multi_discrete"], marks=pytest.mark.slow),
    ],
)
def test_two_processes(name: str, recipes: list[str]) -> None:
    """Two processes take a step as one does on the whole minibatch, and are one run.

    Their weights are equal; a run resumed from a checkpoint is the uninterrupted one, bit for bit.
    Only the first one writes, episodes of both.
    """
    one, many = patched(name, *recipes), patched(name, *recipes, f"torchrun_{name}")
    choices = {"env_id": "probe_envs:Choices-v0", "env_kwargs": '{"kind": "multi_discrete"}'}
    flags = SHORT[name] | (choices if recipes else {})
    Path("job.py").write_text(JOB.format(name=name, one=one.stem, many=many.stem, flags=flags))
    with torchrun(Path("job.py")) as job:
        _, stderr = job.communicate(timeout=300)
    assert job.returncode == 0, stderr

    (score, updates, weights), (resumed_score, _, resumed) = torch.load("0.pt")
    others = torch.load("1.pt")
    torch.testing.assert_close((score, updates), others[0][:2], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(resumed_score, score, rtol=0, atol=0, equal_nan=True)
    for other in (others[0][2], resumed, others[1][2]):
        torch.testing.assert_close(other, weights, rtol=0, atol=0)

    run, interrupted = sorted(Path("runs").iterdir())  # of the uninterrupted one, and the other one
    for tag in ("losses/approx_kl", "debug/advantages", "charts/learning_rate"):
        assert scalars(interrupted, tag) == scalars(run, tag)
    if name == "ppo":
        lengths = scalars(run, "charts/episodic_length")
        assert 0.6 < sum(length for _, length in lengths) / flags["total_timesteps"] <= 1
        assert len({step for step, _ in lengths}) > (0 if recipes else len(lengths) / 2)
        assert [step for step, _ in scalars(run, "eval/return")] == [flags["total_timesteps"]]


@pytest.mark.parametrize("name", SHORT)
def test_one_process(name: str) -> None:
    """Alone, a patched script does what the script does, bit for bit."""
    results = []
    for path in (ROOT / f"{name}.py", patched(name, f"torchrun_{name}")):
        script = load(path)
        script.train(script.Args(**SHORT[name]))
        run = max(Path("runs").iterdir())
        saved = torch.load(run / "checkpoint.pt", weights_only=True)
        tags = EventAccumulator(str(run)).Reload().Tags()["scalars"]
        results.append(
            [saved | {"args": None}, {x: scalars(run, x) for x in {*tags} - {"charts/SPS"}}]
        )
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_shares_that_do_not_divide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes can't share four environments; five can't share minibatches of 32 rows."""
    for processes, num_envs, sentence in ((3, 4, "num_envs=4"), (5, 5, "minibatches of 32")):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        script = load(patched("ppo", "torchrun_ppo"))
        with pytest.raises(script.UsageError, match=f"{processes} processes can't .*{sentence}"):
            script.train(script.Args(num_envs=num_envs, num_steps=32, num_minibatches=num_envs))
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_stopped_by_signals() -> None:
    """A signal to all, and a second one from torchrun, end the run saved; it can be resumed."""
    script, flags = patched("ppo", "torchrun_ppo"), ("--num-steps", 1024, "--eval-episodes", 0)
    with torchrun(script, "--total-timesteps", 100_000_000, *flags) as job:
        while not [*Path().glob("runs/*/events*")]:
            assert job.poll() is None, job.communicate()[1]
            time.sleep(0.05)
        workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert len(workers) >= 2
        for process in (*workers, job.pid):
            os.kill(int(process), signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=300)
    assert job.returncode == 1  # torchrun's own
    assert stdout.count("over the last 100 episodes") == 1, stderr
    (run,) = Path("runs").iterdir()
    step = torch.load(run / "checkpoint.pt", weights_only=True)["global_step"]
    assert step % 4096 == 0
    with torchrun(script, "--resume", run, "--total-timesteps", step + 2 * 4096) as job:
        _, stderr = job.communicate(timeout=300)
    assert job.returncode == 0, stderr
    assert len(scalars(run, "losses/approx_kl")) == (step + 2 * 4096) // 4096
