"""What a run does, through `train`."""

import contextlib
import multiprocessing
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import BOTH, SCRIPTS
from helpers import (
    MODULES,
    SHORT,
    Batch,
    all_scalars,
    assert_same,
    command,
    content,
    kept_batches,
    only_run,
    probe,
    scalars,
    trained,
    watching,
)
from probe_envs import Careless, Spaces

import ppo
import ppo_continuous

# Runs of four iterations, or three, with a checkpoint after the second.
FLAGS = {name: flags | {"checkpoint_interval": 2} for name, flags in SHORT.items()}
FLAGS["ppo_atari"] |= {"total_timesteps": 384, "update_epochs": 1}


@pytest.fixture(scope="module", params=SCRIPTS)
def short(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of each script, what it learned from, and what it reported."""
    name, reports = request.param, []
    script, args = MODULES[name], MODULES[name].Args(**FLAGS[name])
    with contextlib.chdir(tmp_path_factory.mktemp(name)), kept_batches(script) as batches:
        score = script.train(args, lambda *numbers: reports.append(numbers))
        run = only_run().resolve()
    return SimpleNamespace(
        name=name, script=script, args=args, run=run, score=score, reports=reports, batches=batches
    )


def test_seeds(short: Any) -> None:
    """The same seed gives the same run bit for bit, in processes of its environments' own too."""
    is_async, counts = hasattr(short.args, "vectorization"), set()
    flags = FLAGS[short.name] | ({"vectorization": "async"} if is_async else {})
    with watching(short.script, lambda *_: counts.add(len(multiprocessing.active_children()))):
        same = trained(short.name, **flags)
    assert counts == {short.args.num_envs if is_async else 0}
    assert_same(content(same), content(short.run))
    one = {"seed": 2, "total_timesteps": short.args.num_envs * short.args.num_steps}
    with kept_batches(short.script) as others:
        run = trained(short.name, **FLAGS[short.name] | one)
    with pytest.raises(AssertionError):
        assert_same(content(run)["agent"], content(short.run)["agent"])
    starts = [batch.obs[: short.args.num_envs] for batch in (others[0], short.batches[0])]
    assert not torch.equal(*starts)


def test_checkpoints_touch_nothing(short: Any) -> None:
    """More of them, and evaluations at every second iteration, change no bit of the training."""
    flags = FLAGS[short.name] | {"checkpoint_interval": 1, "eval_interval": 2, "eval_episodes": 1}
    evaluated = content(trained(short.name, **flags))
    batch_size, total = short.args.num_envs * short.args.num_steps, short.args.total_timesteps
    assert [step for step, _ in evaluated.pop("eval/return")] == [2 * batch_size, total]
    assert_same(evaluated, content(short.run))


def test_report_and_scalars(short: Any) -> None:
    """Each iteration ends with a report, the last of which has the score, and CleanRL's scalars."""
    args, logged = short.args, all_scalars(short.run)
    size = args.num_envs * args.num_steps
    steps = [*range(size, args.total_timesteps + 1, size)]
    assert [step for step, _ in short.reports] == steps
    last_returns = short.script.load_checkpoint(short.run)["last_returns"]
    assert short.score == short.reports[-1][1] == pytest.approx(np.mean(last_returns))
    losses = "value_loss policy_loss entropy approx_kl clipfrac grad_norm explained_variance"
    for tag in [f"losses/{x}" for x in losses.split()] + ["charts/learning_rate", "charts/SPS"]:
        assert [step for step, _ in logged[tag]] == steps, tag
        assert np.isfinite([x for _, x in logged[tag]]).all(), tag
    explained = [x for _, x in logged["losses/explained_variance"]]
    unexplained = [((x.returns - x.values).var() / x.returns.var()).item() for x in short.batches]
    assert explained == pytest.approx(1 - np.array(unexplained), abs=1e-4)


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
    """Where 150 episodes end in each step, their mean is logged; the score is of the last 100."""
    # Returns are raw. Environments differ in their worth: the best would give another score.
    Careless.worths.clear()
    flags = SHORT[name] | probe(name, "Careless") | {"num_envs": 150, "num_steps": 8}
    script = MODULES[name]
    score = script.train(script.Args(**flags | {"total_timesteps": 3600, "num_minibatches": 4}))
    worths = np.float32(Careless.worths)
    assert len({*worths}) == 150
    mean = pytest.approx(np.mean(worths))
    assert scalars("charts/episodic_return") == [(step, mean) for step in (1200, 2400, 3600)]
    assert [x for _, x in scalars("charts/episodic_length")] == [1.0] * 3
    assert score == pytest.approx(np.mean(worths[50:]))
    assert script.load_checkpoint(only_run())["last_returns"] == worths[50:].tolist()


@pytest.mark.parametrize("flags", [{}, {"vectorization": "async"}, {"stagger": False}])
def test_stagger(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """First episodes end all over the time limit of six steps, and are logged like all others."""
    # The observation counts the steps. It is made worth itself, so that the advantage of every
    # step is r + (n + 1) - n: also of the step that ends a shortened episode, if what it ended
    # with is bootstrapped.
    monkeypatch.setattr(ppo_continuous.Agent, "get_value", lambda self, obs: obs[:, 0])
    flags = flags | probe("ppo_continuous", "Overwriting", max_episode_steps=6)
    flags |= {"total_timesteps": 1536, "num_envs": 32, "num_steps": 24, "gamma": 1, "gae_lambda": 0}
    flags |= {"update_epochs": 1, "eval_episodes": 0}
    with kept_batches(ppo_continuous) as batches:
        score = ppo_continuous.train(ppo_continuous.Args(**flags))
    for batch in batches:
        low, high = batch.advantages.aminmax()
        assert 1.01 < low <= high < low + 1e-4
    firsts, lengths = set(), ([], [])
    for counts in torch.cat([batch.obs.view(24, 32) for batch in batches]).T:
        ends = [t for t in range(1, 48) if counts[t] == 0] + [48] * (counts[47] == 5)
        assert {*np.diff(ends)} == {6}
        firsts.add(ends[0])
        for length, end in zip(np.diff([0, *ends]), ends, strict=True):
            lengths[end > 24].append(length)
    assert firsts == ({6} if "stagger" in flags else {1, 2, 3, 4, 5, 6})
    means = [(768 * (i + 1), pytest.approx(np.mean(lengths[i]))) for i in (0, 1)]
    assert scalars("charts/episodic_return") == scalars("charts/episodic_length") == means
    assert score == 6.0


def test_stagger_is_seeded() -> None:
    """The same seed shortens the same episodes, where an environment takes none, too."""
    flags = probe("ppo_continuous", "Overwriting", lengths=[99], max_episode_steps=50)
    with kept_batches(ppo_continuous) as batches:
        for _ in range(2):
            trained("ppo_continuous", **flags, total_timesteps=512)
    assert torch.equal(batches[0].obs, batches[1].obs)


def test_without_a_time_limit() -> None:
    """Where none is known, a sentence says how to give one; another, that not all ended."""
    flags = probe("ppo_continuous", "Overwriting", lengths=[10**9])
    flags |= {"vectorization": "async", "total_timesteps": 512, "num_envs": 8, "eval_episodes": 1}
    process = command("ppo_continuous", *(f"--{k}={x}" for k, x in flags.items()))
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0
    remedy = "--env-kwargs '{\"max_episode_steps\": 1000}'"
    for said, problem in (stderr, "no time limit of probe_envs:Overw"), (stdout, "not all ended"):
        (line,) = [line for line in said.splitlines() if problem in line]
        assert remedy in line
    assert "return nan over the last 0 episodes" in stdout
    assert np.isnan(scalars("eval/return")[0][1])


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest) -> Any:
    """Each script."""
    return MODULES[request.param]


def updated(script: Any, start: list, batch: Batch, **flags: Any) -> tuple[dict, list]:
    """What an update of the numbers that the network gives reports, and how it moves them."""
    numbers = torch.nn.Parameter(torch.tensor(start))
    agent = SimpleNamespace(
        evaluate_actions=lambda *_: tuple(numbers), parameters=lambda: [numbers]
    )
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
    """Errors of 0.5, 3 and 2, of which the second is clipped to 3.3."""
    # Clipped to 0.2 from the old value, 4.0 is 4.3, and counts as the larger error; 2.0 is 1.2, but
    # what moved away from its return is pulled back.
    start, flags = [[0.0] * 3, [0.0] * 3, [1.0, 4.0, 2.0]], RAW | {"clip_vloss": clip_vloss}
    batch = batch_of(3, values=[1.0, 4.5, 1.0], returns=[0.5, 1.0, 0.0])
    metrics, moved = updated(script, start, batch, **flags)
    assert metrics["losses/value_loss"] == pytest.approx(expected / 6)
    assert moved[2] == pytest.approx(np.array(gradient) / 3, abs=1e-6)


@pytest.mark.parametrize("max_grad_norm", [np.inf, 9.0, 0.1])
def test_policy_loss(script: Any, max_grad_norm: float) -> None:
    """Four samples: whose ratio is clipped for an advantage, and unclipped for its opposite."""
    ratios, advantages = np.array([1.5, 1.5, 0.5, 0.5]), [1.0, -1.0, 1.0, -1.0]
    start = [np.log(ratios).tolist(), [0.0] * 4, [0.0] * 4]
    flags = RAW | {"max_grad_norm": max_grad_norm, "ent_coef": 0.0}
    metrics, moved = updated(script, start, batch_of(4, advantages=advantages), **flags)
    # 1.5 is clipped to 1.2 where that is less, 0.5 to 0.8 where the advantage is negative.
    assert metrics["losses/policy_loss"] == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8) / 4)
    assert metrics["losses/clipfrac"] == 1
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


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("target", "kls", "updates"),
    [
        (None, FAR, 8),
        (0.0, FAR, 8),  # off
        (0.01, [0.0, 0.02, 0.01, 0.01] * 2, 8),  # not above it
        (0.01, [0.0, 0.02, 0.01, 0.02, *FAR], 4),  # above it
        (0.1, [0.0, 0.4, 0.0, 0.0, 0.1, 0.1, 0.1, 0.11], 8),  # only epochs' means count
    ],
)
def test_target_kl(
    name: str, target: float | None, kls: list, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iteration's updates end with an epoch of a mean above it; their number is logged."""
    seen, update = [], MODULES[name].update

    def with_these(*args: Any) -> dict[str, torch.Tensor]:
        seen.append(args)
        return update(*args) | {"losses/approx_kl": torch.tensor(kls[(len(seen) - 1) % updates])}

    monkeypatch.setattr(MODULES[name], "update", with_these)
    sizes = {"num_envs": 2, "num_steps": 16, "total_timesteps": 64, "num_minibatches": 4}
    trained(name, **sizes, update_epochs=2, target_kl=target)
    assert len(seen) == 2 * updates
    assert scalars("losses/minibatches") == [(32, updates), (64, updates)]


@BOTH
@pytest.mark.parametrize("kind", ["integers", "float64", "discrete", "dict", "tuple"])
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


def test_cartpole_is_learned() -> None:
    """A quarter of the default run is enough for several times the return of chance, 22."""
    assert ppo.train(ppo.Args(eval_episodes=0, total_timesteps=24_576)) > 100
