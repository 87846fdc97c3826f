"""Runs that are killed, stopped, or fail, go on as if nothing had happened; what they saved."""

import json
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import probe_envs
import pytest
import torch
from conftest import ROOT, SCRIPTS
from helpers import MODULES, SHORT, command, crashed, go_on, only_run, scalars, trained, wait_for
from moviepy import VideoFileClip
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MLPS = ["ppo", "ppo_continuous"]
# Runs of 6 to 16 iterations, with a checkpoint after every second one.
RUNS = {
    "ppo": {"env_id": "LunarLander-v3", "num_envs": 2, "total_timesteps": 4096},
    "ppo_continuous": {"env_id": "Hopper-v5", "num_steps": 128, "eval_episodes": 2},
    "ppo_atari": {"env_id": "ALE/Pong-v5", "num_steps": 32, "total_timesteps": 384},
}
RUNS["ppo_atari"] |= {"update_epochs": 1}
RUNS = {name: SHORT[name] | args | {"checkpoint_interval": 2} for name, args in RUNS.items()}


def content(run: Path) -> dict[str, Any]:
    """What a run saved, and all its scalars but the clock's."""
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    del saved["args"]
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    tags = set(events.Reload().Tags()["scalars"]) - {"charts/SPS"}
    assert len(tags) > 10
    return saved | {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in tags}


def assert_same(a: Any, b: Any) -> None:
    """Equal bit for bit, where nan is nan."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def flags_of(args: dict[str, Any]) -> list[str]:
    """The arguments as flags."""
    return [f"--{name.replace('_', '-')}={x}" for name, x in args.items()]


@pytest.mark.parametrize(
    ("name", "iteration", "flags"),
    [
        *((name, iteration, {}) for name in SCRIPTS for iteration in (3, 5)),
        ("ppo_continuous", 5, {"env_id": "BipedalWalker-v3", "eval_checkpoints": True}),
        ("ppo", 3, {"vectorization": "async"}),
        ("ppo", 5, {"env_id": "probe_envs:Drawn-v0", "eval_episodes": 2}),
    ],
)
def test_resumed_is_uninterrupted(name: str, iteration: int, flags: dict, folder: Path) -> None:
    """A run that crashes after `iteration` iterations and is resumed ends as the whole one does.

    Weights, optimizer, returns, and every scalar but the clock's are equal, bit for bit.
    """
    script, flags = MODULES[name], RUNS[name] | flags
    expected = content(trained(name, **flags))
    (folder / "runs").rename(folder / "whole")
    run, saved = crashed(name, iteration, **flags)
    batch_size = saved["args"].num_envs * saved["args"].num_steps
    assert saved["global_step"] == (iteration - 1) * batch_size
    go_on(script, run)
    assert_same(content(run), expected)
    assert expected["global_step"] == flags["total_timesteps"]
    assert len(expected["losses/value_loss"]) == flags["total_timesteps"] / batch_size > iteration


KILLED = {
    "ppo": SHORT["ppo"] | {"total_timesteps": 20_480, "checkpoint_interval": 10},
    "ppo_continuous": SHORT["ppo_continuous"] | {"total_timesteps": 8192, "checkpoint_interval": 2},
    "ppo_atari": RUNS["ppo_atari"] | {"total_timesteps": 768},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_killed(name: str, folder: Path) -> None:
    """The same for a process that is killed (SIGKILL) where it happens to be."""
    process = command(name, *flags_of(KILLED[name]))
    wait_for(process, "runs/*/checkpoint.pt")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run, script = only_run(), MODULES[name]
    assert 0 < script.load_checkpoint(run)["global_step"] < KILLED[name]["total_timesteps"]
    go_on(script, run)
    assert_same(content(run), content(trained(name, **KILLED[name])))


def test_crashed_before_the_first_checkpoint() -> None:
    """Nothing can be resumed then."""
    run, saved = crashed("ppo", 2, **RUNS["ppo"])
    assert not saved
    script = MODULES["ppo"]
    with pytest.raises(script.UsageError, match="no checkpoint"):
        script.train(script.Args(resume=str(run)))


def test_steered() -> None:
    """A finished run goes on with other flags; steps are counted on, and the first part stays."""
    script, run = MODULES["ppo"], trained("ppo", eval_episodes=1)
    before = content(run)
    with pytest.raises(script.UsageError, match="raise total_timesteps to 2560"):
        go_on(script, run)
    # Two iterations of 512 steps, then four of 128.
    go_on(script, run, total_timesteps=3072, gamma=0.9)
    go_on(script, run, total_timesteps=3600, num_envs=2, num_steps=64, anneal_lr=False)
    after = content(run)
    steps = [512 * i for i in range(1, 7)] + [3072 + 128 * i for i in range(1, 5)]
    assert [step for step, _ in after["losses/value_loss"]] == steps
    for tag, points in before.items():
        if "/" in tag:
            assert after[tag][: len(points)] == points
    assert after["global_step"] == 3584
    assert [step for step, _ in after["eval/return"]] == [2048, 3072, 3584]
    shares = [1 - i / 4 for i in range(4)] + [1 / 3, 1 / 6] + [1] * 4
    assert [x / 2.5e-4 for _, x in after["charts/learning_rate"]] == pytest.approx(shares)
    assert {int(x["step"]) for x in after["optimizer"].values()} == {10 * 16}
    args = script.load_checkpoint(run)["args"]
    assert (args.gamma, args.num_envs, args.num_steps) == (0.9, 2, 64)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(number: int) -> None:
    """A run that is stopped saves, ends without an evaluation, and can be gone on with.

    Ctrl-C in a terminal reaches the environments' processes too, and does no harm there.
    """
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
    step = MODULES["ppo"].load_checkpoint(only_run())["global_step"]
    assert step < 400_000
    go_on(MODULES["ppo"], only_run(), total_timesteps=step + 1024, eval_episodes=0)
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
    process = command(
        "ppo",
        *flags,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    wait_for(process, "runs/*/checkpoint.pt")
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    process.wait(timeout=60)
    process.stderr.close()
    assert MODULES["ppo"].load_checkpoint(only_run())["global_step"] == 20_480
    assert [step for step, _ in scalars("eval/return")] == [20_480]


def test_a_dead_worker() -> None:
    """A run whose environment's process dies ends, and leaves a checkpoint and no child."""
    script = MODULES["ppo"]
    flags = {"env_id": "probe_envs:Dies-v0", "vectorization": "async", "checkpoint_interval": 1}

    def report(step: int, score: float) -> None:
        if step == 1536:
            Path("die").touch()

    with pytest.raises((EOFError, OSError)):
        script.train(script.Args(**SHORT["ppo"] | flags), report)
    assert script.load_checkpoint(only_run())["global_step"] == 1536
    assert multiprocessing.active_children() == []
    Path("die").unlink()
    go_on(script, only_run())
    assert [x for x, _ in scalars("losses/value_loss")] == [512, 1024, 1536, 2048]


def test_a_write_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that can't be written whole leaves the one before."""
    save = torch.save

    def torn(checkpoint: dict, path: Path) -> None:
        save(checkpoint, path)
        if checkpoint["global_step"] == 1536:
            path.write_bytes(path.read_bytes()[:1000])
            raise OSError("no space")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="no space"):
        trained("ppo", checkpoint_interval=1)
    assert MODULES["ppo"].load_checkpoint(only_run())["global_step"] == 1024


@pytest.mark.parametrize(("what", "when"), [("observation", 600), ("reward", 600), ("reward", 100)])
@pytest.mark.parametrize("name", MLPS)
def test_not_finite(name: str, what: str, when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nan at the environment's step `when` ends the run, and reaches no checkpoint."""
    script = MODULES[name]
    monkeypatch.setattr(probe_envs.Breaks, "taken", 0)
    kwargs = {"what": what, "when": when, "continuous": name == "ppo_continuous"}
    flags = {"num_envs": 1, "num_steps": 128, "num_minibatches": 4, "total_timesteps": 1024}
    flags |= {"env_kwargs": json.dumps(kwargs), "checkpoint_interval": 2}
    step = 128 * (when // 128 + 1)
    with pytest.raises(script.UsageError, match=rf"^infinite or nan at step {step}: \['losses/"):
        trained(name, env_id="probe_envs:Breaks-v0", **flags)
    assert (only_run() / "checkpoint.pt").exists() == (when > 256)
    if when > 256:
        saved = script.load_checkpoint(only_run())
        assert saved["global_step"] == 512
        assert all(torch.isfinite(x).all() for x in saved["agent"].values())


def test_not_finite_with_workers() -> None:
    """The sentence is all that is said, though environments run in processes of their own."""
    flags = SHORT["ppo_continuous"] | {"vectorization": "async", "learning_rate": 1e8}
    process = command("ppo_continuous", *flags_of(flags))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.startswith("ppo_continuous.py: infinite or nan at step 512: ['losses/")
    assert len(stderr.splitlines()) == 1


def test_report() -> None:
    """`report` gets step and return of every iteration, and may end the run, which is saved.

    A learning rate may be NumPy's, as a search draws it.
    """
    script, reports = MODULES["ppo"], []

    def report(step: int, score: float) -> bool:
        reports.append((step, score))
        return step == 1536

    rate = np.float64(1e-3)
    args = script.Args(total_timesteps=4096, eval_episodes=3, learning_rate=rate)
    score = script.train(args, report)
    saved = script.load_checkpoint(only_run())
    assert [step for step, _ in reports] == [512, 1024, 1536]
    assert saved["global_step"] == 1536
    assert score == reports[-1][1] == pytest.approx(np.mean(saved["last_returns"]))
    assert not scalars("eval/return")


def test_an_error_in_report() -> None:
    """An exception of `report` comes out as it is, and leaves no process running."""
    crashed("ppo", 1, vectorization="async")
    assert multiprocessing.active_children() == []


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


ERRORS = [
    ("ppo", "--env-id CartPol-v1", "`CartPole`"),
    ("ppo", "--env-id CartPole-v7", "`v1`"),
    ("ppo", "--env-id cart!pole", "cart!pole"),
    ("ppo", "--env-id no_such_module:CartPole-v1", "no_such_module"),
    ("ppo", "--env-id Pendulum-v1", "ppo_continuous.py"),
    ("ppo", "--env-id Pendulum-v1", "recipes/multi_discrete.diff"),
    ("ppo", "--env-kwargs {is_slippery:false}", "double quotes"),
    ("ppo", "--vectorization vector_entry_point", "doesn't reset in the same step"),
    ("ppo", "--env-id Taxi-v4 --vectorization vector_entry_point", "vector entry point"),
    ("ppo", "--num-envs 3 --num-steps 5 --num-minibatches 4", "num_minibatches=4 must divide"),
    ("ppo", "--num-envs 2 --num-steps 4 --num-minibatches 8", "2 or more each"),
    *(
        ("ppo", f"--{name.replace('_', '-')} {number}", f"{name} must be {low} to")
        for low, names in {
            1: "num_envs num_steps num_minibatches update_epochs checkpoint_interval",
            0: "seed num_threads eval_episodes",
        }.items()
        for name in names.split()
        for number in (low - 1, -5)
    ),
    *(
        ("ppo_atari", f"--{name.replace('_', '-')} {number}", f"{name} must be 0 to")
        for name in ("learning_rate", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm", "gamma")
        for number in ("nan", "-0.1", "inf")
    ),
    ("ppo_continuous", "--gamma 1.1", "gamma must be 0 to 1, not 1.1"),
    ("ppo_continuous", "--gae-lambda -0.1", "gae_lambda must be 0 to 1, not -0.1"),
    ("ppo", "--total-timesteps 0", "raise total_timesteps to 512"),
    ("ppo", "--num-envs 64 --total-timesteps 1000", "raise total_timesteps to 8192"),
    ("ppo", "--device cuda:99", "no device cuda:99"),
    ("ppo", "--device gpu", "no device gpu"),
    ("ppo", "--resume nothing", "nothing"),
    ("ppo_continuous", "--evaluate nothing", "nothing"),
    ("ppo_continuous", "--env-id CartPole-v1", "not a vector within bounds"),
    ("ppo_continuous", "--env-id probe_envs:Unbounded-v0", "not a vector within bounds"),
    ("ppo_atari", "--env-id ALE/Pongg-v5", "`Pong`"),
    ("ppo_atari", "--env-id BreakoutNoFrameskip-v4", "vector entry point"),
]


@pytest.mark.parametrize(("name", "flags", "expected"), ERRORS)
def test_errors(
    name: str, flags: str, expected: str, capsys: pytest.CaptureFixture, folder: Path
) -> None:
    """Bad input ends in one sentence with what to do, exit status 2, and no run folder."""
    assert main(name, *shlex.split(flags)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"{name}.py: ")
    assert expected in lines[-1]
    assert len([line for line in lines if "WARN" not in line and "logger" not in line]) == 1
    assert list(folder.iterdir()) == []


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
    """An evaluation after the run gives the number of the one in it, and changes nothing."""
    script = MODULES[name]
    kwargs = {"env_kwargs": '{"max_num_frames_per_episode": 400}'} if name == "ppo_atari" else {}
    run = trained(name, eval_episodes=3, **kwargs)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("evaluated at ")]
    assert line.endswith(" over 3 episodes")
    before = {file: file.read_bytes() for file in run.iterdir()}
    args = script.load_checkpoint(run)["args"]
    assert scalars("eval/return") == [
        (args.total_timesteps, np.float32(script.evaluate(args, run)))
    ]
    capsys.readouterr()
    assert main(name, "--evaluate", run) is None
    assert capsys.readouterr().out == f"{line}\n"
    main(name, "--evaluate", run, "--no-eval-greedy", "--eval-episodes", 2, "--seed", 3)
    assert capsys.readouterr().out.endswith(" over 2 episodes\n")
    assert {file: file.read_bytes() for file in run.iterdir()} == before
    assert [*Path("runs").iterdir()] == [run]


def test_greedy_and_sampled() -> None:
    """Evaluated, an untrained policy does nearly 0 every time, 0.5 from the best, or samples.

    Its standard deviation is then exp(-0.5): the squared distance is 0.25 + exp(-1), less a
    little, as actions are clipped to -1 .. 1.
    """
    script = MODULES["ppo_continuous"]
    kwargs = {"env_id": "probe_envs:Acted-v0", "env_kwargs": '{"continuous": true}'}
    run = trained("ppo_continuous", **kwargs, learning_rate=0, target_kl=None)
    args = replace(script.load_checkpoint(run)["args"], eval_episodes=1000)
    assert script.evaluate(args, run) == pytest.approx(-0.25, abs=0.03)
    rng = np.random.default_rng(1)
    actions = (np.exp(-0.5) * rng.standard_normal(10**6)).clip(-1, 1)
    expected = -np.square(actions - 0.5).mean()
    sampled = script.evaluate(replace(args, eval_greedy=False), run)
    assert sampled == pytest.approx(expected, abs=0.07)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scheduled_evaluations(name: str) -> None:
    """Evaluations at checkpoints are a learning curve, and don't change the training's bits."""
    kwargs = {"env_kwargs": '{"max_num_frames_per_episode": 200}'} if name == "ppo_atari" else {}
    flags = kwargs | {"checkpoint_interval": 1}
    runs = [
        trained(name, **flags, **x) for x in ({}, {"eval_checkpoints": True, "eval_episodes": 1})
    ]
    plain, evaluated = map(content, runs)
    curve = evaluated.pop("eval/return")
    assert_same(evaluated, plain)
    assert [step for step, _ in curve] == [step for step, _ in plain["losses/value_loss"]]


def test_evaluation_favours_no_episode(capsys: pytest.CaptureFixture) -> None:
    """Short and long episodes count as they come: here 1 and 99 steps in turn, 1 a step."""
    trained("ppo", env_id="probe_envs:Alternating-v0", eval_episodes=6)
    assert scalars("eval/return")[0][1] == 50
    assert "evaluated at 50.0 ± 49.0 over 6 episodes" in capsys.readouterr().out


def test_evaluation_ends(capsys: pytest.CaptureFixture) -> None:
    """An agent that walks against a wall for ever is stopped, and the line says that none ended."""
    trained("ppo", env_id="CliffWalking-v1", eval_episodes=1)
    assert "evaluated at nan ± 0.0 over 0 episodes" in capsys.readouterr().out
    assert np.isnan(scalars("eval/return")[0][1])


@pytest.mark.parametrize(
    ("name", "flags", "extra"),
    [
        ("ppo", {}, 1),  # one more frame than steps
        ("ppo_continuous", {}, 1),
        # But for a game's last one, which its reset replaces.
        ("ppo_atari", {"env_kwargs": '{"max_num_frames_per_episode": 400}'}, 0),
    ],
)
def test_video(name: str, flags: dict, extra: int) -> None:
    """Every evaluated episode is recorded, from its beginning to its end, in a file of its own."""
    run = trained(name, eval_episodes=3, capture_video=True, **flags)
    frames = []
    for video in run.glob("videos-*/*.mp4"):
        with VideoFileClip(str(video)) as clip:
            frames.append(clip.n_frames)
            assert clip.get_frame(0).std() > 1
            assert (clip.get_frame(0) != clip.get_frame(clip.duration - 0.1)).any()
    assert len(frames) == 3
    steps = {"ppo": 3 * scalars("eval/return")[0][1], "ppo_continuous": 600, "ppo_atari": 300}[name]
    assert abs(steps + 3 * extra - sum(frames)) <= 6  # MoviePy rounds, writing and reading


@pytest.mark.parametrize("name", MLPS)
def test_cut_episodes_are_announced(name: str, capsys: pytest.CaptureFixture) -> None:
    """Where resets at checkpoints cut the time limit's episodes, the run names the flag."""
    env_id = {"ppo": "Acrobot-v1", "ppo_continuous": "Pendulum-v1"}[name]
    limit = {"ppo": 500, "ppo_continuous": 200}[name]
    for steps, says in ((limit // 2 - 2, True), (limit // 2, False)):
        flags = {"num_steps": steps, "num_envs": 2, "total_timesteps": 2 * steps}
        trained(name, env_id=env_id, checkpoint_interval=2, num_minibatches=2, **flags)
        sentence = (
            f"resets at checkpoints cut episodes of {limit} steps: raise --checkpoint-interval"
        )
        assert (sentence in capsys.readouterr().out) == says
