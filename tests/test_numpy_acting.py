"""The recipes numpy_acting: NumPy acts as PyTorch does, or the run ends in a sentence."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BOTH
from helpers import SHORT, kept_batches, load, new_agent
from test_recipes import patched
from torch import nn

RECIPES = {"ppo": "numpy_acting", "ppo_continuous": "numpy_acting_continuous"}


def make_agent(name: str) -> tuple[ModuleType, Any]:
    """The script with the recipe, and an agent of it that is far from uniform."""
    script = load(patched(name, RECIPES[name]))
    torch.manual_seed(1)
    agent = new_agent(script, script.Args(**SHORT[name]))
    agent.actor[-1].weight.data.mul_(100)
    agent.obs_rms.update(3 + 5 * torch.randn(1000, agent.actor[0].in_features))
    return script, agent


def observations(agent: Any) -> np.ndarray:
    """As environments give them, some of them far out."""
    return np.random.default_rng(1).normal(3, 30, (64, agent.actor[0].in_features))


@BOTH
def test_acts_alike(name: str) -> None:
    """The same actions of the same generator; of one row, too, and of weights that have changed."""
    _, agent = make_agent(name)
    obs = observations(agent)
    for rows in (obs, obs[:1], -obs):
        act, rng, same_rng = agent.make_act(rows), *map(np.random.default_rng, (2, 2))
        for part in (rows, 2 * rows):
            np.testing.assert_allclose(act(part, rng), agent.act(part, same_rng), 1e-4, 1e-4)
        agent.actor[0].weight.data.neg_()
        agent.obs_rms.update(torch.as_tensor(obs, dtype=torch.float32))
    assert len(np.unique(act(obs, rng))) > 1


@BOTH
def test_trains(name: str) -> None:
    """The first rollout is that of the script without the recipe, and others follow."""
    kept = []
    for recipes in ([], [RECIPES[name]]):
        script = load(patched(name, *recipes))
        with kept_batches(script) as batches:
            script.train(script.Args(**SHORT[name]))
        kept.append(batches)
    torch.testing.assert_close(kept[0][0], kept[1][0], rtol=1e-3, atol=1e-3)
    assert len(kept[0]) == len(kept[1]) == 4


@BOTH
def test_other_networks(name: str) -> None:
    """Another layer, a hook, or another distribution than the actor's end in a sentence."""
    script, agent = make_agent(name)
    obs = observations(agent)
    agent.actor.insert(1, nn.LayerNorm(64))
    with pytest.raises(script.UsageError, match="in_numpy doesn't know LayerNorm"):
        agent.make_act(obs)
    del agent.actor[1]
    agent.make_act(obs)
    hook = agent.actor[0].register_forward_hook(lambda module, inputs, output: 1.1 * output)
    with pytest.raises(script.UsageError, match="make_act must do what"):
        agent.make_act(obs)
    hook.remove()
    method = "get_logits" if name == "ppo" else "get_distribution"
    original = getattr(agent, method)
    if name == "ppo":
        agent.get_logits = lambda obs: original(obs).index_fill(-1, torch.tensor(0), -1e8)
    else:
        agent.get_distribution = lambda obs: (original(obs)[0], original(obs)[1] + 0.1)
    with pytest.raises(script.UsageError, match=f"make_act must do what {method}"):
        agent.make_act(obs)
