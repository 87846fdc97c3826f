"""The recipes: each applies to its script without fuzz, trains, and does what it says."""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import kept_batches, latest_run, load, new_agent, probe, scalars, watching
from probe_envs import Bounded, Signs
from torch.distributions import Categorical, Normal, TanhTransform

DIFFS = {path.stem: path.read_text() for path in sorted(ROOT.glob("recipes/*.diff"))}
# What applies to this script, too; and what changes the gradient step, or what it is fed with.
BOTH = [(name, "ppo_continuous") for name in ("images", "impala", "relu_layernorm")]
COMPILED = ["action_mask", "adaptive_kl", "impala", "multi_discrete", "rnd", "tanh_normal"]
CONTINUOUS = {"tanh_normal", "bound_cost", "recompute_advantages", "rpo"}
# A training that solves a probe, and a much shorter one.
PROBE = {"num_steps": 32, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 3e-3}
PROBE |= {"total_timesteps": 512 * 25, "num_envs": 16, "ent_coef": 0.01, "eval_episodes": 0}
SHORT = PROBE | {"num_envs": 4, "update_epochs": 2, "total_timesteps": 256}
# Where a recipe can be tried.
BOUNDED = {"env_id": "probe_envs:Bounded-v0", "stagger": False}
FLAGS = dict.fromkeys(CONTINUOUS, BOUNDED)
FLAGS |= dict.fromkeys(["images", "impala"], probe("ppo", "Lit"))
FLAGS |= {"action_mask": probe("ppo", "Masked"), "dict_obs": probe("ppo", "Signs")}
FLAGS |= {"multi_discrete": probe("ppo", "Choices", kind="multi_discrete")}
FLAGS |= {"asymmetric": probe("ppo", "Spaces", kind="sides")}


def patched(name: str, *recipes: str) -> Path:
    """The script with these recipes, applied one after the other; fuzz is an error."""
    path = ROOT / f"{name}.py"
    for recipe in ["images", *recipes] if "impala" in recipes else recipes:  # it is on top
        source, path = path, Path(f"{recipe}_{path.name}").absolute()
        command = ["patch", "-F0", "-o", path, source, ROOT / "recipes" / f"{recipe}.diff"]
        subprocess.run(command, check=True, capture_output=True)
    return path


def recipe(*names: str) -> ModuleType:
    """ppo.py, or the script that it is for, with a recipe, or with several ones."""
    return load(patched("ppo_continuous" if {*names} & CONTINUOUS else "ppo", *names))


def make_agent(module: ModuleType, gain: int, **flags: Any) -> Any:
    """An agent that is far from uniform."""
    torch.manual_seed(1)
    agent = new_agent(module, module.Args(**flags))
    agent.actor[-1].weight.data.mul_(gain)
    return agent


def train(module: ModuleType, **flags: Any) -> tuple[float, Any]:
    """The score of a training, and its agent as it was saved."""
    args = module.Args(**SHORT | flags)
    score, agent = module.train(args), new_agent(module, args)
    agent.load_state_dict(module.load_checkpoint(latest_run())["agent"])
    return score, agent


def values_of(tag: str) -> np.ndarray:
    """The values of a scalar in the last run."""
    return np.array([x for _, x in scalars(tag, latest_run())])


def sample(agent: Any, obs: torch.Tensor, number: int) -> np.ndarray:
    """As many actions as that after one observation, (1, size)."""
    return agent.act(obs.expand(number, -1).numpy(), np.random.default_rng(1))


@pytest.mark.parametrize(("name", "script"), [*((name, None) for name in DIFFS), *BOTH])
def test_head(name: str, script: str | None) -> None:
    """A recipe's head says what it does, and how to use it; what comes of it is tidy."""
    head, diff = DIFFS[name].split("--- ", 1)
    head, original = head.splitlines(), diff.splitlines()[0]
    assert 2 <= len(head) <= 4
    assert all(re.match("# .", line) and len(line) <= 100 for line in head)
    command = f"# patch -o my_ppo.py {original} recipes/{name}.diff"
    assert head[-2 if "torchrun" in name else -1].startswith(command)
    path = patched(script or original.removesuffix(".py").replace("my_images", "ppo"), name)
    for check in (["check", "--ignore=I"], ["format", "--check"]):  # I: which module is whose
        command = [sys.executable, "-m", "ruff", *check, "--config", ROOT / "pyproject.toml", path]
        assert subprocess.run(command).returncode == 0


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_and_resumes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed, it learns compiled what it learns eagerly, from what was saved."""
    module, flags = recipe(name), FLAGS.get(name, {})
    train(module, **flags, total_timesteps=128)
    run = latest_run()
    saved = (run / "checkpoint.pt").read_bytes()
    _, expected = train(module, **flags, resume=str(run), total_timesteps=384)
    (run / "checkpoint.pt").write_bytes(saved)
    make = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, mode, **x: make(f, backend="eager", **x))
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        _, agent = train(module, **flags, resume=str(run), total_timesteps=384, compile=True)
    torch.testing.assert_close(agent.state_dict(), expected.state_dict(), rtol=1e-2, atol=1e-3)


PAIRS = ["rnd action_mask", "adaptive_kl rnd", "bound_cost recompute_advantages"]
PAIRS += ["action_mask multi_discrete", "action_mask multi_discrete relu_layernorm"]
PAIRS += ["adaptive_kl relu_layernorm", "rnd relu_layernorm", "bound_cost relu_layernorm"]
PAIRS += ["tanh_normal relu_layernorm", "dict_obs relu_layernorm", "images relu_layernorm"]
PAIRS += ["impala relu_layernorm"]


@pytest.mark.parametrize("names", PAIRS)
def test_pairs(names: str) -> None:
    """Recipes that people combine, applied in this order, train and play together."""
    flags = {k: x for name in names.split() for k, x in FLAGS.get(name, {}).items()}
    if "action_mask multi_discrete" in names:
        flags = probe("ppo", "MaskedChoices")
    train(recipe(*names.split()), **flags, eval_episodes=1)
    assert values_of("eval/return").size == 1


def test_relu_layernorm() -> None:
    """Three normalized layers of ReLUs in each network, which learn."""
    _, agent = train(recipe("relu_layernorm"))
    for network in (agent.actor, agent.critic):
        kinds = [type(x).__name__ for x in network]
        assert kinds == ["Linear", "LayerNorm", "ReLU"] * 3 + ["Linear"]
        assert all((network[i].weight != 1).any() for i in (1, 4, 7))


def test_bound_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every step is worth 10, as rewards are scaled, actions beyond the bounds are less."""
    module = recipe("bound_cost")
    monkeypatch.setattr(module.Agent, "get_value", lambda self, obs: 0 * obs[:, 0])
    with kept_batches(module) as batches:
        train(module, **probe("ppo_continuous", "Probe"), bound_coef=0.5)
    cost = 0.5 * (batches[0].actions.abs() - 1).clamp(min=0).square().sum(-1)
    assert 0 in cost and cost.max() > 0.1
    torch.testing.assert_close(batches[0].advantages, 10 - cost, rtol=0, atol=1e-5)


@pytest.mark.parametrize("anew", [True, False])
def test_recompute_advantages(anew: bool) -> None:
    """Targets are of the values of each epoch's start, or of the first one's, as in the script."""
    module, seen, flags = recipe("recompute_advantages"), [], BOUNDED | {"target_kl": None}
    with watching(module, lambda agent, batch, _: seen.append((agent.get_value(batch.obs), batch))):
        _, agent = train(module, **flags, recompute_advantages=anew)
    for epoch, (values, batch) in enumerate(seen[::4]):  # before the first of four minibatches
        assert ((values - batch.values).abs().max() > 0.01) == epoch % 2
        used = values if anew else batch.values
        torch.testing.assert_close(batch.returns - batch.advantages, used, rtol=1e-4, atol=1e-5)
    _, plain = train(load(ROOT / "ppo_continuous.py"), **flags)
    assert torch.equal(agent.actor[0].weight, plain.actor[0].weight) != anew


def test_adaptive_kl() -> None:
    """The weight doubles after a KL over 1.5 times the target, and halves below its 1.5th part."""
    module, flags = recipe("adaptive_kl"), {"total_timesteps": 128, "num_minibatches": 1}
    train(module, **flags)
    kl = 2 * values_of("losses/approx_kl").item()  # the mean of 0, at first, and the last one
    for ratio, factor in (0.6, 2), (0.7, 1), (1.4, 1), (1.6, 0.5):
        _, agent = train(module, **flags, target_kl=ratio * kl)
        assert values_of("charts/kl_coef").item() == factor == agent.kl_coef.item()


@pytest.mark.parametrize("weight", [1.0, 8.0])
def test_adaptive_kl_penalizes(weight: float) -> None:
    """The loss has the weight of the moment, and no clipping: the ratio is e, the advantage 1."""
    module, zero, logprobs = recipe("adaptive_kl"), torch.zeros(1), torch.ones(1).requires_grad_()
    agent = SimpleNamespace(evaluate_actions=lambda *_: (logprobs, zero, zero))
    agent.kl_coef, agent.parameters = torch.tensor(weight), lambda: [logprobs]
    batch, optimizer = (zero, zero, zero, zero + 1, zero, zero), torch.optim.Adam([logprobs])
    metrics = module.update(agent, optimizer, batch, torch.arange(1), module.Args())
    expected = weight * (math.e - 2) - math.e
    assert metrics["losses/policy_loss"].item() == pytest.approx(expected, rel=1e-4)
    assert metrics["losses/grad_norm"].item() == pytest.approx(abs(weight * (math.e - 1) - math.e))


def test_dict_obs() -> None:
    """Image and vector together solve what neither alone does, of 8 steps 4 by chance."""
    module = recipe("dict_obs")
    score, agent = train(module, **PROBE | FLAGS["dict_obs"])
    assert score > 7
    obs, _ = module.make_envs(module.Args(**FLAGS["dict_obs"]), 1).reset(seed=1)
    shown = gym.spaces.unflatten(Signs.observation_space, obs[0])
    image = torch.tensor(shown["eye"]).float().permute(2, 0, 1)[None] / 255
    place = (torch.tensor(shown["place"]) - agent.obs_rms.mean[:3]) / agent.obs_rms.std[:3]
    expected = torch.cat([agent.cnn(image), place[None], torch.zeros(1, 2)], -1)
    torch.testing.assert_close(agent.get_features(torch.tensor(obs).float()), expected)


@pytest.mark.parametrize("script", ["ppo", "ppo_continuous"])
@pytest.mark.parametrize("name", ["images", "impala"])
@pytest.mark.parametrize("shape", [[12, 10, 3], [3, 12, 10], [12, 10]])
def test_images(script: str, name: str, shape: list[int]) -> None:
    """The lit side is found, of 8 steps 4 by chance; bytes are kept, (channels, height, width)."""
    module, flags = load(patched(script, name)), probe(script, "Lit", shape=shape)
    with kept_batches(module) as batches:
        flags |= {"total_timesteps": 512 * 12, "learning_rate": 1e-3}
        score, agent = train(module, **PROBE | flags)
    assert score > 7
    assert batches[0].obs.dtype == torch.uint8
    assert batches[0].obs.shape[1:] == (3 if 3 in shape else 1, 12, 10)
    envs = module.make_envs(module.Args(**flags), 1)
    obs, _ = envs.reset(seed=1)
    for _ in range(8):
        assert (obs[0, :, 0] == obs[0, -1, -1]).all()  # all channels and rows are alike
        obs, *_, infos = envs.step(agent.act(obs))
    assert (infos["final_obs"][0].min(), obs.min()) == (8, 0)  # a copy of what is overwritten


SIZES = {"multi_discrete": [2, 3, 4], "multi_discrete_2d": [2, 3, 4, 2], "multi_binary": [2] * 4}


@pytest.mark.parametrize(("kind", "sizes"), [*SIZES.items(), ("discrete", [3])])
def test_multi_discrete(kind: str, sizes: list[int]) -> None:
    """Each choice is learned, and all combinations are taken as often as scored."""
    module, flags = recipe("multi_discrete"), probe("ppo", "Choices", kind=kind)
    agent, obs = make_agent(module, 600, **flags), torch.tensor([[0.5]])
    combinations = torch.tensor(list(itertools.product(*map(range, sizes))))
    logprobs, entropies, _ = agent.evaluate_actions(obs.expand(len(combinations), 1), combinations)
    choices = [Categorical(logits=x) for x in agent.actor(obs)[0].split(sizes)]
    torch.testing.assert_close(entropies, sum(x.entropy() for x in choices).expand_as(logprobs))
    expected = sum(x.log_prob(combinations[:, i]) for i, x in enumerate(choices))
    torch.testing.assert_close(logprobs, expected)
    probabilities = logprobs.exp().detach().numpy()
    assert probabilities.max() > 1.5 * probabilities.mean()
    frequencies = (sample(agent, obs, 50_000)[:, None] == combinations.numpy()).all(-1).mean(0)
    np.testing.assert_allclose(frequencies, probabilities, atol=0.01)
    score, agent = train(module, **PROBE | flags)
    assert score > 0.9
    best = agent.act(np.float32([[-1], [1]]))
    assert best.tolist() == [[0] * len(sizes), [size - 1 for size in sizes]]


def test_action_mask() -> None:
    """The best valid action is learned. The environment breaks at any other, in evaluation too."""
    module, flags = recipe("action_mask"), FLAGS["action_mask"]
    best = 5 * (1 + 2 + 3 + 2 + 3 + 3) / 6  # by the six pairs of valid actions; 7.5 by chance
    score, _ = train(module, **PROBE | flags | {"eval_episodes": 20})
    assert score > 0.93 * best
    sampled = module.Args(**flags, eval_episodes=100, eval_greedy=False)
    assert module.evaluate(sampled, latest_run()) > 0.9 * best
    with pytest.raises(KeyError, match="action_mask"):  # CartPole has none
        train(module)


@pytest.mark.parametrize("valid", [[1, 3], [0]])
def test_action_mask_scores(valid: list[int]) -> None:
    """Valid actions share all of the probability, however normalized, and no other is taken."""
    agent, obs = make_agent(recipe("action_mask"), 600, **FLAGS["action_mask"]), torch.ones(1, 5)
    obs[0, 1:] = torch.tensor([float(action in valid) for action in range(4)])
    agent.obs_rms.update(torch.randn(99, 5))
    policy = Categorical(logits=agent.actor(agent.obs_rms(obs))[0, valid])
    logprobs, entropies, _ = agent.evaluate_actions(obs.expand(4, -1), torch.arange(4))
    torch.testing.assert_close(logprobs[valid], policy.logits)
    torch.testing.assert_close(entropies, policy.entropy().expand(4))
    assert (logprobs.exp() > 0).nonzero().flatten().tolist() == valid
    frequencies = np.bincount(sample(agent, obs, 20_000), minlength=4) / 20_000
    assert np.flatnonzero(frequencies).tolist() == valid
    np.testing.assert_allclose(frequencies[valid], policy.probs.detach(), atol=0.02)


def test_rnd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus is of what each step led to, falls, and is learned from, but in no return."""
    module, rollouts, weights, errors = recipe("rnd"), [], [], []
    update = module.update

    def spy(agent: Any, optimizer: Any, batch: tuple, *rest: Any) -> dict:
        if agent.next_obs_rms.count == 512 * len(rollouts) + 512:  # the first step of an iteration
            rollouts.append((batch[0].clone(), batch[-1].clone()))
            seen = torch.cat([next_obs for _, next_obs in rollouts])
            torch.testing.assert_close(agent.next_obs_rms.mean, seen.mean(0))
            errors.append(agent.get_errors(batch[-1]).detach())
            bonus = errors[-1] / torch.cat(errors).mean()
            # Without a discount, the target of a value is the reward alone: 1 of CartPole's.
            expected = ((1 + 0.5 * bonus) / agent.return_rms.std).clip(-10, 10)
            torch.testing.assert_close(batch[4], expected, rtol=1e-4, atol=1e-4)
            weights.append([x[0].weight.clone() for x in (agent.target, agent.predictor)])
        return update(agent, optimizer, batch, *rest)

    monkeypatch.setattr(module, "update", spy)
    train(module, num_steps=128, total_timesteps=512 * 16, gamma=0, bonus_coef=0.5)
    assert [torch.equal(*x) for x in zip(weights[0], weights[-1], strict=True)] == [True, False]
    obs, next_obs = (torch.stack(x).view(16, 128, 4, 4) for x in zip(*rollouts, strict=True))
    is_over = (next_obs[..., 0].abs() > 2.4) | (next_obs[..., 2].abs() > 12 * np.pi / 180)
    assert is_over.any()  # only a last observation is beyond the limits
    assert torch.equal((obs[:, 1:] == next_obs[:, :-1]).all(-1), ~is_over[:, :-1])
    # One step is a fiftieth of a second: x moves by the speed before it.
    torch.testing.assert_close(next_obs[..., 0], obs[..., 0] + 0.02 * obs[..., 1])
    bonus = values_of("charts/bonus")
    assert bonus[0] == pytest.approx(1)
    assert bonus[-4:].mean() < 0.5
    assert (values_of("charts/episodic_return") == values_of("charts/episodic_length")).all()


def test_rpo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates score means that are shifted, evenly and anew each time; a rollout doesn't."""
    module, shifts = recipe("rpo"), []
    evaluate_actions = module.Agent.evaluate_actions

    def spy(agent: Any, obs: torch.Tensor, actions: torch.Tensor, *shift: torch.Tensor) -> tuple:
        mean, log_std = agent.get_distribution(obs)
        scores = Normal(mean + sum(shift), log_std.exp()).log_prob(actions).sum(-1)
        result = evaluate_actions(agent, obs, actions, *shift)
        torch.testing.assert_close(result[0], scores)
        shifts.append(shift)
        return result

    monkeypatch.setattr(module.Agent, "evaluate_actions", spy)
    train(module, **BOUNDED, rpo_alpha=0.3)
    assert [len(x) for x in shifts] == 2 * ([0] + 2 * 4 * [1])
    numbers = torch.cat([x[0] for x in shifts if x]).flatten().sort().values
    assert len(numbers) == len(numbers.unique()) == 2 * 2 * 128 * 2
    torch.testing.assert_close(numbers, torch.linspace(-0.3, 0.3, len(numbers)), rtol=0, atol=0.03)


def test_asymmetric() -> None:
    """Values depend on all that is observed, logits on the actor's part; it must be there."""
    module = recipe("asymmetric")
    _, agent = train(module, **FLAGS["asymmetric"])
    obs = torch.rand(8, 5, requires_grad=True)
    for output, size in (agent.get_logits(obs)[:, 0], 2), (agent.get_value(obs), 5):
        (gradient,) = torch.autograd.grad(output.sum(), obs)
        assert gradient.any(0).tolist() == [i < size for i in range(5)]
    with pytest.raises(module.UsageError, match='isn\'t a Dict of "actor" and "critic"'):
        train(module)


def test_tanh_normal() -> None:
    """The environment gets tanh of the actions, scaled to its bounds, and the best is learned."""
    module, low, high = recipe("tanh_normal"), np.float32([2, -0.3]), np.float32([10, 0])
    _, agent = train(module, **PROBE | BOUNDED | {"gamma": 0.5})
    actions = agent.act(np.float32([[-1], [1]]))
    envs = module.make_envs(module.Args(**BOUNDED), 2)
    envs.reset(seed=1)
    envs.step(actions)
    received = np.stack(Bounded.received[-2:])
    np.testing.assert_allclose(received, low + (high - low) * (np.tanh(actions) + 1) / 2, rtol=1e-5)
    assert (np.abs(received - [8, -0.1]) < 0.1 * (high - low)).all()


def test_tanh_normal_scores() -> None:
    """Log-probabilities are PyTorch's, and entropies those of the actions that are taken."""
    agent = make_agent(recipe("tanh_normal"), 100, **BOUNDED)
    obs, tanh = torch.tensor([[-1.0], [1.0]]), TanhTransform()
    mean, log_std = agent.get_distribution(obs)
    assert ((log_std[0] - log_std[1]).abs() > 0.01).all()
    # As far out as tanh is 1 in float32, where gradients must be finite.
    actions = torch.linspace(-60, 60, 100)[:, None, None] * torch.tensor([[1, -0.7]] * 2)
    log_slope = tanh.log_abs_det_jacobian(actions, actions.tanh())
    expected = Normal(mean, log_std.exp()).log_prob(actions) - log_slope
    logprobs, _, _ = agent.evaluate_actions(obs.repeat(100, 1), actions.flatten(0, 1))
    torch.testing.assert_close(logprobs, expected.sum(-1).flatten(), atol=1e-3, rtol=1e-4)
    gradients = torch.autograd.grad(logprobs.sum(), agent.actor.parameters())
    assert all(x.isfinite().all() for x in gradients)
    for state in obs[:, None]:
        actions = torch.tensor(sample(agent, state, 160_000))
        logprobs, entropies, _ = agent.evaluate_actions(state.expand(160_000, 1), actions)
        assert entropies.mean().item() == pytest.approx(-logprobs.mean().item(), abs=0.01)
