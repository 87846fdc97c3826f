"""Runs that are killed, stopped, or fail, go on as if nothing had happened; what they saved."""

import itertools
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import probe_envs
import pytest
import torch
from conftest import ROOT, SCRIPTS
from helpers import (
    MODULES,
    SHORT,
    assert_same,
    command,
    content,
    crashed,
    go_on,
    only_run,
    probe,
    scalars,
    trained,
    wait_for,
)
from moviepy import VideoFileClip

import ppo
import ppo_continuous

# Runs of 6 to 16 iterations, with a checkpoint after every second one.
RUNS = {
    "ppo": {"env_id": "LunarLander-v3", "num_envs": 2, "total_timesteps": 4096},
    "ppo_continuous": {"env_id": "Hopper-v5", "num_steps": 128, "eval_episodes": 2},
    "ppo_atari": {"num_steps": 32, "total_timesteps": 384, "update_epochs": 1},
}
RUNS = {name: SHORT[name] | args | {"checkpoint_interval": 2} for name, args in RUNS.items()}


@pytest.mark.parametrize(
    ("name", "iterations", "flags"),
    [
        *((name, (3, 5), {}) for name in SCRIPTS),
        ("ppo_continuous", (5,), {"env_id": "BipedalWalker-v3", "eval_checkpoints": True}),
        ("ppo", (3,), {"vectorization": "async"}),
        ("ppo", (5,), {"env_id": "probe_envs:Careless-v0", "eval_episodes": 2}),
    ],
)
def test_resumed_is_uninterrupted(name: str, iterations: tuple[int, ...], flags: dict) -> None:
    """A run that crashes in an iteration and goes on ends as the whole one, bit for bit."""
    flags = RUNS[name] | flags
    expected = content(trained(name, **flags))
    for iteration in iterations:
        run, saved = crashed(name, iteration, **flags)
        batch_size = saved["args"].num_envs * saved["args"].num_steps
        assert saved["global_step"] == (iteration - 1) * batch_size
        go_on(MODULES[name], run)
        assert_same(content(run), expected)
    assert expected["global_step"] == flags["total_timesteps"]
    if flags["eval_episodes"]:
        score = MODULES[name].evaluate(saved["args"], run)
        assert expected["eval/return"][-1] == (flags["total_timesteps"], np.float32(score))
    assert len(expected["losses/value_loss"]) == flags["total_timesteps"] / batch_size > iteration


@pytest.mark.parametrize(
    ("name", "steps"), [("ppo", 8192), ("ppo_continuous", 8192), ("ppo_atari", 768)]
)
def test_killed(name: str, steps: int) -> None:
    """The same for a process that is killed (SIGKILL) where it happens to be."""
    flags = RUNS[name] | {"total_timesteps": steps}
    process = command(name, *(f"--{flag}={x}" for flag, x in flags.items()))
    wait_for(process, "runs/*/checkpoint.pt")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run, script = only_run(), MODULES[name]
    assert 0 < script.load_checkpoint(run)["global_step"] < steps
    go_on(script, run)
    assert_same(content(run), content(trained(name, **flags)))


def test_steered() -> None:
    """A run that its report ended goes on with other flags, and the first part stays."""
    # A learning rate may be NumPy's, as a search draws it.
    flags = {"learning_rate": np.float64(1e-3), "total_timesteps": 4096, "eval_episodes": 1}
    run = trained("ppo", lambda step, score: step == 2048, **flags)
    before = content(run)
    assert "eval/return" not in before
    with pytest.raises(ppo.UsageError, match="raise total_timesteps to 2560"):
        go_on(ppo, run, total_timesteps=2048)
    # Two iterations of 512 steps, then four of 128.
    go_on(ppo, run, total_timesteps=3072, gamma=0.9)
    go_on(ppo, run, total_timesteps=3600, num_envs=2, num_steps=64, anneal_lr=False)
    after = content(run)
    steps = [512 * i for i in range(1, 7)] + [3072 + 128 * i for i in range(1, 5)]
    assert [step for step, _ in after["losses/value_loss"]] == steps
    for tag, points in before.items():
        if "/" in tag:
            assert after[tag][: len(points)] == points
    assert after["global_step"] == 3584
    assert [step for step, _ in after["eval/return"]] == [3072, 3584]
    shares = [1 - i / 8 for i in range(4)] + [1 / 3, 1 / 6] + [1] * 4
    assert [x / 1e-3 for _, x in after["charts/learning_rate"]] == pytest.approx(shares)
    assert {int(x["step"]) for x in after["optimizer"].values()} == {10 * 16}
    args = ppo.load_checkpoint(run)["args"]
    assert (args.gamma, args.num_envs, args.num_steps) == (0.9, 2, 64)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(number: int) -> None:
    """A run that is stopped saves, ends without an evaluation, and can be gone on with."""
    # Ctrl-C in a terminal reaches the environments' processes too, and does no harm there.
    flags = ["--total-timesteps", 400_000, "--checkpoint-interval", 10]
    flags += ["--vectorization", "async"] if number == signal.SIGINT else []
    process = command("ppo", *flags, start_new_session=True)
    wait_for(process, "runs/*/checkpoint.pt")
    time.sleep(0.1)
    send = os.killpg if number == signal.SIGINT else os.kill
    send(process.pid, number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    assert "evaluated" not in stdout
    assert stdout.splitlines()[-1].endswith(str(only_run()))
    step = ppo.load_checkpoint(only_run())["global_step"]
    assert step < 400_000
    go_on(ppo, only_run(), total_timesteps=step + 1024, eval_episodes=0)
    steps = [step for step, _ in scalars("losses/value_loss")]
    assert steps == [512 * (i + 1) for i in range(step // 512 + 2)]


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    """Whoever doesn't want to wait for the iteration's end sends another."""
    process = command("ppo", "--num-steps", 100_000, "--total-timesteps", 800_000)
    wait_for(process, "runs/*/events*")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == -signal.SIGINT
    assert not [*folder.glob("runs/*/checkpoint.pt")]


def test_a_lost_connection() -> None:
    """A run under nohup goes on to its evaluation, though SIGHUP comes and nobody reads it."""
    flags = ["--total-timesteps", 20_480, "--checkpoint-interval", 4, "--eval-episodes", 3]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    process = command("ppo", *flags, env=environment, preexec_fn=ignore)
    wait_for(process, "runs/*/checkpoint.pt")
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    process.wait(timeout=60)
    process.stderr.close()
    assert ppo.load_checkpoint(only_run())["global_step"] == 20_480
    assert [step for step, _ in scalars("eval/return")] == [20_480]


def test_a_dead_worker() -> None:
    """A run whose environments' processes die ends, and leaves a checkpoint and no child."""

    def report(step: int, score: float) -> None:
        if step == 1536:
            for process in multiprocessing.active_children():
                process.kill()

    with pytest.raises((EOFError, OSError)):
        trained("ppo", report, vectorization="async", checkpoint_interval=2)
    assert ppo.load_checkpoint(only_run())["global_step"] == 1024
    assert multiprocessing.active_children() == []
    go_on(ppo, only_run())
    assert [x for x, _ in scalars("losses/value_loss")] == [512, 1024, 1536, 2048]


def test_a_write_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that can't be written whole leaves the one before."""
    save = torch.save

    def torn(checkpoint: dict, path: Path) -> None:
        if checkpoint["global_step"] == 1536:
            path.write_bytes(b"half")
            raise OSError("no space")
        save(checkpoint, path)

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="no space"):
        trained("ppo", checkpoint_interval=1)
    assert ppo.load_checkpoint(only_run())["global_step"] == 1024


@pytest.mark.parametrize(("what", "when"), [("observation", 600), ("reward", 600), ("reward", 100)])
@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_not_finite(name: str, what: str, when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nan at the environment's step `when` ends the run, and reaches no checkpoint."""
    script, steps = MODULES[name], itertools.count(1)

    def step(self: probe_envs.Probe, action: Any) -> probe_envs.Step:
        numbers = {"observation": 1.0, "reward": 1.0}
        if next(steps) == when:
            numbers[what] = np.nan
        return np.float32([numbers["observation"]]), numbers["reward"], False, False, {}

    monkeypatch.setattr(probe_envs.Probe, "step", step)
    flags = {"num_envs": 1, "num_steps": 128, "num_minibatches": 4, "checkpoint_interval": 2}
    last = 128 * (when // 128 + 1)
    with pytest.raises(script.UsageError, match=rf"^infinite or nan at step {last}: \['losses/"):
        trained(name, **flags, **probe(name, "Probe"))
    assert (only_run() / "checkpoint.pt").exists() == (when > 256)
    if when > 256:
        saved = script.load_checkpoint(only_run())
        assert saved["global_step"] == 512
        assert all(torch.isfinite(x).all() for x in saved["agent"].values())


def test_not_finite_with_workers() -> None:
    """The sentence is all that is said, though environments run in processes of their own."""
    flags = SHORT["ppo_continuous"] | {"vectorization": "async", "learning_rate": 1e8}
    process = command("ppo_continuous", *(f"--{flag}={x}" for flag, x in flags.items()))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.startswith("ppo_continuous.py: infinite or nan at step 512: ['losses/")
    assert len(stderr.splitlines()) == 1


def main(name: str, *flags: Any) -> int | None:
    """Run a script as a user does, but in this process; return its exit status."""
    handlers = {number: signal.getsignal(number) for number in (1, 2, 15)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        try:
            runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
        except SystemExit as exit_:
            return exit_.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def test_a_bug_in_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in the user's own environment keeps its traceback."""
    monkeypatch.setattr(probe_envs.Probe, "reward", lambda *_: 1 / 0)
    for flags in ([], ["--vectorization", "async"]):
        with pytest.raises(ZeroDivisionError):
            main("ppo", "--env-id", "probe_envs:Probe-v0", *flags)
        assert multiprocessing.active_children() == []


CHOICES = '--env-id probe_envs:Choices-v0 --env-kwargs \'{"kind": "%s"}\''
ERRORS = [
    ("ppo", "--env-id CartPol-v1", "`CartPole`"),
    ("ppo", "--env-id CartPole-v7", "`v1`"),
    ("ppo", "--env-id cart!pole", "cart!pole"),
    ("ppo", "--env-id no_such_module:CartPole-v1", "no_such_module"),
    ("ppo", "--env-id Pendulum-v1", "ppo_continuous.py for a Box"),
    ("ppo", CHOICES % "multi_discrete", "see recipes/multi_discrete.diff"),
    ("ppo", CHOICES % "multi_binary", "see recipes/multi_discrete.diff"),
    ("ppo", CHOICES % "discrete", "Discrete(3, start=7), not 0 to n - 1"),
    ("ppo", CHOICES % "dict", "actions Dict"),
    ("ppo_continuous", "--env-id CartPole-v1", "Discrete(2), not a vector within bounds"),
    *(
        ("ppo_continuous", CHOICES % kind, "not a vector within bounds")
        for kind in ("scalar", "matrix", "unbounded", "half")
    ),
    ("ppo", "--env-kwargs {is_slippery:false}", "double quotes"),
    ("ppo", "--vectorization vector_entry_point", "doesn't reset in the same step"),
    ("ppo", "--env-id Taxi-v4 --vectorization vector_entry_point", "vector entry point"),
    ("ppo", "--num-envs 3 --num-steps 5 --num-minibatches 4", "num_minibatches=4 must divide"),
    ("ppo", "--num-envs 2 --num-steps 4 --num-minibatches 8", "2 or more each"),
    ("ppo_continuous", "--gamma 1.1", "gamma must be 0 to 1, not 1.1"),
    ("ppo_continuous", "--gae-lambda -0.1", "gae_lambda must be 0 to 1, not -0.1"),
    ("ppo", "--total-timesteps 0", "raise total_timesteps to 512"),
    ("ppo", "--num-envs 64 --total-timesteps 1000", "raise total_timesteps to 8192"),
    ("ppo", "--device cuda:99", "no device cuda:99"),
    ("ppo", "--device gpu", "no device gpu"),
    ("ppo", "--resume nothing", "nothing"),
    ("ppo_continuous", "--evaluate nothing", "nothing"),
    ("ppo_atari", "--env-id ALE/Pongg-v5", "`Pong`"),
    ("ppo_atari", "--env-id BreakoutNoFrameskip-v4", "vector entry point"),
    ("ppo_atari", "--env-kwargs '{\"no_such\": 1}'", "unexpected keyword argument 'no_such'"),
    ("ppo_atari", "--env-kwargs '{\"episodic_life\": true}'", "multiple values for keyword"),
]
COUNTS = "num_envs num_steps num_minibatches update_epochs checkpoint_interval"
RATES = "learning_rate clip_coef ent_coef vf_coef max_grad_norm gamma"
ERRORS += [
    (script, f"--{name} {number}", f"{name} must be {low} to")
    for script, low, names, numbers in (
        ("ppo", 1, COUNTS, "0 -5"),
        ("ppo", 0, "seed num_threads eval_episodes", "-1 -5"),
        ("ppo_atari", 0, RATES, "nan -0.1 inf"),
    )
    for name in names.split()
    for number in numbers.split()
]


@pytest.mark.parametrize(("name", "flags", "expected"), ERRORS)
def test_errors(name: str, flags: str, expected: str, capsys: pytest.CaptureFixture) -> None:
    """Bad input ends in one sentence with what to do, exit status 2, and no run folder."""
    assert main(name, *shlex.split(flags)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"{name}.py: ")
    assert expected in lines[-1]
    assert len([line for line in lines if "WARN" not in line and "logger" not in line]) == 1
    assert [*Path().iterdir()] == []


class Malicious:
    """What does harm when it is unpickled."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Make a folder."""
        return os.mkdir, ("harm",)


def test_checkpoints_that_do_not_fit(capsys: pytest.CaptureFixture) -> None:
    """One of another task, script or version, damaged, or with code in it: a sentence, no harm."""
    run = trained("ppo")
    path = run / "checkpoint.pt"
    whole, saved = path.read_bytes(), torch.load(path, weights_only=True)
    files = {file: file.read_bytes() for file in run.iterdir()}

    def refused(name: str, *flags: Any) -> str:
        assert main(name, *flags, "--total-timesteps", 8192) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{name}.py: ")
        return line

    for flag in ("--resume", "--evaluate"):
        assert "size mismatch" in refused("ppo", flag, run, "--env-id", "Acrobot-v1")
        assert "CartPole-v1 has actions" in refused("ppo_continuous", flag, run)
        assert "argument" in refused("ppo_atari", flag, run)
    assert {file: file.read_bytes() for file in run.iterdir()} == files
    of_1_0 = saved | {"args": '{"seed": 1}', "iteration": 4}
    for other in (of_1_0, saved | {"args": {"no_flag": 1}}, {}, [1, 2], {"args": Malicious()}):
        torch.save(other, path)
        assert "no checkpoint that fits" in refused("ppo", "--resume", run)
    assert not Path("harm").exists()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "no checkpoint that fits" in refused("ppo", "--evaluate", run)
        assert path.read_bytes() == whole[:length]


@pytest.mark.parametrize("name", SCRIPTS)
def test_evaluation_from_the_file(name: str, capsys: pytest.CaptureFixture) -> None:
    """An evaluation after the run gives the number of the one in it, filmed or not."""
    script = MODULES[name]
    kwargs = {"env_kwargs": '{"max_num_frames_per_episode": 400}'} if name == "ppo_atari" else {}
    run = trained(name, eval_episodes=3, **kwargs)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("evaluated at ")]
    assert line.endswith(" over 3 episodes")
    before = {file: file.read_bytes() for file in run.iterdir()}
    args = script.load_checkpoint(run)["args"]
    score = script.evaluate(args, run)
    assert scalars("eval/return") == [(args.total_timesteps, np.float32(score))]
    capsys.readouterr()
    assert main(name, "--evaluate", run) is None
    assert capsys.readouterr().out == f"{line}\n"
    main(name, "--evaluate", run, "--no-eval-greedy", "--eval-episodes", 2, "--seed", 3)
    assert capsys.readouterr().out.endswith(" over 2 episodes\n")
    assert {file: file.read_bytes() for file in run.iterdir()} == before
    assert [*Path("runs").iterdir()] == [run]

    assert script.evaluate(replace(args, capture_video=True), run) == score
    frames = []
    for video in run.glob("videos-*/*.mp4"):
        with VideoFileClip(str(video)) as clip:
            frames.append(clip.n_frames)
            assert clip.get_frame(0).std() > 1
            assert (clip.get_frame(0) != clip.get_frame(clip.duration - 0.1)).any()
    assert len(frames) == 3
    # One more frame than steps, but for a game's last one, which its reset replaces.
    expected = {"ppo": 3 * score + 3, "ppo_continuous": 603, "ppo_atari": 300}[name]
    assert abs(expected - sum(frames)) <= 6  # MoviePy rounds, writing and reading


def test_greedy_and_sampled() -> None:
    """Evaluated, an untrained policy does nearly 0 every time, 0.5 from the best, or samples."""
    flags = probe("ppo_continuous", "Acted") | {"learning_rate": 0, "target_kl": None}
    run = trained("ppo_continuous", **flags)
    args = replace(ppo_continuous.load_checkpoint(run)["args"], eval_episodes=1000)
    assert ppo_continuous.evaluate(args, run) == pytest.approx(-0.25, abs=0.03)
    # Its standard deviation is exp(-0.5); actions are clipped to -1 .. 1.
    rng = np.random.default_rng(1)
    actions = (np.exp(-0.5) * rng.standard_normal(10**6)).clip(-1, 1)
    expected = -np.square(actions - 0.5).mean()
    sampled = ppo_continuous.evaluate(replace(args, eval_greedy=False), run)
    assert sampled == pytest.approx(expected, abs=0.07)


def test_evaluation_favours_no_episode(capsys: pytest.CaptureFixture) -> None:
    """Short and long episodes count as they come: here 1 and 99 steps in turn, 1 a step."""
    trained("ppo", **probe("ppo", "Overwriting", lengths=[1, 99]), eval_episodes=6)
    assert scalars("eval/return")[0][1] == 50
    assert "evaluated at 50.0 ± 49.0 over 6 episodes" in capsys.readouterr().out


def test_evaluation_ends(capsys: pytest.CaptureFixture) -> None:
    """An agent that walks against a wall for ever is stopped, and the line says that none ended."""
    trained("ppo", env_id="CliffWalking-v1", total_timesteps=512, eval_episodes=1)
    printed = capsys.readouterr().out
    assert "evaluated at nan ± 0.0 over 0 episodes" in printed
    assert "return nan over the last 0 episodes" in printed
    assert np.isnan(scalars("eval/return")[0][1])
