"""The recipes: each applies to its script exactly, trains, and does what it says."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import load, only_run, scalars
from report import TABLES

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
NAMES = [
    "adaptive_kl",
    "cosine_lr",
    "dict_obs",
    "early_stop",
    "log_info",
    "relu_layernorm",
    "rnd",
    "smooth_l1",
]


def apply(name: str) -> Path:
    """The script with the recipe, in this folder."""
    recipe = RECIPES / f"{name}.diff"
    script = re.search(r"^--- (\w+\.py)$", recipe.read_text(), re.MULTILINE)[1]
    Path(script).write_text((RECIPES.parent / script).read_text())
    for flags in (["--dry-run"], []):
        patch = ["patch", "-p0", "-F0", "-i", str(recipe), *flags]
        done = subprocess.run(patch, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert "offset" not in done.stdout, done.stdout
        assert "fuzz" not in done.stdout, done.stdout
    return Path(script)


def run(script: Path, *flags: Any) -> None:
    """Train as a user does."""
    command = [sys.executable, str(script), "--eval-episodes", "0", *map(str, flags)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}  # for probe_envs
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr


def saved_agent() -> dict[str, torch.Tensor]:
    """The agent in the checkpoint of the only run."""
    return torch.load(only_run() / "checkpoint.pt", weights_only=True)["agent"]


def setting(module: ModuleType, **flags: Any) -> tuple[Any, Any, Any]:
    """An agent, its optimizer, and its arguments."""
    args = module.Args(**flags)
    envs = module.make_envs(args, 1)
    torch.manual_seed(1)
    agent = module.Agent(envs, args)
    envs.close()
    rate = torch.tensor(1e-4)
    return agent, torch.optim.Adam(agent.parameters(), rate, eps=1e-5), args


def test_all_are_tested() -> None:
    """Each recipe has a test of its own here, and nothing else is in the folder."""
    assert sorted(path.name for path in RECIPES.iterdir()) == [f"{name}.diff" for name in NAMES]
    assert {f"test_{name}" for name in NAMES} <= globals().keys()


@pytest.mark.parametrize("name", NAMES)
def test_form(name: str) -> None:
    """A recipe says what it does and what it reached, is short, and applies exactly."""
    lines = (RECIPES / f"{name}.diff").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("--- "))
    assert 3 <= first <= 5
    assert all(re.match("# .", line) and len(line) <= 100 for line in lines[:first])
    assert re.search(r"Reached: .*\d", "\n".join(lines[:first]))
    rows = [x for x in TABLES["recipes"]().splitlines() if f"{name}.diff" in x or "`ppo.py" in x]
    for figure in re.findall(r"-?[\d.]+ ± [\d.]+", "\n".join(lines[:first])):
        assert any(figure in row for row in rows), figure
    assert f"patch -p0 < recipes/{name}.diff && python ppo" in "\n".join(lines[:first])
    changed = [line for line in lines[first + 2 :] if line[:1] in ("+", "-")]
    assert 0 < len(changed) < 60
    assert max(len(line) for line in changed) <= 101
    compile(apply(name).read_text(), name, "exec")


def test_relu_layernorm() -> None:
    """Three normalized layers of 256 ReLUs in each network, trained and saved."""
    script = apply("relu_layernorm")
    run(script, "--total-timesteps", 2048)
    state = saved_agent()
    agent, *_ = setting(load(script))
    for network in (agent.actor, agent.critic):
        kinds = [type(x).__name__ for x in network]
        assert kinds == ["Linear", "LayerNorm", "ReLU"] * 3 + ["Linear"]
    for name in ("actor", "critic"):
        assert [tuple(state[f"{name}.{i}.weight"].shape) for i in (1, 4, 7)] == [(256,)] * 3
        assert state[f"{name}.3.weight"].shape == (256, 256)
        assert any((state[f"{name}.{i}.weight"] != 1).any() for i in (1, 4, 7))  # it learns


def test_rnd() -> None:
    """The bonus is positive, falls, and is part of what is learned from, not of the returns."""
    run(apply("rnd"), "--total-timesteps", 16384, "--gamma", 0, "--bonus-coef", 0.5)
    bonus = np.array([x for _, x in scalars("charts/intrinsic_reward")])
    assert len(bonus) == 32
    assert bonus.min() > 0
    assert bonus[-8:].mean() < 0.5 * bonus[:8].mean()
    # Without a discount, the target of a value is the reward alone, which CartPole gives as 1.
    targets = np.array([x for _, x in scalars("debug/returns")])
    np.testing.assert_allclose(targets, 1 + 0.5 * bonus, rtol=1e-4)
    assert scalars("charts/episodic_return") == scalars("charts/episodic_length")
    state = saved_agent()
    assert {"target.0.weight", "predictor.0.weight", "obs_norm.running_mean"} <= state.keys()
    assert state["obs_norm.num_batches_tracked"] == 32


def test_rnd_sees_true_next_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus is of the step's own next observation, also where the next episode begins."""
    module, batches, states = load(apply("rnd")), [], []
    update = module.update

    def spy(agent: Any, optimizer: Any, batch: Any, *rest: Any) -> Any:
        if not batches or not torch.equal(batch.obs, batches[-1].obs):
            batches.append(module.Batch(*(x.clone() for x in batch)))
            errors = agent.get_error(batch.next_obs).detach()  # before the first gradient step
            states.append({name: x.clone() for name, x in agent.state_dict().items()})
            states[-1]["square"] = errors.square().mean()
        return update(agent, optimizer, batch, *rest)

    monkeypatch.setattr(module, "update", spy)
    args = {"total_timesteps": 1024, "eval_episodes": 0, "checkpoint_interval": 1}
    module.train(module.Args(**args))
    assert len(batches) == 2
    for batch in batches:
        obs, next_obs = (x.view(128, 4, 4) for x in (batch.obs, batch.next_obs))
        is_over = (next_obs[..., 0].abs() > 2.4) | (next_obs[..., 2].abs() > 12 * np.pi / 180)
        assert is_over.sum() > 10  # only a last observation is beyond the limits
        same = (obs[1:] == next_obs[:-1]).all(-1)
        assert torch.equal(same, ~is_over[:-1])
        # One step is a fiftieth of a second: x moves by the speed before it.
        torch.testing.assert_close(next_obs[..., 0], obs[..., 0] + 0.02 * obs[..., 1])
    # The target stays; each rollout counts in the statistics, the first one at once.
    assert torch.equal(states[0]["target.0.weight"], states[1]["target.0.weight"])
    assert not torch.equal(states[0]["predictor.0.weight"], states[1]["predictor.0.weight"])
    for i in (1, 2):
        means = torch.stack([batch.next_obs.mean(0) for batch in batches[:i]]).mean(0)
        torch.testing.assert_close(states[i - 1]["obs_norm.running_mean"], means)
        squares = torch.stack([state["square"] for state in states[:i]]).mean()
        torch.testing.assert_close(states[i - 1]["mean_square"], squares)


def test_log_info() -> None:
    """The mean is over all steps, with those that end episodes; other keys stay away."""
    sizes = ["--num-envs", 2, "--num-steps", 10, "--num-minibatches", 2, "--update-epochs", 1]
    task = ["--env-id", "probe_envs:Numbered-v0", "--env-kwargs", "continuous", "True"]
    run(apply("log_info"), *task, "--total-timesteps", 40, *sizes)
    assert scalars("charts/x_velocity") == [(20, 3.0), (40, 3.0)]


def test_log_info_of_half_cheetah() -> None:
    """HalfCheetah's speed is logged in every iteration."""
    run(apply("log_info"), "--total-timesteps", 4096, "--update-epochs", 1)
    speeds = scalars("charts/x_velocity")
    assert [step for step, _ in speeds] == [2048, 4096]
    assert all(0 < abs(x) < 5 for _, x in speeds)


@pytest.mark.parametrize(("target", "factor"), [(1e-12, 2), (1e6, 0.5)])
def test_adaptive_kl(target: float, factor: float) -> None:
    """The coefficient doubles where the KL is too large, halves where too small, and is saved."""
    run(apply("adaptive_kl"), "--total-timesteps", 2048, "--kl-target", target)
    assert [x for _, x in scalars("charts/kl_coef")] == [factor**i for i in (1, 2, 3, 4)]
    assert saved_agent()["kl_coef"] == factor**4


def test_adaptive_kl_near_the_target() -> None:
    """The coefficient stays where the last epoch's KL is near the target."""
    script = apply("adaptive_kl")
    flags = ["--total-timesteps", "512", "--num-minibatches", "1", "--update-epochs", "2"]
    run(script, *flags)
    ((_, kl),) = scalars("losses/approx_kl")  # the mean of the first epoch's 0 and the last one's
    assert kl > 0
    Path("runs").rename("before")
    run(script, *flags, "--kl-target", 2 * kl)
    assert scalars("charts/kl_coef") == [(512, 1.0)]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_adaptive_kl_penalizes(is_compiled: bool) -> None:
    """The loss has the coefficient of the moment, compiled too, and no clipping."""
    module = load(apply("adaptive_kl"))
    agent, optimizer, args = setting(module, norm_adv=False)
    obs, actions = torch.randn(8, 4), torch.zeros(8, 1, dtype=torch.int64)
    torch.compiler.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        update = torch.compile(module.update, mode="reduce-overhead", disable=not is_compiled)
        for factor in (1, 2, 4):
            agent.kl_coef.mul_(factor)
            logprobs, _, values = (x.detach() for x in agent.evaluate_actions(obs, actions))
            batch = (obs, actions, logprobs - 1, torch.ones(8), values, values)  # all ratios are e
            metrics = update(agent, optimizer, module.Batch(*batch), torch.arange(8), args)
            kl = math.e - 1 - 1
            assert metrics["losses/approx_kl"].item() == pytest.approx(kl, rel=1e-4)
            expected = agent.kl_coef.item() * kl - math.e
            assert metrics["losses/policy_loss"].item() == pytest.approx(expected, rel=1e-4)
    assert agent.kl_coef == 8


def test_cosine_lr() -> None:
    """The learning rate follows half a wave."""
    run(apply("cosine_lr"), "--total-timesteps", 4096, "--learning-rate", 1e-3)
    expected = 0.5e-3 * (1 + np.cos(np.pi * np.arange(8) / 8))
    np.testing.assert_allclose([x for _, x in scalars("charts/learning_rate")], expected, rtol=1e-5)


def test_early_stop() -> None:
    """The training ends with the first mean return that is high enough, and its checkpoint."""
    run(apply("early_stop"), "--stop-at", 25, "--total-timesteps", 40960)
    means = np.array([x for _, x in scalars("charts/episodic_return")])
    saved = torch.load(only_run() / "checkpoint.pt", weights_only=True)
    assert np.mean(saved["last_returns"]) == means[-100:].mean() >= 25
    steps = 512 * saved["iteration"]
    assert scalars("charts/SPS")[-1][0] == steps < 40960
    ended = np.array([step for step, _ in scalars("charts/episodic_return")])
    before = means[ended <= steps - 512]
    assert len(before) < 100 or before[-100:].mean() < 25


@pytest.mark.parametrize("clip", [False, True])
def test_smooth_l1(clip: bool) -> None:
    """Two errors by hand, of which one is above 1."""
    module = load(apply("smooth_l1"))
    agent, optimizer, args = setting(module, clip_vloss=clip)
    agent.critic[-1].weight.data.zero_()
    agent.critic[-1].bias.data.fill_(1.0)
    obs, actions = torch.randn(2, 4), torch.zeros(2, 1, dtype=torch.int64)
    logprobs = agent.evaluate_actions(obs, actions)[0].detach()
    returns, values = torch.tensor([0.5, 3.0]), torch.zeros(2)
    batch = module.Batch(obs, actions, logprobs, torch.randn(2), returns, values)
    loss = module.update(agent, optimizer, batch, torch.arange(2), args)["losses/value_loss"]
    # Errors 0.5 and -2; where the value moves only from 0 to 0.2, errors -0.3 and -2.8.
    expected = (0.5 * 0.5**2 + 2.8 - 0.5) / 2 if clip else (0.5 * 0.5**2 + 2 - 0.5) / 2
    assert loss.item() == pytest.approx(expected)


def test_search() -> None:
    """The further flags with which benchmark/search.py trains apply, and train."""
    flags = "--obs-eps 0.1 --beta2 0.99 --critic-lr 2 --step-kl 2 --actor-size 32 --lr-end 0.5"
    flags += " --critic-epochs --total-timesteps 4096"
    run(apply("../benchmark/search"), *flags.split())
    assert saved_agent()["actor.0.weight"].shape == (32, 17)


def test_dict_obs() -> None:
    """Image and vector reach their networks whole, and together solve what neither alone does."""
    script = apply("dict_obs")
    flags = ["--env-id", "probe_envs:Signs-v0", "--learning-rate", 2e-3]
    run(script, *flags, "--total-timesteps", 12288)
    returns = [x for _, x in scalars("charts/episodic_return")]
    assert np.mean(returns[:50]) < 5  # of 8; 4 by chance
    assert np.mean(returns[-50:]) > 7
    assert {"actor.0.cnn.0.weight", "critic.0.mlp.0.weight"} <= saved_agent().keys()


def test_dict_obs_splits() -> None:
    """What the CNN and the MLP get is what the environment shows."""
    module, seen = load(apply("dict_obs")), {}
    args = module.Args(env_id="probe_envs:Signs-v0")
    envs = module.make_envs(args, 3)
    agent = module.Agent(envs, args)
    features = agent.actor[0]
    for name in ("cnn", "mlp"):
        network = getattr(features, name)
        network.register_forward_hook(lambda _, x, __, name=name: seen.update({name: x[0]}))
    obs, _ = envs.reset(seed=1)
    agent.get_action(torch.as_tensor(obs))
    for i, env in enumerate(envs.unwrapped.envs):
        side, sign = env.unwrapped.side, env.unwrapped.sign
        image = np.zeros((3, 8, 8), np.float32)
        image[:, :, 4 * side : 4 * side + 4] = 1
        np.testing.assert_array_equal(seen["cnn"][i], image)
        assert seen["mlp"][i].tolist() == [0, 2 * sign - 1, 0]
    envs.close()
