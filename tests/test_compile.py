"""Compiled gradient steps, and those on other devices, do the same as plain ones."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU, SCRIPTS
from helpers import MODULES, SHORT, Batch, new_agent, scalars, trained

import ppo


def setting(script: ModuleType, device: str) -> tuple[Any, Batch, Any]:
    """An agent, a random batch for it, and its arguments."""
    args = script.Args(**SHORT[script.__name__])
    torch.manual_seed(1)
    agent, envs = new_agent(script, args).to(device), script.make_envs(args, 1)
    envs.single_observation_space.seed(1)
    samples = np.stack([envs.single_observation_space.sample() for _ in range(64)])
    envs.close()
    actions = torch.as_tensor(agent.act(samples, np.random.default_rng(1)), device=device)
    obs = torch.as_tensor(samples, device=device)
    with torch.no_grad():
        logprobs, _, values = agent.evaluate_actions(obs, actions)
    logprobs += 0.3 * torch.randn(64, device=device)  # so that some ratios are clipped
    return agent, Batch(obs, actions, logprobs, *torch.randn(2, 64, device=device), values), args


def weights(agent: torch.nn.Module) -> torch.Tensor:
    """All parameters, one after another."""
    return torch.cat([x.detach().flatten() for x in agent.parameters()])


def stepped(update: Callable, agent: Any, batch: Batch, args: Any, fused: bool) -> tuple:
    """The weights after ten gradient steps on halves of the batch, and what they reported."""
    agent, device = copy.deepcopy(agent), batch.obs.device
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(1e-4, device=device), fused=fused)
    generator, reports = torch.Generator().manual_seed(2), []
    for _ in range(10):
        indices = torch.randperm(64, generator=generator)[:32].to(device)
        optimizer.zero_grad()
        metrics = update(agent, optimizer, tuple(batch), indices, args)
        reports.append({name: x.clone() for name, x in metrics.items()})  # CUDA graphs reuse x
    return weights(agent), reports


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_compiled_is_eager(name: str, device: str) -> None:
    """From the same batch, ten compiled steps lead to the same weights and reports."""
    script = MODULES[name]
    agent, batch, args = setting(script, device)
    expected = stepped(script.update, agent, batch, args, fused=True)
    torch._dynamo.config.trace_autograd_ops = True
    torch.compiler.reset()
    update = torch.compile(script.update, mode="reduce-overhead")  # as `train` has it
    got = stepped(update, agent, batch, args, fused=False)
    # Adam divides by the gradients' size, so that rounding shows most where there is hardly one:
    # what must be small is the difference beside the way that the weights went. It grows wherever
    # rounding moves a sample across the clip's border, so the steps are small.
    way = expected[0] - weights(agent)
    assert way.abs().max() > 5e-4
    assert (got[0] - expected[0]).norm() < 0.01 * way.norm()
    torch.testing.assert_close(got[1], expected[1], rtol=1e-2, atol=1e-3)


def test_every_gradient_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --compile, each is, once and for all, though the learning rate falls; else none is."""
    make, adam, calls, made = torch.compile, torch.optim.Adam, [], []

    def counting(function: Callable, **options: Any) -> Callable:
        result = make(function, **options)
        return lambda *args: calls.append((function, options["disable"])) or result(*args)

    # A hacker's optimizer has two groups, of which only the first one's rate falls.
    def two_rates(parameters: Any, lr: torch.Tensor, **kwargs: Any) -> torch.optim.Optimizer:
        parameters = [*parameters]
        groups = [{"params": parameters[:6]}, {"params": parameters[6:], "lr": 4 * lr}]
        made.append(adam(groups, lr, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "compile", counting)
    monkeypatch.setattr(torch.optim, "Adam", two_rates)
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        trained("ppo", compile=True)
    rates = [group["lr"].item() for group in made[0].param_groups]
    assert rates == pytest.approx([1e-3 / 4, 4e-3])
    trained("ppo", total_timesteps=512)
    assert calls == [(ppo.update, False)] * 64 + [(ppo.update, True)] * 16


@NEEDS_GPU
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_gpu(name: str, is_compiled: bool) -> None:
    """Every script trains on a GPU, with CUDA graphs too."""
    trained(name, device="cuda", compile=is_compiled)
    losses = [x for _, x in scalars("losses/value_loss")]
    assert len(losses) >= 2
    assert np.isfinite(losses).all()
