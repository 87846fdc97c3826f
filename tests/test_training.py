"""What a run does, through `train`."""

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, SHORT, same_weights, scalars

import ppo
import ppo_continuous


@pytest.mark.parametrize("name", SCRIPTS)
def test_seeds(name: str, train_agent: Callable) -> None:
    """The same seed gives the same weights, bit for bit, and another seed gives others."""
    script = importlib.import_module(name)
    first, _ = train_agent(script, seed=1, **SHORT[name])
    again, _ = train_agent(script, seed=1, **SHORT[name])
    other, _ = train_agent(script, seed=2, **SHORT[name])
    assert same_weights(first, again)
    assert not same_weights(first, other)


def test_async_is_sync(train_agent: Callable) -> None:
    """Environments in processes of their own give the same weights, bit for bit."""
    for script, env_id in ((ppo, "CartPole-v1"), (ppo_continuous, "Pendulum-v1")):
        kwargs = {"env_id": env_id, "total_timesteps": 1024, "num_envs": 2, "num_steps": 256}
        one, _ = train_agent(script, **kwargs)
        other, _ = train_agent(script, vectorization="async", **kwargs)
        assert same_weights(one, other)


@pytest.mark.parametrize("name", SCRIPTS)
def test_first_minibatch_has_ratio_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities after the rollout are those of the actions taken in it, and none clip.

    Later minibatches of an iteration move away from there.
    """
    script, seen = importlib.import_module(name), []
    ppo_loss = script.ppo_loss

    def keep(agent: Any, batch: Any, args: Any) -> Any:
        logprobs, _, _ = agent.evaluate_actions(batch.obs, batch.actions)
        seen.append((logprobs - batch.logprobs).exp().detach())
        return ppo_loss(agent, batch, args)

    monkeypatch.setattr(script, "ppo_loss", keep)
    args = script.Args(**SHORT[name])
    script.train(args)
    per_iteration = args.num_minibatches * args.update_epochs
    assert len(seen) % per_iteration == 0
    for i in range(0, len(seen), per_iteration):
        torch.testing.assert_close(seen[i], torch.ones_like(seen[i]), atol=1e-4, rtol=0)
        assert (seen[i + per_iteration - 1] - 1).abs().max() > 1e-4


def test_the_rollout_was_sampled_from_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actions follow the probabilities that the agent gives them: a chi-squared test."""
    batches, make_batch = [], ppo.make_batch
    monkeypatch.setattr(ppo, "make_batch", lambda *a: batches.append(make_batch(*a)) or batches[-1])
    ppo.train(ppo.Args(eval_episodes=0, total_timesteps=10_240, learning_rate=1e-3))
    actions = torch.cat([batch.actions[:, 0] for batch in batches]).double()
    probability = torch.cat([batch.logprobs.exp() for batch in batches]).double()
    one = torch.where(actions == 1, probability, 1 - probability)
    deviation = (actions - one).sum() / (one * (1 - one)).sum().sqrt()
    assert abs(deviation) < 4
    # And where one action is much more probable, it is taken as often as it should be.
    sure = one > one.median()
    deviation = (actions - one)[sure].sum() / (one * (1 - one))[sure].sum().sqrt()
    assert abs(deviation) < 4


def test_every_sample_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The minibatches of an epoch are its samples, shuffled, and shuffled anew in the next."""
    seen, ppo_loss = [], ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda *a: seen.append(a[1].obs.clone()) or ppo_loss(*a))
    ppo.train(ppo.Args(eval_episodes=0, total_timesteps=512, num_minibatches=8, update_epochs=3))
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
    """Where an episode is cut, its last observation is kept, although the reset overwrites it."""
    kept, rollout = [], script.Rollout
    monkeypatch.setattr(script, "Rollout", lambda *x: kept.append(x[-1]) or rollout(*x))
    kwargs = {"env_id": "probe_envs:Overwriting-v0", "vectorization": vectorization}
    kwargs["env_kwargs"] = {"continuous": script is ppo_continuous}
    script.train(
        script.Args(eval_episodes=0, total_timesteps=128, num_envs=2, num_steps=64, **kwargs)
    )
    assert list(kept[0]) == [(t, i) for t in range(6, 64, 7) for i in (0, 1)]
    assert {float(x[0]) for x in kept[0].values()} == {7.0}


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


def test_no_state_is_left_behind() -> None:
    """A process can train again and again: threads, settings and files are as before."""
    threads, torch_threads = threading.active_count(), torch.get_num_threads()
    torch.set_num_threads(2)
    for _ in range(2):
        ppo.train(ppo.Args(eval_episodes=0, total_timesteps=512))
        assert threading.active_count() == threads
        assert torch.get_num_threads() == 2
        assert torch.is_grad_enabled()
    torch.set_num_threads(torch_threads)
    runs = list(Path("runs").iterdir())
    assert len(runs) == 2
    for run in runs:
        assert scalars("charts/learning_rate", run) == [(512, pytest.approx(2.5e-4))]


def test_learning_rate() -> None:
    """It falls, to 0 after the last iteration, linearly or as a cosine, or stays."""
    for name, flags in (
        ("linear", {}),
        ("cosine", {"lr_schedule": "cosine"}),
        ("constant", {"anneal_lr": False}),
    ):
        ppo.train(ppo.Args(eval_episodes=0, total_timesteps=2048, exp_name=name, **flags))
    rates = {}
    for run in Path("runs").iterdir():
        logged = scalars("charts/learning_rate", run)
        rates[run.name.split("__")[1]] = [rate / 2.5e-4 for _, rate in logged]
    assert rates["linear"] == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rates["cosine"] == pytest.approx([1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4])
    assert rates["constant"] == pytest.approx([1] * 4)


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

    monkeypatch.setattr(torch.optim, "Adam", two_rates)
    train_agent(ppo, total_timesteps=2048, compile=compiled)
    optimizer, weights, before = made[0]
    changed = [not torch.equal(x, y) for x, y in zip(weights, before, strict=True)]
    assert changed == [False] + [True] * 5
    rates = [group["lr"].item() for group in optimizer.param_groups]
    assert rates == pytest.approx([2.5e-4 / 4, 1e-3 / 4])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"clip_vloss": False}, (0.125 + 4.5) / 2),
        ({"clip_vloss": False, "smooth_l1": True}, (0.125 + 2.5) / 2),
        ({}, (0.125 + 0.5 * 3.3**2) / 2),
        ({"smooth_l1": True}, (0.125 + 2.8) / 2),
    ],
)
def test_value_loss(flags: dict[str, bool], expected: float) -> None:
    """Errors of 0.5 and 3, the latter 3.3 where a value is clipped to 0.2 from the old one."""
    values, old, returns = torch.tensor([[1.0, 4.0], [1.0, 4.5], [0.5, 1.0]])
    zeros = torch.zeros(2)
    agent = SimpleNamespace(evaluate_actions=lambda *_: (zeros, zeros, values))
    batch = ppo.Batch(zeros, zeros, zeros, torch.ones(2), returns, old)
    _, metrics = ppo.ppo_loss(agent, batch, ppo.Args(**flags))
    reported = dict(zip(ppo.LOSSES, metrics.tolist(), strict=True))
    assert reported["value_loss"] == pytest.approx(expected)


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str, **kwargs: Any) -> int:
    """How often a training run calls a function."""
    calls, function = [], getattr(ppo, name)
    with monkeypatch.context() as patch:
        patch.setattr(ppo, name, lambda *a: calls.append(1) or function(*a))
        ppo.train(ppo.Args(eval_episodes=0, total_timesteps=1024, **kwargs))
    return len(calls)


def test_target_kl_stops_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny target stops after the first of four epochs, a large one not at all."""
    assert count_calls(monkeypatch, "ppo_loss", target_kl=1e-9) == 2 * 4
    assert count_calls(monkeypatch, "ppo_loss", target_kl=10.0) == 2 * 4 * 4


def test_recompute_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages are computed once an iteration, or in every epoch of it."""
    assert count_calls(monkeypatch, "compute_advantages") == 2
    assert count_calls(monkeypatch, "compute_advantages", recompute_advantages=True) == 2 * 4


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
    losses = "value_loss policy_loss entropy approx_kl old_approx_kl clipfrac"
    debug = "value value_target advantage"
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
