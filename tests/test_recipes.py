"""The recipes: each applies to its script without fuzz, trains, and does what it says."""

import itertools
import json
import math
import re
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from probe_envs import Bounded
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import Categorical, Normal, TanhTransform, TransformedDistribution

NAMES = sorted(x.stem for x in (ROOT / "recipes").glob("*.diff") if "torchrun" not in x.stem)
# A short training that solves a probe.
PROBE = {"num_steps": 32, "learning_rate": 3e-3, "clip_vloss": False, "total_timesteps": 12800}
BOUNDED = {"env_id": "probe_envs:Bounded-v0", "stagger": False}
MASKED = PROBE | {"env_id": "probe_envs:Masked-v0", "total_timesteps": 19200}


def split(name: str) -> tuple[list[str], str]:
    """A recipe's head, and its script."""
    head, diff = (ROOT / "recipes" / f"{name}.diff").read_text().split("--- ", 1)
    return head.splitlines(), diff.splitlines()[0]


def patched(*names: str) -> ModuleType:
    """A script with these recipes, applied one after the other."""
    path = ROOT / split(names[0])[1]
    for name in names:
        source, path = path, Path(f"my_{name}.py").absolute()
        recipe = ROOT / "recipes" / f"{name}.diff"
        command = ["patch", "-F0", "-o", str(path), str(source), str(recipe)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def last_run() -> Path:
    """The folder of the last run, whose name ends with its time."""
    return max(Path("runs").iterdir())


def scalars(tag: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a scalar in the last run."""
    events = EventAccumulator(str(last_run()), size_guidance={"scalars": 0}).Reload()
    return tuple(np.array([(x.step, x.value) for x in events.Scalars(tag)]).T)


def take_step(module: ModuleType, agent: Any, batch: tuple, **flags: Any) -> dict:
    """The metrics of a step on all of the batch."""
    optimizer = torch.optim.Adam(agent.parameters(), 1e-4)
    return module.update(agent, optimizer, batch, torch.arange(len(batch[0])), module.Args(**flags))


@pytest.mark.parametrize("name", NAMES)
def test_head(name: str) -> None:
    """A recipe's head says what it does, and how to use it; it has a test of its own here."""
    head, script = split(name)
    assert 2 <= len(head) <= 4
    assert all(re.match("# .", line) and len(line) <= 100 for line in head)
    command = f"# patch -o my_ppo.py {script} recipes/{name}.diff && python my_ppo.py"
    assert head[-1].startswith(command)
    assert any(test.startswith(f"test_{name}") for test in globals())


def test_relu_layernorm() -> None:
    """Three normalized layers of 256 ReLUs in each network, which learn and act as they score."""
    module = patched("relu_layernorm")
    train(module, total_timesteps=1024)
    agent, _ = make_agent(module)
    obs = torch.randn(50, 4)
    logits = agent.actor(obs)
    np.testing.assert_array_equal(agent.make_act()(obs.numpy(), 0.0), logits.argmax(-1))
    module.load_checkpoint(last_run(), agent)
    for network in (agent.actor, agent.critic):
        kinds = [type(x).__name__ for x in network]
        assert kinds == ["Linear", "LayerNorm", "ReLU"] * 3 + ["Linear"]
        assert all(network[i].weight.shape == (256,) for i in (1, 4, 7))
        assert all((network[i].weight != 1).any() for i in (1, 4, 7))


@pytest.mark.parametrize("clip", [False, True])
def test_smooth_l1(clip: bool) -> None:
    """Two errors by hand, of which one is above 1; and it trains."""
    module = patched("smooth_l1")
    train(module, total_timesteps=512, clip_vloss=clip)
    agent, _ = make_agent(module)
    agent.critic[-1].weight.data.zero_()
    agent.critic[-1].bias.data.fill_(1.0)
    obs, actions = torch.randn(2, 4), torch.zeros(2, dtype=torch.int64)
    returns, old_values = torch.tensor([0.5, 3.0]), torch.zeros(2)
    batch = obs, actions, torch.zeros(2), torch.randn(2), returns, old_values
    loss = take_step(module, agent, batch, clip_vloss=clip)["losses/value_loss"]
    # Errors 0.5 and -2; where the value moves only from 0 to 0.2, errors -0.3 and -2.8.
    expected = (0.5 * 0.5**2 + 2.8 - 0.5) / 2 if clip else (0.5 * 0.5**2 + 2 - 0.5) / 2
    assert loss.item() == pytest.approx(expected)


def test_cosine_lr() -> None:
    """The learning rate follows half a wave, from its start towards 0."""
    train(patched("cosine_lr"), total_timesteps=2048, learning_rate=1e-3)
    expected = [1e-3, 1e-3 * (0.5 + 0.5**1.5), 0.5e-3, 1e-3 * (0.5 - 0.5**1.5)]
    np.testing.assert_allclose(scalars("charts/learning_rate")[1], expected, rtol=1e-5)


def test_early_stop() -> None:
    """The training ends with the first mean return that is high enough, and is evaluated."""
    module = patched("early_stop")
    score = train(module, stop_at=25, total_timesteps=40960, eval_episodes=1)
    saved, (steps, returns) = module.load_checkpoint(last_run()), scalars("charts/episodic_return")
    assert score == np.mean(saved["last_returns"]) == returns[-100:].mean() >= 25
    assert saved["global_step"] == scalars("eval/return")[0][-1] < 40960
    before = returns[steps <= saved["global_step"] - 512]
    assert len(before) < 100 or before[-100:].mean() < 25


def test_adaptive_kl() -> None:
    """The weight doubles after a KL over 1.5 times the target, and halves below its 1.5th part."""
    flags = {"total_timesteps": 512, "num_minibatches": 1, "update_epochs": 2}
    module = patched("adaptive_kl")
    train(module, **flags)
    kl = 2 * scalars("losses/approx_kl")[1].item()  # the mean of 0, at first, and the last one
    for ratio, factor in (0.6, 2), (0.7, 1), (1.4, 1), (1.6, 0.5):
        train(module, **flags, kl_target=ratio * kl)
        assert scalars("charts/kl_coef")[1] == [factor]
        assert module.load_checkpoint(last_run())["agent"]["kl_coef"] == factor


def test_adaptive_kl_penalizes() -> None:
    """The loss has the weight of the moment, and no clipping: all ratios are e."""
    module = patched("adaptive_kl")
    agent, _ = make_agent(module)
    obs, actions = torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)
    for weight in (1, 2, 8):
        agent.kl_coef.fill_(weight)
        logprobs, _, values = (x.detach() for x in agent.evaluate_actions(obs, actions))
        batch = obs, actions, logprobs - 1, torch.ones(8), values, values
        loss = take_step(module, agent, batch, norm_adv=False)["losses/policy_loss"]
        assert loss.item() == pytest.approx(weight * (math.e - 2) - math.e, rel=1e-4)


def test_dict_obs() -> None:
    """Image and vector together solve what neither alone does, of 8 steps 4 by chance."""
    flags = PROBE | {"env_id": "probe_envs:Signs-v0", "num_steps": 128}
    assert train(patched("dict_obs"), **flags | {"learning_rate": 2e-3}) > 7
    assert scalars("charts/episodic_return")[1][:50].mean() < 5


def test_dict_obs_splits() -> None:
    """What the CNN and the MLP get is what the environment shows."""
    agent, envs = make_agent(patched("dict_obs"), env_id="probe_envs:Signs-v0")
    seen = {}
    for name in ("cnn", "mlp"):
        network = getattr(agent.actor[0], name)
        network.register_forward_hook(lambda _, x, __, name=name: seen.update({name: x[0]}))
    obs, _ = envs.reset(seed=1)
    agent.make_act()(np.float32(obs), 0.0)
    for i, env in enumerate(envs.unwrapped.envs):
        side, sign = env.unwrapped.side, env.unwrapped.sign
        image = np.zeros((3, 8, 8), np.float32)
        image[:, :, 4 * side : 4 * side + 4] = 1
        np.testing.assert_array_equal(seen["cnn"][i], image)
        assert seen["mlp"][i].tolist() == [0, 2 * sign - 1, 0]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("multi_discrete", [2, 3, 4]),
        ("multi_discrete_2d", [2, 3, 4, 2]),
        ("multi_binary", [2, 2, 2, 2]),
        ("discrete", [3]),
    ],
)
def test_multi_discrete(kind: str, sizes: list[int]) -> None:
    """Each choice is learned, padding isn't, and all combinations are taken as often as scored."""
    module, kwargs = patched("multi_discrete"), json.dumps({"kind": kind})
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
    assert probabilities.sum() == pytest.approx(1)
    assert probabilities.max() > 1.5 * probabilities.mean()
    noise = agent.sample_noise(np.random.default_rng(1), 50_000)
    actions = agent.make_act()(obs[:1].numpy(), noise)
    frequencies = (actions[:, None] == combinations.numpy()).all(-1).mean(0)
    np.testing.assert_allclose(frequencies, probabilities, atol=0.01)

    assert train(module, **PROBE, **flags) > 0.9
    module.load_checkpoint(last_run(), agent)
    best = agent.make_act()(np.float32([[-1], [1]]), 0.0)
    assert best.tolist() == [[0] * len(sizes), [size - 1 for size in sizes]]
    for row, size in zip(agent.actor[-1].bias.view(len(sizes), -1), sizes, strict=True):
        assert (row[size:] == -1e8).all() and (row[:size].abs() < 10).all()


def test_action_mask() -> None:
    """The best valid action is learned. The environment breaks at any other, in evaluation too."""
    module = patched("action_mask")
    best = 5 * (1 + 2 + 3 + 2 + 3 + 3) / 6  # by the six pairs of valid actions; 7.5 by chance
    assert train(module, eval_episodes=20, **MASKED) > 0.93 * best
    sampled = module.Args(**MASKED, eval_episodes=100, eval_greedy=False)
    assert module.evaluate(sampled, last_run()) > 0.9 * best


def test_action_mask_scores() -> None:
    """Valid actions share all of the probability, and an untrained agent takes no other."""
    agent, _ = make_agent(patched("action_mask"), env_id="probe_envs:Masked-v0")
    obs = torch.tensor([[1.0, 0, 1, 0, 1], [1, 1, 0, 0, 0]])
    logits = agent.actor(obs)
    for row, valid in (0, [1, 3]), (1, [0]):
        policy, rows = Categorical(logits=logits[row, valid]), obs[row].expand(4, -1)
        logprobs, entropies, _ = agent.evaluate_actions(rows, torch.arange(4))
        torch.testing.assert_close(logprobs[valid], policy.logits)
        torch.testing.assert_close(entropies, policy.entropy().expand(4))
        assert (logprobs.exp() > 0).nonzero().flatten().tolist() == valid
        noise = agent.sample_noise(np.random.default_rng(1), 20_000)
        actions = agent.make_act()(rows[:1].numpy(), noise)
        frequencies = np.bincount(actions, minlength=4)
        assert np.flatnonzero(frequencies).tolist() == valid
        np.testing.assert_allclose(frequencies[valid] / 20_000, policy.probs.detach(), atol=0.02)


def test_action_mask_is_needed() -> None:
    """An environment without masks, or that can't be wrapped, is refused in a sentence."""
    module = patched("action_mask")
    with pytest.raises(module.UsageError, match=r'"action_mask"\] must have 2 numbers.*is None'):
        train(module)
    with pytest.raises(module.UsageError, match="--vectorization sync or async"):
        train(module, vectorization="vector_entry_point")


def test_action_mask_and_rnd() -> None:
    """Both recipes together: the probe is learned, and the bonus, positive, falls."""
    assert train(patched("action_mask", "rnd"), **MASKED | {"total_timesteps": 9600}) > 9
    bonus = scalars("charts/intrinsic_reward")[1]
    assert 0 < bonus[-10:].mean() < 0.5 * bonus[:10].mean()


def test_rnd() -> None:
    """The bonus is positive, falls, and is part of what is learned from, not of the returns."""
    train(patched("rnd"), total_timesteps=16384, gamma=0, bonus_coef=0.5)
    bonus = scalars("charts/intrinsic_reward")[1]
    assert len(bonus) == 32
    assert bonus.min() > 0
    assert bonus[-8:].mean() < 0.5 * bonus[:8].mean()
    # Without a discount, the target of a value is the reward alone, which CartPole gives as 1.
    np.testing.assert_allclose(scalars("debug/returns")[1], 1 + 0.5 * bonus, rtol=1e-4)
    returns, lengths = (scalars(f"charts/episodic_{x}")[1] for x in ("return", "length"))
    np.testing.assert_array_equal(returns, lengths)


def test_rnd_sees_true_next_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus is of what each step led to, also where the next episode begins."""
    module, batches, agents, squares = patched("rnd"), [], [], []
    update = module.update

    def spy(agent: Any, optimizer: Any, batch: tuple, *rest: Any) -> dict:
        if not batches or batches[-1] is not batch:
            batches.append(batch)
            agents.append({name: x.clone() for name, x in agent.state_dict().items()})
            squares.append(agent.get_error(batch[-1]).detach().square().mean())
        return update(agent, optimizer, batch, *rest)

    monkeypatch.setattr(module, "update", spy)
    train(module, total_timesteps=1024)
    (before, after), rollouts = agents, torch.stack([batch[-1] for batch in batches])
    for batch in batches:
        obs, next_obs = (x.view(128, 4, 4) for x in (batch[0], batch[-1]))
        is_over = (next_obs[..., 0].abs() > 2.4) | (next_obs[..., 2].abs() > 12 * np.pi / 180)
        assert is_over.sum() > 10  # only a last observation is beyond the limits
        assert torch.equal((obs[1:] == next_obs[:-1]).all(-1), ~is_over[:-1])
        # One step is a fiftieth of a second: x moves by the speed before it.
        torch.testing.assert_close(next_obs[..., 0], obs[..., 0] + 0.02 * obs[..., 1])
    # The target stays; each rollout counts in the statistics, the first one at once.
    for name in ("target", "predictor"):
        same = torch.equal(before[f"{name}.0.weight"], after[f"{name}.0.weight"])
        assert same == (name == "target")
    torch.testing.assert_close(before["obs_norm.running_mean"], rollouts[0].mean(0))
    torch.testing.assert_close(after["obs_norm.running_mean"], rollouts.mean((0, 1)))
    torch.testing.assert_close(after["mean_square"], torch.stack(squares).mean())


def test_tanh_normal() -> None:
    """The probe is learned. The environment gets tanh of the actions, scaled to its bounds."""
    module, low, high = patched("tanh_normal"), np.float32([2, -0.3]), np.float32([10, 0])
    train(module, **PROBE, **BOUNDED, num_envs=4, num_minibatches=4, update_epochs=4, gamma=0.5)
    assert (low <= Bounded.received).all() and (Bounded.received <= high).all()
    agent, envs = make_agent(module, -0.5, **BOUNDED)
    module.load_checkpoint(last_run(), agent)
    actions = agent.make_act()(np.float32([[-1], [1]]), 0.0)
    envs.reset(seed=1)
    envs.step(actions)
    received = np.stack(Bounded.received[-2:])
    np.testing.assert_allclose(received, low + (high - low) * (np.tanh(actions) + 1) / 2, rtol=1e-5)
    assert (np.abs(received - [8, -0.1]) < 0.1 * (high - low)).all()


def test_tanh_normal_scores() -> None:
    """Log-probabilities are PyTorch's, actions as frequent, and entropies those of the density."""
    agent, _ = make_agent(patched("tanh_normal"), -0.5, gain=100, **BOUNDED)
    act, stds = agent.make_act(), []
    for state in (-1, 1):
        obs = torch.full((160_000, 1), float(state))
        mean, std = act(obs[:1].numpy(), 0.0), act(obs[:1].numpy(), 1.0) - act(obs[:1].numpy(), 0.0)
        stds.append(std)
        normal = Normal(*torch.tensor(np.stack([mean[0], std[0]])).double())
        actions = torch.linspace(-7, 7, 100)[:, None] * torch.tensor([1, -0.7])
        scores = TransformedDistribution(normal, TanhTransform()).log_prob(actions.double().tanh())
        logprobs, _, _ = agent.evaluate_actions(obs[:100], actions)
        torch.testing.assert_close(logprobs.double(), scores.sum(-1), atol=1e-3, rtol=1e-4)
        # Where tanh is 1 in float32, 1 - tanh(x)^2 is 4 exp(-2 |x|), and gradients are finite.
        far = torch.tensor([[-30.0, 30.0]])
        expected = normal.log_prob(far).sum(-1).float() - 2 * math.log(4) + 120
        logprobs, _, _ = agent.evaluate_actions(obs[:1], far)
        torch.testing.assert_close(logprobs, expected, atol=0, rtol=1e-4)
        gradients = torch.autograd.grad(logprobs, agent.actor.parameters())
        assert all(x.isfinite().all() for x in gradients)

        # The density on a grid of 400 x 400 squashed actions, and how often 10 x 10 bins are met.
        grid = (torch.arange(400) + 0.5) / 200 - 1
        points = torch.cartesian_prod(grid, grid).atanh()
        logprobs, entropies, _ = (x.detach() for x in agent.evaluate_actions(obs, points))
        share = (logprobs.exp() / 200**2).view(10, 40, 10, 40).sum((1, 3))
        actions = np.tanh(act(obs.numpy(), agent.sample_noise(np.random.default_rng(1), len(obs))))
        counts, _, _ = np.histogram2d(*actions.T, bins=10, range=[[-1, 1]] * 2)
        np.testing.assert_allclose(counts / len(obs), share, atol=0.003)
        entropy = -(logprobs.exp() * logprobs).sum() / 200**2
        assert entropies.mean().item() == pytest.approx(entropy.item(), abs=0.01)
    assert (np.abs(stds[0] - stds[1]) > 0.01).all()
    agent.actor[-1].weight.data.mul_(1e6)  # the standard deviation stays within bounds
    act = agent.make_act()
    stds = act(np.float32([[-1], [1]]), np.float64(1e9)) / 1e9
    assert (np.exp(-2.01) < stds).all() and (stds < np.exp(1.01)).all()
