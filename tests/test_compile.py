"""Compiled gradient steps, other layouts of memory and other devices do the same as plain ones."""

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

REPORTS = [f"losses/{x}" for x in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")]
REPORTS += ["losses/old_approx_kl", "losses/grad_norm"]


def setting(script: ModuleType, device: str = "cpu", **flags: Any) -> tuple[Any, Batch, Any]:
    """An agent, a random batch for it, and its arguments."""
    args = script.Args(**SHORT[script.__name__] | flags)
    torch.manual_seed(1)
    agent, envs = new_agent(script, args).to(device), script.make_envs(args, 1)
    envs.single_observation_space.seed(1)
    samples = np.stack([envs.single_observation_space.sample() for _ in range(64)])
    envs.close()
    noise = agent.sample_noise(np.random.default_rng(1), 64)
    actions = torch.as_tensor(agent.make_act()(samples, noise), device=device)
    obs = torch.as_tensor(samples, device=device)
    with torch.no_grad():
        logprobs, _, values = agent.evaluate_actions(obs, actions)
    logprobs += 0.3 * torch.randn(64, device=device)  # so that some ratios are clipped
    return agent, Batch(obs, actions, logprobs, *torch.randn(2, 64, device=device), values), args


def stepped(
    update: Callable, agent: Any, batch: Batch, args: Any, fused: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights after ten gradient steps on halves of the batch, and what they reported.

    Where arguments are ppo.py's, their clip_coef changes between the steps.
    """
    agent, device = copy.deepcopy(agent), batch.obs.device
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(1e-4, device=device), fused=fused)
    generator, reports = torch.Generator().manual_seed(2), []
    for i in range(10):
        if isinstance(args, ppo.Args):
            args.clip_coef = (0.1, 0.4, 0.2)[i % 3]
        indices = torch.randperm(64, generator=generator)[:32].to(device)
        metrics = update(agent, optimizer, tuple(batch), indices, args)
        reports.append(
            torch.stack([metrics[name] for name in REPORTS])
        )  # the next CUDA graph overwrites them
    return weights(agent), torch.stack(reports)


def weights(agent: torch.nn.Module) -> torch.Tensor:
    """All parameters, one after another."""
    return torch.cat([x.detach().flatten() for x in agent.parameters()])


def compiled(script: ModuleType) -> Callable:
    """The compiled update, as `train` has it."""
    torch._dynamo.config.trace_autograd_ops = True
    torch.compiler.reset()
    return torch.compile(script.update, mode="reduce-overhead")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_compiled_is_eager(name: str, device: str) -> None:
    """From the same batch, ten compiled steps lead to the same weights and reports.

    Those of ppo.py also where clip_coef changes: more is clipped at 0.1 than at 0.4.
    """
    script = MODULES[name]
    agent, batch, args = setting(script, device)
    expected, reported = stepped(script.update, agent, batch, args)
    update = compiled(script)
    got, compiled_reported = stepped(update, agent, batch, args, fused=False)
    # Adam divides by the gradients' size, so that rounding shows most where there is hardly one:
    # what must be small is the difference beside the way that the weights went. It grows wherever
    # rounding moves a sample across the clip's border, so the steps are small.
    assert (expected - weights(agent)).abs().max() > 5e-4
    assert (got - expected).norm() < 0.01 * (expected - weights(agent)).norm()
    torch.testing.assert_close(compiled_reported, reported, rtol=1e-2, atol=1e-3)
    if name == "ppo":
        clipped = compiled_reported[:, REPORTS.index("losses/clipfrac")]
        assert clipped[[0, 3, 6, 9]].min() > clipped[[1, 4, 7]].max()


def test_every_gradient_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --compile, each calls the compiled function, which never is compiled anew, though the
    learning rate falls; without, none does.
    """
    make, calls = torch.compile, []

    def counting(function: Callable, **options: Any) -> Callable:
        result = make(function, **options)
        return lambda *args: calls.append((function, options["disable"])) or result(*args)

    monkeypatch.setattr(torch, "compile", counting)
    with torch._dynamo.config.patch(error_on_recompile=True):
        trained("ppo", compile=True)
    trained("ppo", total_timesteps=512)
    assert calls == [(ppo.update, False)] * 64 + [(ppo.update, True)] * 16


def transposed(agent: torch.nn.Module) -> None:
    """Lay the weights of a linear layer out as their transpose, as weights from JAX are."""
    agent.network[7].weight.data = agent.network[7].weight.data.T.contiguous().T


def channels_last(agent: torch.nn.Module) -> None:
    """Lay the weights of convolutions out in another order in memory."""
    agent.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("lay_out", [channels_last, transposed])
def test_layouts(lay_out: Callable) -> None:
    """A hacker's agent whose weights lie in another order in memory learns the same ones."""
    script = MODULES["ppo_atari"]
    agent, batch, args = setting(script)
    expected, reported = stepped(script.update, agent, batch, args)
    lay_out(agent)
    assert not all(x.is_contiguous() for x in agent.parameters())
    got, also_reported = stepped(script.update, agent, batch, args)
    assert (got - expected).norm() < 0.01 * (expected - weights(agent)).norm()
    torch.testing.assert_close(also_reported, reported, rtol=1e-2, atol=1e-3)


@NEEDS_GPU
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_gpu(name: str, is_compiled: bool) -> None:
    """Every script trains on a GPU, with CUDA graphs too."""
    trained(name, device="cuda", compile=is_compiled)
    losses = [x for _, x in scalars("losses/value_loss")]
    assert len(losses) >= 2
    assert np.isfinite(losses).all()


@pytest.mark.parametrize(("name", "number"), [("ppo", 2), ("ppo_continuous", 1)])
def test_num_threads(name: str, number: int) -> None:
    """PyTorch has the threads that it is given."""
    script, seen, flags = MODULES[name], [], SHORT[name] | {"num_threads": number}
    script.train(script.Args(**flags), lambda *_: seen.append(torch.get_num_threads()) or True)
    assert seen == [number]
