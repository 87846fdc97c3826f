"""Runs that crash, are stopped, or fail, go on from what they saved, which is always whole."""

import itertools
import os
import re
import runpy
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from conftest import BOTH, ROOT, SCRIPTS
from helpers import (
    MODULES,
    SHORT,
    all_scalars,
    assert_same,
    command,
    content,
    crash,
    go_on,
    kept_batches,
    only_run,
    probe,
    scalars,
    trained,
    watching,
)
from moviepy import VideoFileClip

import ppo
import ppo_continuous

# Runs of six to eight iterations, of fewer than 100 episodes, with a checkpoint after every second.
RUNS = {
    "ppo": {"env_id": "Acrobot-v1", "total_timesteps": 4096},
    "ppo_continuous": {"total_timesteps": 4096, "target_kl": None},
    "ppo_atari": {"num_steps": 32, "total_timesteps": 384, "update_epochs": 1},
}
RUNS = {name: SHORT[name] | args | {"checkpoint_interval": 2} for name, args in RUNS.items()}


@pytest.mark.parametrize(
    ("name", "flags"), [*((name, {}) for name in SCRIPTS), ("ppo", {"vectorization": "async"})]
)
def test_resumed(name: str, flags: dict) -> None:
    """A run that crashed goes on from its checkpoint, with new episodes, and alike each time."""
    script, flags, starts = MODULES[name], RUNS[name] | flags, []
    with pytest.raises(ZeroDivisionError):
        trained(name, crash(5), **flags)
    run, saved = only_run(), script.load_checkpoint(only_run())
    batch_size = flags["num_envs"] * flags["num_steps"]
    assert saved["global_step"] == 4 * batch_size
    before, copy = all_scalars(run), Path(shutil.copytree(run, "copy"))

    def see(agent: Any, batch: Any, indices: torch.Tensor) -> None:
        starts.append({x: weights.clone() for x, weights in agent.named_parameters()})

    with kept_batches(script) as batches, watching(script, see):
        go_on(script, run)
    assert_same(starts[0], {x: weights for x, weights in saved["agent"].items() if "_rms" not in x})
    envs = script.make_envs(script.Args(**flags), flags["num_envs"])
    obs, _ = envs.reset(seed=1 + saved["global_step"])
    envs.close()
    np.testing.assert_array_equal(batches[0].obs[: flags["num_envs"]], np.float32(obs))

    after = content(run)
    assert after["global_step"] == flags["total_timesteps"]
    steps = [*range(batch_size, flags["total_timesteps"] + 1, batch_size)]
    assert [step for step, _ in after["losses/value_loss"]] == steps
    assert after["losses/value_loss"][:4] == before["losses/value_loss"][:4]
    falling = [1 - step / steps[-1] for step in [0, *steps[:-1]]]
    rates = [rate / script.Args().learning_rate for _, rate in after["charts/learning_rate"]]
    assert rates == pytest.approx(falling)
    returns = saved["last_returns"]
    assert after["last_returns"][: len(returns)] == returns
    assert len(returns) < len(after["last_returns"]) < 100
    (updates,) = {int(x["step"]) for x in saved["optimizer"].values()}
    assert {int(x["step"]) for x in after["optimizer"].values()} == {updates * len(steps) // 4}
    if "obs_rms.count" in saved["agent"]:
        for statistics in ("obs_rms", "return_rms"):
            assert after["agent"][f"{statistics}.count"] == flags["total_timesteps"]
    go_on(script, copy)
    assert_same(content(copy), after)


def test_steered() -> None:
    """A run that its report ended is evaluated, goes on with other flags, and is never mixed up."""
    flags = {"learning_rate": np.float64(1e-3), "total_timesteps": 4096, "eval_episodes": 1}
    run = trained("ppo", lambda step, score: step == 2048, **flags)
    before = content(run)
    with pytest.raises(ppo.UsageError, match="nothing to train after global_step=2048"):
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
    assert [step for step, _ in after["eval/return"]] == [2048, 3072, 3584]
    shares = [1 - i / 8 for i in range(4)] + [1 / 3, 1 / 6] + [1] * 4
    assert [x / 1e-3 for _, x in after["charts/learning_rate"]] == pytest.approx(shares)
    assert {int(x["step"]) for x in after["optimizer"].values()} == {10 * 16}
    args = ppo.load_checkpoint(run)["args"]
    assert (args["gamma"], args["num_envs"], args["num_steps"]) == (0.9, 2, 64)
    # What a resumed run saved doesn't resume it: another seed is another run.
    saved = (run / "checkpoint.pt").read_bytes()
    ppo.train(ppo.Args(**args | {"seed": 2, "total_timesteps": 128}))
    assert len([*Path("runs").iterdir()]) == 2
    assert (run / "checkpoint.pt").read_bytes() == saved


def test_workers_that_use_pytorch() -> None:
    """Environments that compute by PyTorch's threads, in processes of their own, don't hang."""
    flags = {"env_id": "probe_envs:Threaded-v0", "vectorization": "async", "num_threads": 2}
    flags |= {"num_envs": 2, "num_steps": 4, "num_minibatches": 2, "total_timesteps": 16}
    flags |= {"eval_interval": 1, "eval_episodes": 1}
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    environment.pop("OMP_NUM_THREADS", None)
    process = command("ppo", *(f"--{k}={x}" for k, x in flags.items()), env=environment)
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    assert stdout.count("evaluated at 1.0 +- 0.0 over 1 episodes") == 2


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


HUGE = float(np.finfo(np.float32).max)  # finite, but its square isn't


@pytest.mark.parametrize(
    ("what", "number"),
    [
        *itertools.product(["observations", "rewards"], [np.nan, np.inf, -HUGE]),
        ("last observations", np.nan),
    ],
)
@pytest.mark.parametrize("when", [100, 1023])
@BOTH
def test_not_finite(
    name: str, when: int, what: str, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What isn't finite, at last in the last step but one, ends the run, and is never saved."""
    script, steps = MODULES[name], itertools.count(1)

    def step(self: probe_envs.Probe, action: Any) -> probe_envs.Step:
        numbers, is_now = {"rewards": 1.0}, next(steps) == when
        if is_now:
            numbers[what.split()[-1]] = number
        obs = np.float32([numbers.get("observations", 0.5)])
        return obs, numbers["rewards"], is_now and what[:4] == "last", False, {}

    monkeypatch.setattr(probe_envs.Probe, "step", step)
    flags = {"num_envs": 1, "num_steps": 128, "num_minibatches": 4, "checkpoint_interval": 2}
    last = 128 * (when // 128 + 1)
    with pytest.raises(FloatingPointError, match=f" {what.split()[-1]} before global_step={last}"):
        trained(name, **flags, **probe(name, "Probe"), total_timesteps=1024)
    assert (only_run() / "checkpoint.pt").exists() == (when > 100)
    if when > 100:
        saved = script.load_checkpoint(only_run())
        assert saved["global_step"] == 768
        assert all(torch.isfinite(x).all() for x in saved["agent"].values())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_gradient_that_is_not_finite(name: str) -> None:
    """A loss that is nan in the last iteration ends the run, and reaches no checkpoint."""
    script, args = MODULES[name], MODULES[name].Args(**RUNS[name] | {"update_epochs": 1})
    batch_size = args.num_envs * args.num_steps

    def report(step: int, score: float) -> None:
        if step == args.total_timesteps - batch_size:
            args.ent_coef = np.nan

    with pytest.raises(FloatingPointError, match="gradient"):
        script.train(args, report)
    saved = script.load_checkpoint(only_run())
    assert saved["global_step"] == args.total_timesteps - 2 * batch_size
    assert all(torch.isfinite(x).all() for x in saved["agent"].values())


def main(name: str, *flags: Any) -> int | None:
    """Run a script as a user does, but in this process; return its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        try:
            runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
        except SystemExit as exit_:
            return exit_.code


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", [ZeroDivisionError, ModuleNotFoundError, gym.error.InvalidAction])
def test_a_bug_in_an_environment(kind: type, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in the user's own environment keeps its traceback."""

    def reward(*_: Any) -> float:
        raise kind("mine")

    monkeypatch.setattr(probe_envs.Probe, "reward", reward)
    with pytest.raises(kind, match="mine"):
        main("ppo", "--env-id", "probe_envs:Probe-v0", "--vectorization", mode)


def test_a_bug_in_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does what goes wrong where the user's module is imported."""
    monkeypatch.syspath_prepend(folder)
    Path("my_own.py").write_text("import no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main("ppo", "--env-id", "my_own:Mine-v0")


CHOICES = '--env-id probe_envs:Choices-v0 --env-kwargs \'{"kind": "%s"}\''
SPACES = '--env-id probe_envs:Spaces-v0 --env-kwargs \'{"kind": "%s", "continuous": %s}\''
ERRORS = [
    ("ppo", "--env-id CartPol-v1", "`CartPole`"),
    ("ppo", "--env-id Mine/CartPole-v7", "--env-id PACKAGE:ID"),
    ("ppo_atari", "--env-id ALE/Pongg-v5", "`Pong`"),
    ("ppo", "--env-id Pendulum-v1", "ppo_continuous.py for a Box of real numbers"),
    ("ppo", CHOICES % "integers", "ppo_continuous.py for a Box of real numbers"),
    ("ppo", CHOICES % "multi_discrete", "see recipes/multi_discrete.diff"),
    ("ppo", CHOICES % "discrete", "Discrete(3, start=7), not Discrete from 0 on"),
    ("ppo", CHOICES % "dict", "actions Dict"),
    ("ppo_continuous", "--env-id CartPole-v1", "Discrete(2), not a vector of floats within bounds"),
    *(
        ("ppo_continuous", CHOICES % kind, "not a vector of floats within bounds")
        for kind in ("integers", "scalar", "matrix", "unbounded", "half")
    ),
    *(
        (name, SPACES % (kind, continuous), told)
        for name, continuous in (("ppo", "false"), ("ppo_continuous", "true"))
        for kind, told in (("image", "docs/environments.md"), ("sequence", "Seq"), ("graph", "Gra"))
    ),
    ("ppo", "--vectorization vector_entry_point", "doesn't reset in the same step"),
    ("ppo", "--total-timesteps 0", "nothing to train after global_step=0"),
    ("ppo", "--num-envs 64 --total-timesteps 1000", "raise --total-timesteps"),
    ("ppo", "--resume nothing", "there is no nothing/checkpoint.pt"),
    ("ppo", "--resume ''", "there is no checkpoint.pt"),
    ("ppo_continuous", "--evaluate ''", "there is no checkpoint.pt"),
    # What tyro says
    ("ppo", "--num-envs 3 --num-steps 5 --num-minibatches 4", "num_minibatches=4 must divide"),
    ("ppo", "--env-kwargs {is_slippery:false}", "double quotes"),
    ("ppo_continuous", "--log-std-min nan", "log_std_min=nan must be a number from -100 on"),
]
COUNTS = "num_envs num_steps num_minibatches update_epochs checkpoint_interval"
RATES = "learning_rate clip_coef ent_coef vf_coef max_grad_norm gamma gae_lambda target_kl"
ERRORS += [
    (script, f"--{name} {number}", f"{name}")
    for script, names, numbers in (
        ("ppo", COUNTS, "0 -5"),
        ("ppo_continuous", "seed num_threads eval_episodes eval_interval", "-1"),
        ("ppo_atari", RATES, "nan -0.1"),
    )
    for name in names.split()
    for number in numbers.split()
]


@pytest.mark.parametrize(("name", "flags", "expected"), ERRORS)
def test_errors(name: str, flags: str, expected: str, capsys: pytest.CaptureFixture) -> None:
    """Bad input ends in one sentence with what to do, exit status 2, and no run folder."""
    assert main(name, *shlex.split(flags)) == 2
    error = capsys.readouterr().err
    if "Error parsing Args" in error:  # tyro's box, with lines of its own
        error = f"{name}.py: {' '.join(re.sub('[─│╭╮╰╯]', '', error).split())}"
    lines = error.splitlines()
    assert lines[-1].startswith(f"{name}.py: ")
    assert expected in lines[-1]
    assert len([line for line in lines if "WARN" not in line and "logger" not in line]) == 1
    assert [*Path().iterdir()] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_another_agent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose parts are in another order, or of another shape, isn't gone on with."""
    script, run = MODULES[name], trained(name)
    files = {file: file.read_bytes() for file in run.iterdir()}

    class Agent(script.Agent):
        def __init__(self, *inputs: Any) -> None:
            super().__init__(*inputs)
            change(self)

    def reorder(agent: Any) -> None:  # its names and shapes stay
        actor = agent.actor
        del agent.actor
        agent.actor = actor

    def widen(agent: Any) -> None:
        agent.critic = torch.nn.Linear(3, 1)

    monkeypatch.setattr(script, "Agent", Agent)
    changes = (reorder, script.UsageError, "another order"), (widen, RuntimeError, "critic")
    for change, kind, told in changes:  # noqa: B007
        args = script.load_checkpoint(run)["args"] | {"resume": str(run)}
        with pytest.raises(kind, match=told):
            script.train(script.Args(**args | {"total_timesteps": 8192}))
    assert {file: file.read_bytes() for file in run.iterdir()} == files


def test_checkpoints_that_do_not_fit(capsys: pytest.CaptureFixture) -> None:
    """One of another task or script, or damaged: an error, and no harm."""
    run = trained("ppo")
    path = run / "checkpoint.pt"
    whole = path.read_bytes()
    for flag in ("--resume", "--evaluate"):
        with pytest.raises(RuntimeError, match="size mismatch"):
            main("ppo", flag, run, "--env-id", "Acrobot-v1")
        with pytest.raises(TypeError, match="unexpected keyword argument 'vectorization'"):
            main("ppo_atari", flag, run)
        assert main("ppo_continuous", flag, run) == 2
        assert "CartPole-v1 has actions" in capsys.readouterr().err
    assert path.read_bytes() == whole
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises((RuntimeError, OSError)):
        main("ppo", "--evaluate", run)
    assert path.read_bytes() == whole[: len(whole) // 2]


@pytest.mark.parametrize("name", SCRIPTS)
def test_evaluation_from_the_file(name: str, capsys: pytest.CaptureFixture) -> None:
    """An evaluation after the run gives the number of the one in it, filmed or not."""
    script = MODULES[name]
    run = trained(name, eval_episodes=3)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("evaluated at ")]
    assert line.endswith(" over 3 episodes")
    before = {file: file.read_bytes() for file in run.iterdir()}
    args = script.Args(**script.load_checkpoint(run)["args"])
    score = script.evaluate(args, run)
    assert scalars("eval/return") == [(args.total_timesteps, np.float32(score))]
    capsys.readouterr()
    assert main(name, "--evaluate", run) is None
    assert capsys.readouterr().out == f"{line}\n"
    assert {file: file.read_bytes() for file in run.iterdir()} == before
    assert [*Path("runs").iterdir()] == [run]

    assert script.evaluate(replace(args, capture_video=True), run) == score
    frames, videos = [], [*run.glob("videos-*/*.mp4")]
    assert len(videos) == 3
    for video in videos:
        with VideoFileClip(str(video)) as clip:
            frames.append(clip.n_frames)
            assert (clip.get_frame(0) != clip.get_frame(clip.duration - 0.1)).any()
    # One more frame than steps, but for a game's last one, which its reset replaces.
    expected = {"ppo": 3 * score + 3, "ppo_continuous": 603, "ppo_atari": 150}[name]
    assert abs(expected - sum(frames)) <= 6  # MoviePy rounds, writing and reading


def test_greedy_and_sampled() -> None:
    """Evaluated, an untrained policy does nearly 0 every time, 0.5 from the best, or samples."""
    flags = probe("ppo_continuous", "Acted") | {"learning_rate": 0, "target_kl": None}
    run = trained("ppo_continuous", **flags)
    saved = ppo_continuous.load_checkpoint(run)["args"]
    args = ppo_continuous.Args(**saved | {"eval_episodes": 1000})
    assert ppo_continuous.evaluate(args, run) == pytest.approx(-0.25, abs=0.03)
    # Its standard deviation is exp(-0.5); actions are clipped to -1 .. 1.
    rng = np.random.default_rng(1)
    actions = (np.exp(-0.5) * rng.standard_normal(10**6)).clip(-1, 1)
    expected = -np.square(actions - 0.5).mean()
    sampled = ppo_continuous.evaluate(replace(args, eval_greedy=False), run)
    assert sampled == pytest.approx(expected, abs=0.07)


@BOTH
def test_evaluation_in_several_rows(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Side by side, each row samples for itself, and each episode that ended counts."""
    run = trained(name, **probe(name, "Overwriting", lengths=[2, 4]))
    script, acted = MODULES[name], []
    make_envs, act = script.make_envs, script.Agent.act
    args = script.load_checkpoint(run)["args"] | {"eval_episodes": 4, "eval_greedy": False}
    monkeypatch.setattr(script, "make_envs", lambda args, _, *videos: make_envs(args, 3, *videos))
    monkeypatch.setattr(script.Agent, "act", lambda *x: acted.append(act(*x)) or acted[-1])
    assert script.evaluate(script.Args(**args), run) == 3
    assert "evaluated at 3.0 +- 1.0 over 6 episodes" in capsys.readouterr().out
    rows = np.reshape(acted, (6, 3)).T
    assert len({*map(tuple, rows)}) == 3
