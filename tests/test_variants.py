"""The recurrent variants differ little from their scripts, and remember what they should."""

import inspect
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import ppo_continuous_recurrent
import ppo_recurrent
import pytest
import torch
from helpers import assert_same, content, go_on, latest_run, new_agent, probe, watching
from probe_envs import Scripted
from test_advantages import GAMMA, LAMBDA, brute_force, deviation
from torch import Tensor

import ppo
import ppo_continuous

BASES = {ppo_recurrent: ppo, ppo_continuous_recurrent: ppo_continuous}
SHORT = {"total_timesteps": 512, "num_envs": 4, "num_steps": 64, "num_minibatches": 4}
SHORT |= {"sequence_length": 16, "update_epochs": 2, "eval_episodes": 0, "target_kl": None}
pytestmark = pytest.mark.parametrize("script", BASES)


def arguments(script: ModuleType, env: str = "", keywords: Any = (), **flags: Any) -> Any:
    """Arguments of a short run, of a probe or of what the script is for."""
    is_continuous = hasattr(script.Args, "stagger")
    own = {"env_id": "Pendulum-v1" if is_continuous else "CartPole-v1"}
    if env:
        own = probe("ppo_continuous" if is_continuous else "ppo", env, **dict(keywords))
        own |= {"stagger": False}
    flags = SHORT | own | flags
    return script.Args(**{name: x for name, x in flags.items() if hasattr(script.Args, name)})


def step(agent: Any, obs: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """The LSTM's equations for one step: its features, and the states after it."""
    obs = agent.obs_rms(obs)
    lstm, (output, cell) = agent.lstm, states.chunk(2, -1)
    from_obs = obs @ lstm.weight_ih_l0.T + lstm.bias_ih_l0
    gates = from_obs + output @ lstm.weight_hh_l0.T + lstm.bias_hh_l0
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    output = o.sigmoid() * cell.tanh()
    return torch.cat([output, obs], -1), torch.cat([output, cell], -1)


def functions(module: ModuleType) -> dict[str, str]:
    """The sources of the functions, and of the methods of `Agent`."""
    members = [*vars(module).values(), *vars(module.Agent).values()]
    own = [x for x in members if getattr(x, "__module__", "") == module.__name__]
    return {x.__name__: inspect.getsource(x) for x in own if inspect.isfunction(x)}


def test_same_memory(script: ModuleType) -> None:
    """What a variant adds is the other one's text; of what it shares, just two functions are."""
    base, variant = functions(BASES[script]), functions(script)
    (other,) = (functions(x) for x in BASES if x is not script)
    for name in base.keys() & variant.keys() & other.keys():
        is_same = base[name] == variant[name]
        assert is_same == (name in ("layer_init", "load_checkpoint")), name
    for name in variant.keys() - base.keys():
        assert variant[name] == other[name], name


def test_first_weights(script: ModuleType) -> None:
    """Biases are 0, but 1 for the forget gate; recurrent weights are orthogonal (detail 32)."""
    lstm = new_agent(script, arguments(script)).lstm
    biases = (lstm.bias_ih_l0 + lstm.bias_hh_l0).view(4, 64)  # input, forget, cell, output
    assert biases.tolist() == [[0] * 64, [1] * 64, [0] * 64, [0] * 64]
    product = lstm.weight_hh_l0.T @ lstm.weight_hh_l0
    torch.testing.assert_close(product, torch.eye(64), rtol=0, atol=1e-5)


def test_features(script: ModuleType) -> None:
    """Features and gradients are those of the equations, piece by piece from the given states."""
    agent = new_agent(script, arguments(script))
    torch.nn.init.normal_(agent.lstm.bias_ih_l0)
    obs, states = torch.randn(11, agent.lstm.input_size), torch.randn(11, 128)
    agent.obs_rms.update(3 * obs + 1)
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


def test_rollouts(script: ModuleType) -> None:
    """What is learned from, against the LSTM's equations and sums, step by step."""
    seen, learned_from, carried = [], [], [torch.zeros(4, 128)]

    def see(agent: Any, batch: tuple, indices: Tensor) -> None:
        learned_from.extend(indices.tolist())
        sequences = indices.view(-1, 8)  # minibatches are of whole ones
        assert (sequences[:, 0] // 4 % 8 == 0).all()
        assert (sequences == sequences[:, :1] + 4 * torch.arange(8)).all()

    def see_first(agent: Any, batch: tuple, indices: Tensor) -> None:
        seen.append(batch)
        with torch.no_grad():
            compare(agent, *(x.unflatten(0, (16, 4)) for x in batch))
            obs, states, is_first, actions, logprobs, *_ = (x[indices] for x in batch)
            features = agent.get_features(obs, states, is_first)
            ratios = (agent.evaluate_actions(features, actions)[0] - logprobs).exp()
        torch.testing.assert_close(ratios, torch.ones(32))

    def compare(agent: Any, *batch: Tensor) -> None:
        got_obs, states, is_first, actions, logprobs, advantages, returns, values = batch
        played = [x[-16:] for x in Scripted.played]
        columns = (np.array([[x[t][i] for x in played] for t in range(16)]) for i in range(5))
        obs, rewards, next_obs, terminated, truncated = map(torch.tensor, columns)
        dones, next_values = terminated | truncated, torch.zeros(16, 4)
        torch.testing.assert_close(got_obs, obs)
        for t in range(16):
            torch.testing.assert_close(states[t], carried[0])
            begins = dones[t - 1] if t % 8 else torch.ones(4, dtype=torch.bool)
            assert torch.equal(is_first[t], begins)
            features, after = step(agent, obs[t], carried[0])
            logprob, _, value = agent.evaluate_actions(features, actions[t])
            torch.testing.assert_close((logprobs[t], values[t]), (logprob, value))
            next_values[t] = agent.get_value(step(agent, next_obs[t], after)[0])
            carried[0] = after * ~dones[t, :, None]
        scaled = (rewards / deviation()).clip(-10, 10)
        deltas = scaled + GAMMA * next_values * ~terminated - values
        expected = [brute_force(deltas[:, i].numpy(), dones[:, i]) for i in range(4)]
        np.testing.assert_allclose(advantages.T, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(returns, advantages + values)

    Scripted.played.clear()
    flags = {"num_steps": 16, "sequence_length": 8, "num_minibatches": 2, "total_timesteps": 320}
    flags |= {"learning_rate": 0.01, "gamma": GAMMA, "gae_lambda": LAMBDA}
    keywords = {"patterns": "----,--t-c,c--b-t,tcb"}
    with watching(script, see), watching(script, see_first, once=True):
        script.train(arguments(script, "Scripted", keywords, **flags))
    assert len(seen) == 5
    assert np.bincount(learned_from).tolist() == [10] * 64  # each step in both epochs


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
        with torch.no_grad():
            _, after = step(agent, obs[0], states)


def test_resumed(script: ModuleType) -> None:
    """A run goes on with its weights, but with states of zeros; twice the same, bit for bit."""
    first = []

    def see(agent: Any, batch: tuple, indices: Tensor) -> None:
        if not first:
            first.append({name: x.clone() for name, x in agent.state_dict().items()})
            assert not batch[1][:4].any()

    script.train(arguments(script))
    run = latest_run()
    copy = shutil.copytree(run, Path("copy"))
    saved = script.load_checkpoint(run)["agent"]
    go_on(script, copy, total_timesteps=1024)
    with watching(script, see):
        go_on(script, run, total_timesteps=1024)
    del saved["return_rms.mean"], saved["return_rms.std"], saved["return_rms.count"]
    assert_same({name: first[0][name] for name in saved}, saved)
    assert script.load_checkpoint(run)["global_step"] == 1024
    assert_same(content(run), content(copy))


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
        ({"sequence_length": 48}, "must divide num_steps"),
        ({"num_minibatches": 32}, "must divide the number of sequences"),
        ({"sequence_length": 0}, "sequence_length=0 must"),
        ({"env_id": "Acrobot-v1", "mask_velocity": True}, "mask_velocity is for"),
        ({"vectorization": "vector_entry_point", "mask_velocity": True}, "mask_velocity is for"),
    ):
        with pytest.raises(ValueError, match=problem):
            arguments(script, **flags)
