"""What people change first: each change works as meant, or fails loudly."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BOTH, SCRIPTS
from helpers import MODULES, SHORT, Batch, go_on, kept_batches, only_run, probe, scalars, trained
from torch import Tensor, nn

import ppo


@BOTH
def test_networks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that both networks have learns, what isn't in the loss doesn't, and both resume."""
    script, agents = MODULES[name], []

    class Hacked(script.Agent):
        def __init__(self, *inputs: Any) -> None:
            super().__init__(*inputs)
            self.actor[2] = self.critic[2]
            self.unused = nn.Parameter(torch.ones(3))
            agents.append((self, deepcopy(dict(self.named_parameters()))))

    monkeypatch.setattr(script, "Agent", Hacked)
    go_on(script, trained(name), total_timesteps=3072)
    for agent, start in agents:
        same = {x for x, weights in agent.named_parameters() if torch.equal(weights, start[x])}
        assert same == {"unused"}


def test_masked_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action that get_logits rules out, as CleanRL does, is never taken, nor in the entropy."""

    def get_logits(agent: Any, obs: Tensor) -> Tensor:
        mask = torch.tensor([True, False, True], device=obs.device)
        return torch.where(mask, agent.actor(agent.obs_rms(obs)), torch.tensor(-1e8))

    monkeypatch.setattr(ppo.Agent, "get_logits", get_logits)
    with kept_batches(ppo) as batches:
        trained("ppo", env_id="Acrobot-v1", eval_episodes=1)
    assert {*torch.cat([batch.actions for batch in batches]).tolist()} == {0, 2}
    entropies = [x for _, x in scalars("losses/entropy")]
    assert entropies == pytest.approx([np.log(2)] * 4, abs=0.1)  # of three actions: 1.1


def cleanrl_update(agent: Any, optimizer: Any, batch: tuple, indices: Tensor, args: Any) -> dict:
    """Take a gradient step by CleanRL's own four lines."""
    batch = Batch(*(x[indices] for x in batch))
    logprobs, _, values = agent.evaluate_actions(batch.obs, batch.actions)
    ratio = (logprobs - batch.logprobs).exp()
    policy_losses = torch.max(-batch.advantages * ratio, -batch.advantages * ratio.clamp(0.8, 1.2))
    loss = policy_losses.mean() + 0.5 * (values - batch.returns).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"losses/approx_kl": (ratio - 1 - ratio.log()).mean().detach()}


def test_gradient_steps_of_cleanrl(monkeypatch: pytest.MonkeyPatch) -> None:
    """They learn; compiled, where zero_grad() undoes them, they end the run in a sentence."""
    monkeypatch.setattr(ppo, "update", cleanrl_update)
    flags = probe("ppo", "Acted", observed=True) | {"learning_rate": 5e-3, "num_minibatches": 16}
    run = trained("ppo", **flags, total_timesteps=4096)
    assert np.mean(ppo.load_checkpoint(run)["last_returns"]) > 0.9
    with pytest.raises(FloatingPointError, match="gradient of 0"):
        trained("ppo", **flags, compile=True)


@pytest.mark.parametrize("column", [0, 2])  # log-probabilities, values
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
    flags = SHORT["ppo"] | {"num_minibatches": 1, "update_epochs": 2, "anneal_lr": False}
    args = ppo.Args(**flags | {"total_timesteps": 1024}, clip_coef=0.2, compile=compile)

    def change(step: int, score: float) -> None:
        args.clip_coef = 1e-5

    ppo.train(args, change)
    shares = [x for _, x in scalars("losses/clipfrac")]  # the mean over both epochs
    assert shares == pytest.approx([0, 0.5], abs=0.02)
    assert ppo.load_checkpoint(only_run())["args"]["clip_coef"] == 0.2


@pytest.mark.parametrize("name", SCRIPTS)
def test_dropout_is_off_in_evaluations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent trains in training mode, also after an evaluation, which is in the other."""
    modes, script = [], MODULES[name]

    class Agent(script.Agent):
        def act(self, obs: np.ndarray, rng: Any = None) -> np.ndarray:
            modes.append((self.training, rng is not None))  # evaluations are greedy
            return super().act(obs, rng)

    monkeypatch.setattr(script, "Agent", Agent)
    trained(name, eval_episodes=1, eval_interval=1)
    assert {*modes} == {(True, True), (False, False)}
    assert modes[-1] == (False, False) != modes[0]
