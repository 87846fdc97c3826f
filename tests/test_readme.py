"""The pages' changes of a few lines, made in ppo.py as a reader would, and their programs."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import MODULES, SHORT, assert_same, command, go_on, latest_run, load, scalars, trained
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_training import batch_of, updated

import ppo

PAGES = "".join((ROOT / x).read_text() for x in ("README.md", "docs/hacking.md"))
BLOCKS = re.findall(r"(?ms)^```diff\n(.+?)^```$", PAGES)
HUNKS = "@@\n".join(BLOCKS).split("@@\n")
SECOND = "critic_optimizer|optimizers"


def changed(word: str) -> ModuleType:
    """ppo.py with the hunks that match this."""
    source = (ROOT / "ppo.py").read_text()
    for hunk in (x for x in HUNKS if re.search(word, x)):
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(x[1:] for x in lines if x[0] in " " + sign) for sign in "-+")
        assert source.count(before) == 1, f"ppo.py has not one place like:\n{before}"
        source = source.replace(before, after)
    Path("my_ppo.py").write_text(source)
    return load(Path("my_ppo.py"))


def train_with(word: str, **flags: float) -> ModuleType:
    """The changed script, after a short run."""
    script = changed(word)
    script.train(script.Args(**SHORT["ppo"] | flags))
    return script


def test_every_hunk_is_tested() -> None:
    """Each has one of the words below, and each word has as many hunks as it should."""
    words = {"np.cos": 1, "smooth_l1": 1, "RMSprop": 1, "scaled": 1, "samples": 1, "best_return": 2}
    words |= {"OTHER": 1, "requires_grad_": 1, "rewards \\+=": 1, "histogram": 1, "groups =": 1}
    words[SECOND] = 7
    assert {word: sum(bool(re.search(word, x)) for x in HUNKS) for word in words} == words
    assert sum(words.values()) == len(HUNKS)


def test_cosine() -> None:
    """The learning rate follows half a wave, from its start towards 0."""
    train_with("np.cos", total_timesteps=4 * 512, num_envs=4, num_minibatches=4, learning_rate=1e-3)
    rates = [x for _, x in scalars("charts/learning_rate")]
    expected = [1e-3, 1e-3 * (0.5 + 0.5**1.5), 0.5e-3, 1e-3 * (0.5 - 0.5**1.5)]
    assert rates == pytest.approx(expected)


def test_smooth_l1() -> None:
    """Errors of 0.5 and -2, of which one is above 1, by hand; and it trains."""
    script = train_with("smooth_l1")
    metrics, _ = updated(script, [[0.0] * 2] * 3, batch_of(2, returns=[-0.5, 2.0]))
    assert metrics["losses/value_loss"] == pytest.approx((0.5 * 0.5**2 + 2 - 0.5) / 2)


def test_rmsprop() -> None:
    """RMSprop has one average for each weight, and learns."""
    script = train_with("RMSprop")
    states = script.load_checkpoint(latest_run())["optimizer"].values()
    assert all({*state} == {"step", "square_avg"} for state in states)
    assert all(state["square_avg"].any() for state in states)


def test_raw_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values are 0 and gamma is, advantages are CartPole's rewards, 1; no samples change."""
    script, seen = changed("scaled|samples"), []
    monkeypatch.setattr(script.Agent, "get_value", lambda agent, obs: 0 * agent.critic(obs)[:, 0])
    update = script.update
    monkeypatch.setattr(script, "update", lambda *x: seen.append(x[2][3]) or update(*x))
    script.train(script.Args(**SHORT["ppo"] | {"gamma": 0.0}))
    assert all((advantages == 1).all() for advantages in seen)
    assert script.RunningMeanStd(2)(seen[0]) is seen[0]


def test_best_checkpoint() -> None:
    """The best checkpoint is of the best mean return so far, and can be evaluated."""
    script, scores = changed("best_return"), []
    args = script.Args(**SHORT["ppo"] | {"total_timesteps": 8192, "checkpoint_interval": 1})
    script.train(args, lambda step, score: scores.append(score))
    best = script.load_checkpoint(latest_run() / "best")
    assert np.mean(best["last_returns"]) == pytest.approx(np.nanmax(scores))
    assert script.evaluate(script.Args(eval_episodes=1), latest_run() / "best") > 0


def actor(run: Path) -> list[torch.Tensor]:
    """The weights of a run's actor."""
    agent = ppo.load_checkpoint(run)["agent"]
    return [x for name, x in agent.items() if name.startswith("actor.")]


def test_agent_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run begins with its weights and its normalization."""
    other = trained("ppo")
    script = changed("OTHER")
    load = script.load_checkpoint
    monkeypatch.setattr(script, "load_checkpoint", lambda _: load(other))
    script.train(script.Args(**SHORT["ppo"] | {"learning_rate": 0.0}))
    assert_same(actor(latest_run()), actor(other))
    counts = [load(x)["agent"]["obs_rms.count"] for x in (other, latest_run())]
    assert counts == [2048, 4096]


@pytest.mark.parametrize("compiled", [False, True])
def test_frozen_actor(compiled: bool) -> None:
    """The actor stays as it was, the critic doesn't, and the run goes on."""
    script = train_with("requires_grad_", total_timesteps=512, compile=compiled)
    before = actor(latest_run())
    go_on(script, latest_run(), total_timesteps=2048)
    assert_same(actor(latest_run()), before)
    assert all(x > 0 for _, x in scalars("losses/grad_norm"))


def test_bonus() -> None:
    """It counts for what is learned, and not in the log."""
    script = train_with(r"rewards \+=", gamma=0.0)
    assert script.load_checkpoint(latest_run())["agent"]["return_rms.mean"] > 1.001
    assert scalars("charts/episodic_return") == scalars("charts/episodic_length")


def test_histogram() -> None:
    """Each iteration has one."""
    train_with("histogram")
    events = EventAccumulator(str(latest_run()), size_guidance={"histograms": 0}).Reload()
    assert [x.step for x in events.Histograms("advantages")] == [512, 1024, 1536, 2048]


def test_two_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor's falls, the critic's stays."""
    script, rates = changed("groups ="), []
    update = script.update

    def watched(agent: Any, optimizer: torch.optim.Adam, *rest: Any) -> dict:
        rates.append([float(x["lr"]) for x in optimizer.param_groups])
        return update(agent, optimizer, *rest)

    monkeypatch.setattr(script, "update", watched)
    script.train(script.Args(**SHORT["ppo"]))
    assert rates[0] == pytest.approx([1e-3, 2e-3]) and rates[-1] == pytest.approx([0.25e-3, 2e-3])


def test_second_optimizer() -> None:
    """It learns, is saved, and goes on with its state and the rate of the new run."""
    script, rates = changed(SECOND), []
    script.train(script.Args(**SHORT["ppo"]))
    before = script.load_checkpoint(latest_run())["critic_optimizer"]
    update = script.update

    def watched(agent: Any, optimizers: list, *rest: Any) -> dict:
        rates.append([float(x.param_groups[0]["lr"]) for x in optimizers])
        if len(rates) == 1:
            assert_same(optimizers[1].state_dict()["state"], before)
        return update(agent, optimizers, *rest)

    script.update = watched
    go_on(script, latest_run(), total_timesteps=4096, learning_rate=4e-3)
    assert rates[0] == pytest.approx([2e-3, 2e-3]) and rates[-1] == pytest.approx([0.5e-3] * 2)


EXAMPLE = r"(?ms)```python\n(.+?)^```.+?`python ppo.py (.+?)`"
EXAMPLES = re.findall(EXAMPLE, (ROOT / "docs/environments.md").read_text())


@pytest.mark.parametrize(("source", "flags"), EXAMPLES, ids=["one", "vector"])
def test_own_environment(source: str, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walks of docs/environments.md are learned, from a module beside the script."""
    Path("my_module.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    command("ppo", *shlex.split(flags), "--total-timesteps", 20480).communicate()
    assert scalars("eval/return") == [(20480, 1.0)]


POLICIES = ["Policy(envs)", "ContinuousPolicy(envs, 0.0)", "AtariPolicy(envs, False)"]


@pytest.mark.parametrize(("name", "policy"), [*zip(MODULES, POLICIES, strict=True)])
def test_exported_policy(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/hacking.md exports plays as an evaluation does, with the bounds in it."""
    script, run = MODULES[name], trained(name, eval_episodes=3)
    torch.backends.cudnn.rnn.fp32_precision = "tf32"  # as it was: a variant's isn't exported
    source = re.findall(r"(?ms)^```python\n(.+?)^```$", PAGES)[-1]
    source = source.replace("= Policy(envs)", f"= {policy}").replace("runs/NAME", str(run))
    source = source.replace("from ppo ", f"from {name} ")
    exec(source[: None if find_spec("onnxscript") else source.index("torch.onnx")], {})
    program = torch.export.load("policy.pt2").module()

    def act(agent: Any, obs: np.ndarray, rng: None) -> np.ndarray:
        actions = program(torch.as_tensor(obs, dtype=torch.float32)).numpy(force=True)
        return actions / 2 if name == "ppo_continuous" else actions  # Pendulum's bounds are at 2

    monkeypatch.setattr(script.Agent, "act", act)
    score = script.evaluate(script.Args(**script.load_checkpoint(run)["args"]), run)
    assert scalars("eval/return")[0][1] == pytest.approx(score, rel=1e-3)
