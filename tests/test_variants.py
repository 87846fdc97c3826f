"""The variants: little differs from the script that each varies, and a memory does what it should.

That a resumed run is the uninterrupted one, and that processes share the work, is tested with the
scripts.
"""

import difflib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import ppo_continuous_recurrent
import ppo_recurrent
import pytest
import torch
from conftest import ROOT, SHORT, VARIANTS, kept_batches, only_run, scalars, watching
from probe_envs import Scripted
from test_advantages import GAMMA, LAMBDA, brute_force
from test_scripts import DIFFERENT, definitions

RECURRENT = [ppo_recurrent, ppo_continuous_recurrent]


def remembered(agent: Any, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The LSTM's equations (in PyTorch's form) for one observation: its features, and the state."""
    if hasattr(agent, "obs_statistics"):
        obs = agent.normalize(obs, agent.obs_statistics.mean, agent.obs_statistics.std)
    lstm, (output, cell) = agent.lstm, state.chunk(2)
    from_obs = lstm.weight_ih_l0 @ obs + lstm.bias_ih_l0
    i, f, g, o = (from_obs + lstm.weight_hh_l0 @ output + lstm.bias_hh_l0).chunk(4)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    output = o.sigmoid() * cell.tanh()
    return torch.cat([output, obs]), torch.cat([output, cell])


def made(script: Any, **flags: Any) -> Any:
    """An agent whose LSTM has biases."""
    args = script.Args(**SHORT[script.__name__] | flags)
    envs = script.make_envs(args, 2)
    torch.manual_seed(1)
    agent = script.Agent(envs, args)
    envs.close()
    torch.nn.init.normal_(agent.lstm.bias_ih_l0)
    torch.nn.init.normal_(agent.lstm.bias_hh_l0)
    return agent


@pytest.mark.parametrize("name", VARIANTS)
def test_difference(name: str) -> None:
    """At most 140 lines come or go."""
    paths = ROOT / f"{VARIANTS[name]}.py", ROOT / "variants" / f"{name}.py"
    lines = difflib.unified_diff(*(path.read_text().splitlines() for path in paths), n=0)
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("---", "+++")]
    assert 0 < len(changed) <= 140
    ours, base = definitions(f"variants/{name}"), definitions(VARIANTS[name])
    others = {x for x in ours.keys() | base.keys() if ours.get(x) != base.get(x)}
    by_intent = {"VISIBLE", "check", "Batch", "update", "set_up_torch", "evaluate", "train"}
    assert others <= DIFFERENT | by_intent


@pytest.mark.parametrize("script", RECURRENT)
def test_features(script: Any) -> None:
    """Pieces of an episode or several give what the equations give, step by step."""
    agent = made(script)
    obs, states = torch.randn(11, agent.lstm.input_size), torch.randn(11, 128)
    is_first = torch.zeros(11, dtype=torch.bool)
    is_first[[0, 4, 5, 9]] = True
    expected, state = [], None
    for t in range(11):
        features, state = remembered(agent, obs[t], states[t] if is_first[t] else state)
        expected.append(features)
    torch.testing.assert_close(agent.get_features(obs, states, is_first), torch.stack(expected))
    alone = zip(*(remembered(agent, *pair) for pair in zip(obs, states, strict=True)), strict=True)
    for x, y in zip(agent.remember(obs, states), alone, strict=True):
        torch.testing.assert_close(x, torch.stack(y))


@pytest.mark.parametrize("script", RECURRENT)
def test_forget_gate_begins_open(script: Any) -> None:
    """Biases are 0, but 1 for the forget gate; recurrent weights are orthogonal (detail 32)."""
    envs = script.make_envs(args := script.Args(**SHORT[script.__name__]), 2)
    lstm = script.Agent(envs, args).lstm
    envs.close()
    biases = (lstm.bias_ih_l0 + lstm.bias_hh_l0).view(4, 64)  # input, forget, cell, output
    assert biases.tolist() == [[0] * 64, [1] * 64, [0] * 64, [0] * 64]
    weights = lstm.weight_hh_l0
    torch.testing.assert_close(weights.T @ weights, torch.eye(64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("script", RECURRENT)
def test_gradient_is_of_the_episodes_apart(script: Any) -> None:
    """The gradient of a rollout with ends is the sum of the gradients of its episodes alone."""
    agent = made(script)
    obs, weights = torch.randn(12, agent.lstm.input_size), torch.randn(12)
    starts, parameters = [0, 3, 8, 12], [*agent.lstm.parameters(), *agent.critic.parameters()]
    is_first = torch.zeros(12, dtype=torch.bool)
    is_first[starts[:-1]] = True
    values = agent.get_value(agent.get_features(obs, torch.zeros(12, 128), is_first))
    together = torch.autograd.grad((weights * values).sum(), parameters)
    apart = [torch.zeros_like(x) for x in parameters]
    for start, end in itertools.pairwise(starts):
        state, loss = torch.zeros(128), 0.0
        for t in range(start, end):
            features, state = remembered(agent, obs[t], state)
            loss = loss + weights[t] * agent.get_value(features[None])[0]
        for x, gradient in zip(apart, torch.autograd.grad(loss, parameters), strict=True):
            x += gradient
    torch.testing.assert_close(together, tuple(apart))


@pytest.mark.parametrize("script", RECURRENT)
def test_ratio_is_one_at_first(script: Any) -> None:
    """Before an iteration's first step, the minibatch's log-probabilities are the rollout's.

    Each minibatch is of whole sequences, in which the steps follow one another.
    """
    seen, latest = [], [None]

    def see(agent: Any, batch: Any, indices: torch.Tensor) -> None:
        sequences = indices.view(-1, 16)
        assert (sequences[:, :1] % 16 == 0).all()
        assert (sequences.diff(dim=1) == 1).all()
        assert batch.is_first[sequences[:, 0]].all()
        if batch is latest[0]:
            return
        latest[0] = batch
        x = script.Batch(*(x[indices] for x in batch))
        features = agent.get_features(x.obs, x.states, x.is_first)
        logprobs, _, values = agent.evaluate_actions(features, x.actions)
        torch.testing.assert_close(logprobs, x.logprobs)
        torch.testing.assert_close(values, x.values)
        seen.append(int(batch.is_first.sum()))

    flags = {"sequence_length": 16, "recompute_advantages": False}
    with watching(script, see):
        script.train(script.Args(**SHORT[script.__name__] | flags))
    assert len(seen) == 4
    if script is ppo_recurrent:
        assert max(seen) > 512 / 16  # episodes begin within sequences, too


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("script", RECURRENT)
def test_advantages(script: Any, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages against the sum, last observations' values with the states that the rollout had.

    Each sequence begins with the state that the rollout had there.
    """
    patterns, scaled, compared = ["----", "--t-c", "c--b-t", "tcb"], [], []
    num_envs, num_steps, length, latest, rolled = 4, 16, 8, [None], {}
    scale_rewards = script.Agent.scale_rewards

    def keep(agent: Any, *rest: Any) -> np.ndarray:
        scaled.append(scale_rewards(agent, *rest).copy())
        return scaled[-1]

    def see(agent: Any, batch: Any, indices: torch.Tensor) -> None:
        if batch is latest[0]:
            return
        latest[0] = batch
        start, epoch = num_steps * (len(scaled) - 1), len(compared) % 2
        states = batch.states.view(num_envs, num_steps, -1)
        for i, steps in enumerate(Scripted.played):
            values, next_values, ended, over, state = [], [], [], True, None
            for t, (obs, _, next_obs, terminated, truncated) in enumerate(steps[start:]):
                if over and (t > 0 or start == 0):
                    assert (states[i, t] == 0).all()
                elif t > 0 and (recompute is False or epoch == 0):
                    torch.testing.assert_close(states[i, t], state)
                if over or t % length == 0:
                    state = states[i, t]
                with torch.no_grad():
                    features, state = remembered(agent, torch.as_tensor(obs), state)
                    rollouts = rolled.setdefault((i, start + t), state)
                    is_last = terminated or truncated or t + 1 == num_steps
                    pair = torch.as_tensor(next_obs), rollouts if is_last else state
                    after, _ = remembered(agent, *pair)
                    both = agent.get_value(torch.stack([features, after]))
                values.append(both[0].double().numpy())
                next_values.append(both[1].double().numpy())
                over = terminated or truncated
                ended.append((terminated, over))
                if t % length == length - 1 and t + 1 < num_steps and not over:
                    next_values[-1] = None  # of the next sequence, from its own state
            for t in range(num_steps - 1):
                if next_values[t] is None:
                    next_values[t] = values[t + 1]
            terminations, dones = np.array(ended).T
            arrays = scaled[-1][:, i], np.array(values), np.array(next_values)
            expected = brute_force(*arrays, terminations, dones)
            got = batch.advantages.view(num_envs, num_steps)[i]
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(batch.returns, batch.advantages + batch.values)
        compared.append(epoch)

    Scripted.played.clear()
    monkeypatch.setattr(script.Agent, "scale_rewards", keep)
    continuous = script is ppo_continuous_recurrent
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "sequence_length": length}
    flags = {
        "env_id": "probe_envs:Scripted-v0",
        "env_kwargs": {"patterns": ",".join(patterns), "continuous": continuous},
        "total_timesteps": 3 * num_envs * num_steps,
        "num_minibatches": 2,
        "update_epochs": 2,
        "learning_rate": 0.01,
        "checkpoint_interval": 0,
        "eval_episodes": 0,
        "gamma": GAMMA,
        "gae_lambda": LAMBDA,
        "recompute_advantages": recompute,
    }
    flags |= {"target_kl": None, "stagger": False} if continuous else {}
    with watching(script, see):
        script.train(script.Args(**flags | sizes))
    assert len(compared) == (6 if recompute else 3)


@pytest.mark.parametrize("script", RECURRENT)
def test_pieces_are_the_steps(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory that is another in pieces than in the rollout's steps ends the run."""
    get_features = script.Agent.get_features

    def forget(agent: Any, obs: Any, states: Any, is_first: Any) -> torch.Tensor:
        return get_features(agent, obs, 0 * states, is_first)

    monkeypatch.setattr(script.Agent, "get_features", forget)
    with pytest.raises(AssertionError, match="otherwise than remember"):
        script.train(script.Args(**SHORT[script.__name__]))


PROBE = {"num_minibatches": 4, "update_epochs": 4, "num_envs": 4, "num_steps": 128}
PROBE |= {"total_timesteps": 40_960, "learning_rate": 1e-3, "eval_episodes": 20}


def test_memory_pays() -> None:
    """What was seen three steps before is used, in training and in the evaluation."""
    args = ppo_recurrent.Args(env_id="probe_envs:Remembered-v0", **PROBE)
    assert ppo_recurrent.train(args) > 0.95
    assert scalars("eval/return")[-1][1] == 1


def test_memory_pays_in_continuous_control() -> None:
    """As above; without a memory, the best is -0.25."""
    kwargs = {"env_kwargs": {"continuous": True}, "stagger": False, "learning_rate": 3e-3}
    args = ppo_continuous_recurrent.Args(env_id="probe_envs:Remembered-v0", **(PROBE | kwargs))
    ppo_continuous_recurrent.train(args)
    assert scalars("eval/return")[-1][1] > -0.02


def test_nothing_leaks() -> None:
    """What the episode before showed would pay, but is forgotten; a guess is right half the time.

    An agent that keeps its state beyond an episode's end reaches 1 here.
    """
    args = ppo_recurrent.Args(env_id="probe_envs:Leaking-v0", **PROBE)
    assert 0.3 < ppo_recurrent.train(args) < 0.7
    assert scalars("eval/return")[-1][1] < 0.9


@pytest.mark.parametrize("script", RECURRENT)
def test_an_evaluation_forgets(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its episodes, of four steps, begins with a state of zeros, and goes on from there."""
    flags = SHORT[script.__name__] | {"env_id": "probe_envs:Remembered-v0"}
    flags["env_kwargs"] = {"continuous": script is ppo_continuous_recurrent}
    args = script.Args(**flags | {"eval_episodes": 3})
    script.train(replace(args, eval_episodes=0))
    remember, is_zero = script.Agent.remember, []

    def keep(agent: Any, obs: torch.Tensor, states: torch.Tensor) -> Any:
        is_zero.append(not states.any())
        return remember(agent, obs, states)

    monkeypatch.setattr(script.Agent, "remember", keep)
    script.evaluate(args, only_run())
    assert is_zero == [True, False, False, False] * 3


@pytest.mark.parametrize(
    ("script", "env_id", "hidden"),
    [
        (ppo_recurrent, "CartPole-v1", [1, 3]),
        (ppo_recurrent, "LunarLander-v3", [2, 3, 5]),
        (ppo_continuous_recurrent, "Pendulum-v1", [2]),
    ],
)
def test_mask_velocity(script: Any, env_id: str, hidden: list[int]) -> None:
    """Velocities are 0 in all that is learned from, and nothing else is."""
    flags = {"env_id": env_id, "mask_velocity": True, "total_timesteps": 2048}
    with kept_batches(script) as batches:
        script.train(script.Args(**SHORT[script.__name__] | flags))
    spread = torch.cat([batch.obs for batch in batches]).var(0)
    assert [i for i, x in enumerate(spread) if x == 0] == hidden


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"env_id": "Acrobot-v1", "mask_velocity": True}, "mask_velocity is for CartPole-v1"),
        ({"mask_velocity": True, "vectorization": "native"}, "masks need --vectorization sync"),
        ({"sequence_length": 48}, "num_steps into sequences"),
        ({"sequence_length": 0}, "sequence_length 0"),
    ],
)
def test_bad_input(flags: dict[str, Any], problem: str) -> None:
    """One sentence."""
    with pytest.raises(ppo_recurrent.UsageError, match=problem):
        ppo_recurrent.train(ppo_recurrent.Args(**SHORT["ppo_recurrent"] | flags))


@pytest.mark.parametrize("script", RECURRENT)
def test_compiled(script: Any, train_agent: Callable) -> None:
    """Compiled, the weights become the same, but for rounding."""
    flags = SHORT[script.__name__] | {"total_timesteps": 1024, "update_epochs": 1}
    agents = [train_agent(script, **flags, compile=x)[0] for x in (False, True)]
    for x, y in zip(*(agent.parameters() for agent in agents), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
