"""The recipes: each applies to its script without fuzz, trains, and does what it says."""

import itertools
import json
import math
import re
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import kept_batches, latest_run, load, probe, scalars
from probe_envs import Bounded, Signs
from torch.distributions import Categorical, Normal, TanhTransform

NAMES = sorted(x.stem for x in (ROOT / "recipes").glob("*.diff") if "torchrun" not in x.stem)
CONTINUOUS = {"tanh_normal", "bound_cost"}
# A short training that solves a probe.
PROBE = {"num_steps": 32, "learning_rate": 3e-3, "clip_vloss": False, "total_timesteps": 12800}
BOUNDED = {"env_id": "probe_envs:Bounded-v0", "stagger": False}
MASKED = PROBE | {"env_id": "probe_envs:Masked-v0"}


def patched(name: str, *recipes: str) -> Path:
    """The script with these recipes, applied one after the other; fuzz is an error."""
    path = ROOT / f"{name}.py"
    for recipe in recipes:
        source, path = path, Path(f"{recipe}_{path.name}").absolute()
        command = ["patch", "-F0", "-o", path, source, ROOT / "recipes" / f"{recipe}.diff"]
        subprocess.run(command, check=True, capture_output=True)
    return path


def recipe(*names: str) -> ModuleType:
    """ppo.py, or the script that it is for, with a recipe, or with several ones."""
    return load(patched("ppo_continuous" if {*names} & CONTINUOUS else "ppo", *names))


def make_agent(module: ModuleType, *rest: float, gain: int = 600, **flags: Any) -> tuple[Any, Any]:
    """An agent that is far from uniform, and its two environments."""
    envs = module.make_envs(module.Args(**flags), 2)
    torch.manual_seed(1)
    agent = module.Agent(envs, *rest)
    agent.actor[-1].weight.data.mul_(gain)
    return agent, envs


def train(module: ModuleType, **flags: Any) -> float:
    """The score of a training."""
    return module.train(module.Args(**({"eval_episodes": 0} | flags)))


def values_of(tag: str) -> np.ndarray:
    """The values of a scalar in the last run."""
    return np.array([x for _, x in scalars(tag, latest_run())])


def sample(agent: Any, obs: torch.Tensor, number: int) -> np.ndarray:
    """As many actions as that after one observation, (1, size)."""
    noise = agent.sample_noise(np.random.default_rng(1), number)
    return agent.make_act()(obs.numpy(), noise)


def losses(module: ModuleType, outputs: tuple, returns: list[float], **flags: Any) -> dict:
    """The metrics of a step on log-probabilities and values, where old ones and entropies are 0."""
    logprobs, values = (torch.tensor(x, requires_grad=True) for x in outputs)
    zeros, returns = torch.zeros(len(values)), torch.tensor(returns)
    agent = SimpleNamespace(evaluate_actions=lambda *_: (logprobs, zeros, values))
    agent.kl_coef = torch.tensor(flags.pop("kl_coef", 1.0))
    batch = zeros, zeros, zeros, torch.ones(len(values)), returns, zeros
    args = module.Args(**flags, norm_adv=False)
    optimizer = torch.optim.Adam([logprobs, values])
    return module.update(agent, optimizer, batch, torch.arange(len(values)), args)


@pytest.mark.parametrize("name", NAMES)
def test_head(name: str) -> None:
    """A recipe's head says what it does, and how to use it; it has a test of its own here."""
    head, diff = (ROOT / "recipes" / f"{name}.diff").read_text().split("--- ", 1)
    head, script = head.splitlines(), diff.splitlines()[0]
    assert 2 <= len(head) <= 4
    assert all(re.match("# .", line) and len(line) <= 100 for line in head)
    command = f"# patch -o my_ppo.py {script} recipes/{name}.diff && python my_ppo.py"
    assert head[-1].startswith(command)
    assert any(test.startswith(f"test_{name}") for test in globals())


def test_relu_layernorm() -> None:
    """Three normalized layers of 256 ReLUs in each network, which learn and act as they score."""
    module = recipe("relu_layernorm")
    train(module, total_timesteps=1024)
    agent, _ = make_agent(module)
    module.load_checkpoint(latest_run(), agent)
    for network in (agent.actor, agent.critic):
        kinds = [type(x).__name__ for x in network]
        assert kinds == ["Linear", "LayerNorm", "ReLU"] * 3 + ["Linear"]
        for i in (1, 4, 7):
            assert network[i].weight.shape == (256,) and (network[i].weight != 1).any()
    obs = torch.randn(50, 4)
    np.testing.assert_array_equal(agent.make_act()(obs.numpy(), 0.0), agent.actor(obs).argmax(-1))


@pytest.mark.parametrize("clip", [False, True])
def test_smooth_l1(clip: bool) -> None:
    """Two errors by hand, of which one is above 1; and it trains."""
    module = recipe("smooth_l1")
    train(module, total_timesteps=512, clip_vloss=clip)
    metrics = losses(module, ([0.0, 0.0], [1.0, 1.0]), [0.5, 3.0], clip_vloss=clip)
    # Errors 0.5 and -2; where the value moves only from 0 to 0.2, errors -0.3 and -2.8.
    expected = (0.5 * 0.5**2 + 2.8 - 0.5) / 2 if clip else (0.5 * 0.5**2 + 2 - 0.5) / 2
    assert metrics["losses/value_loss"].item() == pytest.approx(expected)


def test_bound_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every step is worth 10, as rewards are scaled, actions beyond the bounds are less."""
    module = recipe("bound_cost")
    monkeypatch.setattr(module.Agent, "get_value", lambda self, obs: 0 * obs[:, 0])
    with kept_batches(module) as batches:
        train(module, **probe("ppo_continuous", "Probe"), total_timesteps=2048, bound_coef=0.5)
    cost = 0.5 * (batches[0].actions.abs() - 1).clamp(min=0).square().sum(-1)
    assert 0 in cost and cost.max() > 0.1
    torch.testing.assert_close(batches[0].advantages, 10 - cost, rtol=0, atol=1e-5)


def test_cosine_lr() -> None:
    """The learning rate follows half a wave, from its start towards 0."""
    train(recipe("cosine_lr"), total_timesteps=2048, learning_rate=1e-3)
    expected = [1e-3, 1e-3 * (0.5 + 0.5**1.5), 0.5e-3, 1e-3 * (0.5 - 0.5**1.5)]
    np.testing.assert_allclose(values_of("charts/learning_rate"), expected, rtol=1e-5)


@pytest.mark.parametrize("stop_at", [15, 25])  # the untrained agent's is 22
def test_early_stop(stop_at: int) -> None:
    """The training ends with the first mean return that is high enough, and is evaluated."""
    module = recipe("early_stop")
    score = train(module, stop_at=stop_at, total_timesteps=40960, eval_episodes=1)
    saved = module.load_checkpoint(latest_run())
    steps, returns = np.transpose(scalars("charts/episodic_return"))
    assert score == np.mean(saved["last_returns"]) == returns[-100:].mean() >= stop_at
    assert len(saved["last_returns"]) == 100
    assert saved["global_step"] == scalars("eval/return")[0][0] < 40960
    before = returns[steps <= saved["global_step"] - 512]
    assert len(before) < 100 or before[-100:].mean() < stop_at


def test_adaptive_kl() -> None:
    """The weight doubles after a KL over 1.5 times the target, and halves below its 1.5th part."""
    flags = {"total_timesteps": 512, "num_minibatches": 1, "update_epochs": 2}
    module = recipe("adaptive_kl")
    train(module, **flags)
    kl = 2 * values_of("losses/approx_kl").item()  # the mean of 0, at first, and the last one
    for ratio, factor in (0.6, 2), (0.7, 1), (1.4, 1), (1.6, 0.5):
        train(module, **flags, kl_target=ratio * kl)
        assert values_of("charts/kl_coef") == [factor]
        assert module.load_checkpoint(latest_run())["agent"]["kl_coef"] == factor


@pytest.mark.parametrize("weight", [1.0, 2.0, 8.0])
def test_adaptive_kl_penalizes(weight: float) -> None:
    """The loss has the weight of the moment, and no clipping: the ratio is e, the advantage 1."""
    metrics = losses(recipe("adaptive_kl"), ([1.0], [0.0]), [0.0], kl_coef=weight)
    expected = weight * (math.e - 2) - math.e
    assert metrics["losses/policy_loss"].item() == pytest.approx(expected, rel=1e-4)


def test_dict_obs() -> None:
    """Image and vector together solve what neither alone does, of 8 steps 4 by chance."""
    flags = PROBE | {"env_id": "probe_envs:Signs-v0", "num_steps": 128}
    assert train(recipe("dict_obs"), **flags | {"learning_rate": 2e-3}) > 7
    assert values_of("charts/episodic_return")[:50].mean() < 5


def test_dict_obs_splits() -> None:
    """What the CNN and the MLP get is what the environment shows."""
    agent, envs = make_agent(recipe("dict_obs"), env_id="probe_envs:Signs-v0")
    features, seen = agent.actor[0], []
    for network in (features.cnn, features.mlp):
        network.register_forward_hook(lambda network, inputs, output: seen.append(inputs[0]))
    obs, _ = envs.reset(seed=1)
    agent.make_act()(np.float32(obs), 0.0)
    for flat, image, vector in zip(obs, *seen, strict=True):
        shown = gym.spaces.unflatten(Signs.observation_space, flat)
        np.testing.assert_array_equal(image, np.float32(shown["image"].transpose(2, 0, 1) / 255))
        np.testing.assert_array_equal(vector, shown["vector"])
        assert shown["image"].any() and shown["vector"].any()


SIZES = {"multi_discrete": [2, 3, 4], "multi_discrete_2d": [2, 3, 4, 2], "multi_binary": [2] * 4}


@pytest.mark.parametrize(("kind", "sizes"), [*SIZES.items(), ("discrete", [3])])
def test_multi_discrete(kind: str, sizes: list[int]) -> None:
    """Each choice is learned, padding isn't, and all combinations are taken as often as scored."""
    module, kwargs = recipe("multi_discrete"), json.dumps({"kind": kind})
    flags = {"env_id": "probe_envs:Choices-v0", "env_kwargs": kwargs}
    agent, _ = make_agent(module, **flags)
    combinations = torch.tensor(list(itertools.product(*map(range, sizes))))
    obs = torch.full((len(combinations), 1), 0.5)
    logprobs, entropies, _ = agent.evaluate_actions(obs, combinations)
    logits = agent.actor(obs[:1]).view(len(sizes), -1)
    choices = [Categorical(logits=x[:size]) for x, size in zip(logits, sizes, strict=True)]
    torch.testing.assert_close(entropies, sum(x.entropy() for x in choices).expand(len(obs)))
    expected = sum(x.log_prob(combinations[:, i]) for i, x in enumerate(choices))
    torch.testing.assert_close(logprobs, expected)
    probabilities = logprobs.exp().detach().numpy()
    assert probabilities.max() > 1.5 * probabilities.mean()
    actions = sample(agent, obs[:1], 50_000)
    frequencies = (actions[:, None] == combinations.numpy()).all(-1).mean(0)
    np.testing.assert_allclose(frequencies, probabilities, atol=0.01)

    assert train(module, **PROBE, **flags) > 0.9
    module.load_checkpoint(latest_run(), agent)
    best = agent.make_act()(np.float32([[-1], [1]]), 0.0)
    assert best.tolist() == [[0] * len(sizes), [size - 1 for size in sizes]]
    for row, size in zip(agent.actor[-1].bias.view(len(sizes), -1), sizes, strict=True):
        assert (row[size:] == -1e8).all() and (row[:size].abs() < 10).all()


@pytest.mark.parametrize(("others", "steps", "share"), [([], 19200, 0.93), (["rnd"], 9600, 0.8)])
def test_action_mask(others: list[str], steps: int, share: float) -> None:
    """The best valid action is learned. The environment breaks at any other, in evaluation too."""
    module, flags = recipe("action_mask", *others), MASKED | {"total_timesteps": steps}
    best = 5 * (1 + 2 + 3 + 2 + 3 + 3) / 6  # by the six pairs of valid actions; 7.5 by chance
    assert train(module, eval_episodes=20, **flags) > share * best
    sampled = module.Args(**flags, eval_episodes=100, eval_greedy=False)
    assert module.evaluate(sampled, latest_run()) > (share - 0.03) * best


@pytest.mark.parametrize("valid", [[1, 3], [0]])
def test_action_mask_scores(valid: list[int]) -> None:
    """Valid actions share all of the probability, and an untrained agent takes no other."""
    agent, _ = make_agent(recipe("action_mask"), env_id="probe_envs:Masked-v0")
    obs = torch.ones(1, 5)
    obs[0, 1:] = torch.tensor([float(action in valid) for action in range(4)])
    policy = Categorical(logits=agent.actor(obs)[0, valid])
    logprobs, entropies, _ = agent.evaluate_actions(obs.expand(4, -1), torch.arange(4))
    torch.testing.assert_close(logprobs[valid], policy.logits)
    torch.testing.assert_close(entropies, policy.entropy().expand(4))
    assert (logprobs.exp() > 0).nonzero().flatten().tolist() == valid
    frequencies = np.bincount(sample(agent, obs, 20_000), minlength=4) / 20_000
    assert np.flatnonzero(frequencies).tolist() == valid
    np.testing.assert_allclose(frequencies[valid], policy.probs.detach(), atol=0.02)


def test_action_mask_is_needed() -> None:
    """An environment without masks, or that can't be wrapped, is refused in a sentence."""
    module = recipe("action_mask")
    with pytest.raises(module.UsageError, match=r'"action_mask"\] must have 2 numbers.*is None'):
        train(module)
    with pytest.raises(module.UsageError, match="--vectorization sync or async"):
        train(module, vectorization="vector_entry_point")


def test_rnd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus is of what each step led to, falls, and is learned from, but in no return."""
    module, rollouts, squares, weights = recipe("rnd"), [], [], []
    update = module.update

    def spy(agent: Any, optimizer: Any, batch: tuple, *rest: Any) -> dict:
        if not rollouts or rollouts[-1][-1] is not batch[-1]:
            rollouts.append((batch[0], batch[-1]))
            squares.append(agent.get_error(batch[-1]).detach().square().mean())
            # Each rollout counts in the statistics, the first one at once.
            so_far = torch.cat([next_obs for _, next_obs in rollouts])
            torch.testing.assert_close(agent.obs_norm.running_mean, so_far.mean(0))
            torch.testing.assert_close(agent.mean_square, torch.stack(squares).mean())
            weights.append([x[0].weight.clone() for x in (agent.target, agent.predictor)])
        return update(agent, optimizer, batch, *rest)

    monkeypatch.setattr(module, "update", spy)
    train(module, total_timesteps=16384, gamma=0, bonus_coef=0.5)
    (target, predictor), (last_target, last_predictor) = weights[0], weights[-1]
    assert torch.equal(target, last_target) and not torch.equal(predictor, last_predictor)
    for obs, next_obs in (x.view(2, 128, 4, 4) for x in map(torch.stack, rollouts)):
        is_over = (next_obs[..., 0].abs() > 2.4) | (next_obs[..., 2].abs() > 12 * np.pi / 180)
        assert is_over.any()  # only a last observation is beyond the limits
        assert torch.equal((obs[1:] == next_obs[:-1]).all(-1), ~is_over[:-1])
        # One step is a fiftieth of a second: x moves by the speed before it.
        torch.testing.assert_close(next_obs[..., 0], obs[..., 0] + 0.02 * obs[..., 1])
    bonus = values_of("charts/intrinsic_reward")
    assert len(bonus) == 32
    assert bonus.min() > 0
    assert bonus[-8:].mean() < 0.5 * bonus[:8].mean()
    # Without a discount, the target of a value is the reward alone, which CartPole gives as 1.
    np.testing.assert_allclose(values_of("debug/returns"), 1 + 0.5 * bonus, rtol=1e-4)
    returns, lengths = (values_of(f"charts/episodic_{x}") for x in ("return", "length"))
    np.testing.assert_array_equal(returns, lengths)


def test_tanh_normal() -> None:
    """The probe is learned. The environment gets tanh of the actions, scaled to its bounds."""
    module, low, high = recipe("tanh_normal"), np.float32([2, -0.3]), np.float32([10, 0])
    train(module, **PROBE, **BOUNDED, num_envs=4, num_minibatches=4, update_epochs=4, gamma=0.5)
    assert (low <= Bounded.received).all() and (Bounded.received <= high).all()
    agent, envs = make_agent(module, -0.5, **BOUNDED)
    module.load_checkpoint(latest_run(), agent)
    actions = agent.make_act()(np.float32([[-1], [1]]), 0.0)
    envs.reset(seed=1)
    envs.step(actions)
    received = np.stack(Bounded.received[-2:])
    np.testing.assert_allclose(received, low + (high - low) * (np.tanh(actions) + 1) / 2, rtol=1e-5)
    assert (np.abs(received - [8, -0.1]) < 0.1 * (high - low)).all()


def test_tanh_normal_scores() -> None:
    """Log-probabilities are PyTorch's, and entropies those of the actions that are taken."""
    agent, _ = make_agent(recipe("tanh_normal"), -0.5, gain=100, **BOUNDED)
    obs, act, tanh = torch.tensor([[-1.0], [1.0]]), agent.make_act(), TanhTransform()
    mean, one_above = (torch.tensor(act(obs.numpy(), noise)) for noise in (0.0, 1.0))
    std = one_above - mean
    assert ((std[0] - std[1]).abs() > 0.01).all()
    # As far out as tanh is 1 in float32, where gradients must be finite.
    actions = torch.linspace(-60, 60, 100)[:, None, None] * torch.tensor([[1, -0.7]] * 2)
    log_slope = tanh.log_abs_det_jacobian(actions, actions.tanh())
    expected = Normal(mean, std).log_prob(actions) - log_slope
    logprobs, _, _ = agent.evaluate_actions(obs.repeat(100, 1), actions.flatten(0, 1))
    torch.testing.assert_close(logprobs, expected.sum(-1).flatten(), atol=1e-3, rtol=1e-4)
    gradients = torch.autograd.grad(logprobs.sum(), agent.actor.parameters())
    assert all(x.isfinite().all() for x in gradients)

    for state in obs[:, None]:
        actions = torch.tensor(sample(agent, state, 160_000))
        logprobs, entropies, _ = agent.evaluate_actions(state.expand(160_000, 1), actions)
        assert entropies.mean().item() == pytest.approx(-logprobs.mean().item(), abs=0.01)
    agent.actor[-1].weight.data.mul_(1e6)  # the standard deviation stays within bounds
    stds = agent.make_act()(obs.numpy(), np.float64(1e9)) / 1e9
    assert (np.exp(-2.01) < stds).all() and (stds < np.exp(1.01)).all()
