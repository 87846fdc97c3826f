"""The recipes for torchrun: several processes do what one does, and are one run."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import helpers
import pytest
import torch
from conftest import ROOT
from helpers import Batch, assert_same, content, latest_run, load, scalars
from test_recipes import patched

# Runs of four iterations, with a scheduled checkpoint after two, of which target_kl cuts epochs.
OWN = {"ppo": {"eval_episodes": 1, "target_kl": 0.001}, "ppo_continuous": {"target_kl": 0.01}}
OWN["ppo_atari"] = {"env_id": "ALE/Pong-v5", "total_timesteps": 128, "num_steps": 16}
OWN["ppo_atari"] |= {"update_epochs": 1}
SHORT = {name: helpers.SHORT[name] | {"checkpoint_interval": 2} | own for name, own in OWN.items()}


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


def take_step(script: ModuleType, agent: Any, batch: Batch, indices: torch.Tensor) -> tuple:
    """Metrics and gradients of a step on these indices, and the statistics of their returns."""
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(1e-4))
    args = script.Args(norm_adv=True, max_grad_norm=0.1)
    metrics = script.update(agent, optimizer, batch, indices, args)
    gradients = [x.grad for x in agent.parameters()]
    if not hasattr(agent, "return_rms"):
        return metrics, gradients, {}
    agent.return_rms.update(batch.returns[indices])
    return metrics, gradients, agent.return_rms.state_dict()


def work(script: ModuleType, flags: dict[str, Any]) -> tuple:
    """What each process does: a step on its half, a run, and one that is ended and resumed."""

    def train(report: Callable | None = None, **more: Any) -> tuple:
        """The score, the number of updates, and the weights."""
        agents = []
        with helpers.watching(script, lambda agent, *_: agents.append(agent)):
            score = script.train(script.Args(**flags | more), report)
        return score, len(agents), agents[0].state_dict()

    torch.set_num_threads(1)
    uninterrupted = train()  # begins the group of processes
    weights, batch = torch.load("step.pt")
    agent = helpers.new_agent(script, script.Args(**flags))
    agent.load_state_dict(weights)
    half = torch.arange(len(batch[0])).chunk(2)[script.RANK]
    step = take_step(script, agent, Batch(*batch), half)
    # The report of the second process ends it, at a scheduled checkpoint
    end = flags["total_timesteps"] // 2
    train(lambda global_step, _: script.RANK == 1 and global_step == end)
    assert script.load_checkpoint(latest_run())["global_step"] == end
    return step, uninterrupted, train(resume=str(latest_run()))


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
    """Two processes take a step as one does on the whole minibatch, and are one run."""
    choices = {"env_id": "probe_envs:Choices-v0", "env_kwargs": '{"kind": "multi_discrete"}'}
    flags, one = SHORT[name] | (choices if recipes else {}), load(patched(name, *recipes))
    args = one.Args(**flags)
    with helpers.kept_batches(one) as batches:
        one.train(args)
    shutil.rmtree("runs")
    size = len(batches[0].obs)
    noisy = {x: getattr(batches[0], x) + torch.randn(size) for x in ("returns", "values")}
    noisy["logprobs"] = batches[0].logprobs + 0.3 * torch.randn(size)
    noisy["advantages"] = torch.randn(size).sort().values  # those of the halves differ
    batch, agent = batches[0]._replace(**noisy), helpers.new_agent(one, args)
    torch.save((agent.state_dict(), tuple(batch)), "step.pt")
    metrics, gradients, statistics = take_step(one, agent, batch, torch.arange(size))
    assert metrics["losses/grad_norm"] > 0.1, "it is clipped"

    many = patched(name, *recipes, f"torchrun_{name}")
    with torchrun(Path(__file__), many, json.dumps(flags)) as job:
        _, stderr = job.communicate(timeout=300)
    assert job.returncode == 0, stderr
    _, uninterrupted, _ = torch.load("0.pt")
    for step, whole, resumed in map(torch.load, ("0.pt", "1.pt")):
        torch.testing.assert_close(step[:2], (metrics, gradients), rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(step[2], statistics)
        assert_same(whole, uninterrupted)
        assert_same(resumed[::2], uninterrupted[::2])  # the score and the weights

    run, interrupted = sorted(Path("runs").iterdir())  # of the uninterrupted one, and the other one
    for tag in ("losses/approx_kl", "debug/advantages", "charts/learning_rate"):
        assert scalars(tag, interrupted) == scalars(tag, run) != []
    if name == "ppo":
        lengths = scalars("charts/episodic_length", run)
        assert 0.6 < sum(length for _, length in lengths) / args.total_timesteps <= 1
        assert len({step for step, _ in lengths}) > (0 if recipes else len(lengths) / 2)
        assert [step for step, _ in scalars("eval/return", run)] == [args.total_timesteps]


@pytest.mark.parametrize("name", SHORT)
def test_one_process(name: str) -> None:
    """Alone, a patched script does what the script does, bit for bit."""
    contents = []
    for path in (patched(name), patched(name, f"torchrun_{name}")):
        script = load(path)
        script.train(script.Args(**SHORT[name]))
        contents.append(content(latest_run()))
    assert_same(*contents)


def test_shares_that_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes can't share four environments; five can't share minibatches of 32 rows."""
    for processes, num_envs, sentence in ((3, 4, "num_envs=4"), (5, 5, "minibatches of 32")):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        script = load(patched("ppo", "torchrun_ppo"))
        with pytest.raises(script.UsageError, match=f"{processes} processes can't .*{sentence}"):
            script.train(script.Args(num_envs=num_envs, num_steps=32, num_minibatches=num_envs))
    assert not Path("runs").exists()


@pytest.mark.slow
def test_stopped_by_signals() -> None:
    """A signal to all, and a second one from torchrun, end the run saved; it can be resumed."""
    script, flags = patched("ppo", "torchrun_ppo"), ("--num-steps", 1024, "--eval-episodes", 0)
    with torchrun(script, "--total-timesteps", 100_000_000, *flags) as job:
        helpers.wait_for(job, "runs/*/events*")
        workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert len(workers) >= 2
        for process in (*workers, job.pid):
            os.kill(int(process), signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=300)
    assert job.returncode == 1  # torchrun's own
    assert stdout.count("over the last 100 episodes") == 1, stderr
    step = load(script).load_checkpoint(latest_run())["global_step"]
    assert step % 4096 == 0
    with torchrun(script, "--resume", latest_run(), "--total-timesteps", step + 2 * 4096) as job:
        _, stderr = job.communicate(timeout=300)
    assert job.returncode == 0, stderr
    assert len(scalars("losses/approx_kl")) == (step + 2 * 4096) // 4096


if __name__ == "__main__":  # in each process of test_two_processes
    torch.save(work(load(Path(sys.argv[1])), json.loads(sys.argv[2])), f"{os.environ['RANK']}.pt")
