"""The recipes: each applies to its script without fuzz, trains, and does what it says."""

import itertools
import math
import re
import subprocess
import sys
from functools import partial
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
CONTINUOUS = {"tanh_normal", "bound_cost", "recompute_advantages"}
# A training that solves a probe, and a much shorter one.
PROBE = {"num_steps": 32, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 3e-3}
PROBE |= {"total_timesteps": 512 * 25, "num_envs": 16, "ent_coef": 0.01, "eval_episodes": 0}
SHORT = PROBE | {"num_envs": 4, "update_epochs": 2, "total_timesteps": 256}
# Where a recipe can be tried.
BOUNDED = {"env_id": "probe_envs:Bounded-v0", "stagger": False}
FLAGS = dict.fromkeys(CONTINUOUS, BOUNDED) | {
    "action_mask": probe("ppo", "Masked"),
    "dict_obs": probe("ppo", "Signs"),
    "images": probe("ppo", "Lit"),
    "multi_discrete": probe("ppo", "Choices", kind="multi_discrete"),
}


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


BOTH = [("images", "ppo_continuous"), ("relu_layernorm", "ppo_continuous")]


@pytest.mark.parametrize(("name", "script"), [*((name, None) for name in DIFFS), *BOTH])
def test_head(name: str, script: str | None) -> None:
    """A recipe's head says what it does, and how to use it; what comes of it is tidy."""
    head, diff = DIFFS[name].split("--- ", 1)
    head, original = head.splitlines(), diff.splitlines()[0]
    assert 2 <= len(head) <= 4
    assert all(re.match("# .", line) and len(line) <= 100 for line in head)
    command = f"# patch -o my_ppo.py {original} recipes/{name}.diff"
    assert head[-2 if "torchrun" in name else -1].startswith(command)
    path = patched(script or original.removesuffix(".py"), name)
    for check in (["check", "--ignore=I"], ["format", "--check"]):  # I: which module is whose
        command = [sys.executable, "-m", "ruff", *check, "--config", ROOT / "pyproject.toml", path]
        assert subprocess.run(command).returncode == 0


@pytest.mark.parametrize(
    "name", ["action_mask", "adaptive_kl", "multi_discrete", "rnd", "tanh_normal"]
)
def test_compiles_and_resumes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed, it learns compiled what it learns eagerly, from what was saved."""
    module, flags = recipe(name), FLAGS.get(name, {})
    train(module, **flags, total_timesteps=128)
    run = latest_run()
    saved = (run / "checkpoint.pt").read_bytes()
    _, expected = train(module, **flags, resume=str(run), total_timesteps=384)
    (run / "checkpoint.pt").write_bytes(saved)
    make = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda f, mode, disable: make(f, disable=disable))
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        _, agent = train(module, **flags, resume=str(run), total_timesteps=384, compile=True)
    assert module.load_checkpoint(run)["global_step"] == 384
    torch.testing.assert_close(agent.state_dict(), expected.state_dict(), rtol=1e-2, atol=1e-3)


PAIRS = ["rnd action_mask", "adaptive_kl rnd", "bound_cost recompute_advantages"]
PAIRS += ["action_mask multi_discrete", "action_mask multi_discrete relu_layernorm"]
PAIRS += ["adaptive_kl relu_layernorm", "rnd relu_layernorm", "bound_cost relu_layernorm"]
PAIRS += ["tanh_normal relu_layernorm", "recompute_advantages relu_layernorm"]
PAIRS += ["dict_obs relu_layernorm", "images relu_layernorm"]


@pytest.mark.parametrize("names", PAIRS)
def test_pairs(names: str) -> None:
    """Recipes that people combine, applied in this order, train and play together."""
    flags = {k: x for name in names.split() for k, x in FLAGS.get(name, {}).items()}
    if "action_mask multi_discrete" in names:
        flags = probe("ppo", "MaskedChoices")
    train(recipe(*names.split()), **flags, eval_episodes=1)
    assert values_of("eval/return").size == 1


def test_numpy_acting_knows_no_layernorm() -> None:
    """What can't act in NumPy is refused, in a sentence."""
    module = recipe("numpy_acting", "relu_layernorm")
    with pytest.raises(module.UsageError, match="LayerNorm"):
        train(module)


def test_relu_layernorm() -> None:
    """Three normalized layers of ReLUs in each network, which learn."""
    _, agent = train(recipe("relu_layernorm"))
    for network in (agent.actor, agent.critic):
        kinds = [type(x).__name__ for x in network]
        assert kinds == ["Linear", "LayerNorm", "ReLU"] * 3 + ["Linear"]
        assert [network[i].out_features for i in (0, 3, 6)] == [256, 256, 64]
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
    flags, seen = BOUNDED | {"target_kl": None}, []

    def see(agent: Any, batch: Any, indices: torch.Tensor) -> None:
        with torch.no_grad():
            seen.append((agent.get_value(batch.obs), batch))

    module = recipe("recompute_advantages")
    with watching(module, see):
        _, agent = train(module, **flags, recompute_advantages=anew)
    for epoch, (values, batch) in enumerate(seen[::4]):  # the first of four minibatches
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
    image = torch.tensor(shown["image"]).permute(2, 0, 1)[None] / 255
    vector = (torch.tensor(shown["vector"]) - agent.obs_rms.mean[:3]) / agent.obs_rms.std[:3]
    expected = torch.cat([agent.cnn(image), vector[None]], -1)
    torch.testing.assert_close(agent.get_features(torch.tensor(obs)), expected)


@pytest.mark.parametrize(
    ("script", "shape"), [*(("ppo", x) for x in ([12, 10, 3], [3, 12, 10], [12, 10])), BOTH[0]]
)
def test_images(script: str, shape: Any) -> None:
    """The lit side is found, of 8 steps 4 by chance; bytes are kept, (channels, height, width)."""
