"""What a run does, through `train`."""

import json
import multiprocessing
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SCRIPTS
from helpers import (
    MODULES,
    SHORT,
    Batch,
    kept_batches,
    only_run,
    same_weights,
    scalars,
    train_agent,
    trained,
    watching,
)
from probe_envs import Spaces

import ppo
import ppo_continuous

BOTH = pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])


def probe(name: str, env: str, **kwargs: Any) -> dict[str, str]:
    """Flags for a probe environment."""
    kwargs |= {"continuous": True} if name == "ppo_continuous" else {}
    return {"env_id": f"probe_envs:{env}-v0", "env_kwargs": json.dumps(kwargs)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_seeds(name: str) -> None:
    """The same seed gives the same weights, bit for bit; another seed gives other weights."""
    sizes = (
        {"total_timesteps": 128, "update_epochs": 1}
        if name == "ppo_atari"
        else {"total_timesteps": 1024, "update_epochs": 4}
    )
    agents = [train_agent(MODULES[name], **SHORT[name] | sizes, seed=seed)[0] for seed in (1, 1, 2)]
    assert same_weights(*agents[:2])
    assert not same_weights(*agents[1:])


@BOTH
def test_environments_that_seed(name: str) -> None:
    """One that seeds all global generators at each episode doesn't repeat what is explored.

    Hardly anything is learned here, so that the same noise would give the same actions.
    """
    sizes = {"num_envs": 2, "num_steps": 64, "total_timesteps": 512, "learning_rate": 1e-30}
    with kept_batches(MODULES[name]) as batches:
        trained(name, **probe(name, "Seeding") | sizes, recompute_advantages=False)
    actions = torch.stack([batch.actions.flatten() for batch in batches])
    if name == "ppo_continuous":
        assert len(actions.unique()) > 0.99 * 512
    else:
        agreement = (actions[:, None] == actions).float().mean(-1)
        assert agreement[~torch.eye(4, dtype=bool)].max() < 0.75


@BOTH
def test_checkpoints_draw_anew(name: str) -> None:
    """After a checkpoint, episodes begin elsewhere, and the noise is another."""
    flags = SHORT[name] | {"checkpoint_interval": 1, "update_epochs": 1, "learning_rate": 1e-30}
    with kept_batches(MODULES[name]) as batches:
        MODULES[name].train(args := MODULES[name].Args(**flags))
    firsts = torch.cat([batch.obs[: args.num_envs] for batch in batches])
    assert len(firsts.unique(dim=0)) == 4 * args.num_envs
    assert len({tuple(batch.actions.flatten().tolist()) for batch in batches}) == 4


@BOTH
def test_async_is_sync(name: str) -> None:
    """Environments in processes of their own give the same weights, bit for bit."""
    flags, counts = SHORT[name] | {"total_timesteps": 1024}, set()
    one, _ = train_agent(MODULES[name], **flags)
    with watching(MODULES[name], lambda *_: counts.add(len(multiprocessing.active_children()))):
        other, _ = train_agent(MODULES[name], **flags, vectorization="async")
    assert counts == {MODULES[name].Args(**flags).num_envs}
    assert same_weights(one, other)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_running(fails: bool) -> None:
    """No process and no thread is left, also where a report raises; its exception is passed on."""

    def stop(step: int, score: float) -> None:
        raise KeyError("of the report")

    before = threading.active_count()
    if fails:
        with pytest.raises(KeyError, match="of the report"):
            ppo.train(ppo.Args(**SHORT["ppo"], vectorization="async"), stop)
    else:
        ppo.train(ppo.Args(**SHORT["ppo"], vectorization="async"))
    assert not multiprocessing.active_children()
    assert threading.active_count() == before
    assert len(scalars("losses/value_loss")) == (1 if fails else 4)


def test_every_sample_once_an_epoch() -> None:
    """The minibatches of an epoch are its samples, shuffled, and shuffled anew in the next."""
    seen = []
    with watching(ppo, lambda _, batch, indices: seen.append(indices.clone())):
        trained("ppo", total_timesteps=512, num_minibatches=8, update_epochs=3)
    assert [len(indices) for indices in seen] == [64] * 24
    epochs = [torch.cat(seen[i : i + 8]).tolist() for i in (0, 8, 16)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(512)]] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [*range(512)]


@BOTH
def test_every_episode_counts(name: str) -> None:
    """Where 150 episodes end in each step, all are logged; the score is of the last 100 in order.

    Returns are raw. Environments differ in their worth, so that the best would give another score.
    """
    flags = SHORT[name] | probe(name, "Drawn") | {"num_envs": 150, "num_steps": 8}
    script = MODULES[name]
    score = script.train(script.Args(**flags | {"total_timesteps": 1200, "num_minibatches": 4}))
    returns, lengths = scalars("charts/episodic_return"), scalars("charts/episodic_length")
    assert [step for step, _ in returns] == [150 * (i // 150 + 1) for i in range(1200)]
    assert {length for _, length in lengths} == {1.0}
    worths = [value for _, value in returns[:150]]
    assert len({*worths}) == 150
    assert [value for _, value in returns] == 8 * worths
    assert score == pytest.approx(np.mean(worths[50:]))


@BOTH
def test_truncated_episodes_count(name: str) -> None:
    """Episodes cut by a time limit are reported with their raw returns: here, 0 or 4."""
    score = MODULES[name].train(MODULES[name].Args(**SHORT[name] | probe(name, "Endless")))
    returns = [value for _, value in scalars("charts/episodic_return")]
    assert len(returns) == 512
    assert {*returns} == {0.0, 4.0}
    assert score == pytest.approx(np.mean(returns[-100:]))


def test_score_of_no_episode() -> None:
    """Where no episode ended, the score is not a number."""
    assert np.isnan(
        ppo.train(
            ppo.Args(**SHORT["ppo"] | {"env_id": "MountainCar-v0"} | {"total_timesteps": 512})
        )
    )


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@BOTH
def test_final_observations(name: str, vectorization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an episode is cut, its last observation is kept, although the reset overwrites it.

    An observation is made worth itself, so that the advantage of every step is r + (n + 1) - n; it
    would be r + 0 - 6 where what the reset made of the last observation were taken for it.
    """
    monkeypatch.setattr(MODULES[name].Agent, "get_value", lambda self, obs: obs[:, 0])
    flags = SHORT[name] | probe(name, "Overwriting") | {"vectorization": vectorization}
    sizes = {"total_timesteps": 128, "num_envs": 2, "num_steps": 64, "gamma": 1, "gae_lambda": 0}
    with kept_batches(MODULES[name]) as batches:
        MODULES[name].train(MODULES[name].Args(**flags | sizes))
    assert batches[0].obs[:, 0].tolist() == [float(t % 7) for t in range(64) for _ in range(2)]
    advantages = batches[0].advantages
    assert advantages.tolist() == pytest.approx([advantages[0].item()] * 128, abs=1e-4)
    assert advantages[0] == 2 if name == "ppo" else advantages[0] > 1.01  # of a scaled reward


@pytest.mark.parametrize("flags", [{}, {"vectorization": "async"}, {"stagger": False}])
def test_stagger(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """First episodes end all over the time limit of six steps, after a checkpoint, too.

    The observation counts the steps. An observation is made worth itself, so that the advantage of
    every step is r + (n + 1) - n: also of the step that ends a shortened episode, if what it ended
    with is bootstrapped. Shortened episodes are reported nowhere, and all others are.
    """
    script = ppo_continuous
    monkeypatch.setattr(script.Agent, "get_value", lambda self, obs: obs[:, 0])
    flags = flags | probe("ppo_continuous", "Overwriting", max_episode_steps=6)
    sizes = {"total_timesteps": 1536, "num_envs": 32, "num_steps": 24, "gamma": 1, "gae_lambda": 0}
    args = script.Args(
        **sizes, **flags, seed=2, checkpoint_interval=1, update_epochs=1, eval_episodes=0
    )
    with kept_batches(script) as batches:
        score = script.train(args)
    expected = []
    for rollout, batch in enumerate(batches):
        low, high = batch.advantages.aminmax()
        assert 1.01 < low <= high < low + 1e-4
        firsts = []
        for counts in batch.obs[:, 0].view(24, 32).T:
            ends = [t for t in range(1, 24) if counts[t] == 0] + [24] * (counts[23] == 5)
            assert {*np.diff(ends)} == {6}
            firsts.append(ends[0])
            expected += [32 * (24 * rollout + t) for t in ends if t > ends[0] or t == 6]
        assert {*firsts} == ({6} if "stagger" in flags else {1, 2, 3, 4, 5, 6})
    assert [step for step, _ in scalars("charts/episodic_return")] == sorted(expected)
    assert {x for _, x in scalars("charts/episodic_return")} == {6.0}
    assert {x for _, x in scalars("charts/episodic_length")} == {6.0}
    assert score == 6.0


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
    "clip_coef": 0.2,
    "clip_vloss": True,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "target_kl": None,
}
OWN = {
    "ppo": {"total_timesteps": 500_000, "num_envs": 4, "checkpoint_interval": 1000},
    "ppo_atari": {
        "total_timesteps": 10_000_000,
        "num_envs": 8,
        "clip_coef": 0.1,
        "checkpoint_interval": 500,
        "repeat_action_probability": 0.0,
    },
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
        "clip_vloss": False,
        "ent_coef": 0.0,
        "max_grad_norm": 5.0,
        "target_kl": 0.02,
        "log_std_init": -0.5,
        "log_std_min": -2.0,
        "checkpoint_interval": 250,
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_defaults(name: str) -> None:
    """The results in the READMEs are of these."""
    expected = CANONICAL | OWN[name]
    args = MODULES[name].Args()
    assert {flag: getattr(args, flag) for flag in expected} == expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_report_and_scalars(name: str) -> None:
    """Each iteration ends with a report of the steps and the mean return, and with scalars under
    CleanRL's names; the run's score is the last report's.
    """
    script, reports = MODULES[name], []
    args = script.Args(**SHORT[name])
    with kept_batches(script) as batches:
        score = script.train(args, lambda *numbers: reports.append(numbers))
    size = args.num_envs * args.num_steps
    steps = [*range(size, args.total_timesteps + 1, size)]
    assert [step for step, _ in reports] == steps
    returns = scalars("charts/episodic_return")
    for step, mean in reports:
        ended = [x for at, x in returns if at <= step][-100:]
        assert mean == pytest.approx(np.mean(ended)) if ended else np.isnan(mean)
    assert score == reports[-1][1] or np.isnan(score)

    losses = "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance"
    tags = [f"losses/{x}" for x in f"{losses} grad_norm".split()]
    tags += ["charts/learning_rate", "charts/SPS", "debug/values", "debug/returns"]
    logged = {tag: scalars(tag) for tag in [*tags, "debug/advantages"]}
    for tag, points in logged.items():
        assert [step for step, _ in points] == steps, tag
        assert np.isfinite([x for _, x in points]).all(), tag
    for i, batch in enumerate([] if args.recompute_advantages else batches):
        unexplained = (batch.returns - batch.values).var() / batch.returns.var()
        expected = 1 - unexplained, batch.returns.mean(), batch.advantages.mean()
        tags = "losses/explained_variance", "debug/returns", "debug/advantages"
        for tag, x in zip(tags, expected, strict=True):
            assert logged[tag][i][1] == pytest.approx(x.item(), abs=1e-4)


@BOTH
def test_learning_rate(name: str) -> None:
    """It falls linearly, to 0 after the last iteration, or stays."""
    for anneals, shares in ((True, [1, 0.75, 0.5, 0.25]), (False, [1] * 4)):
        run = trained(name, anneal_lr=anneals, learning_rate=1e-3, update_epochs=1)
        rates = [rate / 1e-3 for _, rate in scalars("charts/learning_rate", run)]
        assert rates == pytest.approx(shares)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_groups_of_parameters(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hacker's optimizer with two groups: the first one's rate falls, the second keeps its own,
    and all weights learn.
    """
    adam, made = torch.optim.Adam, []

    def two_rates(parameters: Any, lr: Any, **kwargs: Any) -> torch.optim.Optimizer:
        parameters = [*parameters]
        groups = [{"params": parameters[:6]}, {"params": parameters[6:], "lr": 4 * lr}]
        made.append((adam(groups, lr, **kwargs), parameters, [x.clone() for x in parameters]))
        return made[0][0]

    monkeypatch.setattr(torch.optim, "Adam", two_rates)
    trained("ppo", total_timesteps=1024, compile=compiled)
    optimizer, parameters, before = made[0]
    assert not any(torch.equal(x, y) for x, y in zip(parameters, before, strict=True))
    rates = [group["lr"].item() for group in optimizer.param_groups]
    assert rates == pytest.approx([2.5e-4 / 2, 1e-3])


def test_evaluation_at_checkpoints() -> None:
    """There is a greedy return at each checkpoint and at the end, which change no training."""
    flags = SHORT["ppo"] | {"total_timesteps": 5 * 512, "checkpoint_interval": 2}
    plain, score = train_agent(ppo, **flags)
    flags |= {"eval_checkpoints": True, "eval_episodes": 2, "exp_name": "evaluated"}
    evaluated, same_score = train_agent(ppo, **flags)
    assert same_weights(plain, evaluated)
    assert score == same_score
    (run,) = Path("runs").glob("*evaluated*")
    assert [step for step, _ in scalars("eval/return", run)] == [1024, 2048, 2560]


@pytest.mark.parametrize(("limit", "told"), [(600, True), (512, False)])
def test_checkpoints_that_cut(limit: int, told: bool, capsys: pytest.CaptureFixture) -> None:
    """Where checkpoints come before an episode's limit, the run says so, and which flag helps."""
    kwargs = json.dumps({"max_episode_steps": limit})
    trained("ppo_continuous", checkpoint_interval=2, total_timesteps=1024, env_kwargs=kwargs)
    assert ("--checkpoint-interval" in capsys.readouterr().out) == told


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest) -> Any:
    """Each script."""
    return MODULES[request.param]


def updated(script: Any, start: list, batch: Batch, **flags: Any) -> tuple[dict, list]:
    """What an update reports, and its gradient, where the network is the log-probabilities,
    entropies and values that it starts with.
    """
    numbers = torch.nn.Parameter(torch.tensor(start))
    agent = SimpleNamespace(evaluate_actions=lambda *_: tuple(numbers))
    optimizer = torch.optim.SGD([numbers], lr=1.0)
    before, indices = numbers.detach().clone(), torch.arange(numbers.shape[1])
    metrics = script.update(agent, optimizer, batch, indices, script.Args(**flags))
    return {name: x.item() for name, x in metrics.items()}, (before - numbers.detach()).tolist()


def batch_of(n: int, **parts: list) -> Batch:
    """A batch of n samples that is 0 but for these."""
    return Batch(*(torch.tensor(parts.get(name, [0.0] * n)) for name in Batch._fields))


RAW = {"norm_adv": False, "max_grad_norm": 9.0, "vf_coef": 1.0, "clip_coef": 0.2}


@pytest.mark.parametrize(
    ("clip_vloss", "expected", "gradient"),
    [(False, 0.5**2 + 3**2 + 2**2, [0.5, 3, 2]), (True, 0.5**2 + 3.3**2 + 2**2, [0.5, 0, 2])],
)
def test_value_loss(script: Any, clip_vloss: bool, expected: float, gradient: list) -> None:
    """Errors of 0.5, 3 and 2. Clipped to 0.2 from the old value, 4.0 is 4.3, and counts as the
    larger error; 2.0 is 1.2, but what moved away from its return is pulled back.
    """
    values, batch = [1.0, 4.0, 2.0], batch_of(3, values=[1.0, 4.5, 1.0], returns=[0.5, 1.0, 0.0])
    metrics, moved = updated(
        script, [[0.0] * 3, [0.0] * 3, values], batch, **RAW, clip_vloss=clip_vloss
    )
    assert metrics["losses/value_loss"] == pytest.approx(expected / 6)
    assert moved[2] == pytest.approx(np.array(gradient) / 3, abs=1e-6)


@pytest.mark.parametrize("max_grad_norm", [9.0, 0.1])
def test_policy_loss(script: Any, max_grad_norm: float) -> None:
    """Four samples: whose ratio is clipped for an advantage, and unclipped for its opposite."""
    ratios, advantages = np.array([1.5, 1.5, 0.5, 0.5]), [1.0, -1.0, 1.0, -1.0]
    start = [np.log(ratios).tolist(), [0.0] * 4, [0.0] * 4]
    flags = RAW | {"max_grad_norm": max_grad_norm, "ent_coef": 0.0}
    metrics, moved = updated(script, start, batch_of(4, advantages=advantages), **flags)
    # 1.5 is clipped to 1.2 where that is less, 0.5 to 0.8 where the advantage is negative.
    assert metrics["losses/policy_loss"] == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8) / 4)
    assert metrics["losses/clipfrac"] == 1
    assert metrics["losses/old_approx_kl"] == pytest.approx(-np.log(ratios).mean())
    assert metrics["losses/approx_kl"] == pytest.approx((ratios - 1 - np.log(ratios)).mean())
    gradient = np.array([0, 1.5, -0.5, 0]) / 4
    norm = np.linalg.norm(gradient)
    assert metrics["losses/grad_norm"] == pytest.approx(norm)
    assert moved[0] == pytest.approx(gradient * min(1, max_grad_norm / norm), rel=1e-4, abs=1e-6)


def test_normalized_advantages(script: Any) -> None:
    """A minibatch's advantages are shifted and scaled to a mean of 0 and a deviation of 1."""
    start = [np.log([1.1, 1.0, 0.9]).tolist(), [0.0] * 3, [0.0] * 3]
    metrics, _ = updated(script, start, batch_of(3, advantages=[5.0, 7.0, 9.0]), norm_adv=True)
    assert metrics["losses/policy_loss"] == pytest.approx((1.1 * 1 - 0.9 * 1) / 3)


def test_weights_of_the_losses(script: Any) -> None:
    """The policy loss, plus vf_coef times the value loss, minus ent_coef times the entropy."""
    start, batch = [[0.0, 0.0], [0.3, 0.5], [1.0, 2.0]], batch_of(2, advantages=[1.0, -3.0])
    flags = RAW | {"clip_vloss": False, "vf_coef": 0.25, "ent_coef": 0.125}
    metrics, moved = updated(script, start, batch, **flags)
    assert moved[0] == pytest.approx([-1 / 2, 3 / 2])
    assert moved[1] == pytest.approx([-0.125 / 2] * 2)
    assert moved[2] == pytest.approx([0.25 * 1 / 2, 0.25 * 2 / 2])
    assert metrics["losses/entropy"] == pytest.approx(0.4)


FAR = [9.0] * 8


@pytest.mark.parametrize(
    ("name", "target", "kls", "updates"),
    [
        ("ppo", None, FAR, 8),
        ("ppo_continuous", None, FAR, 8),
        *((name, 0.01, [0.0, 0.02, 0.01, 0.01] * 2, 8) for name in SCRIPTS[:2]),  # not above it
        *((name, 0.01, [0.0, 0.02, 0.01, 0.02, *FAR], 4) for name in SCRIPTS[:2]),  # above it
        ("ppo_continuous", 0.01, [0.0, 0.02, 0.01, 0.01, 0.0, 0.06, *FAR], 6),  # a collapse
        ("ppo_continuous", 0.01, [0.06, *FAR], 1),
        ("ppo", 0.1, [0.0, 0.4, 0.0, 0.0, 0.1, 0.1, 0.1, 0.11], 8),  # only epochs' means count
    ],
)
def test_target_kl(
    name: str, target: float | None, kls: list, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates end by an epoch's mean and, in continuous control, by a minibatch that is five times
    as far; in each iteration.
    """
    seen, update = [], MODULES[name].update

    def with_these(*args: Any) -> dict[str, torch.Tensor]:
        seen.append(args)
        return update(*args) | {"losses/approx_kl": torch.tensor(kls[(len(seen) - 1) % updates])}

    monkeypatch.setattr(MODULES[name], "update", with_these)
    trained(name, num_minibatches=4, update_epochs=2, total_timesteps=1024, target_kl=target)
    assert len(seen) == 2 * updates


@BOTH
@pytest.mark.parametrize(
    "kind", ["image", "integers", "float64", "discrete", "dict", "tuple", "empty"]
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_observation_spaces(name: str, kind: str) -> None:
    """Observations of any space that flattens become a vector of floats, in gymnasium's order."""
    Spaces.seen.clear()
    sizes = {"num_envs": 1, "num_steps": 64, "total_timesteps": 64, "num_minibatches": 2}
    with kept_batches(MODULES[name]) as batches:
        trained(name, **probe(name, "Spaces", kind=kind) | sizes)
    space = gym.make("probe_envs:Spaces-v0", kind=kind).observation_space
    # A step's observation ends the episode; the next one begins another.
    expected = [gym.spaces.flatten(space, x) for x in Spaces.seen[0:128:2]]
    assert batches[0].obs.dtype == torch.float32
    np.testing.assert_allclose(batches[0].obs, np.float32(expected))


@BOTH
def test_infos_may_vary(name: str) -> None:
    """Keys of infos come and go."""
    assert MODULES[name].train(MODULES[name].Args(**SHORT[name] | probe(name, "Talks"))) == 1.0


def test_cartpole_is_learned() -> None:
    """A fourteenth of the default run is enough for several times the return of chance, 22."""
    flags = {"num_envs": 8, "total_timesteps": 35_840, "learning_rate": 1e-3}
    assert ppo.train(ppo.Args(eval_episodes=0, **flags)) > 100


@pytest.mark.slow
def test_cartpole_is_solved() -> None:
    """By the default run."""
    ppo.train(ppo.Args())
    assert scalars("eval/return", only_run())[-1][1] >= 475
