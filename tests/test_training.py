"""What a run does, through `train`."""

import contextlib
import multiprocessing
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    MODULES,
    SCRIPTS,
    SHORT,
    kept_batches,
    only_run,
    same_weights,
    scalars,
    watching,
)

import ppo
import ppo_continuous


@pytest.mark.parametrize("name", SCRIPTS)
def test_seeds(name: str, train_agent: Callable) -> None:
    """The same seed gives the same weights, bit for bit, and another seed gives others."""
    script = MODULES[name]
    first, _ = train_agent(script, seed=1, **SHORT[name])
    again, _ = train_agent(script, seed=1, **SHORT[name])
    other, _ = train_agent(script, seed=2, **SHORT[name])
    assert same_weights(first, again)
    assert not same_weights(first, other)
    args, starts = script.Args(**SHORT[name] | {"learning_rate": 1e-30}), []
    for seed in (1, 2):
        with kept_batches(script) as batches:
            script.train(replace(args, seed=seed))
        starts.append(batches[0].obs[: args.num_envs])
    assert not torch.equal(*starts)


def test_async_is_sync(train_agent: Callable) -> None:
    """Environments in processes of their own give the same weights, bit for bit."""
    for script, env_id in ((ppo, "CartPole-v1"), (ppo_continuous, "Pendulum-v1")):
        kwargs = {"env_id": env_id, "total_timesteps": 1024, "num_envs": 2, "num_steps": 256}
        one, _ = train_agent(script, **kwargs)
        other, _ = train_agent(script, vectorization="async", **kwargs)
        assert same_weights(one, other)


def test_async_has_processes() -> None:
    """One for each environment."""
    counts = set()
    flags = SHORT["ppo"] | {"vectorization": "async"}
    with watching(ppo, lambda *_: counts.add(len(multiprocessing.active_children()))):
        ppo.train(ppo.Args(**flags))
    assert counts == {4}


@pytest.mark.parametrize("name", SCRIPTS)
def test_first_minibatch_has_ratio_one(name: str) -> None:
    """Log-probabilities after the rollout are those of the actions taken in it, and none clip.

    Later minibatches of an iteration move away from there.
    """
    script, seen = MODULES[name], []

    def keep(agent: Any, batch: Any, indices: torch.Tensor) -> None:
        logprobs, _, _ = agent.evaluate_actions(batch.obs[indices], batch.actions[indices])
        seen.append((logprobs - batch.logprobs[indices]).exp().detach())

    args = script.Args(**SHORT[name])
    with watching(script, keep):
        script.train(args)
    per_iteration = args.num_minibatches * args.update_epochs
    assert len(seen) == args.total_timesteps // (args.num_envs * args.num_steps) * per_iteration
    for i in range(0, len(seen), per_iteration):
        torch.testing.assert_close(seen[i], torch.ones_like(seen[i]), atol=1e-4, rtol=0)
        assert (seen[i + per_iteration - 1] - 1).abs().max() > 1e-4


def test_the_rollout_was_sampled_from_the_policy() -> None:
    """Actions follow the probabilities that the agent gives them: a chi-squared test."""
    with kept_batches(ppo) as batches:
        ppo.train(ppo.Args(eval_episodes=0, total_timesteps=10_240, learning_rate=1e-3))
    assert len(batches) == 20
    actions = torch.cat([batch.actions[:, 0] for batch in batches]).double()
    probability = torch.cat([batch.logprobs.exp() for batch in batches]).double()
    one = torch.where(actions == 1, probability, 1 - probability)
    deviation = (actions - one).sum() / (one * (1 - one)).sum().sqrt()
    assert abs(deviation) < 4
    # And where one action is much more probable, it is taken as often as it should be.
    sure = one > one.median()
    deviation = (actions - one)[sure].sum() / (one * (1 - one))[sure].sum().sqrt()
    assert abs(deviation) < 4


def test_every_sample_once_an_epoch() -> None:
    """The minibatches of an epoch are its samples, shuffled, and shuffled anew in the next."""
    seen = []
    sizes = {"total_timesteps": 512, "num_minibatches": 8, "update_epochs": 3}
    with watching(ppo, lambda _, batch, indices: seen.append(batch.obs[indices])):
        ppo.train(ppo.Args(eval_episodes=0, **sizes))
    assert len(seen) == 24
    assert {len(minibatch) for minibatch in seen} == {64}
    epochs = [torch.cat(seen[i : i + 8]).tolist() for i in (0, 8, 16)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    assert len({tuple(x) for x in epochs[0]}) == 512


def test_every_episode_counts() -> None:
    """Episodes of one step, four of them ending in every step, are all recorded."""
    score = ppo.train(ppo.Args(eval_episodes=0, env_id="probe_envs:Probe-v0", total_timesteps=1024))
    returns, lengths = scalars("charts/episodic_return"), scalars("charts/episodic_length")
    assert [step for step, _ in returns] == [4 * (i // 4 + 1) for i in range(1024)]
    assert {value for _, value in returns} == {1.0} == {value for _, value in lengths}
    assert score == 1.0


def test_the_last_episodes_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 150 episodes end in one step, the score is of the last 100 in order, not the best."""
    made, make_envs = [], ppo.make_envs
    monkeypatch.setattr(ppo, "make_envs", lambda *a: made.append(make_envs(*a)) or made[-1])
    flags = {"env_id": "probe_envs:Drawn-v0", "num_envs": 150, "num_steps": 8, "eval_episodes": 0}
    score = ppo.train(ppo.Args(total_timesteps=1200, **flags))
    returns = made[0].unwrapped.get_attr("worth")
    assert score == pytest.approx(np.mean(returns[50:]))
    assert score < np.mean(sorted(returns)[50:]) - 0.1
    logged = [value for _, value in scalars("charts/episodic_return")]
    assert logged[-150:] == pytest.approx(returns)


def test_truncated_episodes_count() -> None:
    """CartPole cut after ten steps has returns of ten, or less where the pole fell before."""
    kwargs = {"max_episode_steps": 10}
    score = ppo.train(
        ppo.Args(
            eval_episodes=0, env_kwargs=kwargs, total_timesteps=1024, num_envs=2, num_steps=256
        )
    )
    returns = [value for _, value in scalars("charts/episodic_return")]
    assert returns.count(10.0) > 0.8 * len(returns)
    assert max(returns) == 10
    assert 100 <= len(returns) <= 1024 / 8
    assert score == pytest.approx(np.mean(returns[-100:]))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("script", [ppo, ppo_continuous])
def test_final_observations(
    script: Any, vectorization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an episode is cut, its last observation is kept, although the reset overwrites it.

    An observation is made worth itself, so that the advantage of every step is 1 + (n + 1) - n; it
    would be 1 + 0 - 6 where what the reset made of the last observation were taken for it.
    """
    monkeypatch.setattr(script.Agent, "get_value", lambda self, obs: obs[:, 0])
    monkeypatch.setattr(script.Agent, "scale_rewards", lambda self, rewards, *_: rewards)
    kwargs = {"env_id": "probe_envs:Overwriting-v0", "vectorization": vectorization}
    kwargs |= {"env_kwargs": {"continuous": script is ppo_continuous}, "eval_episodes": 0}
    sizes = {"total_timesteps": 128, "num_envs": 2, "num_steps": 64, "gamma": 1, "gae_lambda": 0}
    with kept_batches(script) as batches:
        script.train(script.Args(**sizes, **kwargs))
    assert batches[0].obs[:, 0].tolist() == [float(t % 7) for t in range(64) for _ in range(2)]
    assert set(batches[0].advantages.tolist()) == {2.0}


@pytest.mark.parametrize("flags", [{}, {"vectorization": "async"}, {"stagger": False}])
def test_out_of_lockstep(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """First episodes end all over the time limit of six steps, after a checkpoint, too.

    The observation counts the steps. An observation is made worth itself, so that the advantage of
    every step is 1 + (n + 1) - n: also of the step that ends a shortened episode, if what it ended
    with is bootstrapped. Shortened episodes are reported nowhere, and all others are.
    """
    monkeypatch.setattr(ppo_continuous.Agent, "get_value", lambda self, obs: obs[:, 0])
    monkeypatch.setattr(ppo_continuous.Agent, "scale_rewards", lambda self, rewards, *_: rewards)
    kwargs = {"env_id": "probe_envs:Overwriting-v0", "eval_episodes": 0, "checkpoint_interval": 1}
    kwargs["env_kwargs"] = {"continuous": True, "max_episode_steps": 6}
    sizes = {"total_timesteps": 1536, "num_envs": 32, "num_steps": 24, "gamma": 1, "gae_lambda": 0}
    with kept_batches(ppo_continuous) as batches:
        args = ppo_continuous.Args(seed=2, **sizes, **kwargs, **flags, update_epochs=1)
        score = ppo_continuous.train(args)
    expected = []
    for rollout, batch in enumerate(batches):
        assert set(batch.advantages.tolist()) == {2.0}
        firsts = []
        for counts in batch.obs[:, 0].view(24, 32).T:
            ends = [t for t in range(1, 24) if counts[t] == 0] + [24] * (counts[23] == 5)
            assert set(np.diff(ends)) == {6}
            firsts.append(ends[0])
            expected += [32 * (24 * rollout + t) for t in ends if t > ends[0] or t == 6]
        assert set(firsts) == ({6} if "stagger" in flags else {1, 2, 3, 4, 5, 6})
    assert [step for step, _ in scalars("charts/episodic_return")] == sorted(expected)
    assert {x for _, x in scalars("charts/episodic_return")} == {6.0}
    assert {x for _, x in scalars("charts/episodic_length")} == {6.0}
    assert score == 6.0


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("script", [ppo, ppo_continuous])
def test_infos_of_any_kind(script: Any, vectorization: str) -> None:
    """What an environment tells in its infos can't stop a run, whatever it is."""
    kwargs = {"env_id": "probe_envs:Talks-v0", "vectorization": vectorization, "eval_episodes": 3}
    kwargs["env_kwargs"] = {"continuous": script is ppo_continuous}
    score = script.train(script.Args(total_timesteps=128, num_envs=4, num_steps=32, **kwargs))
    assert score == 1.0
    assert len(scalars("charts/episodic_return")) == 128


def test_score_of_no_episode() -> None:
    """Where no episode ended, the score is not a number."""
    args = ppo_continuous.Args(eval_episodes=0, total_timesteps=2048, env_id="HalfCheetah-v5")
    assert np.isnan(ppo_continuous.train(args))


def test_raw_rewards_are_reported() -> None:
    """Scaled rewards are learned from, but returns are the environment's own: here, 0 or 4."""
    kwargs = {"env_id": "probe_envs:Endless-v0", "env_kwargs": {"continuous": True}}
    score = ppo_continuous.train(
        ppo_continuous.Args(eval_episodes=0, total_timesteps=2048, **kwargs)
    )
    returns = [value for _, value in scalars("charts/episodic_return")]
    assert len(returns) == 512
    assert set(returns) == {0.0, 4.0}
    assert score == pytest.approx(np.mean(returns[-100:]))


class Stop(Exception):
    """What a report raises."""


@pytest.mark.parametrize("script", [ppo, ppo_continuous])
def test_no_state_is_left_behind(script: ModuleType) -> None:
    """A process can train again and again: threads, settings and processes are as before.

    Whether the training ends, is stopped by what a report raises, or fails.
    """

    def state() -> tuple[Any, ...]:
        handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
        children = len(multiprocessing.active_children())
        threads = threading.active_count(), torch.get_num_threads()
        drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return threads, torch.is_grad_enabled(), handlers, children, drawn

    def stop(step: int, score: float) -> None:
        raise stopped

    flags = SHORT[script.__name__] | {"vectorization": "async"}
    torch_threads, stopped = torch.get_num_threads(), Stop()
    torch.set_num_threads(2)
    before = state()
    assert before[0][1] == 2
    for report in (None, stop, None):
        with contextlib.ExitStack() as ending:
            if report:
                raised = ending.enter_context(pytest.raises(Stop))
            script.train(script.Args(**flags), report)
        assert state() == before
    assert raised.value is stopped
    with pytest.raises(script.UsageError, match="cannot make NoSuch"):
        script.train(script.Args(**flags | {"env_id": "NoSuch-v0"}))
    assert state() == before
    torch.set_num_threads(torch_threads)
    runs = sorted(Path("runs").iterdir())
    size = 512
    lengths = [len(scalars("charts/learning_rate", run)) for run in runs]
    assert lengths == [2048 // size, 1, 2048 // size]


def test_in_another_thread() -> None:
    """A thread that can't handle signals, as a search's may be, can train."""
    with ThreadPoolExecutor(1) as pool:
        score = pool.submit(ppo.train, ppo.Args(**SHORT["ppo"])).result()
    assert score > 0


# Those of "The 37 Implementation Details", then where the scripts have others.
CANONICAL = {
    "num_steps": 128,
    "num_minibatches": 4,
    "update_epochs": 4,
    "learning_rate": 2.5e-4,
    "anneal_lr": True,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "recompute_advantages": False,
    "norm_adv": True,
    "clip_vloss": True,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "target_kl": None,
}
DEFAULTS = {
    "ppo": {"total_timesteps": 500_000, "num_envs": 4, "clip_coef": 0.2},
    "ppo_atari": {"total_timesteps": 10_000_000, "num_envs": 8, "clip_coef": 0.1},
    "ppo_continuous": {
        "total_timesteps": 1_000_000,
        "num_envs": 64,
        "num_steps": 32,
        "stagger": True,
        "num_minibatches": 32,
        "update_epochs": 10,
        "learning_rate": 4e-4,
        "recompute_advantages": True,
        "norm_adv": False,
        "clip_coef": 0.2,
        "clip_vloss": False,
        "ent_coef": 0.0,
        "max_grad_norm": 5.0,
        "target_kl": 0.02,
        "log_std_init": -0.5,
        "log_std_min": -2.0,
        "squash": False,
        "state_std": False,
    },
}
# Steps of each environment between two checkpoints, which cut episodes.
INTERVALS = {"ppo": 12_800, "ppo_continuous": 3_200, "ppo_atari": 64_000}


@pytest.mark.parametrize("name", SCRIPTS)
def test_defaults(name: str) -> None:
    """The results in the READMEs are of these."""
    args = MODULES[name].Args()
    expected = CANONICAL | DEFAULTS[name]
    assert {flag: x for flag, x in asdict(args).items() if flag in expected} == expected
    assert args.checkpoint_interval * args.num_steps == INTERVALS[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_report(name: str) -> None:
    """Each iteration ends with a report: how many steps there were, and the mean return."""
    script, reports = MODULES[name], []
    args = script.Args(**SHORT[name])
    score = script.train(args, lambda *numbers: reports.append(numbers))
    size = args.num_envs * args.num_steps
    assert [step for step, _ in reports] == [*range(size, args.total_timesteps + 1, size)]
    assert [step for step, _ in scalars("losses/value_loss")] == [step for step, _ in reports]
    returns = scalars("charts/episodic_return")
    for step, mean in reports:
        ended = [x for at, x in returns if at <= step][-100:]
        assert mean == pytest.approx(np.mean(ended)) if ended else np.isnan(mean)
    assert score == reports[-1][1]


def test_learning_rate() -> None:
    """It falls linearly, to 0 after the last iteration, or stays."""
    for name, flags in (("linear", {}), ("constant", {"anneal_lr": False})):
        ppo.train(ppo.Args(eval_episodes=0, total_timesteps=2048, exp_name=name, **flags))
    rates = {}
    for run in Path("runs").iterdir():
        logged = scalars("charts/learning_rate", run)
        rates[run.name.split("__")[1]] = [rate / 2.5e-4 for _, rate in logged]
    assert rates["linear"] == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rates["constant"] == pytest.approx([1] * 4)


def test_learning_rate_of_a_doubled_run() -> None:
    """A finished run of four iterations that is to have eight goes on at half of the rate."""
    flags = SHORT["ppo"]
    ppo.train(ppo.Args(**flags))
    ppo.train(ppo.Args(**flags | {"total_timesteps": 4096, "resume": str(only_run())}))
    rates = [rate / 2.5e-4 for _, rate in scalars("charts/learning_rate")]
    assert sorted(rates[4:]) == pytest.approx([1 / 8, 1 / 4, 3 / 8, 1 / 2])


def test_evaluation_at_checkpoints(train_agent: Callable) -> None:
    """There is a greedy return at each checkpoint and at the end, which change no training."""
    flags = {"total_timesteps": 5 * 512, "checkpoint_interval": 2}
    plain, score = train_agent(ppo, exp_name="plain", **flags)
    flags |= {"eval_checkpoints": True, "eval_episodes": 2}
    evaluated, same_score = train_agent(ppo, exp_name="evaluated", **flags)
    assert same_weights(plain, evaluated)
    assert score == same_score
    (run,) = Path("runs").glob("*evaluated*")
    assert [step for step, _ in scalars("eval/return", run)] == [1024, 2048, 2560]
    saved = ppo.load_checkpoint(run)
    assert saved["iteration"] == 5
    last = ppo.evaluate(saved["args"], run)["eval/return"]
    assert scalars("eval/return", run)[-1][1] == pytest.approx(last)


@pytest.mark.parametrize(("limit", "told"), [(4000, 2), (200, 0)])
def test_no_episode_ended(limit: int, told: int, capsys: pytest.CaptureFixture) -> None:
    """Where checkpoints cut every episode before its end, the run says so, and only there."""
    flags = SHORT["ppo_continuous"] | {"total_timesteps": 2560, "checkpoint_interval": 2}
    ppo_continuous.train(ppo_continuous.Args(**flags, env_kwargs={"max_episode_steps": limit}))
    error = capsys.readouterr().err
    assert error.count("no whole episode ended in 2 iterations") == told
    assert error.count("--checkpoint-interval") == told
    # It goes on within an interval, in half of which none could end.
    flags |= {"total_timesteps": 7 * 512, "resume": str(only_run())}
    ppo_continuous.train(ppo_continuous.Args(**flags, env_kwargs={"max_episode_steps": limit}))
    assert "no whole episode" not in capsys.readouterr().err


@pytest.mark.parametrize("compiled", [False, True])
def test_groups_of_parameters(
    compiled: bool, train_agent: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hacker's optimizer: groups learn at their own rates, which fall; what is frozen stays."""
    adam, made = torch.optim.Adam, []

    def two_rates(parameters: Any, lr: float, **kwargs: Any) -> torch.optim.Optimizer:
        linear = [x for x in parameters if x.ndim == 2]  # the actor's three, and the critic's
        linear[0].requires_grad_(False)
        groups = [{"params": linear[:3]}, {"params": linear[3:], "lr": 4 * lr}]
        made.append((adam(groups, lr=lr, **kwargs), linear, [x.clone() for x in linear]))
        return made[0][0]

    monkeypatch.setattr(ppo, "Adam", two_rates)
    train_agent(ppo, total_timesteps=2048, compile=compiled)
    optimizer, weights, before = made[0]
    changed = [not torch.equal(x, y) for x, y in zip(weights, before, strict=True)]
    assert changed == [False] + [True] * 5
    rates = [group["lr"].item() for group in optimizer.param_groups]
    assert rates == pytest.approx([2.5e-4 / 4, 1e-3 / 4])


def updated(
    logprobs: list[float], values: list[float], batch: ppo.Batch, **flags: Any
) -> tuple[dict[str, float], list[float]]:
    """What an update reports, and its gradient, where the network is these two and no entropy."""
    numbers = torch.nn.Parameter(torch.tensor([logprobs, values]))
    zeros = torch.zeros(len(values))
    agent = SimpleNamespace(evaluate_actions=lambda *_: (numbers[0], zeros, numbers[1]))
    optimizer = torch.optim.SGD([numbers], lr=1.0)
    before, indices = numbers.detach().clone(), torch.arange(len(values))
    metrics = ppo.update(agent, optimizer, batch, indices, ppo.Args(**flags))
    moved = (before - numbers.detach()).flatten().tolist()
    return {name: float(x) for name, x in metrics.items()}, moved


@pytest.mark.parametrize(
    ("flags", "expected", "gradient"),
    [
        ({"clip_vloss": False}, (0.125 + 4.5) / 2, [0.25, 1.5]),
        ({}, (0.125 + 0.5 * 3.3**2) / 2, [0.25, 0]),
    ],
)
def test_value_loss(flags: dict[str, bool], expected: float, gradient: list[float]) -> None:
    """Errors of 0.5 and 3, the latter 3.3 where a value is clipped to 0.2 from the old one."""
    values, old, returns = [1.0, 4.0], torch.tensor([1.0, 4.5]), torch.tensor([0.5, 1.0])
    zeros = torch.zeros(2)
    batch = ppo.Batch(zeros, zeros, zeros, zeros, returns, old)
    metrics, moved = updated([0.0, 0.0], values, batch, vf_coef=1, max_grad_norm=9, **flags)
    assert metrics["losses/value_loss"] == pytest.approx(expected)
    assert moved == pytest.approx([0, 0, *gradient], abs=1e-6)


@pytest.mark.parametrize("max_grad_norm", [9.0, 0.1])
def test_policy_loss(max_grad_norm: float) -> None:
    """Four samples: whose ratio is clipped for an advantage, and unclipped for its opposite."""
    ratios, advantages = np.array([1.5, 1.5, 0.5, 0.5]), np.array([1.0, -1.0, 1.0, -1.0])
    zeros = torch.zeros(4)
    batch = ppo.Batch(zeros, zeros, zeros, torch.tensor(advantages).float(), zeros, zeros)
    flags = {"norm_adv": False, "max_grad_norm": max_grad_norm}
    metrics, moved = updated(np.log(ratios).tolist(), [0.0] * 4, batch, **flags)
    # 1.5 is clipped to 1.2 where that is less, 0.5 to 0.8 where the advantage is negative.
    assert metrics["losses/policy_loss"] == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8) / 4)
    assert metrics["losses/clipfrac"] == 1
    assert metrics["losses/old_approx_kl"] == pytest.approx(-np.log(ratios).mean())
    assert metrics["losses/approx_kl"] == pytest.approx((ratios - 1 - np.log(ratios)).mean())
    gradient = np.array([0, 1.5, -0.5, 0, 0, 0, 0, 0]) / 4
    norm = np.linalg.norm(gradient)
    assert metrics["losses/grad_norm"] == pytest.approx(norm)
    assert moved == pytest.approx(gradient * min(1, max_grad_norm / norm), rel=1e-4, abs=1e-6)


def test_normalized_advantages() -> None:
    """A minibatch's advantages are shifted and scaled to a mean of 0 and a deviation of 1."""
    ratios, zeros = np.array([1.1, 1.0, 0.9]), torch.zeros(3)
    batch = ppo.Batch(zeros, zeros, zeros, torch.tensor([5.0, 7.0, 9.0]), zeros, zeros)
    metrics, _ = updated(np.log(ratios).tolist(), [0.0] * 3, batch)
    assert metrics["losses/policy_loss"] == pytest.approx((1.1 * 1 - 0.9 * 1) / 3)


@pytest.mark.parametrize(
    ("target", "kls", "updates"),
    [
        (None, [9.0] * 8, 8),
        (0.01, [0.0, 0.02, 0.01, 0.01] * 2, 8),  # a mean of the target, not above
        (0.01, [0.0, 0.02, 0.01, 0.02, 9.0, 9.0, 9.0, 9.0], 4),  # the first epoch is above
        (0.01, [0.0, 0.02, 0.01, 0.01, 0.0, 0.06, 9.0, 9.0], 6),  # one is above five times that
        (0.01, [0.06, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0], 1),
    ],
)
def test_target_kl_stops_an_update(
    target: float | None, kls: list[float], updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the mean of an epoch, and by a minibatch that is five times as far; in each iteration."""
    seen, update = [], ppo.update

    def with_these(*args: Any) -> dict[str, torch.Tensor]:
        seen.append(args)
        return update(*args) | {"losses/approx_kl": torch.tensor(kls[(len(seen) - 1) % updates])}

    monkeypatch.setattr(ppo, "update", with_these)
    sizes = {"num_minibatches": 4, "update_epochs": 2, "eval_episodes": 0}
    ppo.train(ppo.Args(**sizes, total_timesteps=1024, target_kl=target))
    assert len(seen) == 2 * updates
    assert scalars("losses/epochs") == [(512, -(-updates // 4)), (1024, -(-updates // 4))]


def test_recompute_advantages() -> None:
    """Advantages are computed once an iteration, or in every epoch of it, from other values."""
    for flags, count in (({}, 2), ({"recompute_advantages": True}, 2 * 4)):
        with kept_batches(ppo) as batches:
            ppo.train(ppo.Args(eval_episodes=0, total_timesteps=1024, **flags))
        assert len(batches) == count
        assert len({tuple(batch.values.tolist()) for batch in batches}) == count
        assert len({tuple(batch.advantages.tolist()) for batch in batches}) == count
        assert len({tuple(batch.logprobs.tolist()) for batch in batches}) == 2


@pytest.mark.parametrize(
    ("kind", "size"), [("image", 60), ("discrete", 7), ("dict", 7), ("tuple", 12)]
)
def test_observation_spaces(kind: str, size: int, train_agent: Callable) -> None:
    """Observations of any space that flattens become a vector."""
    for script in ppo, ppo_continuous:
        kwargs = {"kind": kind, "continuous": script is ppo_continuous}
        steps = {"total_timesteps": 256, "num_envs": 2, "num_steps": 128}
        agent, _ = train_agent(script, env_id="probe_envs:Spaces-v0", env_kwargs=kwargs, **steps)
        assert agent.actor[0].in_features == size


def test_scalars() -> None:
    """A run's events hold what CleanRL's do under the same names, and the debugging plots."""
    ppo_continuous.train(ppo_continuous.Args(**SHORT["ppo_continuous"]))
    charts = "episodic_return episodic_length learning_rate SPS policy_std"
    losses = "value_loss policy_loss entropy approx_kl old_approx_kl clipfrac epochs"
    debug = "values returns advantages"
    for tag in [f"charts/{name}" for name in charts.split()]:
        assert np.isfinite([value for _, value in scalars(tag)]).all(), tag
    for tag in [f"losses/{name}" for name in [*losses.split(), "explained_variance", "grad_norm"]]:
        assert len(scalars(tag)) == 4, tag
        assert np.isfinite([value for _, value in scalars(tag)]).all(), tag
    for tag in [f"debug/{name}" for name in debug.split()]:
        assert len(scalars(tag)) == 4, tag


def test_cartpole_is_learned() -> None:
    """A fifth of the default run is enough for several times the return of chance, 22."""
    assert ppo.train(ppo.Args(eval_episodes=0, total_timesteps=100_000)) > 150


def test_weights_of_the_losses() -> None:
    """The policy loss, plus vf_coef times the value loss, minus ent_coef times the entropy."""
    numbers = torch.nn.Parameter(torch.tensor([[0.0, 0.0], [0.3, 0.5], [1.0, 2.0]]))
    agent = SimpleNamespace(evaluate_actions=lambda *_: (numbers[0], numbers[1], numbers[2]))
    zeros = torch.zeros(2)
    batch = ppo.Batch(zeros, zeros, zeros, torch.tensor([1.0, -3.0]), zeros, zeros)
    flags = {"norm_adv": False, "clip_vloss": False, "max_grad_norm": 9, "vf_coef": 0.25}
    optimizer, before = torch.optim.SGD([numbers], lr=1.0), numbers.detach().clone()
    metrics = ppo.update(
        agent, optimizer, batch, torch.arange(2), ppo.Args(**flags, ent_coef=0.125)
    )
    gradient = (before - numbers.detach()).tolist()
    assert gradient[0] == pytest.approx([-1 / 2, 3 / 2])
    assert gradient[1] == pytest.approx([-0.125 / 2] * 2)
    assert gradient[2] == pytest.approx([0.25 * 1 / 2, 0.25 * 2 / 2])
    assert metrics["losses/entropy"].item() == pytest.approx(0.4)


def test_value_loss_is_the_larger() -> None:
    """A value that moved beyond the clip, away from its return, is pulled back."""
    zeros = torch.zeros(1)
    batch = ppo.Batch(zeros, zeros, zeros, zeros, zeros, torch.tensor([1.0]))
    flags = {"norm_adv": False, "vf_coef": 1, "max_grad_norm": 9}
    metrics, moved = updated([0.0], [2.0], batch, **flags)
    assert metrics["losses/value_loss"] == 2  # with the value clipped, 1.2, it would be 0.72
    assert moved == pytest.approx([0, 2], abs=1e-6)


@pytest.mark.parametrize("script", [ppo, ppo_continuous])
def test_intervals_differ(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a checkpoint, episodes begin elsewhere, and the noise is another."""
    sample_noise, noises = script.Agent.sample_noise, []

    def keep(agent: Any, *shape: int) -> torch.Tensor:
        noises.append(sample_noise(agent, *shape))
        return noises[-1]

    monkeypatch.setattr(script.Agent, "sample_noise", keep)
    args = script.Args(**SHORT[script.__name__] | {"checkpoint_interval": 1, "update_epochs": 1})
    with kept_batches(script) as batches:
        script.train(args)
    firsts = torch.cat([batch.obs[: args.num_envs] for batch in batches])
    assert len(firsts.unique(dim=0)) == 4 * args.num_envs
    assert len({tuple(x.flatten().tolist()) for x in noises}) == 4


def test_explained_variance() -> None:
    """It is 1 where values are the returns, and 0 where they explain nothing."""
    with kept_batches(ppo) as batches:
        ppo.train(ppo.Args(**SHORT["ppo"]))
    expected = [1 - (x.returns - x.values).var() / x.returns.var() for x in batches]
    logged = [x for _, x in scalars("losses/explained_variance")]
    assert logged == pytest.approx([x.item() for x in expected], abs=1e-4)


def test_num_threads() -> None:
    """PyTorch has the threads that it is given."""
    seen = []
    ppo.train(
        ppo.Args(**SHORT["ppo"], num_threads=3), lambda *_: seen.append(torch.get_num_threads())
    )
    assert set(seen) == {3}
