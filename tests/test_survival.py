"""Runs that are killed, stopped, or fail, go on as if nothing had happened; what they saved."""

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import probe_envs
import pytest
import resume
import torch
from conftest import MODULES, NEEDS_ENVPOOL, SCRIPTS, SHORT, VARIANTS, only_run, scalars, watching
from helpers import command, crashed, go_on, refusal, trained, wait_for
from moviepy import VideoFileClip
from moviepy.video.io import ImageSequenceClip

# Runs of 6 to 16 iterations, with a checkpoint after every second one.
RUNS = {
    "ppo": {"env_id": "LunarLander-v3", "num_envs": 2, "total_timesteps": 4096},
    "ppo_continuous": {"env_id": "Hopper-v5", "num_steps": 128, "total_timesteps": 2048},
    "ppo_atari": {"env_id": "ALE/Pong-v5", "num_envs": 2, "num_steps": 32, "num_threads": 1},
}
RUNS["ppo_continuous"] |= {"num_minibatches": 4, "eval_episodes": 2}
RUNS["ppo_atari"] |= {"total_timesteps": 384, "eval_episodes": 0}
RUNS |= {name: RUNS[base] for name, base in VARIANTS.items()}
RUNS = {name: SHORT[name] | args | {"checkpoint_interval": 2} for name, args in RUNS.items()}


@pytest.mark.parametrize(
    ("name", "iteration", "flags"),
    [
        *((name, iteration, {}) for name in SCRIPTS for iteration in (2, 3, 5)),
        # Its reset keeps something of the episodes before.
        ("ppo_continuous", 5, {"env_id": "BipedalWalker-v3"}),
        ("ppo", 3, {"vectorization": "async"}),
        ("ppo", 3, {"env_id": "CartPole-v1", "vectorization": "native"}),
        pytest.param("ppo_continuous", 3, {"vectorization": "envpool"}, marks=NEEDS_ENVPOOL),
        ("ppo", 3, {"env_id": "probe_envs:Drawn-v0", "eval_episodes": 2}),
        ("ppo_continuous", 3, {"squash": True, "state_std": True}),
        *((name, 3, {}) for name in VARIANTS),
    ],
)
def test_resumed_is_uninterrupted(name: str, iteration: int, flags: dict, folder: Path) -> None:
    """A run that crashes after `iteration` iterations and is resumed ends as the whole one does.

    Weights, optimizer, returns, and every scalar but the clock's are equal, bit for bit.
    """
    script, flags = MODULES[name], RUNS[name] | flags
    expected = resume.content(trained(name, **flags))
    (folder / "runs").rename(folder / "whole")
    run, saved = crashed(name, iteration, **flags)
    assert saved["iteration"] == iteration - iteration % 2
    go_on(script, run)
    got = resume.content(only_run())
    assert resume.differences(expected, got) == []
    assert len(expected[1]["losses/value_loss"]) == expected[0]["iteration"]
    args = expected[0]["args"]
    size = args["num_envs"] * args["num_steps"]
    assert expected[0]["iteration"] == args["total_timesteps"] // size > iteration


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_crashed_in_the_evaluation(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that crashes when all is trained, and is resumed, ends as the whole one does."""
    script, flags = MODULES[name], SHORT[name] | {"eval_episodes": 1}
    expected = resume.content(trained(name, **flags))
    (folder / "runs").rename(folder / "whole")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(script, "evaluate", lambda *_: 1 / 0)
        script.train(script.Args(**flags))
    go_on(script, only_run())
    assert resume.differences(expected, resume.content(only_run())) == []


def test_crashed_before_the_first_checkpoint() -> None:
    """Nothing can be resumed then."""
    run, saved = crashed("ppo", 1, **RUNS["ppo"])
    assert not saved
    assert "checkpoint.pt is missing" in refusal("ppo", "--resume", run)


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
    wait_for(process, "runs/*/checkpoint.pt")
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr
    saved = MODULES["ppo"].load_checkpoint(only_run())
    assert saved["iteration"] < 120
    if number == signal.SIGKILL:
        assert process.returncode == -number
        assert saved["iteration"] % 10 == 0
    else:
        assert process.returncode == 128 + number
        assert f"--resume {only_run()}" in stderr.splitlines()[-1]
    process = command("ppo", "--resume", only_run())
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert f"{61_440 - 512 * saved['iteration']:,} steps in" in stdout
    steps = [step for step, _ in scalars("losses/value_loss")]
    assert steps == [512 * (i + 1) for i in range(120)]


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    """Whoever doesn't want to wait for the iteration's end sends another."""
    process = command("ppo", "--num-steps", 100_000, "--total-timesteps", 800_000)
    wait_for(process, "runs/*/events*")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 128 + signal.SIGTERM
    assert not [*folder.glob("runs/*/checkpoint.pt")]


def test_a_signal_while_it_sets_up(folder: Path) -> None:
    """Before there is anything to save, SIGTERM ends the process at once."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = command("ppo", "--env-id", "probe_envs:Slow-v0", env=environment)
    wait_for(process, "making")
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=5)
    assert process.returncode == -signal.SIGTERM
    assert stderr == ""
    assert [path.name for path in folder.iterdir()] == ["making"]


def test_ctrl_c_with_workers(folder: Path) -> None:
    """Ctrl-C in a terminal reaches the environments' processes too, and does no harm there."""
    flags = ["--vectorization", "async", "--total-timesteps", 200_000]
    process = command("ppo", *flags, start_new_session=True)
    wait_for(process, "runs/*/events*")
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.splitlines() == [f"stopped: go on with --resume {only_run()}"]
    assert (only_run() / "checkpoint.pt").exists()


def test_a_dead_worker() -> None:
    """A run whose environment's process dies ends; what was saved before is gone on with."""
    flags = ["--env-id", "probe_envs:Dies-v0", "--vectorization", "async", "--num-envs", 3]
    flags += ["--num-minibatches", 3, "--total-timesteps", 384 * 30, "--checkpoint-interval", 3]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = command("ppo", *flags, env=environment)
    wait_for(process, "runs/*/checkpoint.pt")
    Path("die").touch()
    process.communicate(timeout=30)
    assert process.returncode > 0
    saved = MODULES["ppo"].load_checkpoint(only_run())
    assert saved["iteration"] in range(3, 30, 3)
    Path("die").unlink()
    process = command("ppo", "--resume", only_run(), env=environment)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    steps = [step for step, _ in scalars("losses/value_loss")]
    assert steps == [384 * (i + 1) for i in range(30)]


def test_a_worker_that_dies_in_the_evaluation() -> None:
    """A run whose environment's process dies when all is trained ends; its weights are saved."""
    flags = ["--env-id", "probe_envs:Dies-v0", "--vectorization", "async"]
    flags += ["--total-timesteps", 512, "--env-kwargs", "steps", 150]  # a rollout has 128
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = command("ppo", *flags, "--eval-episodes", 200, env=environment)
    process.communicate(timeout=60)
    assert process.returncode > 0
    assert MODULES["ppo"].load_checkpoint(only_run())["iteration"] == 1
    process = command("ppo", "--evaluate", only_run(), "--eval-episodes", 100, env=environment)
    assert "over 100 episodes" in process.communicate(timeout=60)[0]


def test_a_checkpoint_cut_short() -> None:
    """A checkpoint cut at any byte is refused, and left as it is."""
    path = trained("ppo") / "checkpoint.pt"
    content, rng = path.read_bytes(), random.Random(1)
    script = MODULES["ppo"]
    for length in [0, 1, len(content) - 1, *(rng.randrange(len(content)) for _ in range(50))]:
        path.write_bytes(content[:length])
        with pytest.raises(
            script.UsageError, match=r"checkpoint\.pt is missing or damaged, or doesn't"
        ):
            script.train(script.Args(resume=str(path.parent)))
        assert path.read_bytes() == content[:length]
    for flag in ("--resume", "--evaluate"):
        assert "damaged" in refusal("ppo", flag, path.parent)


class Malicious:
    """What does harm when it is unpickled."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Make a folder."""
        return os.mkdir, ("harm",)


def test_checkpoints_that_do_not_fit(folder: Path) -> None:
    """One with code in it, of another script, environment or layout: a sentence, no harm."""
    script, run = MODULES["ppo"], trained("ppo", eval_episodes=1)
    path, saved = run / "checkpoint.pt", torch.load(run / "checkpoint.pt")
    before = {file: file.read_bytes() for file in run.iterdir()}
    does_not_fit = f"{path} is missing or damaged, or doesn't fit: "
    for name, flag in (("ppo_atari", "--resume"), ("ppo_continuous", "--evaluate")):
        sentence = refusal(name, flag, run)
        assert does_not_fit in sentence
        assert "unexpected keyword argument" in sentence
    for flag in ("--num-envs 8", "--env-id Acrobot-v1", "--env-kwargs max_episode_steps 9"):
        name = flag.split()[0][2:].replace("-", "_")
        sentence = refusal("ppo", "--resume", run, *flag.split(), "--total-timesteps", 8192)
        assert f"keeps its {name}: leave it out" in sentence
    assert script.load_checkpoint(run)["iteration"] == 4
    sentence = refusal("ppo", "--evaluate", run, "--env-id", "Acrobot-v1")
    assert does_not_fit in sentence
    assert "size mismatch for actor.0.weight" in sentence
    assert {file: file.read_bytes() for file in run.iterdir()} == before
    larger = json.dumps(json.loads(saved["args"]) | {"env_id": "Acrobot-v1"})  # than it was
    torch.save(saved | {"args": larger}, path)
    assert "size mismatch" in refusal("ppo", "--resume", run, "--total-timesteps", 8192)
    for other in (saved | {"args": '{"no_flag": 1}'}, saved | {"args": "{"}, {}, [1, 2]):
        torch.save(other, path)
        with pytest.raises(script.UsageError, match=f"^{does_not_fit}"):
            script.train(script.Args(resume=str(run)))
    torch.save({"args": Malicious()}, path)
    assert "damaged" in refusal("ppo", "--evaluate", run)
    assert not Path("harm").exists()
    assert "FileNotFoundError" in refusal("ppo", "--evaluate", "runs")


def test_extended_run(capfd: pytest.CaptureFixture) -> None:
    """A finished run goes on, to a larger total, and says what changed; the first part stays."""
    run = trained("ppo", eval_episodes=1, anneal_lr=False)
    assert "resumed" not in capfd.readouterr().err
    before = resume.content(run)
    assert before[0]["iteration"] == 4
    go_on(MODULES["ppo"], run, total_timesteps=3072, gamma=0.9)
    assert sorted(x for x in capfd.readouterr().err.splitlines() if "resumed" in x) == [
        "resumed with gamma 0.9",
        "resumed with total_timesteps 3072",
    ]
    saved, logged = resume.content(run)
    assert saved["iteration"] == 6
    assert (saved["args"]["total_timesteps"], saved["args"]["gamma"]) == (3072, 0.9)
    assert [step for step, _ in logged["losses/value_loss"]] == [512 * (i + 1) for i in range(6)]
    assert [step for step, _ in logged["eval/return"]] == [2048, 3072]
    for tag, points in before[1].items():
        assert logged[tag][: len(points)] == points
    steps = {int(x["step"]) for x in saved["optimizer"]["state"].values()}
    assert steps == {6 * 4 * 4}
    # And once more, without a change: nothing is trained, but it is evaluated again.
    go_on(MODULES["ppo"], run, eval_episodes=2)
    again = resume.content(run)
    assert resume.differences(saved["agent"], again[0]["agent"]) == []
    assert again[1]["losses/value_loss"] == logged["losses/value_loss"]
    assert [step for step, _ in again[1]["eval/return"]] == [2048, 3072, 3072]


@pytest.mark.parametrize("compiled", [False, True])
def test_another_learning_rate(compiled: bool) -> None:
    """A resumed run learns at the rate that it is given, not at that of its checkpoint."""
    run, saved = crashed("ppo", 2, anneal_lr=False, checkpoint_interval=2, compile=compiled)
    before = {name: x.clone() for name, x in saved["agent"].items()}
    go_on(MODULES["ppo"], run, learning_rate=1e-9)
    rates = [rate for _, rate in scalars("charts/learning_rate")]
    assert rates == pytest.approx([2.5e-4] * 2 + [1e-9] * 2)
    after = MODULES["ppo"].load_checkpoint(run)
    assert after["iteration"] == 4
    moved = max((x - before[name]).abs().max().item() for name, x in after["agent"].items())
    assert 0 < moved < 1e-6


@pytest.mark.parametrize("name", SCRIPTS)
def test_fixed_flags(name: str) -> None:
    """What a resumed run can't change is refused, before anything is written or trained."""
    script, run = MODULES[name], trained(name)
    before = {file: file.read_bytes() for file in run.iterdir()}
    args = script.load_checkpoint(run)["args"]
    for flag in script.FIXED:
        old = getattr(args, flag)
        new = {"env_id": "Acrobot-v1", "env_kwargs": {"max_episode_steps": 9}}.get(flag)
        new = new or (not old if isinstance(old, bool) else 2 * old or 0.5)
        changed = {flag: new, "resume": str(run), "total_timesteps": 10 * args.total_timesteps}
        with pytest.raises(script.UsageError, match=f"^a resumed run keeps its {flag}"):
            script.train(replace(args, **changed))
    assert {file: file.read_bytes() for file in run.iterdir()} == before


@pytest.mark.parametrize("name", SCRIPTS)
def test_evaluation_from_the_file(name: str) -> None:
    """An evaluation after the run gives the number of the one in it, and changes nothing."""
    script = MODULES[name]
    episodes = 1 if name == "ppo_atari" else 5
    limit = {"max_num_frames_per_episode": 400}
    game = {"env_id": "ALE/Pong-v5", "env_kwargs": limit} if name == "ppo_atari" else {}
    run = trained(name, eval_episodes=episodes, **game)
    before = {file: file.read_bytes() for file in run.iterdir()}
    args = script.load_checkpoint(run)["args"]
    result = script.evaluate(args, run)
    assert set(result) == {"eval/return", "eval/return_std"}
    for tag, x in result.items():
        assert scalars(tag, run) == [(args.total_timesteps, np.float32(x))]
    process = command(name, "--evaluate", run)
    mean, std = (result[f"eval/{tag}"] for tag in ("return", "return_std"))
    printed = f"{args.env_id}: greedy return {mean:.1f}, std {std:.1f}, over {episodes} episodes"
    stdout, stderr = process.communicate(timeout=120)
    assert stdout.strip() == printed, stderr
    assert {file: file.read_bytes() for file in run.iterdir()} == before
    assert [*Path("runs").iterdir()] == [run]


def test_keywords_of_an_evaluation() -> None:
    """An evaluation has its run's keywords for the environment, and those that it is given."""
    run = trained("ppo", env_id="FrozenLake-v1", env_kwargs={"is_slippery": False})
    flags = ["--evaluate", run, "--eval-episodes", 3, "--env-kwargs"]
    stdout, stderr = command("ppo", *flags, "max_episode_steps", 1).communicate()
    assert "greedy return 0.0, std 0.0, over" in stdout, stderr
    sentence = refusal("ppo", *flags, "legs", 5)
    assert "{'is_slippery': False, 'legs': 5}" in sentence


def test_numbers_of_numpy() -> None:
    """A run whose arguments are NumPy's numbers, as a search draws them, can be evaluated."""
    numbers = {"learning_rate": np.float64(1e-3), "seed": np.int64(3), "num_steps": np.int32(128)}
    kwargs = {"env_id": "probe_envs:Dies-v0", "env_kwargs": {"steps": np.int64(10**9)}}
    run = trained("ppo", eval_episodes=1, **kwargs, **numbers)
    script = MODULES["ppo"]
    args = script.load_checkpoint(run)["args"]
    assert {type(getattr(args, name)) for name in numbers} == {int, float}
    assert args.env_kwargs == {"steps": 10**9}
    assert type(args.env_kwargs["steps"]) is int
    assert script.evaluate(args, run)["eval/return"] == 0


def test_evaluation_favours_no_episode(capsys: pytest.CaptureFixture) -> None:
    """Short and long episodes count as they come: here 1 and 99 steps in turn, 1 a step."""
    flags = {"env_id": "probe_envs:Alternating-v0", "eval_episodes": 6, "num_envs": 4}
    trained("ppo", **flags)
    assert scalars("eval/return")[0][1] == 50
    assert scalars("eval/return_std")[0][1] == 49
    assert "greedy return 50.0, std 49.0, over 6 episodes" in capsys.readouterr().out


ONE_STEP = {"learning_rate": 1e30, "update_epochs": 1, "num_minibatches": 1}


@pytest.mark.parametrize(
    ("flags", "quantity", "iteration"),
    [
        ({"env_kwargs": {"what": "observation", "when": 600}}, "observation", 4),
        ({"env_kwargs": {"what": "reward", "when": 600}}, "reward", 4),
        ({"learning_rate": 1e30}, "losses/(policy_loss|value_loss|grad_norm)", 0),
        # Its only gradient step of an iteration breaks the policy, which acts in the next one.
        (ONE_STEP, "(losses|debug)/.*", 1),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_not_finite(name: str, flags: dict, quantity: str, iteration: int) -> None:
    """A nan ends the run, is named with its iteration, and reaches no checkpoint."""
    script, probe_envs.Breaks.taken = MODULES[name], 0
    flags = {"env_kwargs": {"what": "nothing", "when": 0}} | flags
    flags["env_kwargs"] |= {"continuous": name == "ppo_continuous"}
    sizes = {"num_envs": 1, "num_steps": 128, "num_minibatches": 4, "total_timesteps": 1024}
    flags = {"env_id": "probe_envs:Breaks-v0", "checkpoint_interval": 2} | sizes | flags
    where = f"iteration {iteration}, up to step {128 * (iteration + 1)}"
    with pytest.raises(script.UsageError, match=f"^{quantity} became infinite or nan in {where}"):
        trained(name, **flags)
    if iteration == 4:
        saved = script.load_checkpoint(only_run())
        assert saved["iteration"] == 4
        assert all(torch.isfinite(x).all() for x in saved["agent"].values())
    else:
        assert not (only_run() / "checkpoint.pt").exists()


def test_not_finite_and_stopped() -> None:
    """Ctrl-C at a run that breaks doesn't let what is nan into the checkpoint."""
    script, probe_envs.Breaks.taken, sent = MODULES["ppo"], 0, []

    def see(*args: Any) -> None:
        if probe_envs.Breaks.taken >= 600 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    flags = {"num_envs": 1, "total_timesteps": 1024, "env_id": "probe_envs:Breaks-v0"}
    flags |= {"checkpoint_interval": 2, "env_kwargs": {"what": "reward", "when": 600}}
    broken = pytest.raises(script.UsageError, match=r"^reward became infinite or nan")
    with watching(script, see), broken:
        trained("ppo", **flags)
    assert sent
    saved = script.load_checkpoint(only_run())
    assert saved["iteration"] == 4
    assert all(torch.isfinite(x).all() for x in saved["agent"].values())


def test_a_connection_lost_while_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks after an update leaves the checkpoint of before, whole."""
    log = MODULES["ppo"].log

    def broken(writer: Any, values: dict[str, float], step: int) -> None:
        if step > 2 * 512:
            raise BrokenPipeError("no")
        log(writer, values, step)

    monkeypatch.setattr(MODULES["ppo"], "log", broken)
    with pytest.raises(BrokenPipeError):
        trained("ppo", checkpoint_interval=2)
    saved = MODULES["ppo"].load_checkpoint(only_run())
    steps = {int(x["step"]) for x in saved["optimizer"]["state"].values()}
    assert (saved["iteration"], steps) == (2, {2 * 4 * 4})


def test_stopped_in_the_last_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes when all is trained lets the run finish."""
    replace, calls = os.replace, []

    def interrupted(*args: Any) -> None:
        calls.append(os.kill(os.getpid(), signal.SIGINT))
        replace(*args)

    monkeypatch.setattr(os, "replace", interrupted)
    run = trained("ppo", checkpoint_interval=0, eval_episodes=1)
    assert MODULES["ppo"].load_checkpoint(run)["iteration"] == 4
    assert len(calls) == 1
    assert len(scalars("eval/return")) == 1


def test_ctrl_c_in_the_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it trains, Ctrl-C waits for the iteration's end; in the last evaluation, it ends it."""
    script, evaluated = MODULES["ppo"], []

    def interrupted(*args: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        evaluated.append(args)
        return {}

    monkeypatch.setattr(script, "evaluate", interrupted)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job may ignore it
    with pytest.raises(KeyboardInterrupt):
        trained("ppo", eval_episodes=1)
    signal.signal(signal.SIGINT, previous)
    assert not evaluated
    assert script.load_checkpoint(only_run())["iteration"] == 4
    with pytest.raises(SystemExit) as exit_:
        trained("ppo", eval_episodes=1, eval_checkpoints=True, checkpoint_interval=2)
    assert exit_.value.code == 130
    assert len(evaluated) == 1
    saved = sorted(script.load_checkpoint(run)["iteration"] for run in Path("runs").iterdir())
    assert saved == [3, 4]


def test_a_full_disk() -> None:
    """Where no more can be written, a sentence says so, and the last checkpoint stays."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (130_000, 130_000))

    flags = ["--total-timesteps", 500_000, "--checkpoint-interval", 10]
    process = command("ppo", *flags, preexec_fn=limit)
    _, stderr = process.communicate(timeout=300)  # TensorBoard's thread adds a traceback of its own
    assert process.returncode == 2
    assert any(x.startswith("ppo.py: ") and "File too large" in x for x in stderr.splitlines())
    assert MODULES["ppo"].load_checkpoint(only_run())["iteration"] >= 10


def test_a_write_that_fails() -> None:
    """A checkpoint that can't be written whole leaves the one before, which is gone on with."""
    save = torch.save

    def torn(checkpoint: Any, path: Path) -> None:
        save(checkpoint, path)
        if checkpoint["iteration"] == 2:
            path.write_bytes(path.read_bytes()[:1000])
            raise OSError("no")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no"):
        patch.setattr(torch, "save", torn)
        trained("ppo", checkpoint_interval=1)
    assert MODULES["ppo"].load_checkpoint(only_run())["iteration"] == 1
    go_on(MODULES["ppo"], only_run())
    assert MODULES["ppo"].load_checkpoint(only_run())["iteration"] == 4
    assert [step for step, _ in scalars("losses/value_loss")] == [512, 1024, 1536, 2048]
    assert not [*only_run().glob("*.tmp")]


def test_an_unwritable_folder() -> None:
    """Where the run's folder can't be made, a sentence says so."""
    Path("runs").touch()
    assert "runs" in refusal("ppo", "--total-timesteps", 1024)


@pytest.mark.parametrize(
    ("name", "env_id", "flags"),
    [
        ("ppo", "CartPole-v1", {}),
        ("ppo", "Taxi-v4", {"mask_actions": True}),
        ("ppo_continuous", "Pendulum-v1", {}),
        ("ppo_atari", "ALE/Pong-v5", {}),
        ("ppo_atari", "ALE/Breakout-v5", {}),
    ],
)
def test_video(
    name: str, env_id: str, flags: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every evaluated episode is recorded, from its beginning to its end, in a file of its own."""
    script, lengths, frames = MODULES[name], [], []
    make_envs, make_clip = script.make_envs, ImageSequenceClip.ImageSequenceClip

    def keep(images: list[np.ndarray], **kwargs: Any) -> Any:
        frames.append(len(images))
        return make_clip(images, **kwargs)

    def make(*args: Any) -> Any:
        envs = make_envs(*args)
        step = envs.step

        def watch(actions: np.ndarray) -> tuple:
            result = step(actions)
            lengths.extend(result[-1]["episode"]["l"] if "episode" in result[-1] else [])
            return result

        envs.step = watch if len(args) == 3 and args[2] else step
        return envs

    monkeypatch.setattr(script, "make_envs", make)
    monkeypatch.setattr(ImageSequenceClip, "ImageSequenceClip", keep)
    run = trained(name, env_id=env_id, eval_episodes=3, capture_video=True, **flags)
    videos = sorted(run.glob("videos-*/*.mp4"))
    assert len(videos) == len(lengths) == 3
    # One more frame than steps, but for a game's last one, which its reset replaces.
    extra = 0 if name == "ppo_atari" else 1
    assert frames == [length + extra for length in lengths]
    for video, count in zip(videos, frames, strict=True):
        with VideoFileClip(str(video)) as clip:  # left open, it would wait for forked processes
            assert 0 <= count - clip.n_frames <= 2  # MoviePy rounds down, writing and reading
            first, last = clip.get_frame(0), clip.get_frame(clip.duration - 0.1)
        assert first.std() > 1
        assert (first != last).any()


def test_evaluation_has_no_noise() -> None:
    """Evaluated, an untrained policy does the same every time: nearly the centre, 0.5 from best."""
    kwargs = {"env_id": "probe_envs:Acted-v0", "env_kwargs": {"continuous": True}}
    trained("ppo_continuous", **kwargs, total_timesteps=512, learning_rate=1e-30, eval_episodes=20)
    assert scalars("eval/return")[0][1] == pytest.approx(-0.25, abs=0.1)
    assert scalars("eval/return_std")[0][1] < 0.1


def test_steps_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an iteration of 512 steps takes a second, there are 512, in a resumed run, too."""
    seconds, ppo = [0.0], MODULES["ppo"]

    def tick(*_: Any) -> None:
        seconds[0] += 1 / 16  # at each gradient step

    monkeypatch.setattr(ppo, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    with watching(ppo, tick):
        go_on(ppo, trained("ppo"), total_timesteps=4096)
    assert [x for _, x in scalars("charts/SPS")] == [512] * 8


def test_epsilon() -> None:
    """Adam's is 1e-5."""
    saved = MODULES["ppo"].load_checkpoint(trained("ppo"))
    assert saved["optimizer"]["param_groups"][0]["eps"] == 1e-5
