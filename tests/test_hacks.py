"""What people change first: each change works as meant, or fails loudly."""

import itertools
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, SHORT, kept_batches, load, only_run, same_weights


def hacked(name: str, *changes: tuple[str, str]) -> ModuleType:
    """A copy of the script, in this folder, with other text in these places."""
    text = (ROOT / f"{name}.py").read_text()
    for old, new in changes:
        assert old in text, f"{name}.py has no {old}"
        text = text.replace(old, new)
    script = Path(f"{name}_hacked.py")
    script.write_text(text)
    return load(script)


def run(module: ModuleType, **flags: Any) -> None:
    """Train for a moment."""
    module.train(module.Args(**SHORT[module.__name__.removesuffix("_hacked")] | flags))


def watched(
    module: ModuleType, probe: Callable[..., Any] | None = None, **flags: Any
) -> list[SimpleNamespace]:
    """Train. At each iteration's first gradient step: the stored rollout, the noise it was acted
    with, and what the agent of the moment, and the probe, say of both.
    """
    sample_noise, update = module.Agent.sample_noise, module.update
    noises, rollouts = [], []

    def keep_noise(agent: Any, *shape: int) -> torch.Tensor:
        noises.append(sample_noise(agent, *shape))
        return noises[-1]

    def watch(agent: Any, optimizer: Any, batch: Any, *rest: Any) -> Any:
        if not rollouts or not torch.equal(batch.obs, rollouts[-1].obs):
            obs, noise = batch.obs.clone(), noises[-1].flatten(0, 1)
            with torch.no_grad():
                logprobs = agent.evaluate_actions(obs.clone(), batch.actions)[0]
                seen = {"expected": agent.get_action(obs.clone(), noise), "agent": agent}
                seen["probed"] = probe and probe(agent, obs.clone(), noise)
            seen |= {"ratio": (logprobs - batch.logprobs).exp(), "actions": batch.actions.clone()}
            rollouts.append(SimpleNamespace(obs=obs, noise=noise, **seen))
        return update(agent, optimizer, batch, *rest)

    module.Agent.sample_noise, module.update = keep_noise, watch
    run(module, **flags)
    assert len(rollouts) > 1
    return rollouts


def assert_acts_as_it_learns(rollouts: list[SimpleNamespace]) -> None:
    """The actions are those of the agent that learns, and so are their log-probabilities."""
    for rollout in rollouts:
        if rollout.actions.is_floating_point():
            torch.testing.assert_close(rollout.actions, rollout.expected, rtol=1e-4, atol=1e-4)
        else:  # rounding may decide between actions of the same probability
            assert (rollout.actions == rollout.expected).float().mean() > 0.999
        ones = torch.ones_like(rollout.ratio)
        torch.testing.assert_close(rollout.ratio, ones, rtol=1e-3, atol=1e-3)


def trained(module: ModuleType, **flags: Any) -> tuple[dict, Any]:
    """The parameters of the agent as it was made, and the agent as it was trained."""
    make, made = module.Agent, []

    def keep(*args: Any) -> Any:
        agent = make(*args)
        made.append(({name: x.clone() for name, x in agent.state_dict().items()}, agent))
        return agent

    module.Agent = keep
    run(module, **flags)
    return made[0]


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_activation(name: str) -> None:
    """Another activation is what acts and what learns."""
    rollouts = watched(hacked(name, ("nn.Tanh()", "nn.GELU()")))
    assert_acts_as_it_learns(rollouts)
    agent, obs = rollouts[-1].agent, rollouts[-1].obs
    if name == "ppo_continuous":
        obs = agent.normalize(obs, agent.obs_statistics.mean, agent.obs_statistics.std)
    for layer in (agent.critic[0], torch.nn.functional.gelu, agent.critic[2]):
        obs = layer(obs)
    obs = agent.critic[4](torch.nn.functional.gelu(obs)).squeeze(-1)
    torch.testing.assert_close(agent.get_value(rollouts[-1].obs.clone()), obs)


def test_activation_learns() -> None:
    """GELU balances CartPole's pole."""
    module = hacked("ppo", ("nn.Tanh()", "nn.GELU()"))
    flags = {"total_timesteps": 20_480, "learning_rate": 2e-3, "eval_episodes": 0}
    assert module.train(module.Args(**flags)) > 100  # 22 by chance


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_layernorm(name: str) -> None:
    """Normalized layers act as they learn, and their weights move."""
    module = hacked(name, ("nn.Tanh(),", "nn.LayerNorm(64), nn.Tanh(),"))
    rollouts = watched(module)
    assert_acts_as_it_learns(rollouts)
    weights = [x.weight for x in rollouts[-1].agent.actor if isinstance(x, torch.nn.LayerNorm)]
    assert len(weights) == 2
    assert all((x != 1).any() for x in weights)


def test_clamp() -> None:
    """Observations clipped closer are what acts, too: by hand, and not as it was before."""

    def act(agent: Any, obs: torch.Tensor, noise: torch.Tensor) -> list[torch.Tensor]:
        statistics, std = agent.obs_statistics, agent.log_std.exp()
        x = (obs - statistics.mean) / statistics.var.sqrt()
        return [agent.actor(x.clamp(-limit, limit)) + noise * std for limit in (0.1, 10)]

    change = "/ std).clip(-10, 10)", "/ std).clip(-0.1, 0.1)"
    rollouts = watched(hacked("ppo_continuous", change), act)
    assert_acts_as_it_learns(rollouts)
    for rollout in rollouts:
        now, before = rollout.probed
        torch.testing.assert_close(rollout.actions, now, rtol=1e-4, atol=1e-4)
    assert (now - before).abs().max() > 0.01


APART = """
    def finish_iteration(self, obs: Tensor) -> dict[str, float]:
        loss = self.predictor(obs).square().mean()
        for x in torch.autograd.grad(loss, self.predictor.parameters()):
            assert x.abs().max() > 0
        with torch.no_grad():
            self.predictor.bias += 1
        return {}

"""


@pytest.mark.parametrize("compile", [False, True])
def test_unused_parameters(compile: bool) -> None:
    """The optimizer leaves alone what the loss doesn't use, which may be trained apart."""
    module = hacked(
        "ppo",
        (
            "        self.critic = nn.Sequential(",
            "        self.unused = nn.Linear(obs_size, 3)\n"
            "        self.predictor = nn.Linear(obs_size, 3)\n"
            "        self.critic = nn.Sequential(",
        ),
        ("\n\nBatch = namedtuple", f"{APART}\nBatch = namedtuple"),  # it replaces the method
    )
    before, agent = trained(module, compile=compile)
    after = agent.state_dict()
    for name in ("unused.weight", "unused.bias", "predictor.weight"):
        assert torch.equal(after[name], before[name])
    expected = before["predictor.bias"]
    for _ in range(4):  # iterations
        expected = expected + 1
    assert torch.equal(after["predictor.bias"], expected)
    assert not torch.equal(after["actor.0.weight"], before["actor.0.weight"])


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_forward_hook(name: str) -> None:
    """A hook that changes what a layer gives does so where it acts and where it learns."""
    hook = "lambda module, args, output: output + 2 * output.square()"
    critic = "        self.critic = nn.Sequential("
    change = f"        self.actor[1].register_forward_hook({hook})\n{critic}"

    def without(agent: Any, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        hooks, agent.actor[1]._forward_hooks = agent.actor[1]._forward_hooks, OrderedDict()
        actions = agent.get_action(obs, noise)
        agent.actor[1]._forward_hooks = hooks
        return actions

    rollouts = watched(hacked(name, (critic, change)), without)
    assert_acts_as_it_learns(rollouts)
    assert any((x.actions - x.probed).abs().max() > 0.01 for x in rollouts)


NORMALIZE = "obs = self.normalize(obs, self.obs_statistics.mean, self.obs_statistics.std)"
IN_PLACE = {
    "get_value": ("ppo", [("self.critic(obs)", "self.critic(obs{})")]),
    "acting": (
        "ppo",
        [
            ("self.actor(obs)) + noise", "self.actor(obs{})) + noise"),
            (" actor(obs)) + noise", " actor(obs{})) + noise"),
            ("self.actor(obs)).log_softmax", "self.actor(obs / 2)).log_softmax"),
        ],
    ),
    "evaluate_actions": (
        "ppo",
        [
            ("self.actor(obs)) + noise", "self.actor(obs / 2)) + noise"),
            (" actor(obs)) + noise", " actor(obs / 2)) + noise"),
            ("self.actor(obs)).log_softmax", "self.actor(obs{})).log_softmax"),
            ("self.get_value(obs)\n", "self.get_value(obs_before)\n"),
            (
                "        logprobs = self.get_logits(",
                "        obs_before = obs.clone()\n        logprobs = self.get_logits(",
            ),
        ],
    ),
    "continuous": (
        "ppo_continuous",
        [(f"{NORMALIZE}\n        return self.critic(obs)", "return self.critic(obs{})")],
    ),
}


@pytest.mark.parametrize("place", IN_PLACE)
def test_in_place(place: str) -> None:
    """Observations changed in place within the agent stay as the environment gave them, or PyTorch
    refuses, as where the actor's gradient needs what the critic changes.
    """
    name, changes = IN_PLACE[place]
    apart = watched(hacked(name, *((old, new.format(".__truediv__(2)")) for old, new in changes)))
    assert_acts_as_it_learns(apart)
    module = hacked(name, *((old, new.format(".__itruediv__(2)")) for old, new in changes))
    if place == "get_value":
        with pytest.raises(RuntimeError, match="inplace"):
            run(module)
        return
    in_place = watched(module)
    for a, b in zip(apart, in_place, strict=True):
        assert torch.equal(a.obs, b.obs)
        assert torch.equal(a.actions, b.actions)
    assert same_weights(apart[-1].agent, in_place[-1].agent)


TEMPERED = {  # in get_action, and in make_act
    "ppo": [
        ("self.actor(obs)) + noise", "self.actor(obs)) + self.temperature * noise"),
        (" actor(obs)) + noise", " actor(obs)) + self.temperature * noise"),
    ],
    "ppo_continuous": [
        ("noise * log_std.exp()", "self.temperature * noise * log_std.exp()"),
        ("noise * np.exp(log_std)", "self.temperature * noise * np.exp(log_std)"),
    ],
}


def tempered(name: str, *changes: tuple[str, str]) -> ModuleType:
    """A script with these changes, whose agent's temperature falls after every iteration."""
    actor = "        self.actor = nn.Sequential("
    finish = "    def finish_iteration(self, obs: Tensor) -> dict[str, float]:\n"
    return hacked(
        name,
        *changes,
        (actor, f"        self.temperature = 1.0\n{actor}"),
        (finish, f"{finish}        self.temperature /= 10\n"),
    )


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_state_that_changes(name: str) -> None:
    """An attribute that changes after an iteration does so where it acts, too, in the next one."""

    def before(agent: Any, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return agent.get_action(obs, noise * 10)  # as it was an iteration before

    rollouts = watched(tempered(name, *TEMPERED[name]), before)
    assert_acts_as_it_learns(rollouts)
    for rollout in rollouts[1:]:
        assert (rollout.actions - rollout.probed).abs().max() > 1e-3
    assert rollouts[-1].agent.temperature == pytest.approx(1e-4)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_acting_changed_in_one_place(name: str, place: int) -> None:
    """Where only one of get_action and make_act is changed, the run stops, and names both."""
    with pytest.raises(AssertionError, match="make_act and get_action differ"):
        run(tempered(name, TEMPERED[name][place]))


def test_two_learning_rates() -> None:
    """Each group learns at its own falling rate; what is frozen stays."""
    module = hacked(
        "ppo",
        (
            "Adam(agent.parameters(),",
            "Adam([{'params': agent.actor.parameters()},"
            " {'params': agent.critic.parameters(), 'lr': 4e-3}],",
        ),
        (
            "        # Choices with fewer",
            "        self.critic[0].requires_grad_(False)\n        # Choices with fewer",
        ),
    )
    update, steps = module.update, []

    def watch(agent: Any, optimizer: Any, *rest: Any) -> Any:
        before = [[x.clone() for x in group["params"]] for group in optimizer.param_groups]
        metrics = update(agent, optimizer, *rest)
        moves = [
            max((x - y).abs().max().item() for x, y in zip(old, group["params"], strict=True))
            for old, group in zip(before, optimizer.param_groups, strict=True)
        ]
        steps.append((moves, [float(group["lr"]) for group in optimizer.param_groups]))
        return metrics

    module.update = watch
    before, agent = trained(module, learning_rate=1e-3)
    after = agent.state_dict()
    for i, (_, rates) in enumerate(steps):  # 4 iterations of 16 steps
        rate = 1e-3 * (1 - i // 16 / 4)
        assert rates == pytest.approx([rate, 4 * rate])
    assert len(steps) == 64
    assert steps[0][0] == pytest.approx([1e-3, 4e-3], rel=0.1)  # Adam's first step is its rate
    assert torch.equal(after["critic.0.weight"], before["critic.0.weight"])
    assert not torch.equal(after["critic.2.weight"], before["critic.2.weight"])


def test_monte_carlo() -> None:
    """Returns summed up by hand in GAE's place are GAE's with a lambda of 1, at cuts, too."""
    trace = "advantages[t] = advantage = deltas[t] + discounts[t] * advantage"
    by_hand = """target = scaled_rewards[t] + args.gamma * ~dones[t] * target
                        target += args.gamma * next_values[t] * truncations[t]
                        advantages[t] = target - values[t]"""
    loop = "                    for t in reversed(range(args.num_steps)):"
    start = f"                    target = last_values[:local_num_envs]\n{loop}"
    flags = {"checkpoint_interval": 1, "eval_episodes": 0}
    expected = watched_advantages(hacked("ppo"), gae_lambda=1.0, **flags)
    found = watched_advantages(hacked("ppo", (trace, by_hand), (loop, start)), **flags)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def watched_advantages(module: ModuleType, **flags: Any) -> torch.Tensor:
    """Train without learning; the advantages of all iterations."""
    with kept_batches(module) as batches:
        run(module, learning_rate=1e-30, **flags)
    return torch.stack([batch.advantages for batch in batches])


def test_flag_that_falls() -> None:
    """A flag that falls during the training is as it was in the checkpoint, for a resumed run."""
    annealed = "            if args.anneal_lr:  # detail 4; overwrites any other schedule\n"
    falls = "            args.ent_coef = 0.01 * (1 - iteration / num_iterations)\n"
    run(hacked("ppo", (annealed, falls + annealed)), ent_coef=0.01)
    saved = torch.load(only_run() / "checkpoint.pt", weights_only=True)
    assert json.loads(saved["args"])["ent_coef"] == 0.01


@pytest.mark.parametrize("compile", [False, True])
def test_clip_coef_that_falls(compile: bool) -> None:
    """The ratio is clipped to the range of the moment, in a compiled gradient step, too."""
    annealed = "            if args.anneal_lr:  # detail 4; overwrites any other schedule\n"
    falls = "            args.clip_coef = 0.01 * (1 - iteration / num_iterations)\n"
    metric = '            "losses/clipfrac"'
    module = hacked(
        "ppo",
        (annealed, falls + annealed),
        (metric, f'            "widest": (clipped_ratio - 1).abs().max(),\n{metric}'),
    )
    update, widest = module.update, []

    def watch(agent: Any, optimizer: Any, batch: Any, indices: Any, args: Any) -> Any:
        metrics = module.inner(agent, optimizer, batch, indices, args)
        widest.append((args.clip_coef, metrics["widest"].item()))
        return metrics

    module.inner = torch.compile(update, disable=not compile)
    module.update = watch
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        run(module, learning_rate=1e-2)
    by_iteration = dict(max(group) for _, group in itertools.groupby(widest, lambda x: x[0]))
    assert len(by_iteration) == 4
    for clip_coef, found in by_iteration.items():
        assert found == pytest.approx(clip_coef, rel=1e-3)


@pytest.mark.parametrize("name", ["ppo", "ppo_atari"])
def test_resumed_with_another_optimizer(name: str) -> None:
    """Adam's moments of other parameters are refused."""
    run(hacked(name))
    module = hacked(name, ("Adam(agent.parameters(),", "Adam([*agent.parameters()][::-1],"))
    with pytest.raises(module.UsageError, match="the optimizer's order differs"):
        run(module, resume=str(only_run()), total_timesteps=10**5)


def test_dropout() -> None:
    """The greedy evaluation has none, and so is the same each time."""
    bias = "        # Choices with fewer"
    module = hacked("ppo", (bias, f"        self.actor.insert(4, nn.Dropout())\n{bias}"))
    agents, make = [], module.Agent

    def keep(*args: Any) -> Any:
        agents.append(make(*args))
        return agents[-1]

    run(module, total_timesteps=512, num_steps=128)
    module.Agent = keep
    module.evaluate(module.Args(eval_episodes=1), only_run())
    obs = torch.randn(100, 4)
    logits = [agents[0].actor(obs) for _ in range(2)]
    assert torch.equal(*logits)


def test_value_changed_in_one_place() -> None:
    """A critic of its own must be the critic everywhere."""
    head = "        self.critic = layer_init(nn.Linear(512, 1), std=1.0)\n"
    other = "        self.other = layer_init(nn.Linear(512, 1), std=1.0)\n"
    value = ("self.critic(self.get_features(obs))", "self.other(self.get_features(obs))")
    module = hacked("ppo_atari", (head, head + other), value)
    with pytest.raises(AssertionError, match="get_value and evaluate_actions differ"):
        run(module)
    run(hacked("ppo_atari", (head, head + other), value, ("self.critic(f", "self.other(f")))


@pytest.mark.parametrize(
    "change",
    [
        ("gather(-1, actions[..., None]).squeeze(-1)", "gather(-1, actions[..., None])"),
        ("-(logprobs.exp() * logprobs).sum(-1)", "-(logprobs.exp() * logprobs).sum(-1, True)"),
        ("self.critic(features).squeeze(-1)", "self.critic(features)"),
    ],
)
def test_wrong_shapes(change: tuple[str, str]) -> None:
    """A column in place of a vector would broadcast to all pairs."""
    with pytest.raises(AssertionError, match=r"not \(B,\)|get_value and evaluate_actions differ"):
        run(hacked("ppo_atari", change), num_minibatches=1)
