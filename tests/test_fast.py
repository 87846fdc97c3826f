"""Compiled steps, bfloat16 and jobs of several processes do the same as one plain process."""

import contextlib
import copy
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import resume
import torch
from conftest import SCRIPTS, SHORT, scalars
from test_survival import MODULES, command, failing, go_on, only_run, refusal, trained

ROOT = Path(__file__).parent.parent
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")


def setting(script: ModuleType, device: str = "cpu", **flags: Any) -> tuple[Any, Any, Any]:
    """An agent, a random batch for it, and its arguments."""
    args = script.Args(**SHORT[script.__name__] | {"num_envs": 2} | flags)
    envs = script.make_envs(args)
    torch.manual_seed(1)
    agent = script.Agent(envs, args).to(device)
    envs.single_observation_space.seed(1)
    samples = np.stack([envs.single_observation_space.sample() for _ in range(64)])
    obs = torch.as_tensor(samples).to(device)
    envs.close()
    with torch.no_grad():
        actions = agent.make_act()(samples, agent.sample_noise(64))
        actions = torch.as_tensor(actions).to(device)
        logprobs, _, values = agent.evaluate_actions(obs, actions)
    logprobs += 0.3 * torch.randn(64, device=device)  # so that some ratios are clipped
    targets = torch.randn(2, 64, device=device)
    return agent, script.Batch(obs, actions, logprobs, *targets, values), args


def steps(script: ModuleType, learn: Any, agent: Any, batch: Any, args: Any, fused: bool) -> Any:
    """The weights after ten gradient steps on halves of the batch, and what they reported."""
    agent = copy.deepcopy(agent)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=fused)
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-4, device=batch.obs.device)
    generator = torch.Generator().manual_seed(2)
    reports = []
    for _ in range(10):
        indices = torch.randperm(64, generator=generator)[:32].to(batch.obs.device)
        reports.append(learn(agent, optimizer, batch, indices, args).clone())
    return agent.state_dict(), torch.stack(reports)


def vector(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """All the weights, one after another."""
    return torch.cat([x.flatten() for x in state.values()])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *((name, {}) for name in SCRIPTS),
        ("ppo_continuous", {"state_std": True, "smooth_l1": True, "clip_vloss": True}),
    ],
)
def test_compiled_is_eager(name: str, flags: dict[str, bool], device: str) -> None:
    """From the same batch, ten compiled steps lead to the same weights and reports."""
    script = MODULES[name]
    agent, batch, args = setting(script, device, **flags)
    expected, reported = steps(script, script.gradient_step, agent, batch, args, fused=True)
    torch.compiler.reset()
    compiled = torch.compile(script.gradient_step, mode="reduce-overhead")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        got, compiled_reported = steps(script, compiled, agent, batch, args, fused=False)
    # Adam divides by the gradients' size, so that rounding shows most where there is hardly one:
    # what must be small is the difference beside the way that the weights went. It grows wherever
    # rounding moves a sample across the clip's border, so the steps are small.
    start, end, compiled_end = map(vector, (agent.state_dict(), expected, got))
    assert (end - start).abs().max() > 5e-4
    assert (compiled_end - end).norm() < 0.01 * (end - start).norm()
    torch.testing.assert_close(compiled_reported, reported, rtol=1e-2, atol=1e-3)


def test_compiled_run_is_resumed(folder: Path) -> None:
    """A compiled run learns, twice in a process, and goes on bit for bit after a crash."""
    flags = {"compile": True, "total_timesteps": 4096, "checkpoint_interval": 4}
    whole = resume.content(trained("ppo", **flags))
    (folder / "runs").rename(folder / "whole")
    script = MODULES["ppo"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        make_batch, calls = script.make_batch, []

        def fail_at_last(*args: Any) -> Any:
            calls.append(1)
            return make_batch(*args) if len(calls) < 6 else 1 / 0

        patch.setattr(script, "make_batch", fail_at_last)
        script.train(script.Args(**SHORT["ppo"] | flags))
    run, saved = script.load_checkpoint(str(only_run()))
    script.train(script.Args(**saved["args"] | {"resume": str(run)}))
    assert resume.differences(whole, resume.content(only_run())) == []


def test_no_compiler(tmp_path: Path) -> None:
    """Without a compiler, --compile ends in a sentence, before anything is written."""
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    assert "needs a C++ compiler" in refusal("ppo", "--compile", env=environment)
    assert not (tmp_path / "runs").exists()
    path = trained("ppo", eval_episodes=1) / "checkpoint.pt"  # an evaluation needs none
    saved = torch.load(path)
    torch.save(saved | {"args": saved["args"] | {"compile": True}}, path)
    evaluation = command("ppo", "--evaluate", path, env=environment)
    assert "greedy return" in evaluation.communicate(timeout=60)[0]
    assert evaluation.returncode == 0


def test_layouts() -> None:
    """Weights and moments that a checkpoint has in another order in memory are the same ones."""
    flags = {"total_timesteps": 512, "checkpoint_interval": 2}
    crash = failing(MODULES["ppo_atari"], "make_batch", 4, ZeroDivisionError())
    with crash, pytest.raises(ZeroDivisionError):
        trained("ppo_atari", **flags)
    path, saved = MODULES["ppo_atari"].load_checkpoint(str(only_run()))
    ends = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        for state in (saved["agent"], *saved["optimizer"]["state"].values()):
            for name, x in state.items():
                state[name] = x.contiguous(memory_format=memory_format) if x.ndim == 4 else x
        torch.save(saved, path)
        go_on(MODULES["ppo_atari"], **saved["args"] | {"resume": str(path)})
        ends.append(MODULES["ppo_atari"].load_checkpoint(str(path))[1]["agent"])
    assert all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_bf16(device: str) -> None:
    """The CNN in bfloat16 gives nearly the same, in float32, and trains."""
    script = MODULES["ppo_atari"]
    agent, batch, _ = setting(script, device)
    expected = agent.evaluate_actions(batch.obs, batch.actions)
    agent.dtype = torch.bfloat16
    got = agent.evaluate_actions(batch.obs, batch.actions)
    assert all(x.dtype == torch.float32 for x in got)
    assert not torch.equal(got[2], expected[2])
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
    trained("ppo_atari", bf16=True, device=device)
    assert np.isfinite([x for _, x in scalars("losses/value_loss")]).all()


@NEEDS_GPU
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_gpu(name: str, compiled: bool) -> None:
    """Every script trains on a GPU, with CUDA graphs too."""
    trained(name, device="cuda", compile=compiled)
    losses = [x for _, x in scalars("losses/value_loss")]
    assert len(losses) >= 2
    assert np.isfinite(losses).all()


JOB = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import {name} as script

learn, checked = script.gradient_step, []

def gradient_step(agent, *rest):
    metrics = learn(agent, *rest)
    weights = torch.cat([x.detach().flatten() for x in agent.parameters()])
    both = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(both, weights)
    assert torch.equal(*both)
    checked.append(weights)
    return metrics

make_batch, batches = script.make_batch, []

def compare(*arguments):
    batches.append(make_batch(*arguments))
    both = [torch.empty_like(batches[-1].advantages) for _ in range(2)]
    dist.all_gather(both, batches[-1].advantages)
    assert not torch.equal(*both)
    return batches[-1]

make_rollout, rollouts = script.Rollout, []

def count(*arrays):
    rollouts.append(arrays)
    assert len(rollouts) != {crash}, "crash"
    return make_rollout(*arrays)

script.gradient_step, script.make_batch, script.Rollout = gradient_step, compare, count
arguments = {flags}
if sys.argv[1:]:
    arguments["resume"] = sys.argv[1]
score = script.train(script.Args(**arguments))
# Gloo's threads would sometimes abort the process at its end.
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert "pt_gloo_runloop" not in threads, threads
# One write: print would make several, and those of the two processes mingle.
sys.stdout.write(f"checked {{len(checked)}} score {{score}}\\n")
"""


@contextlib.contextmanager
def started_job(code: str, *arguments: Any, processes: int = 2) -> Iterator[subprocess.Popen]:
    """Code that runs in several processes, at the longest until the context ends."""
    Path("job.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--standalone", "job.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *map(str, arguments)], env=environment, **pipes) as job:
        try:
            yield job
        finally:
            job.terminate()


def torchrun(code: str, *arguments: Any) -> subprocess.CompletedProcess:
    """Run code in two processes."""
    with started_job(code, *arguments) as job:
        stdout, stderr = job.communicate(timeout=300)
    return subprocess.CompletedProcess(job.args, job.returncode, stdout, stderr)


@pytest.mark.parametrize("name", SCRIPTS)
def test_job(name: str, folder: Path) -> None:
    """Two processes keep the same weights at every step, on samples of their own, and go on.

    They write one run, with all episodes; a job that crashed ends as the undisturbed one does.
    """
    flags = SHORT[name] | {"num_envs": 2, "eval_episodes": 1, "checkpoint_interval": 1}
    if name == "ppo_atari":
        flags |= {"env_id": "ALE/Pong-v5", "eval_episodes": 0}
    done = torchrun(JOB.format(name=name, flags=flags, crash=0))
    assert done.returncode == 0, done.stderr
    checked, score = zip(*re.findall(r"checked (\d+) score (\S+)", done.stdout), strict=True)
    expected = resume.content(only_run())
    iterations = expected[0]["iteration"]
    args = expected[0]["args"]
    assert int(checked[0]) == iterations * args["update_epochs"] * args["num_minibatches"]
    assert checked[0] == checked[1]
    assert score[0] == score[1]
    assert args["num_envs"] == 2
    assert expected[0]["step"] == flags["total_timesteps"] == iterations * 2 * args["num_steps"]
    (folder / "runs").rename(folder / "whole")

    crashed = torchrun(JOB.format(name=name, flags=flags, crash=2))
    assert crashed.returncode != 0
    assert "crash" in crashed.stderr
    again = torchrun(JOB.format(name=name, flags=flags, crash=0), str(only_run()))
    assert again.returncode == 0, again.stderr
    assert resume.differences(expected, resume.content(only_run())) == []


HALVES = """
import sys
import torch
import torch.distributed as dist
import {name} as script
from test_fast import setting, steps

agent, batch, args = setting(script)
expected, reported = steps(script, script.gradient_step, agent, batch, args, True)
dist.init_process_group("gloo")
rank = dist.get_rank()

def learn(agent, optimizer, batch, indices, args):
    own = indices.chunk(2)[rank]
    metrics = script.gradient_step(agent, optimizer, batch, own, args)
    return script.gather(metrics[None]).mean(0)

got, both_reported = steps(script, learn, agent, batch, args, True)
for key, x in expected.items():
    assert (got[key] - x).norm() <= 0.01 * (x - agent.state_dict()[key]).norm(), key
torch.testing.assert_close(both_reported, reported, rtol=1e-2, atol=1e-3)

if hasattr(script, "RunningStatistics"):
    values, statistics = torch.randn(40) + 5, script.RunningStatistics(())
    for part in values.split(20):
        statistics.update(part.chunk(2)[rank])
    torch.testing.assert_close(statistics.mean, values.mean(), rtol=1e-3, atol=0)
    torch.testing.assert_close(statistics.var, values.var(correction=0), rtol=1e-3, atol=0)
dist.destroy_process_group()  # its threads would sometimes abort the process at its end
sys.stdout.write("same\\n")
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_halves_are_a_whole(name: str) -> None:
    """Steps of two processes on halves of a minibatch are one process's on the whole."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    code += f"sys.path.insert(0, {str(ROOT / 'benchmark')!r})\n" + HALVES.format(name=name)
    done = torchrun(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same", "same"]


COMMAND = f"""
import os
import runpy
from pathlib import Path

Path(f"process-{{os.getpid()}}").touch()
runpy.run_path({str(ROOT / "ppo.py")!r}, run_name="__main__")
"""


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_stopped_job(number: int, processes: int, folder: Path) -> None:
    """Where a signal goes to all processes of a job and torchrun adds its own, the job is saved."""
    flags = "--num-steps", 4096, "--total-timesteps", 100_000_000
    with started_job(COMMAND, *flags, processes=processes) as job:
        while not [*folder.glob("runs/*/events*")]:
            time.sleep(0.05)
            assert job.poll() is None
        time.sleep(2)
        found = [int(path.name.split("-")[1]) for path in folder.glob("process-*")]
        assert len(found) == processes
        for process in (*found, job.pid):
            os.kill(process, number)
        _, stderr = job.communicate(timeout=60)
    assert job.returncode == 1
    assert stderr.count(f"stopped: go on with --resume {only_run()}") == 1
    _, saved = MODULES["ppo"].load_checkpoint(str(only_run()))
    assert not saved["finished"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_job_without_gpus(folder: Path) -> None:
    """Where a process of a job has no GPU, it says so before anything is written."""
    done = torchrun(COMMAND, "--device", "cuda")
    assert done.returncode != 0
    assert "there is no device cuda:" in done.stderr
    assert "UsageError" not in done.stderr
    assert not (folder / "runs").exists()


NOT_FINITE = f"""
import os
import sys

sys.path[:0] = {[str(ROOT / "tests"), str(ROOT)]!r}
import probe_envs
from ppo import Args, UsageError, train

breaks = {{"what": "reward", "when": 300 if os.environ["RANK"] == "1" else 0}}
sizes = {{"num_envs": 2, "num_steps": 128, "total_timesteps": 2048, "eval_episodes": 0}}
try:
    train(Args(env_id="probe_envs:Breaks-v0", env_kwargs=breaks, **sizes))
except UsageError as error:
    sys.stdout.write(f"{{error}}\\n")
"""


def test_a_job_that_is_not_finite(folder: Path) -> None:
    """What is nan in one process of a job ends all of them with a sentence, in that iteration."""
    done = torchrun(NOT_FINITE)
    assert done.returncode == 0, done.stderr
    first, second = sorted(done.stdout.splitlines(), key=lambda x: "reward" in x)
    assert "loss became infinite or nan in iteration 2, up to step 768" in first
    assert second.startswith("reward became infinite or nan in iteration 2, up to step 768")


def test_shares_that_do_not_divide() -> None:
    """Environments that can't be split over processes are refused, and so is an evaluation."""
    environment = os.environ | {"WORLD_SIZE": "3"}
    sentence = refusal("ppo", env=environment)
    assert "num_envs * num_steps = 4 * 128" in sentence
    assert "3 processes" in sentence
    environment["WORLD_SIZE"] = "2"
    run = trained("ppo", eval_episodes=1)
    assert "without torchrun" in refusal("ppo", "--evaluate", run, env=environment)
