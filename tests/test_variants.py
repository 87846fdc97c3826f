"""The recurrent variants differ little from their scripts, and remember what they should."""

import inspect
import subprocess
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import ppo_continuous_recurrent
import ppo_recurrent
import pytest
import torch
from helpers import assert_same, content, go_on, latest_run, probe
from probe_envs import Scripted
from torch import Tensor

import ppo
import ppo_continuous

BASES = {ppo_recurrent: ppo, ppo_continuous_recurrent: ppo_continuous}
SHORT = {"total_timesteps": 1024, "num_envs": 4, "num_steps": 64, "num_minibatches": 4}
SHORT |= {"sequence_length": 16, "update_epochs": 2, "eval_episodes": 0}
pytestmark = pytest.mark.parametrize("script", BASES)


def arguments(script: ModuleType, env: str = "", keywords: Any = (), **flags: Any) -> Any:
    """Arguments of a short run, of a probe or of what the script is for."""
    is_continuous = hasattr(script.Args, "stagger")
    own = {"env_id": "Pendulum-v1" if is_continuous else "CartPole-v1"}
    if env:
        own = probe("ppo_continuous" if is_continuous else "ppo", env, **dict(keywords))
        own |= {"stagger": False, "target_kl": None}
    flags = SHORT | own | flags
    return script.Args(**{name: x for name, x in flags.items() if hasattr(script.Args, name)})


def make_agent(script: ModuleType) -> Any:
    """An agent as a run begins with it."""
    envs = script.make_envs(arguments(script), 1)
    envs.close()
    return script.Agent(envs, *[-0.5] * (script is ppo_continuous_recurrent), hidden_size=64)


def step(agent: Any, obs: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """The LSTM's equations for one step: its features, and the states after it."""
    obs = agent.obs_rms(obs) if hasattr(agent, "obs_rms") else obs
    lstm, (output, cell) = agent.lstm, states.chunk(2, -1)
    from_obs = obs @ lstm.weight_ih_l0.T + lstm.bias_ih_l0
    gates = from_obs + output @ lstm.weight_hh_l0.T + lstm.bias_hh_l0
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    output = o.sigmoid() * cell.tanh()
    return torch.cat([output, obs], -1), torch.cat([output, cell], -1)


def functions(module: ModuleType) -> dict[str, str]:
    """The sources of the functions, and of the methods of `Agent`."""
    members = vars(module) | vars(module.Agent)
    own = {
        name: x for name, x in members.items() if getattr(x, "__module__", "") == module.__name__
    }
    return {name: inspect.getsource(x) for name, x in own.items() if inspect.isfunction(x)}


def test_difference(script: ModuleType) -> None:
    """`diff` with the script shows at most 140 lines, in the functions that are named here."""
    command = ["diff", BASES[script].__file__, script.__file__]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    assert 0 < sum(line[0] in "<>" for line in lines) <= 140
    base, variant = functions(BASES[script]), functions(script)
    differing = {name for name in base | variant if base.get(name) != variant.get(name)}
    of_agent = {"__init__", "remember", "get_features", "make_act"}
    others = {"check", "make_envs", "update", "set_up_torch", "evaluate", "train"}
    assert differing == of_agent | others


def test_first_weights(script: ModuleType) -> None:
    """Biases are 0, but 1 for the forget gate; recurrent weights are orthogonal (detail 32)."""
    lstm = make_agent(script).lstm
    biases = (lstm.bias_ih_l0 + lstm.bias_hh_l0).view(4, 64)  # input, forget, cell, output
    assert biases.tolist() == [[0] * 64, [1] * 64, [0] * 64, [0] * 64]
    product = lstm.weight_hh_l0.T @ lstm.weight_hh_l0
    torch.testing.assert_close(product, torch.eye(64), rtol=0, atol=1e-5)


def test_features(script: ModuleType) -> None:
    """Features and gradients are those of the equations, piece by piece from the given states."""
    agent = make_agent(script)
    torch.nn.init.normal_(agent.lstm.bias_ih_l0)
    obs, states = torch.randn(11, agent.lstm.input_size), torch.randn(11, 128)
    is_first, starts, steps = torch.zeros(11, dtype=torch.bool), [0, 4, 5, 9, 11], []
    for start, end in pairwise(starts):
        is_first[start], state = True, states[start]
        for t in range(start, end):
            features, state = step(agent, obs[t], state)
            steps.append(features)
    expected, got = torch.stack(steps), agent.get_features(obs, states, is_first)
    torch.testing.assert_close(got, expected)
    parameters, weights = [*agent.lstm.parameters(), *agent.critic.parameters()], torch.randn(11)
    losses = ((weights * agent.get_value(x)).sum() for x in (got, expected))
    torch.testing.assert_close(*(torch.autograd.grad(loss, parameters) for loss in losses))


@pytest.mark.parametrize("recompute", [False, True])
def test_rollouts(script: ModuleType, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learned from, against the LSTM's equations and sums, step by step."""
    update, latest, carried, after, rollouts = script.update, [None], [None], {}, []

    def see(agent: Any, optimizer: Any, batch: tuple, indices: Tensor, args: Any) -> dict:
        sequences = indices.view(-1, 8)  # minibatches are of whole ones
        assert (sequences[:, 0] % 8 == 0).all()
        assert (sequences == sequences[:, :1] + torch.arange(8)).all()
        if batch is not latest[0]:
            latest[0] = batch
            rollouts.append(not recompute or len(rollouts) % 2 == 0)
            with torch.no_grad():
                compare(agent, rollouts[-1], *(x.unflatten(0, (4, 16)) for x in batch))
                obs, states, is_first, actions, logprobs, *_ = (x[indices] for x in batch)
                features = agent.get_features(obs, states, is_first)
                ratios = (agent.evaluate_actions(features, actions)[0] - logprobs).exp()
                assert ((ratios - 1).abs() < 1e-5).all() == rollouts[-1]
        return update(agent, optimizer, batch, indices, args)

    def compare(agent: Any, is_rollout: bool, *batch: Tensor) -> None:
        _, states, _, actions, logprobs, advantages, returns, _ = batch  # (environments, steps)
        played = [x[-16:] for x in Scripted.played[-4:]]  # of the present environments
        columns = (np.array([[x[i] for x in steps] for steps in played]) for i in range(5))
        obs, rewards, next_obs, terminated, truncated = (torch.tensor(x) for x in columns)
        is_new = len(Scripted.played[-1]) == 16
        state, values, last_values = torch.zeros(4, 128) if is_new else carried[0], [], []
        for t in range(16):
            if is_rollout:
                torch.testing.assert_close(states[:, t], state)
                features, after[t] = step(agent, obs[:, t], state)
                logprob, _, _ = agent.evaluate_actions(features, actions[:, t])
                torch.testing.assert_close(logprobs[:, t], logprob)
            features, state = step(agent, obs[:, t], states[:, t] if t % 8 == 0 else state)
            values.append(agent.get_value(features))
            last_values.append(agent.get_value(step(agent, next_obs[:, t], after[t])[0]))
            state = state * ~(terminated | truncated)[:, t, None]
        if is_rollout:
            carried[0] = state
        values, last_values = torch.stack(values, 1), torch.stack(last_values, 1)
        is_last = truncated | (torch.arange(16) == 15)
        next_values = torch.where(is_last, last_values, values.roll(-1, 1)) * ~terminated
        if hasattr(agent, "return_rms"):
            rewards = (rewards / agent.return_rms.std).clamp(-10, 10)
        deltas = rewards + 0.9 * next_values - values
        # A step's advantage is a sum to its episode's end.
        dones, steps = (terminated | truncated).int(), torch.arange(16)
        episode = dones.cumsum(1) - dones
        discounts = (0.9 * 0.8) ** (steps - steps[:, None]) * (steps >= steps[:, None])
        weights = discounts * (episode[:, :, None] == episode[:, None])
        expected = (weights @ deltas.float()[..., None])[..., 0]
        torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(returns, expected + values, rtol=1e-4, atol=1e-5)

    monkeypatch.setattr(script, "update", see)
    sizes = {"num_steps": 16, "sequence_length": 8, "num_minibatches": 2, "total_timesteps": 320}
    flags = {"learning_rate": 0.01, "gamma": 0.9, "gae_lambda": 0.8, "checkpoint_interval": 3}
    flags |= sizes | {"recompute_advantages": recompute}
    keywords = {"patterns": "----,--t-c,c--b-t,tcb"}
    script.train(arguments(script, "Scripted", keywords, **flags))
    assert len(rollouts) == (10 if recompute else 5)


def test_probes(script: ModuleType) -> None:
    """What was shown three steps before is used; what the episode before showed is forgotten."""
    flags = {"num_envs": 16, "num_steps": 32, "total_timesteps": 12_288, "update_epochs": 4}
    # A guess, all that the script without a memory can do, is worth 0.5; continuously, up to -0.25.
    guess, best = (0.7, 0.9) if script is ppo_recurrent else (-0.24, -0.2)
    runs = (script, "Remembered"), (script, "Leaking"), (BASES[script], "Remembered")
    for trained, env in runs:
        args = arguments(trained, env, learning_rate=3e-3, **flags)
        score, knows = trained.train(args), (trained, env) == runs[0]
        for x in score, trained.evaluate(replace(args, eval_episodes=100), latest_run()):
            assert x > best if knows else x < guess


def test_an_evaluation_forgets(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its episodes, of four steps, begins with a state of zeros, and goes on from there."""
    args = arguments(script, "Remembered")
    script.train(args)
    remember = mock.create_autospec(script.Agent.remember, side_effect=script.Agent.remember)
    monkeypatch.setattr(script.Agent, "remember", remember)
    script.evaluate(replace(args, eval_episodes=3), latest_run())
    assert len(remember.call_args_list) == 12
    zeros = after = torch.zeros(1, 128)
    for t, call in enumerate(remember.call_args_list):
        agent, obs, states = call.args
        torch.testing.assert_close(states, zeros if t % 4 == 0 else after)
        _, after = step(agent, obs[0], states)


def test_resumed(script: ModuleType) -> None:
    """A run that crashed after a checkpoint, and goes on, ends as the uninterrupted one does."""
    args = arguments(script, checkpoint_interval=2)  # of 4 iterations
    script.train(args)
    whole = latest_run()

    def crash(global_step: int, mean_return: float) -> None:
        if global_step == 768:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script.train(args, crash)
    run = latest_run()
    assert script.load_checkpoint(run)["global_step"] == 512
    go_on(script, run)
    assert_same(content(run), content(whole))


def test_mask_velocity(script: ModuleType) -> None:
    """Velocities are 0 in all that is observed, and nothing else is."""
    kwargs = {"LunarLander-v3": '{"continuous": true}'} if script is not ppo_recurrent else {}
    for env_id in script.VISIBLE:
        flags = {"env_id": env_id, "env_kwargs": kwargs.get(env_id, "{}")}
        envs = script.make_envs(arguments(script, mask_velocity=True, **flags), 1)
        obs = [envs.reset(seed=1)[0], *(envs.step(envs.action_space.sample())[0] for _ in range(9))]
        envs.close()
        is_hidden = (np.concatenate(obs) == 0).all(0)
        hidden = {"CartPole-v1": [1, 3], "Pendulum-v1": [2], "LunarLander-v3": [2, 3, 5, 6, 7]}
        assert np.flatnonzero(is_hidden).tolist() == hidden[env_id]  # 6, 7: legs in the air


def test_bad_input(script: ModuleType) -> None:
    """Sizes that don't fit, and a mask for what has none, end in one sentence."""
    for flags, problem in (
        ({"sequence_length": 48}, "must divide args.num_steps"),
        ({"num_minibatches": 32}, "must divide the rollout's sequences"),
        ({"sequence_length": 0}, "sequence_length must be"),
        ({"env_id": "Acrobot-v1", "mask_velocity": True}, "mask_velocity is for"),
        ({"vectorization": "vector_entry_point", "mask_velocity": True}, "mask_velocity is for"),
    ):
        with pytest.raises(script.UsageError, match=problem):
            script.train(arguments(script, **flags))


@pytest.mark.slow
def test_compiled(script: ModuleType) -> None:
    """Compiled, the weights become the same, but for rounding."""
    weights = []
    for is_compiled in (False, True):
        script.train(arguments(script, compile=is_compiled, target_kl=None))
        weights.append(script.load_checkpoint(latest_run())["agent"])
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)
