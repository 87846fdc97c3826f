"""Compiled steps, bfloat16 and jobs of several processes do the same as one plain process."""

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import resume
import torch
from conftest import MODULES, NEEDS_GPU, ROOT, SCRIPTS, SHORT, VARIANTS, only_run, scalars
from helpers import command, crashed, go_on, refusal, trained, wait_for


def setting(script: ModuleType, device: str = "cpu", **flags: Any) -> tuple[Any, Any, Any]:
    """An agent, a random batch for it, and its arguments."""
    args = script.Args(**SHORT[script.__name__] | {"num_envs": 2} | flags)
    envs = script.make_envs(args, 2)
    torch.manual_seed(1)
    agent = script.Agent(envs, args).to(device)
    envs.single_observation_space.seed(1)
    samples = np.stack([envs.single_observation_space.sample() for _ in range(64)])
    obs = torch.as_tensor(samples).to(device)
    envs.close()
    with torch.no_grad():
        actions = agent.get_action(obs, agent.sample_noise(64).to(device))
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
        metrics = learn(agent, optimizer, batch, indices, args)
        assert all(name.startswith("losses/") for name in metrics)
        reports.append(torch.stack([*metrics.values()]))  # the next CUDA graph overwrites them
    return agent.state_dict(), torch.stack(reports)


def vector(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """All the weights, one after another."""
    return torch.cat([x.flatten() for x in state.values()])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *((name, {}) for name in SCRIPTS),
        ("ppo_continuous", {"state_std": True, "norm_adv": True, "clip_vloss": True}),
    ],
)
def test_compiled_is_eager(name: str, flags: dict[str, bool], device: str) -> None:
    """From the same batch, ten compiled steps lead to the same weights and reports."""
    script = MODULES[name]
    agent, batch, args = setting(script, device, **flags)
    expected, reported = steps(script, script.update, agent, batch, args, fused=True)
    torch.compiler.reset()
    compiled = torch.compile(script.update, mode="reduce-overhead")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        got, compiled_reported = steps(script, compiled, agent, batch, args, fused=False)
    # Adam divides by the gradients' size, so that rounding shows most where there is hardly one:
    # what must be small is the difference beside the way that the weights went. It grows wherever
    # rounding moves a sample across the clip's border, so the steps are small.
    start, end, compiled_end = map(vector, (agent.state_dict(), expected, got))
    assert (end - start).abs().max() > 5e-4
    assert (compiled_end - end).norm() < 0.01 * (end - start).norm()
    torch.testing.assert_close(compiled_reported, reported, rtol=1e-2, atol=1e-3)


def test_every_gradient_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --compile, each calls the compiled function, which never has to be compiled anew."""
    make, calls, script = torch.compile, [], MODULES["ppo"]

    def counting(function: Callable, **options: Any) -> Callable:
        compiled = make(function, **options)
        return lambda *args: calls.append((function, options["disable"])) or compiled(*args)

    monkeypatch.setattr(torch, "compile", counting)
    torch.compiler.reset()  # what other tests compiled
    with torch._dynamo.config.patch(error_on_recompile=True):
        trained("ppo", compile=True)
    assert calls.count((script.update, False)) == 4 * 16


def test_compiled_run_is_resumed(folder: Path) -> None:
    """A compiled run learns, twice in a process, and goes on bit for bit after a crash."""
    flags = {"compile": True, "total_timesteps": 4096, "checkpoint_interval": 4}
    whole = resume.content(trained("ppo", **flags))
    (folder / "runs").rename(folder / "whole")
    run, saved = crashed("ppo", 6, **flags)
    assert saved["iteration"] == 4
    go_on(MODULES["ppo"], run)
    assert resume.differences(whole, resume.content(run)) == []


def test_no_compiler(tmp_path: Path) -> None:
    """Without a compiler, --compile ends in a sentence, before anything is written."""
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    assert "no C++ compiler" in refusal("ppo", "--compile", env=environment)
    assert not (tmp_path / "runs").exists()
    path = trained("ppo", eval_episodes=1) / "checkpoint.pt"  # an evaluation needs none
    saved = torch.load(path)
    args = json.dumps(json.loads(saved["args"]) | {"compile": True})
    torch.save(saved | {"args": args}, path)
    evaluation = command("ppo", "--evaluate", path.parent, env=environment)
    assert "greedy return" in evaluation.communicate(timeout=60)[0]
    assert evaluation.returncode == 0


def channels_last(agent: torch.nn.Module) -> None:
    """Lay the weights of convolutions out in another order in memory."""
    agent.to(memory_format=torch.channels_last)


def transposed(agent: torch.nn.Module) -> None:
    """Lay the weights of a linear layer out as their transpose, as weights from JAX are."""
    agent.network[7].weight.data = agent.network[7].weight.data.T.contiguous().T


@pytest.mark.parametrize("lay_out", [channels_last, transposed])
def test_layouts(lay_out: Callable, train_agent: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hacker's agent whose weights lie in another order in memory learns the same ones."""
    script, ends = MODULES["ppo_atari"], []
    flags = SHORT["ppo_atari"] | {"total_timesteps": 128, "update_epochs": 1}
    make = script.Agent

    def make_laid_out(*args: Any) -> torch.nn.Module:
        agent = make(*args)
        lay_out(agent)
        assert not all(x.is_contiguous() for x in agent.parameters())
        return agent

    for make_agent in (make, make_laid_out):
        monkeypatch.setattr(script, "Agent", make_agent)
        ends.append(vector(train_agent(script, **flags)[0].state_dict()))
        ends.append(vector(train_agent(script, **flags | {"learning_rate": 1e-30})[0].state_dict()))
    (end, start), (other_end, other_start) = ends[:2], ends[2:]
    torch.testing.assert_close(start, other_start, rtol=0, atol=1e-8)
    assert (end - start).abs().max() > 5e-4
    assert (other_end - end).norm() < 0.05 * (end - start).norm()


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
@pytest.mark.parametrize("name", [*SCRIPTS, *VARIANTS])
def test_gpu(name: str, compiled: bool) -> None:
    """Every script trains on a GPU, with CUDA graphs too."""
    trained(name, device="cuda", compile=compiled)
    losses = [x for _, x in scalars("losses/value_loss")]
    assert len(losses) >= 2
    assert np.isfinite(losses).all()


JOB = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
import torch.distributed as dist
import {name} as script

learn, checked, latest = script.update, [], [None]

def update(agent, optimizer, batch, indices, args):
    both = [torch.empty_like(batch.advantages) for _ in range(2)]
    if batch is not latest[0]:
        latest[0] = batch
        dist.all_gather(both, batch.advantages)
        assert not torch.equal(*both)
    metrics = learn(agent, optimizer, batch, indices, args)
    weights = torch.cat([x.detach().flatten() for x in agent.state_dict().values()])
    both = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(both, weights)
    assert torch.equal(*both)
    checked.append(weights)
    return metrics

reports = []

def report(step, score):
    reports.append(step)
    assert len(reports) != {crash}, "crash"

script.update = update
if sys.argv[1:]:
    args = replace(script.load_checkpoint(sys.argv[1])["args"], resume=sys.argv[1])
else:
    args = script.Args(**{flags})
score = script.train(args, report)
# Gloo's threads would sometimes abort the process at its end.
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert "pt_gloo_runloop" not in threads, threads
# One write: print would make several, and those of the two processes mingle.
sys.stdout.write(f"checked {{len(checked)}} score {{score}} steps {{reports}}\\n")
"""


@contextlib.contextmanager
def started_job(code: str, *arguments: Any, processes: int = 2) -> Iterator[subprocess.Popen]:
    """Code that runs in several processes, at the longest until the context ends."""
    Path("job.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--standalone", "job.py"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/variants"}
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


@pytest.mark.parametrize("name", [*SCRIPTS, *VARIANTS])
def test_job(name: str, folder: Path) -> None:
    """Two processes keep the same weights at every step, on samples of their own, and go on.

    They write one run, with all episodes; a job that crashed ends as the undisturbed one does.
    """
    flags = SHORT[name] | {"num_envs": 2, "eval_episodes": 1, "checkpoint_interval": 1}
    if name == "ppo_atari":
        flags |= {"env_id": "ALE/Pong-v5", "eval_episodes": 0}
    done = torchrun(JOB.format(name=name, flags=flags, crash=0))
    assert done.returncode == 0, done.stderr
    found = re.findall(r"checked (\d+) score (\S+) steps (.+)", done.stdout)
    checked, score, steps = zip(*found, strict=True)
    expected = resume.content(only_run())
    iterations = expected[0]["iteration"]
    args = expected[0]["args"]
    assert int(checked[0]) == iterations * args["update_epochs"] * args["num_minibatches"]
    assert checked[0] == checked[1]
    assert score[0] == score[1]
    assert args["num_envs"] == 2
    size = 2 * args["num_steps"]
    assert flags["total_timesteps"] == iterations * size
    assert [*steps] == [str([size * (i + 1) for i in range(iterations)])] * 2
    ended = expected[1].get("charts/episodic_return", [])
    assert name == "ppo_atari" or len({step for step, _ in ended}) > 1
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
expected, reported = steps(script, script.update, agent, batch, args, True)
dist.init_process_group("gloo")
rank = dist.get_rank()

def learn(agent, optimizer, batch, indices, args):
    own = indices.chunk(2)[rank]
    metrics = script.update(agent, optimizer, batch, own, args)
    return {{key: script.gather(x[None]).mean() for key, x in metrics.items()}}

got, both_reported = steps(script, learn, agent, batch, args, True)
for key, x in expected.items():
    assert (got[key] - x).norm() <= 0.01 * (x - agent.state_dict()[key]).norm(), key
torch.testing.assert_close(both_reported, reported, rtol=1e-2, atol=1e-3)

if hasattr(script, "RunningStatistics"):
    values, statistics = torch.randn(40) + 5, script.RunningStatistics()
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
        wait_for(job, "runs/*/events*")
        time.sleep(2)
        found = [int(path.name.split("-")[1]) for path in folder.glob("process-*")]
        assert len(found) == processes
        for process in (*found, job.pid):
            os.kill(process, number)
        _, stderr = job.communicate(timeout=60)
    assert job.returncode == 1
    assert stderr.count(f"stopped: go on with --resume {only_run()}") == 1
    iterations = MODULES["ppo"].load_checkpoint(only_run())["iteration"]
    assert 0 < iterations < 100_000_000 // (4 * 4096)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_job_without_gpus(folder: Path) -> None:
    """Where a process of a job has no GPU, it says so before anything is written."""
    done = torchrun(COMMAND, "--device", "cuda")
    assert done.returncode != 0
    assert re.search(r"^ppo\.py: no cuda:\d, or no C\+\+ compiler", done.stderr, re.MULTILINE)
    assert "UsageError" not in done.stderr
    assert not (folder / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_process_has_its_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process of a job takes the second GPU; auto is a GPU where there is one."""
    script = MODULES["ppo"]
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: gpu)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(script.UsageError, match="no cuda:1,"):
        trained("ppo", device=device)


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
    first, second = sorted(done.stdout.splitlines(), key=lambda x: x.startswith("reward"))
    assert re.match(r"(losses|debug)/\w+ became infinite or nan in iteration 2, up to step", first)
    assert second.startswith("reward became infinite or nan in iteration 2, up to step 768")


def test_shares_that_do_not_divide(folder: Path) -> None:
    """Environments that can't be split over processes are refused."""
    sentence = refusal("ppo", env=os.environ | {"WORLD_SIZE": "3"})
    assert "num_envs * num_steps = 512" in sentence
    assert "3 processes" in sentence
    assert not (folder / "runs").exists()


RAISES = f"""
import os
import sys

sys.path.insert(0, {str(ROOT)!r})
from ppo import Args, train

def report(step, score):
    if step == 2048 and os.environ["RANK"] == "{{rank}}":
        sys.stderr.write("a report raised\\n")
        raise ZeroDivisionError

train(Args(total_timesteps=100_000_000, eval_episodes=0), report)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_report_that_raises_in_a_job(rank: int) -> None:
    """What a report raises in one process of a job ends the other within seconds, too."""
    with started_job(RAISES.format(rank=rank)) as job:
        for line in job.stderr:
            if "a report raised" in line:
                break
        start = time.monotonic()
        stderr = job.stderr.read()  # until all processes that write there have ended
        job.wait(timeout=1)
        assert time.monotonic() - start < 15
    assert "ZeroDivisionError" in stderr
    assert job.returncode == 1
    assert [step for step, _ in scalars("losses/value_loss")] == [512, 1024, 1536, 2048]


SHARED = f"""
import sys

sys.path[:0] = {[str(ROOT / "tests"), str(ROOT)]!r}
import probe_envs
from ppo import Args, train

train(Args(env_id="probe_envs:Drawn-v0", num_envs=2, total_timesteps=1024, eval_episodes=0))
"""


def test_a_job_shares_the_environments() -> None:
    """Of two environments, each process has one, another one; episodes of both are reported."""
    done = torchrun(SHARED)
    assert done.returncode == 0, done.stderr
    returns = scalars("charts/episodic_return")
    assert [step for step, _ in returns] == [2 * (i // 2 + 1) for i in range(1024)]
    assert [*Counter(worth for _, worth in returns).values()] == [512, 512]


STOPS = f"""
import os
import sys

sys.path.insert(0, {str(ROOT)!r})
import ppo
import torch

updates, kl = [], {{kl}} * int(os.environ["RANK"])

def update(*args):  # no collective in it: a wrong count shows, and nothing hangs
    updates.append(args)
    return {{{{"losses/approx_kl": torch.tensor(kl)}}}}

ppo.update = update
ppo.train(ppo.Args(target_kl=0.02, total_timesteps=1024, eval_episodes=0))
sys.stdout.write(f"updates {{{{len(updates)}}}}\\n")
"""


@pytest.mark.parametrize(("kl", "updates"), [(0.08, 8), (0.18, 2)])
def test_a_job_stops_an_update_together(kl: float, updates: int) -> None:
    """A KL that is large in one process, and on average, ends the epochs of both.

    After 4 minibatches in each of 2 iterations; where it is 5 times too large there, after 1.
    """
    done = torchrun(STOPS.format(kl=kl))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"updates {updates}\n") == 2
    assert scalars("losses/approx_kl")[0][1] == pytest.approx(kl / 2)
