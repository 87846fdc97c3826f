"""What people change first: each change works as meant, or fails loudly."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import SHORT, kept_batches, load, only_run, scalars, watching
from torch import nn

MLPS = ["ppo", "ppo_continuous"]
CRITIC = "        self.critic = nn.Sequential("
LOOP = "            if args.anneal_lr:  # detail 4"


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


def by_pytorch(agent: Any, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The actions, as the networks that learn give them."""
    if hasattr(agent, "log_std"):
        return agent.actor(obs) + agent.log_std.exp() * noise
    return (agent.get_logits(obs, agent.actor) + noise).argmax(-1)


def rollouts(
    module: ModuleType, probe: Callable = by_pytorch, **flags: Any
) -> list[SimpleNamespace]:
    """Train. Of each iteration: the rollout, and the actions that the probe says of the agent."""
    sample_noise, noises, kept = module.Agent.sample_noise, [], []

    def keep_noise(*args: Any) -> np.ndarray:
        noises.append(sample_noise(*args))
        return noises[-1]

    def see(agent: Any, batch: Any, indices: torch.Tensor) -> None:
        if len(kept) < len(noises):
            noise = torch.tensor(noises[-1]).flatten(0, 1)
            with torch.no_grad():
                actions = {name: x(agent, batch.obs, noise) for name, x in probes.items()}
            kept.append(SimpleNamespace(obs=batch.obs, taken=batch.actions, agent=agent, **actions))

    probes = {"expected": by_pytorch, "probed": probe}
    module.Agent.sample_noise = keep_noise
    with watching(module, see):
        run(module, **flags)
    assert len(kept) > 1
    return kept


def assert_acts_as_it_learns(kept: list[SimpleNamespace]) -> None:
    """The actions taken are those of the networks that learn."""
    for rollout in kept:
        if rollout.taken.is_floating_point():
            torch.testing.assert_close(rollout.taken, rollout.expected, rtol=1e-4, atol=1e-4)
        else:  # rounding may decide between actions of the same probability
            assert (rollout.taken == rollout.expected).float().mean() > 0.999


@pytest.mark.parametrize("name", MLPS)
def test_layers(name: str) -> None:
    """Normalized layers with another activation act as they learn, and their weights move."""
    kept = rollouts(hacked(name, ("nn.Tanh(),", "nn.LayerNorm(64), nn.ReLU(),")))
    assert_acts_as_it_learns(kept)
    for network in (kept[-1].agent.actor, kept[-1].agent.critic):
        norms = [x.weight for x in network if isinstance(x, nn.LayerNorm)]
        assert len(norms) == 2
        assert all((x != 1).any() for x in norms)


@pytest.mark.parametrize("vf_coef", [0.0, 0.5])
def test_shared_trunk(vf_coef: float) -> None:
    """Layers that actor and critic share learn from both losses, and act."""
    module = hacked("ppo")

    class Shared(module.Agent):
        def __init__(self, envs: Any) -> None:
            super().__init__(envs)
            self.actor[0] = self.critic[0]

    module.Agent = Shared
    kept = rollouts(module, vf_coef=vf_coef, norm_adv=False, total_timesteps=1024)
    agent = kept[-1].agent
    assert agent.actor[0] is agent.critic[0]
    assert_acts_as_it_learns(kept)
    assert (agent.actor[0].bias != 0).any()
    assert (agent.critic[2].bias != 0).any() == (vf_coef > 0)
    saved = module.load_checkpoint(only_run())["optimizer"]
    assert len(saved) == len([*agent.parameters()]) == 10  # not 12


@pytest.mark.parametrize("name", MLPS)
def test_forward_hook(name: str) -> None:
    """A hook that changes what a layer gives does so where it acts and where it learns."""
    hook = "lambda module, args, output: output + 2 * output.square()"
    change = f"        self.actor[1].register_forward_hook({hook})\n{CRITIC}"

    def without(agent: Any, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        hooks, agent.actor[1]._forward_hooks = agent.actor[1]._forward_hooks, OrderedDict()
        actions = by_pytorch(agent, obs, noise)
        agent.actor[1]._forward_hooks = hooks
        return actions

    kept = rollouts(hacked(name, (CRITIC, change)), without)
    assert_acts_as_it_learns(kept)
    assert any((x.taken - x.probed).abs().max() > 0.01 for x in kept)


UNUSED = CRITIC, f"        self.unused = nn.Parameter(torch.ones(3))\n{CRITIC}"


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
@pytest.mark.parametrize("name", MLPS)
def test_unused_parameters(name: str, optimizer: str) -> None:
    """What the loss doesn't use stays under Adam; under AdamW it decays by 0.01 of the rate."""
    module = hacked(name, UNUSED, ("optim.Adam(", f"optim.{optimizer}("))
    flags = {"learning_rate": 0.1, "anneal_lr": False, "update_epochs": 1, "target_kl": None}
    kept = rollouts(module, **flags)
    steps = len(kept) * module.Args(**SHORT[name]).num_minibatches
    expected = 1.0 if optimizer == "Adam" else (1 - 0.1 * 0.01) ** steps
    unused = module.load_checkpoint(only_run())["agent"]["unused"]
    torch.testing.assert_close(unused, torch.full((3,), expected))
    assert (kept[-1].agent.critic[-1].bias != 0).all()


def test_frozen_layer() -> None:
    """A layer without gradients stays as it is, and the others learn."""
    module, before = hacked("ppo"), []

    class Frozen(module.Agent):
        def __init__(self, envs: Any) -> None:
            super().__init__(envs)
            self.critic[0].requires_grad_(False)
            before.append({name: x.clone() for name, x in self.state_dict().items()})

    module.Agent = Frozen
    run(module)
    after = module.load_checkpoint(only_run())["agent"]
    same = {name for name, x in before[0].items() if torch.equal(x, after[name])}
    assert same == {"critic.0.weight", "critic.0.bias"}


def test_two_learning_rates() -> None:
    """The first group's rate falls, the second keeps its own; Adam's first step is the rate."""
    groups = """Adam([
        {"params": agent.actor.parameters()},
        {"params": agent.critic.parameters(), "lr": torch.tensor(4e-3)},
    ],"""
    module = hacked("ppo", ("Adam(agent.parameters(),", groups))
    update, steps = module.update, []

    def watch(agent: Any, optimizer: Any, *rest: Any) -> dict:
        biases = agent.actor[-1].bias, agent.critic[-1].bias
        before = [x.detach().clone() for x in biases]
        metrics = update(agent, optimizer, *rest)
        moves = [(x - y).abs().max().item() for x, y in zip(biases, before, strict=True)]
        steps.append((moves, [float(group["lr"]) for group in optimizer.param_groups]))
        return metrics

    module.update = watch
    run(module, learning_rate=1e-3)
    assert len(steps) == 64
    for i, (_, rates) in enumerate(steps):  # 4 iterations of 16 steps
        assert rates == pytest.approx([1e-3 * (1 - i // 16 / 4), 4e-3])
    assert steps[0][0] == pytest.approx([1e-3, 4e-3], rel=0.1)


def test_module_outside_the_agent() -> None:
    """A parameter that isn't the agent's, but in optimizer and loss, learns: here towards 3."""
    module = hacked(
        "ppo",
        ("class Agent(", "OUTSIDE = nn.Parameter(torch.ones(()))\n\n\nclass Agent("),
        ("Adam(agent.parameters(),", "Adam([*agent.parameters(), OUTSIDE],"),
        ("    loss = policy_loss", "    loss = (OUTSIDE - 3).square() + policy_loss"),
    )
    seen = []
    with watching(module, lambda *_: seen.append(module.OUTSIDE.item())):
        run(module, learning_rate=1e-2, anneal_lr=False)
    assert seen[1] == pytest.approx(1.01, abs=1e-3)  # Adam's first step is its rate
    assert seen == sorted(seen)
    assert 1.2 < seen[-1] < 3


def test_masked_logits() -> None:
    """An action that get_logits alone rules out is never taken, nor in the entropy."""
    logits = "logits = actor(obs)\n        logits[..., 1] = -1e9\n        return logits"
    module = hacked("ppo", ("return actor(obs)", logits))
    kept = rollouts(module, env_id="Acrobot-v1", eval_episodes=1)
    assert_acts_as_it_learns(kept)
    assert all(set(x.taken.tolist()) == {0, 2} for x in kept)
    entropies = [x for _, x in scalars("losses/entropy")]
    assert entropies == pytest.approx([np.log(2)] * 4, abs=0.1)  # of three actions: 1.1


def test_logged_info() -> None:
    """A key of an episode's last info is where gymnasium puts it: a third, on slippery ice."""
    start = 'charts = {"charts/episodic_return": total'
    prob = (
        'charts = {"charts/prob": infos["final_info"]["prob"][i], "charts/episodic_return": total'
    )
    run(hacked("ppo", (start, prob)), env_id="FrozenLake-v1")
    logged = scalars("charts/prob")
    assert [x for _, x in logged] == pytest.approx([1 / 3] * len(logged))
    assert [step for step, _ in logged] == [step for step, _ in scalars("charts/episodic_return")]
    assert len(logged) > 50


def test_normalized_by_a_wrapper() -> None:
    """gymnasium's NormalizeObservation, put where the comment says, is what the agent sees."""
    wrap = "        return FlattenObservation(env)"
    added = f"        env = gym.wrappers.NormalizeObservation(env)\n{wrap}"
    for changes, low, high in (([], 0, 0.2), ([(wrap, added)], 0.5, 2)):
        module = hacked("ppo", *changes)
        with kept_batches(module) as batches:
            run(module, env_id="MountainCar-v0")
        deviations = batches[-1].obs.std(0)
        assert ((low < deviations) & (deviations < high)).all()


@pytest.mark.parametrize("name", MLPS)
def test_overwritten_observations(name: str) -> None:
    """Observations in an array that the environment uses again are kept as they were."""
    module, valued = hacked(name), []
    get_value = module.Agent.get_value

    def keep(agent: Any, obs: torch.Tensor) -> torch.Tensor:
        valued.append(obs.flatten().tolist())
        return get_value(agent, obs)

    module.Agent.get_value = keep
    kwargs = '{"continuous": true}' if name == "ppo_continuous" else "{}"
    flags = {"num_envs": 1, "num_steps": 16, "num_minibatches": 1, "total_timesteps": 16}
    flags |= {"stagger": False, "update_epochs": 1} if name == "ppo_continuous" else {}
    with kept_batches(module) as batches:
        run(module, env_id="probe_envs:Overwriting-v0", env_kwargs=kwargs, **flags)
    assert batches[0].obs.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6] * 2 + [0, 1]
    assert [7, 7, 2] in valued  # where the next observation isn't the next row


LOGPROB = "gather(-1, actions[:, None]).squeeze(-1)", "gather(-1, actions[:, None])"
ENTROPY = "log_softmax).sum(-1)", "log_softmax).sum(-1, True)"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, ("self.critic(obs).squeeze(-1)", "self.critic(obs)")) for name in MLPS),
        ("ppo_atari", ("self.critic(features).squeeze(-1)", "self.critic(features)")),
        *((name, change) for name in ("ppo", "ppo_atari") for change in (LOGPROB, ENTROPY)),
        ("ppo_continuous", ("deviations.square().sum(-1)", "deviations.square().sum(-1, True)")),
    ],
)
def test_wrong_shapes(name: str, change: tuple[str, str]) -> None:
    """A column in place of a vector, which would broadcast to all pairs, stops the run."""
    module = hacked(name, change)
    with pytest.raises((AssertionError, TypeError)):
        run(module, total_timesteps=512)
    assert not (only_run() / "checkpoint.pt").exists()


@pytest.mark.parametrize("compile", [False, True])
def test_clip_coef_that_falls(compile: bool) -> None:
    """The ratio is clipped to the range of the moment, in a compiled gradient step, too.

    The checkpoint has the flag as it was given.
    """
    falls = "            args.clip_coef = 0.01 * (1 - iteration / num_iterations)\n"
    metric = '            "losses/clipfrac"'
    widest = f'            "losses/widest": (clipped_ratio - 1).abs().max(),\n{metric}'
    module = hacked("ppo", (LOOP, falls + LOOP), (metric, widest))
    # With one minibatch, the second epoch's ratios are as far as the range goes.
    run(
        module,
        learning_rate=0.1,
        clip_coef=0.01,
        num_minibatches=1,
        update_epochs=2,
        compile=compile,
    )
    means = [x for _, x in scalars("losses/widest")]  # of the first epoch, 0, and the second
    assert means == pytest.approx([0.005, 0.00375, 0.0025, 0.00125], rel=1e-3)
    assert module.load_checkpoint(only_run())["args"].clip_coef == 0.01
