"""Runs that are killed, stopped, or fail, go on as if nothing had happened; what they saved."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import probe_envs
import pytest
import resume
import torch
from conftest import SCRIPTS, SHORT, scalars
from moviepy import VideoFileClip

ROOT = Path(__file__).parent.parent
MODULES = {name: __import__(name) for name in SCRIPTS}
# Runs of 6 to 16 iterations, with a checkpoint after every second one.
RUNS = {
    "ppo": {"env_id": "LunarLander-v3", "num_envs": 2, "total_timesteps": 4096},
    "ppo_continuous": {"env_id": "Hopper-v5", "num_steps": 128, "total_timesteps": 2048},
    "ppo_atari": {"env_id": "ALE/Pong-v5", "num_envs": 2, "num_steps": 32, "num_threads": 1},
}
RUNS["ppo_continuous"] |= {"num_minibatches": 4, "eval_episodes": 2}
RUNS["ppo_atari"] |= {"total_timesteps": 384, "eval_episodes": 0}
RUNS = {name: SHORT[name] | args | {"checkpoint_interval": 2} for name, args in RUNS.items()}


def command(name: str, *flags: Any, **options: Any) -> subprocess.Popen:
    """Start a script as a user does."""
    arguments = [sys.executable, str(ROOT / f"{name}.py"), *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, **pipes, **options)


def refusal(name: str, *flags: Any, **options: Any) -> str:
    """The only sentence of a command that fails as it should."""
    process = command(name, *flags, **options)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 2, stderr
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith(f"{name}.py: ")
    return stderr.splitlines()[-1]


def only_run() -> Path:
    """The folder of the only run."""
    (folder,) = Path("runs").iterdir()
    return folder


def trained(name: str, **kwargs: Any) -> Path:
    """The folder of a short run in a new folder of its own."""
    before = {*Path("runs").iterdir()} if Path("runs").exists() else set()
    MODULES[name].train(MODULES[name].Args(**(SHORT[name] | kwargs)))
    (folder,) = {*Path("runs").iterdir()} - before
    return folder


def go_on(script: Any, **flags: Any) -> None:
    """Resume a run of this process in another second: TensorBoard sorts files by their names,
    which have the second and, unsorted from 10 on, how many the process wrote."""
    time.sleep(1.1)
    script.train(script.Args(**flags))


@contextlib.contextmanager
def failing(script: Any, name: str, call: int, error: BaseException) -> Any:
    """Let the `call`-th call of a script's function fail."""
    function, calls = getattr(script, name), []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            raise error
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, name, fail)
        yield


@pytest.mark.parametrize(
    ("name", "iteration", "flags"),
    [
        *((name, iteration, {}) for name in SCRIPTS for iteration in (1, 2, 3, 5)),
        # Its reset keeps something of the episodes before.
        ("ppo_continuous", 5, {"env_id": "BipedalWalker-v3"}),
        ("ppo", 3, {"vectorization": "async"}),
        ("ppo", 3, {"env_id": "probe_envs:Drawn-v0", "eval_episodes": 2}),
        ("ppo_continuous", 3, {"squash": True, "state_std": True, "lr_schedule": "cosine"}),
    ],
)
def test_resumed_is_uninterrupted(name: str, iteration: int, flags: dict, folder: Path) -> None:
    """A run that crashes after `iteration` iterations and is resumed ends as the whole one does.

    Weights, optimizer, returns, and every scalar but the clock's are equal, bit for bit.
    """
    script, flags = MODULES[name], RUNS[name] | flags
    expected = resume.content(trained(name, **flags))
    (folder / "runs").rename(folder / "whole")
    with (
        failing(script, "Rollout", iteration + 1, ZeroDivisionError()),
        pytest.raises(ZeroDivisionError),
    ):
        script.train(script.Args(**flags))
    if iteration == 1:
        assert not (only_run() / "checkpoint.pt").exists()
        return
    run, saved = script.load_checkpoint(str(only_run()))
    assert saved["iteration"] == iteration - iteration % 2
    go_on(script, **saved["args"] | {"resume": str(run)})
    got = resume.content(only_run())
    assert resume.differences(expected, got) == []
    assert len(expected[1]["losses/value_loss"]) == expected[0]["iteration"]
    assert got[0]["finished"]


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_crashed_in_the_evaluation(name: str, folder: Path) -> None:
    """A run that crashes when all is trained, and is resumed, ends as the whole one does."""
    script, flags = MODULES[name], SHORT[name] | {"eval_episodes": 1}
    expected = resume.content(trained(name, **flags))
    (folder / "runs").rename(folder / "whole")
    with failing(script, "evaluate", 1, ZeroDivisionError()), pytest.raises(ZeroDivisionError):
        script.train(script.Args(**flags))
    go_on(script, **flags, resume=str(only_run()))
    assert resume.differences(expected, resume.content(only_run())) == []


def test_differences_are_found() -> None:
    """The comparison that these tests rest on sees one changed bit, and no difference in nan."""
    a = {"x": [torch.zeros(2), float("nan")], "y": {0: 1.0}}
    b = {"x": [torch.zeros(2), float("nan")], "y": {0: 1.0}}
    assert resume.differences(a, b) == []
    b["x"][0][1] = -1e-45
    assert resume.differences(a, b) == ["/x/0"]
    b["y"][0] = 1.0000000000000002
    b["z"] = []
    assert resume.differences(a, b) == ["/x/0", "/y/0", "/z"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals(number: int, folder: Path) -> None:
    """A run that is stopped says how to go on; it does so from there, a killed one from before."""
    flags = ["--total-timesteps", 61_440, "--checkpoint-interval", 10]
    process = command("ppo", *flags)
    while not [*folder.glob("runs/*/checkpoint.pt")]:
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr
    _, saved = MODULES["ppo"].load_checkpoint(str(only_run()))
    assert not saved["finished"]
    if number == signal.SIGKILL:
        assert process.returncode == -number
        assert saved["iteration"] % 10 == 0
    else:
        assert process.returncode == 128 + number
        assert f"--resume {only_run()}" in stderr.splitlines()[-1]
    process = command("ppo", "--resume", only_run())
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert f"{61_440 - saved['step']:,} steps in" in stdout
    steps = [step for step, _ in scalars("losses/value_loss")]
    assert steps == [512 * (i + 1) for i in range(120)]


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    """Whoever doesn't want to wait for the iteration's end sends another."""
    process = command("ppo", "--num-steps", 100_000, "--total-timesteps", 800_000)
    while not [*folder.glob("runs/*/events*")]:
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == -signal.SIGTERM


def test_ctrl_c_with_workers(folder: Path) -> None:
    """Ctrl-C in a terminal reaches the environments' processes too, and does no harm there."""
    flags = ["--vectorization", "async", "--total-timesteps", 200_000]
    process = command("ppo", *flags, start_new_session=True)
    while not [*folder.glob("runs/*/events*")]:
        time.sleep(0.05)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.splitlines() == [f"stopped: go on with --resume {only_run()}"]
    assert (only_run() / "checkpoint.pt").exists()


@pytest.mark.parametrize(("steps", "total"), [(400, 20_000), (140, 384)])
def test_a_dead_worker(steps: int, total: int) -> None:
    """An environment's process that dies ends the run with a sentence and a checkpoint: one of the
    training after 400 steps, or that of the evaluation after 140.
    """
    flags = ["--env-id", "probe_envs:Dies-v0", "--vectorization", "async", "--num-envs", 3]
    flags += ["--num-minibatches", 3, "--total-timesteps", total, "--env-kwargs", "steps", steps]
    flags += ["--eval-episodes", 200]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    sentence = refusal("ppo", *flags, env=environment)
    assert f"--resume {only_run()}" in sentence
    _, saved = MODULES["ppo"].load_checkpoint(str(only_run()))
    assert saved["iteration"] == steps // 128
    assert not saved["finished"]
    assert saved["step"] == saved["iteration"] * 128 * 3


def test_a_checkpoint_cut_short() -> None:
    """A checkpoint cut at any byte is refused, and left as it is."""
    path = trained("ppo") / "checkpoint.pt"
    content, rng = path.read_bytes(), random.Random(1)
    script = MODULES["ppo"]
    for length in [0, 1, len(content) - 1, *(rng.randrange(len(content)) for _ in range(50))]:
        path.write_bytes(content[:length])
        with pytest.raises(
            script.UsageError, match=r"checkpoint\.pt is no checkpoint, or a damaged"
        ):
            script.train(script.Args(resume=str(path.parent)))
        assert path.read_bytes() == content[:length]
    for flag in ("--resume", "--evaluate"):
        assert "damaged" in refusal("ppo", flag, path)


class Malicious:
    """What does harm when it is unpickled."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Make a folder."""
        return os.mkdir, ("harm",)


def test_checkpoints_that_do_not_fit(folder: Path) -> None:
    """One with code in it, of another script, environment or layout: a sentence, no harm."""
    script, run = MODULES["ppo"], trained("ppo", eval_episodes=1)
    path, saved = script.load_checkpoint(str(run))
    before = path.read_bytes()
    assert "another script" in refusal("ppo_atari", "--resume", run)
    assert "another script" in refusal("ppo_continuous", "--evaluate", run)
    assert "leave out env_id" in refusal("ppo", "--resume", run, "--env-id", "Acrobot-v1")
    assert "environment" in refusal("ppo", "--evaluate", run, "--env-id", "Acrobot-v1")
    sentence = refusal("ppo", "--resume", run, "--gamma", 0.5, "--seed", 3)
    assert "leave out gamma, seed" in sentence
    assert "finished" in refusal("ppo", "--resume", run)
    assert path.read_bytes() == before
    others = [saved | {"args": {"env_id": "CartPole-v1"}}, {"agent": saved["agent"]}, [1, 2]]
    for other in others:
        torch.save(other, "other.pt")
        assert "another script or version" in refusal("ppo", "--resume", "other.pt")
    torch.save({"args": Malicious()}, "malicious.pt")
    assert "damaged" in refusal("ppo", "--evaluate", "malicious.pt")
    assert not Path("harm").exists()
    assert "no checkpoint" in refusal("ppo", "--evaluate", "runs")


@pytest.mark.parametrize("name", SCRIPTS)
def test_evaluation_from_the_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation from the file gives the number of the one in memory.

    It changes nothing in the agent, and draws no random number: it is greedy.
    """
    script, seen, evaluate = MODULES[name], [], MODULES[name].evaluate

    def watch(agent: Any, *rest: Any) -> dict[str, float]:
        before = {key: x.clone() for key, x in agent.state_dict().items()}, torch.get_rng_state()
        seen.append(evaluate(agent, *rest))
        assert resume.differences(before[0], dict(agent.state_dict())) == []
        assert torch.equal(before[1], torch.get_rng_state())
        return seen[-1]

    monkeypatch.setattr(script, "evaluate", watch)
    episodes = 1 if name == "ppo_atari" else 5
    game = {"env_id": "ALE/Pong-v5"} if name == "ppo_atari" else {}
    run = trained(name, eval_episodes=episodes, **game)
    _, saved = script.load_checkpoint(str(run))
    mean = script.train(script.Args(**saved["args"] | {"evaluate": str(run)}))
    assert seen[0] == seen[1]
    assert mean == seen[0]["eval/return"]
    assert seen[0]["eval/episodes"] == episodes
    for tag, x in seen[0].items():
        assert scalars(tag, run) == [(saved["step"], np.float32(x))]
    assert [*Path("runs").iterdir()] == [run]


def test_keywords_of_an_evaluation() -> None:
    """An evaluation has its run's keywords for the environment, and those that it is given."""
    run = trained("ppo", env_id="FrozenLake-v1", env_kwargs={"is_slippery": False})
    flags = ["--evaluate", run, "--eval-episodes", 3, "--env-kwargs"]
    stdout, stderr = command("ppo", *flags, "max_episode_steps", 1).communicate()
    assert "greedy return 0.0, std 0.0, over" in stdout, stderr
    sentence = refusal("ppo", *flags, "legs", 5)
    assert "--env-kwargs is_slippery False or --env-kwargs legs 5" in sentence


def test_numbers_of_numpy() -> None:
    """A run whose arguments are NumPy's numbers, as a search draws them, can be evaluated."""
    numbers = {"learning_rate": np.float64(1e-3), "seed": np.int64(3), "num_steps": np.int32(128)}
    kwargs = {"max_episode_steps": np.int64(10)}
    run = trained("ppo", eval_episodes=1, env_kwargs=kwargs, **numbers)
    script = MODULES["ppo"]
    _, saved = script.load_checkpoint(str(run))
    assert {type(saved["args"][name]) for name in numbers} == {int, float}
    assert saved["args"]["env_kwargs"] == {"max_episode_steps": 10}
    assert script.train(script.Args(**saved["args"] | {"evaluate": str(run)})) == 10


def test_evaluation_favours_no_episode(capsys: pytest.CaptureFixture) -> None:
    """Short and long episodes count as they come: here 1 and 99 steps in turn, 1 a step."""
    flags = {"env_id": "probe_envs:Alternating-v0", "eval_episodes": 6, "num_envs": 4}
    trained("ppo", **flags)
    assert scalars("eval/return")[0][1] == 50
    assert scalars("eval/return_std")[0][1] == 49
    assert "greedy return 50.0, std 49.0, over 6 episodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "quantity", "iteration"),
    [
        ({"env_kwargs": {"what": "observation", "when": 600}}, "observation", 4),
        ({"env_kwargs": {"what": "reward", "when": 600}}, "reward", 4),
        ({"learning_rate": 1e30}, "(policy_loss|value_loss|grad_norm)", 0),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_not_finite(name: str, flags: dict, quantity: str, iteration: int) -> None:
    """A nan ends the run, is named with its iteration, and reaches no checkpoint."""
    script, probe_envs.Breaks.taken = MODULES[name], 0
    flags = {"env_kwargs": {"what": "nothing", "when": 0}} | flags
    flags["env_kwargs"] |= {"continuous": name == "ppo_continuous"}
    sizes = {"num_envs": 1, "num_steps": 128, "num_minibatches": 4, "total_timesteps": 1024}
    where = f"iteration {iteration}, up to step {128 * (iteration + 1)}"
    with pytest.raises(script.UsageError, match=f"^{quantity} became infinite or nan in {where}"):
        trained(name, env_id="probe_envs:Breaks-v0", checkpoint_interval=2, **sizes, **flags)
    if iteration:
        _, saved = script.load_checkpoint(str(only_run()))
        assert saved["iteration"] == 4
        assert all(torch.isfinite(x).all() for x in saved["agent"].values())
    else:
        assert not (only_run() / "checkpoint.pt").exists()


def test_not_finite_and_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at a run that breaks doesn't let what is nan into the checkpoint."""
    script, probe_envs.Breaks.taken = MODULES["ppo"], 0
    check_finite = script.check_finite

    def check(*args: Any, **arrays: Any) -> None:
        if probe_envs.Breaks.taken >= 600:
            os.kill(os.getpid(), signal.SIGINT)
        check_finite(*args, **arrays)

    monkeypatch.setattr(script, "check_finite", check)
    flags = {"num_envs": 1, "total_timesteps": 1024, "env_id": "probe_envs:Breaks-v0"}
    flags |= {"checkpoint_interval": 2, "env_kwargs": {"what": "reward", "when": 600}}
    with pytest.raises(script.UsageError, match=r"^reward became infinite or nan"):
        trained("ppo", **flags)
    _, saved = script.load_checkpoint(str(only_run()))
    assert all(torch.isfinite(x).all() for x in saved["agent"].values())


def test_a_connection_lost_while_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks after an update leaves the checkpoint of before, whole."""
    broken = failing(MODULES["ppo"], "check_finite", 3, BrokenPipeError("no"))
    with broken, pytest.raises(BrokenPipeError):
        trained("ppo", checkpoint_interval=2)
    _, saved = MODULES["ppo"].load_checkpoint(str(only_run()))
    steps = {int(x["step"]) for x in saved["optimizer"]["state"].values()}
    assert (saved["iteration"], steps) == (2, {2 * 4 * 4})


def test_stopped_in_the_last_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes when all is trained lets the run finish."""
    fsync, calls = os.fsync, []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        fsync(*args)

    monkeypatch.setattr(os, "fsync", interrupted)
    _, saved = MODULES["ppo"].load_checkpoint(str(trained("ppo", checkpoint_interval=0)))
    assert saved["finished"]
    assert len(calls) == 2


def test_an_evaluation_that_does_not_end() -> None:
    """A greedy policy that never ends an episode ends in a sentence; the training isn't lost."""
    flags = {"env_id": "probe_envs:Breaks-v0", "env_kwargs": {"what": "nothing", "when": 0}}
    with pytest.raises(MODULES["ppo"].UsageError, match="doesn't end: --env-kwargs"):
        trained("ppo", **flags, eval_episodes=1)
    _, saved = MODULES["ppo"].load_checkpoint(str(only_run()))
    assert saved["step"] == SHORT["ppo"]["total_timesteps"]


def test_a_full_disk() -> None:
    """Where no more can be written, a sentence says so, and the last checkpoint stays."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (130_000, 130_000))

    flags = ["--total-timesteps", 500_000, "--checkpoint-interval", 10]
    assert "File too large" in refusal("ppo", *flags, preexec_fn=limit)
    _, saved = MODULES["ppo"].load_checkpoint(str(only_run()))
    assert saved["iteration"] >= 10


def test_a_write_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that can't be written whole leaves the one before, and no rest of itself."""
    with failing(os, "fsync", 2, OSError("no")), pytest.raises(OSError, match="no"):
        trained("ppo", checkpoint_interval=1)
    assert {path.suffix for path in only_run().iterdir() if "events" not in path.name} == {".pt"}
    assert MODULES["ppo"].load_checkpoint(str(only_run()))[1]["iteration"] == 1


def test_an_unwritable_folder() -> None:
    """Where the run's folder can't be made, a sentence says so."""
    Path("runs").touch()
    assert "runs" in refusal("ppo", "--total-timesteps", 1024)


@pytest.mark.parametrize(("name", "env_id"), [("ppo", "CartPole-v1"), ("ppo_atari", "ALE/Pong-v5")])
def test_video(name: str, env_id: str) -> None:
    """Every evaluated episode is recorded, from its beginning to its end."""
    run = trained(name, env_id=env_id, eval_episodes=2, capture_video=True)
    videos = sorted(run.glob("video-*/*.mp4"))
    assert len(videos) == 2
    clips = [VideoFileClip(str(video)) for video in videos]
    frames = sum(clip.n_frames for clip in clips)
    returns = 2 * scalars("eval/return", run)[0][1]
    if name == "ppo":  # one more frame than there are steps, and than rewards of 1
        assert frames == returns + 2
    first, last = clips[0].get_frame(0), clips[0].get_frame(clips[0].duration - 0.1)
    assert first.std() > 1
    assert (first != last).any()


def test_no_renderer(folder: Path) -> None:
    """Where MuJoCo can't render, a sentence says so before the training."""
    environment = {key: x for key, x in os.environ.items() if "DISPLAY" not in key}
    environment["MUJOCO_GL"] = "glfw"
    flags = ["--env-id", "Hopper-v5", "--capture-video"]
    assert "MUJOCO_GL" in refusal("ppo_continuous", *flags, env=environment)
    assert not (folder / "runs").exists()
