"""The agents' distributions and statistics, against torch's and numpy's own."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU, SCRIPTS, SHORT, watching
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import nn
from torch.distributions import Categorical, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

import ppo
import ppo_atari
import ppo_continuous


class Spaces:
    """As much of a vector environment as an agent is made from."""

    num_envs = 2

    def __init__(self, obs: gym.Space, action: gym.Space) -> None:
        self.single_observation_space, self.single_action_space = obs, action


class Doubled(nn.Linear):
    """A linear layer with another forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice what the layer gives."""
        return 2 * super().forward(x)


def hooked(layer: nn.Module) -> nn.Module:
    """The layer, with a hook that changes what it gives."""
    layer.register_forward_hook(lambda module, args, output: output + 2 * output.square())
    return layer


def changed_input(layer: nn.Module) -> nn.Module:
    """The layer, with a hook that changes what it gets, as PyTorch's pruning has one."""
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return layer


LAYERS = {
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Linear(8, 4)),
    "gelu": lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 4)),
    "layernorm": lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh()),
    "subclass": lambda: nn.Sequential(nn.Tanh(), Doubled(5, 4), nn.Tanh()),
    "hooked layers": lambda: nn.Sequential(hooked(nn.Linear(5, 4)), hooked(nn.Tanh())),
    "changed input": lambda: nn.Sequential(nn.Linear(5, 4), changed_input(nn.Linear(4, 4))),
    "hooked network": lambda: nn.Sequential(hooked(nn.Sequential(nn.Linear(5, 4)))),
    "one layer": lambda: nn.Linear(5, 4),
    "no layer": nn.Sequential,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("layers", LAYERS)
def test_in_numpy(layers: str, device: str) -> None:
    """A network of any layers gives the same for arrays, and stays on its device."""
    torch.manual_seed(0)
    network = LAYERS[layers]().to(device)
    obs = torch.randn(7, 5)
    with torch.no_grad():
        expected = network(obs.to(device)).cpu().numpy()
        got = ppo.in_numpy(network)(obs.numpy())
    assert isinstance(got, np.ndarray)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert {x.device.type for x in network.parameters()} <= {device}


def act_agents() -> dict[str, tuple[Any, torch.Tensor]]:
    """Agents of every kind, whose policies are far from uniform, and observations for them."""
    vectors, screens = torch.randn(500, 9), torch.randint(256, (20, 84, 84, 4), dtype=torch.uint8)
    masked = vectors.clone()
    masked[:, 5:] = torch.randint(2, (500, 4))
    masked[:, 5] = 1  # at least one is valid
    choices = Spaces(Box(-1, 1, (9,)), MultiDiscrete([2, 4, 3]))
    one = Spaces(Box(-1, 1, (9,)), MultiDiscrete([4]))
    agents = {
        "choices": (ppo.Agent(choices, ppo.Args()), vectors),
        "masked": (ppo.Agent(one, ppo.Args(mask_actions=True)), masked),
        "atari": (atari_agent(), screens),
        "bf16": (atari_agent(bf16=True), screens),
    }
    for flags in ({}, {"state_std": True}, {"state_std": True, "squash": True}):
        agent = continuous_agent(**flags)
        agent.finish_iteration(3 * torch.randn(500, 5) + 7)
        agent.log_std.data.normal_()
        agents[f"continuous {flags}"] = agent, 3 * vectors[:, :5] + 7
    for agent, _ in agents.values():
        last = agent.actor[-1] if isinstance(agent.actor, nn.Sequential) else agent.actor
        last.weight.data.normal_(std=0.5)
    return agents


def test_acting_is_get_action() -> None:
    """What acts on arrays in a rollout gives what get_action gives for tensors, for any noise."""
    torch.manual_seed(0)
    for name, (agent, obs) in act_agents().items():
        with torch.no_grad():
            for noise in (agent.sample_noise(len(obs)), torch.zeros(agent.sample_noise(1).shape)):
                expected = agent.get_action(obs, noise).numpy()
                before = obs.clone(), noise.clone()
                got = agent.make_act()(obs.numpy(), noise.numpy())
                assert isinstance(got, np.ndarray), name
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4, err_msg=name)
                assert torch.equal(obs, before[0])
                assert torch.equal(noise, before[1])
        assert len(np.unique(expected)) > 1  # of the most probable actions, without noise


def test_discrete() -> None:
    """Log-probabilities and entropies are the sums of independent categorical distributions'."""
    agent = ppo.Agent(Spaces(Box(-1, 1, (5,)), MultiDiscrete([2, 4, 3])), ppo.Args())
    agent.actor[-1].weight.data.normal_()
    obs = torch.randn(7, 5)
    actions = torch.stack([torch.randint(n, (7,)) for n in (2, 4, 3)], 1)
    logits = agent.actor(obs).view(7, 3, 4)
    choices = [Categorical(logits=logits[:, i, :n]) for i, n in enumerate((2, 4, 3))]
    logprobs, entropy, value = agent.evaluate_actions(obs, actions)
    expected = sum(choice.log_prob(actions[:, i]) for i, choice in enumerate(choices))
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, sum(choice.entropy() for choice in choices))
    torch.testing.assert_close(value, agent.get_value(obs))
    modes = torch.stack([choice.probs.argmax(-1) for choice in choices], 1)
    assert torch.equal(agent.get_action(obs), modes)


def test_discrete_samples() -> None:
    """Samples come as often as their probabilities say, and never beyond a choice's values."""
    torch.manual_seed(0)
    agent = ppo.Agent(Spaces(Box(-1, 1, (5,)), MultiDiscrete([2, 3])), ppo.Args())
    agent.actor[-1].weight.data.normal_()
    obs = torch.randn(1, 5)
    samples = agent.get_action(obs, agent.sample_noise(100_000))
    for i, n in enumerate((2, 3)):
        probabilities = agent.get_logits(obs, agent.actor(obs))[0, i, :n].softmax(-1)
        counts = torch.bincount(samples[:, i])
        assert len(counts) <= n
        error = counts / len(samples) - probabilities[: len(counts)]
        assert error.abs().max() < 4 * 0.5 / len(samples) ** 0.5


@pytest.mark.parametrize("bf16", [False, True])
def test_atari(bf16: bool) -> None:
    """The same for the one choice of a game."""
    agent = atari_agent(bf16=bf16)
    obs = torch.randint(256, (3, 84, 84, 4), dtype=torch.uint8)
    actions = torch.tensor([5, 0, 2])
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        features = agent.network(obs.permute(0, 3, 1, 2) / 255)
    choice = Categorical(logits=agent.actor(features.float()))
    logprobs, entropy, value = agent.evaluate_actions(obs, actions)
    torch.testing.assert_close(logprobs, choice.log_prob(actions))
    torch.testing.assert_close(entropy, choice.entropy())
    torch.testing.assert_close(value, agent.get_value(obs))
    assert torch.equal(agent.get_action(obs), choice.probs.argmax(-1))
    noise = agent.sample_noise(3)
    assert torch.equal(agent.get_action(obs, noise), (choice.logits + noise).argmax(-1))


def atari_agent(**flags: Any) -> ppo_atari.Agent:
    """An agent with six buttons."""
    spaces = Spaces(Box(0, 255, (84, 84, 4), np.uint8), Discrete(6))
    return ppo_atari.Agent(spaces, ppo_atari.Args(**flags))


def continuous_agent(num_actions: int = 3, **flags: Any) -> ppo_continuous.Agent:
    """An agent with 5 numbers to observe."""
    spaces = Spaces(Box(-1, 1, (5,)), Box(-np.inf, np.inf, (num_actions,)))
    return ppo_continuous.Agent(spaces, ppo_continuous.Args(**flags))


def test_continuous() -> None:
    """Log-probabilities and entropies are the sums of independent normal distributions'."""
    agent = continuous_agent()
    agent.log_std.data.normal_()
    obs, actions = torch.randn(7, 5), torch.randn(7, 3)
    normal = Normal(agent.actor(obs), agent.log_std.exp())
    logprobs, entropy, value = agent.evaluate_actions(obs, actions)
    torch.testing.assert_close(logprobs, normal.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    torch.testing.assert_close(value, agent.get_value(obs))
    noise = agent.sample_noise(100_000)
    torch.testing.assert_close(agent.get_action(obs), normal.mean)
    samples = agent.get_action(obs, noise[:7])
    torch.testing.assert_close(samples, normal.mean + normal.scale * noise[:7])
    torch.testing.assert_close(noise.std(0), torch.ones(3), rtol=0.02, atol=0)
    assert noise.mean(0).abs().max() < 0.02


def test_deviation_of_the_state() -> None:
    """With state_std, every observation has a deviation of its own, which the actions follow."""
    agent = continuous_agent(state_std=True, log_std_init=-0.7)
    log_std = agent.get_distribution(torch.zeros(1, 5))[1]
    assert log_std.tolist() == [pytest.approx([-0.7] * 3)]
    agent.actor[-1].weight.data.normal_(std=0.3)
    obs, actions = torch.randn(7, 5), torch.randn(7, 3)
    mean, change = agent.actor(obs).split(3, -1)
    normal = Normal(mean, (change - 0.7).clamp(-2).exp())  # log_std_min
    assert normal.scale.std(0).min() > 0.05
    logprobs, entropy, _ = agent.evaluate_actions(obs, actions)
    torch.testing.assert_close(logprobs, normal.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    torch.testing.assert_close(agent.get_action(obs), mean)
    samples = agent.get_action(obs.repeat(4000, 1), agent.sample_noise(28_000)).view(4000, 7, 3)
    torch.testing.assert_close(samples.std(0), normal.scale, rtol=0.06, atol=0)


@pytest.mark.parametrize("state_std", [False, True])
def test_squashed_log_probabilities(state_std: bool) -> None:
    """Policies' log-probabilities differ as those of tanh's values do; so do their gradients."""
    torch.manual_seed(0)
    obs, actions = torch.randn(50, 5), 2 * torch.randn(50, 3)
    got, exact = [], []
    for log_std_init in (-0.5, 0.3):
        agent = continuous_agent(squash=True, state_std=state_std, log_std_init=log_std_init)
        agent.actor[-1].weight.data.normal_(std=0.2)
        mean, change = (
            agent.actor(obs).double().split(3, -1)
            if state_std
            else (
                agent.actor(obs).double(),
                0,
            )
        )
        log_std = (agent.log_std + change).clamp(-2)
        squashed = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
        exact.append(squashed.log_prob(actions.double().tanh()).sum(-1).float())
        got.append(agent.evaluate_actions(obs, actions)[0])
        parameters = [*agent.actor.parameters(), agent.log_std]
        gradients = (torch.autograd.grad(x[-1].mean(), parameters) for x in (got, exact))
        for x, y in zip(*gradients, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    assert (exact[0] - exact[1]).std() > 1
    torch.testing.assert_close(got[0] - got[1], exact[0] - exact[1], rtol=1e-4, atol=1e-3)
    far = torch.full((1, 3), 40.0)  # where tanh is 1 in floats, and 1 - tanh^2 would be 0
    assert torch.isfinite(agent.evaluate_actions(obs[:1], far)[0]).all()


@pytest.mark.parametrize("means", [[0.0], [1.5], [-0.7, 1.2]])
def test_squashed_entropy(means: list[float]) -> None:
    """Entropies are on average those of tanh's values, by their shares of a grid over -1 .. 1."""
    torch.manual_seed(0)
    log_stds = [-0.5, -0.9][: len(means)]
    agent = continuous_agent(num_actions=len(means), squash=True)
    agent.actor[-1].weight.data.zero_()
    agent.actor[-1].bias.data = torch.tensor(means)
    agent.log_std.data = torch.tensor(log_stds)
    exact, edges = 0.0, torch.linspace(-1, 1, 200_001, dtype=torch.float64).atanh()
    for mean, log_std in zip(means, log_stds, strict=True):
        shares = Normal(mean, math.exp(log_std)).cdf(edges).diff()
        assert shares.sum().item() == pytest.approx(1)
        exact += torch.special.entr(shares).sum().item() + math.log(2 / 200_000)
    obs, actions = torch.zeros(200_000, 5), torch.zeros(200_000, len(means))
    entropy = agent.evaluate_actions(obs, actions)[1]
    assert entropy.shape == (200_000,)
    assert entropy.std() > 0.1  # of one sample a row
    assert entropy.mean().item() == pytest.approx(exact, abs=0.01)


def test_squashed_entropy_far_out() -> None:
    """Where tanh is 1 in floats, and 1 - tanh(x)^2 would be 0, its logarithm is log 4 - 2 |x|."""
    for mean in (-40.0, 40.0):
        agent = continuous_agent(num_actions=1, squash=True, log_std_init=-0.5)
        agent.actor[-1].weight.data.zero_()
        agent.actor[-1].bias.data.fill_(mean)
        entropy = agent.evaluate_actions(torch.zeros(10_000, 5), torch.zeros(10_000, 1))[1]
        normal = Normal(0, math.exp(-0.5)).entropy().item()
        assert entropy.mean().item() == pytest.approx(normal + math.log(4) - 80, abs=0.05)


def test_masked_actions() -> None:
    """Masked actions have no probability and no part in the entropy, and are never chosen."""
    space = Box(-1, 1, (5 + 4,))  # 5 numbers, and the mask
    agent = ppo.Agent(Spaces(space, MultiDiscrete([4])), ppo.Args(mask_actions=True))
    agent.actor[-1].weight.data.normal_()
    obs = torch.randn(1000, 9)
    obs[:, -4:] = torch.randint(2, (1000, 4))
    obs[torch.arange(1000), 5 + torch.randint(4, (1000,))] = 1  # at least one is valid
    valid = obs[:, -4:].bool()
    logits = agent.actor(obs).where(valid, torch.tensor(-torch.inf))
    choice = Categorical(logits=logits)
    actions = agent.get_action(obs, agent.sample_noise(1000))
    for chosen in actions, agent.get_action(obs):
        assert valid.gather(1, chosen).all()
    logprobs, entropy, _ = agent.evaluate_actions(obs, actions)
    torch.testing.assert_close(logprobs, choice.log_prob(actions[:, 0]))
    torch.testing.assert_close(entropy, choice.entropy())
    some = ~valid.all(1)
    invalid = (~valid[some]).int().argmax(1, keepdim=True)
    assert agent.evaluate_actions(obs[some], invalid)[0].max() < -1e7


def other_get_action(get_action: Callable) -> Callable:
    """The opposite actions, where there is something to see."""

    def act(agent: Any, obs: torch.Tensor, noise: torch.Tensor | float = 0.0) -> torch.Tensor:
        actions = get_action(agent, obs, noise)
        return 1 - actions if obs.any() else actions

    return act


def without_noise(make_act: Callable) -> Callable:
    """Acting by the most probable actions."""
    return lambda agent: lambda obs, noise: make_act(agent)(obs, 0 * noise)


def later_without_noise(make_act: Callable) -> Callable:
    """Acting by the most probable actions from the 41st step of a rollout on."""

    def make(agent: Any) -> Callable:
        act, steps = make_act(agent), itertools.count()
        return lambda obs, noise: act(obs, noise * (next(steps) < 40))

    return make


@pytest.mark.parametrize(
    ("name", "method", "change"),
    [
        ("ppo", "get_action", other_get_action),
        ("ppo_continuous", "get_action", other_get_action),
        *((name, "make_act", without_noise) for name in SCRIPTS),
        *((name, "make_act", later_without_noise) for name in SCRIPTS),
    ],
)
def test_acting_otherwise(
    name: str, method: str, change: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever changes how it acts in only one of two places is told, before anything is learned."""
    script = {"ppo": ppo, "ppo_continuous": ppo_continuous, "ppo_atari": ppo_atari}[name]
    monkeypatch.setattr(script.Agent, method, change(getattr(script.Agent, method)))
    updates = []
    told = pytest.raises(AssertionError, match="make_act and get_action differ")
    with watching(script, lambda *args: updates.append(args)), told:
        script.train(script.Args(**SHORT[name]))
    assert not updates


def test_acting_otherwise_by_one_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of six actions that is another one in a sixth of the steps stops the run, too."""
    make_act = ppo_continuous.Agent.make_act

    def make(agent: Any) -> Callable:
        act, last = make_act(agent), np.arange(6) == 5
        return lambda obs, noise: act(obs, np.where((noise[:, :1] > 1) & last, 0, noise))

    monkeypatch.setattr(ppo_continuous.Agent, "make_act", make)
    flags = SHORT["ppo_continuous"] | {"env_id": "HalfCheetah-v5"}
    with pytest.raises(AssertionError, match="make_act and get_action differ"):
        ppo_continuous.train(ppo_continuous.Args(**flags))


@pytest.mark.parametrize("wrong", [[34], [17, 34]])
def test_acting_otherwise_in_few_steps(wrong: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a short rollout, where 8 steps are compared, one may differ, as at a tie, but not two."""
    make_act = ppo.Agent.make_act

    def make(agent: Any) -> Callable:
        act, steps = make_act(agent), itertools.count()
        return lambda obs, noise: act(obs, noise) ^ (next(steps) in wrong)

    monkeypatch.setattr(ppo.Agent, "make_act", make)
    args = ppo.Args(**SHORT["ppo"] | {"num_envs": 1, "num_steps": 128})
    if len(wrong) == 1:
        ppo.train(args)
    else:
        with pytest.raises(AssertionError, match="make_act and get_action differ"):
            ppo.train(args)


def test_gather_has_no_gradient() -> None:
    """With one process as with several, so that a loss doesn't learn less with several only."""
    assert not ppo.gather(torch.ones(2, requires_grad=True)).requires_grad


def test_running_statistics() -> None:
    """Batches of any size give the mean and variance of all that was seen, far from 0 too."""
    rng = np.random.default_rng(0)
    batches = [
        rng.normal(loc=[100, -3, 0], scale=[1, 0.1, 50], size=(n, 3)) for n in (1, 7, 500, 64)
    ]
    statistics = ppo_continuous.RunningStatistics(3)
    for batch in batches:
        statistics.update(torch.tensor(batch, dtype=torch.float32))
    seen = np.concatenate(batches)
    np.testing.assert_allclose(statistics.mean, seen.mean(0), rtol=1e-3)
    np.testing.assert_allclose(statistics.var, seen.var(0), rtol=2e-2)
    assert statistics.count.item() == pytest.approx(len(seen), abs=0.01)


def normalize(agent: ppo_continuous.Agent, obs: torch.Tensor) -> torch.Tensor:
    """Observations as the agent's networks get them; the same, in floats, for arrays."""
    statistics = agent.obs_statistics
    tensors = obs, statistics.mean, statistics.std
    expected = agent.normalize(*tensors)
    arrays = agent.normalize(*(x.numpy() for x in tensors))
    np.testing.assert_allclose(arrays, expected, rtol=1e-6)
    assert arrays.dtype == np.float32
    return expected


def test_normalized_observations() -> None:
    """Observations are centred, scaled and clipped; the statistics are saved with the weights."""
    agent = continuous_agent()
    obs = torch.randn(200, 5) * 3 + 7
    agent.finish_iteration(obs)
    normalized = normalize(agent, obs)
    torch.testing.assert_close(normalized.mean(0), torch.zeros(5), atol=1e-3, rtol=0)
    torch.testing.assert_close(normalized.std(0), torch.ones(5), atol=1e-2, rtol=0)
    assert normalize(agent, torch.full((1, 5), 1e6)).tolist() == [[10.0] * 5]
    agent.actor[-1].weight.data.normal_()
    torch.testing.assert_close(agent.get_action(obs), agent.actor(normalized))
    torch.testing.assert_close(agent.get_value(obs), agent.critic(normalized)[:, 0])
    copy = continuous_agent()
    copy.load_state_dict(agent.state_dict())
    for method in "get_action", "get_value":
        torch.testing.assert_close(getattr(copy, method)(obs), getattr(agent, method)(obs))
    torch.testing.assert_close(normalize(copy, obs), normalized)
    assert not torch.equal(normalize(continuous_agent(), obs), normalized)


def test_large_observations() -> None:
    """Numbers that are large and hardly change are normalized as well as float32 can tell them."""
    agent = continuous_agent()
    center = torch.tensor([100.1, 2026.0, 101325.3, 12345.678, 1234567.0])
    obs = center + torch.tensor([0.0, 0.0, 0.0, 1e-1, 1.0]) * torch.randn(2048, 5)
    for part in obs.chunk(4):
        agent.finish_iteration(part)
    normalized = normalize(agent, obs)
    torch.testing.assert_close(normalized[:, 3:].std(0), torch.ones(2), rtol=0.1, atol=0)
    assert normalized.abs().max() <= 10


def test_scaled_rewards() -> None:
    """Rewards are divided by the deviation of the discounted return, which episodes restart."""
    agent = continuous_agent()
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(2, 50, 2)).astype(np.float32)
    dones = rng.random((2, 50, 2)) < 0.1
    returns, running = [], np.zeros(2)
    for reward, done in zip(rewards.reshape(100, 2), dones.reshape(100, 2), strict=True):
        running = 0.9 * running + reward
        returns.append(running)
        running = np.where(done, 0, running)
    for i in range(2):  # the second rollout goes on where the first stopped
        scaled = agent.scale_rewards(rewards[i], dones[i], 0.9)
        deviation = np.std(returns[: 50 * (i + 1)])
        np.testing.assert_allclose(scaled, rewards[i] / deviation, rtol=1e-3)
    assert agent.scale_rewards(np.full((1, 2), 1e6, np.float32), dones[0, :1], 0.9).max() == 10


@pytest.mark.parametrize("state_std", [False, True])
def test_floor_of_the_deviation(state_std: bool) -> None:
    """The deviation rises to log_std_min after an update, or to log_std_init if that is less."""
    for first, expected in ((-0.5, -1.0), (-3.0, -3.0)):
        flags = {"state_std": state_std, "log_std_init": first, "log_std_min": -1}
        agent = continuous_agent(**flags)
        log_std = agent.get_distribution(torch.zeros(1, 5))[1]
        assert log_std.min().item() == pytest.approx(first)
        agent.log_std.data.fill_(-4)
        scalars = agent.finish_iteration(torch.randn(10, 5))
        assert scalars["charts/policy_std"] == pytest.approx(np.exp(expected), rel=0.1)
        log_std = agent.get_distribution(torch.randn(10, 5))[1]
        assert log_std.min().item() == pytest.approx(expected, abs=0.1)
        assert log_std.min() >= expected


def test_initial_policy() -> None:
    """The first policy is nearly uniform, or nearly centred; biases are 0."""
    agent = ppo.Agent(Spaces(Box(-1, 1, (5,)), MultiDiscrete([4])), ppo.Args())
    obs = torch.randn(100, 5)
    logits = agent.get_logits(obs, agent.actor(obs))
    assert (logits.softmax(-1) - 0.25).abs().max() < 0.02
    continuous = continuous_agent()
    assert continuous.get_action(torch.randn(100, 5)).abs().max() < 0.1
    assert continuous.log_std.tolist() == [-0.5, -0.5, -0.5]
    for critic in agent.critic, continuous.critic:
        weight = critic[2].weight
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(64), atol=1e-4, rtol=0)
        assert all(not critic[i].bias.any() for i in (0, 2, 4))


def test_atari_samples() -> None:
    """Actions come as often as their probabilities say."""
    torch.manual_seed(0)
    agent, logits = atari_agent(), torch.randn(6)
    samples = (logits + agent.sample_noise(100_000)).argmax(-1)
    shares = torch.bincount(samples, minlength=6) / 100_000
    assert (shares - logits.softmax(-1)).abs().max() < 4 * 0.5 / 100_000**0.5


def test_heads() -> None:
    """Heads begin with a gain of 0.01 (actor) and of 1 (critic)."""
    atari, continuous = atari_agent(), continuous_agent()
    agent = ppo.Agent(ppo.make_envs(ppo.Args(), 1), ppo.Args())
    pairs = [(x.actor[-1], x.critic[-1]) for x in (agent, continuous)]
    for actor, critic in (*pairs, (atari.actor, atari.critic)):
        gram = actor.weight @ actor.weight.T
        torch.testing.assert_close(gram, 1e-4 * torch.eye(len(gram)), rtol=0, atol=1e-7)
        assert critic.weight.norm().item() == pytest.approx(1)


def test_initial_cnn() -> None:
    """Its layers begin with orthogonal weights of gain sqrt(2), and without biases (detail 2)."""
    layers = [x for x in atari_agent().network if isinstance(x, nn.Conv2d | nn.Linear)]
    assert len(layers) == 4
    for layer in layers:
        weight = layer.weight.flatten(1)
        gram = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
        torch.testing.assert_close(gram, 2 * torch.eye(len(gram)), rtol=0, atol=1e-4)
        assert not layer.bias.any()
