"""What people change first: each change works as meant, or fails loudly."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SCRIPTS
from helpers import MODULES, kept_batches, new_agent, only_run, scalars, trained, watching
from torch import Tensor, nn, optim

import ppo

MLPS = ["ppo", "ppo_continuous"]


def hacked(name: str, change: Callable, patch: pytest.MonkeyPatch, **flags: Any) -> tuple:
    """Train with changed agents; the weights before the training, and the agent after it."""
    script, starts = MODULES[name], []

    class Hacked(script.Agent):
        def __init__(self, *inputs: Any) -> None:
            super().__init__(*inputs)
            change(self)
            starts.append(deepcopy(self.state_dict()))

    patch.setattr(script, "Agent", Hacked)
    checkpoint = script.load_checkpoint(trained(name, **flags))
    agent = new_agent(script, checkpoint["args"])
    agent.load_state_dict(checkpoint["agent"])
    learning = [x for x in agent.parameters() if x.requires_grad]
    assert len(checkpoint["optimizer"]) == len(learning)  # a shared one is one
    return starts[0], agent


def share(agent: Any) -> None:
    """A layer that is in both networks."""
    agent.actor[-5] = agent.critic[-5]


def add_unused(agent: Any) -> None:
    """A parameter that isn't in the loss."""
    agent.unused = nn.Parameter(torch.ones(3))


CRITIC = {"critic.2.weight", "critic.2.bias", "critic.4.weight", "critic.4.bias"}


@pytest.mark.parametrize(
    ("name", "change", "still", "flags"),
    [
        *((name, share, set(), {}) for name in MLPS),
        ("ppo", share, CRITIC, {"vf_coef": 0.0}),  # the policy's loss moves the shared layer
        *((name, add_unused, {"unused"}, {}) for name in MLPS),
    ],
)
def test_networks(
    name: str, change: Callable, still: set, flags: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another network acts as it learns, and all of it learns but what should be still."""
    start, agent = hacked(name, change, monkeypatch, **flags)
    same = {x for x, weights in agent.named_parameters() if torch.equal(weights, start[x])}
    assert same == still
    obs = torch.randn(500, agent.actor[-5].in_features)
    acted, output = agent.make_act()(obs.numpy(), 0.0), agent.actor(obs).detach()
    expected = output.argmax(-1) if name == "ppo" else output
    np.testing.assert_allclose(acted, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compile", [False, True])
def test_freezing(compile: bool) -> None:
    """What is frozen after an iteration stays as it is, though Adam has moved it before."""
    agents, seen = [], []

    def freeze(step: int, score: float) -> None:
        agents[0].critic.requires_grad_(False)
        seen.append(deepcopy(agents[0].state_dict()))

    with watching(ppo, lambda agent, *_: agents.append(agent)):
        trained("ppo", freeze, compile=compile)
    moved = {x for x, weights in seen[0].items() if not torch.equal(weights, seen[-1][x])}
    assert moved == {x for x in seen[0] if x.startswith("actor.")}


@pytest.mark.parametrize("name", MLPS)
def test_adamw(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AdamW in Adam's place, what is in no loss decays, by 0.01 of the rate a step."""
    monkeypatch.setattr(optim, "Adam", optim.AdamW)
    flags = {"learning_rate": 0.1, "anneal_lr": False, "update_epochs": 1, "num_minibatches": 4}
    _, agent = hacked(name, add_unused, monkeypatch, **flags, target_kl=None)
    assert agent.unused.tolist() == pytest.approx([(1 - 0.1 * 0.01) ** 16] * 3)


def test_module_outside_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in loss and optimizer, but not in the agent, learns, at a rate of its own."""
    outside, seen, made = nn.Parameter(torch.tensor(0.0)), [], []
    adam, get_value = optim.Adam, ppo.Agent.get_value

    def with_outside(parameters: Any, lr: Tensor, **kwargs: Any) -> optim.Optimizer:
        groups = [{"params": [*parameters]}, {"params": [outside], "lr": torch.tensor(4e-3)}]
        made.append(adam(groups, lr, **kwargs))
        return made[0]

    monkeypatch.setattr(optim, "Adam", with_outside)
    monkeypatch.setattr(ppo.Agent, "get_value", lambda *inputs: get_value(*inputs) + outside)
    with watching(ppo, lambda *_: seen.append(outside.item())):
        trained("ppo", learning_rate=1e-3)
    assert seen[1] == pytest.approx(4e-3, rel=1e-3)  # Adam's first step is its rate
    assert seen == sorted(seen)  # as all returns are positive
    assert seen[-1] > 0.1
    rates = [float(group["lr"]) for group in made[0].param_groups]
    assert rates == pytest.approx([1e-3 / 4, 4e-3])  # the last of four iterations


def test_masked_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action that get_logits alone rules out is never taken, nor in the entropy."""

    def get_logits(agent: Any, obs: Any, actor: Callable) -> Any:
        logits = actor(obs)
        logits[..., 1] = -1e9
        return logits

    monkeypatch.setattr(ppo.Agent, "get_logits", get_logits)
    with kept_batches(ppo) as batches:
        trained("ppo", env_id="Acrobot-v1", eval_episodes=1)
    assert {*torch.cat([batch.actions for batch in batches]).tolist()} == {0, 2}
    entropies = [x for _, x in scalars("losses/entropy")]
    assert entropies == pytest.approx([np.log(2)] * 4, abs=0.1)  # of three actions: 1.1


@pytest.mark.parametrize("column", [0, 1, 2])  # log-probabilities, entropies, values
@pytest.mark.parametrize("name", SCRIPTS)
def test_wrong_shapes(name: str, column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column in place of a vector, which would broadcast to all pairs, stops the run."""
    evaluate_actions = MODULES[name].Agent.evaluate_actions

    def wrong(*inputs: Any) -> list[Tensor]:
        vectors = [*evaluate_actions(*inputs)]
        vectors[column] = vectors[column][:, None]
        return vectors

    monkeypatch.setattr(MODULES[name].Agent, "evaluate_actions", wrong)
    with pytest.raises(AssertionError):
        trained(name)
    assert not (only_run() / "checkpoint.pt").exists()


@pytest.mark.parametrize("compile", [False, True])
def test_clip_coef_that_changes(compile: bool) -> None:
    """The ratio is clipped to the range of the moment; the checkpoint has the flag as given."""
    # With one minibatch, all ratios are 1 in the first epoch, and not far from it in the second.
    flags = {"num_minibatches": 1, "update_epochs": 2, "anneal_lr": False, "eval_episodes": 0}
    args = ppo.Args(total_timesteps=2048, clip_coef=0.2, compile=compile, **flags)

    def change(step: int, score: float) -> None:
        args.clip_coef = 0.3 if args.clip_coef == 1e-5 else 1e-5

    ppo.train(args, change)
    shares = [x for _, x in scalars("losses/clipfrac")]  # the mean over both epochs
    assert shares == pytest.approx([0, 0.5, 0, 0.5], abs=0.02)
    assert ppo.load_checkpoint(only_run())["args"].clip_coef == 0.2


@pytest.mark.parametrize("name", SCRIPTS)
def test_dropout_is_off_in_evaluations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent trains in training mode, and is evaluated in the other."""
    modes, script = [], MODULES[name]

    class Agent(script.Agent):
        def make_act(self, *args: Any) -> Callable:
            modes.append(self.training)
            return super().make_act(*args)

    monkeypatch.setattr(script, "Agent", Agent)
    run = trained(name)
    script.evaluate(replace(script.load_checkpoint(run)["args"], eval_episodes=1), run)
    assert modes[-1] is False
    assert all(modes[:-1])
