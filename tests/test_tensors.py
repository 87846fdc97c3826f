"""ppo_tensors.py learns what is known of a simulator of tensors; its examples are gymnasium's."""

import gymnasium as gym
import numpy as np
import ppo_tensors
import pytest
import tensor_envs
import torch
from helpers import assert_same, content, go_on, latest_run, scalars

SHORT = {"env_id": "test_tensors:Kinds", "num_envs": 64, "gamma": 0.5, "log_std_init": -2.0}
SHORT |= {"num_minibatches": 4, "total_timesteps": 2048, "eval_episodes": 6}


class Kinds:
    """Episodes of one step, of kinds 0, which end and pay 1, and 1, which are cut and pay -1.

    An action of 0.5 costs nothing. The next episode is of the other kind.
    What is returned is memory of its own, which the next step writes on, as simulators do.
    """

    obs_size = 1
    action_size = 1

    def __init__(self, num_envs: int, device: str, stagger: bool) -> None:
        self.obs = torch.empty(num_envs, 1, device=device)
        self.rewards = torch.empty(num_envs, device=device)
        self.terminations = torch.empty_like(self.rewards, dtype=torch.bool)

    def reset(self, seed: int) -> torch.Tensor:
        return self.obs.copy_(torch.arange(len(self.obs))[:, None] % 2)

    def step(self, actions: torch.Tensor) -> tuple:
        assert actions.abs().max() <= 1
        self.rewards.copy_(1 - 2 * self.obs[:, 0] - (actions[:, 0] - 0.5) ** 2)
        self.terminations.copy_(self.obs[:, 0] == 0)
        last_obs = self.obs.clone()
        self.obs.copy_(1 - self.obs)
        return self.obs, self.rewards, self.terminations, ~self.terminations, last_obs

    def close(self) -> None:
        pass


def test_values() -> None:
    """The best action is found; an end is worth 0, a cut what its last observation is."""
    score = ppo_tensors.train(ppo_tensors.Args(**SHORT | {"total_timesteps": 60 * 1024}))
    agent = ppo_tensors.Agent(Kinds(2, "cpu", False), 0.0)
    agent.load_state_dict(ppo_tensors.load_checkpoint(latest_run())["agent"])
    obs = torch.tensor([[0.0], [1.0]])
    assert agent.act(obs).squeeze().tolist() == pytest.approx([0.5, 0.5], abs=0.1)
    values = (agent.get_value(obs) * agent.return_rms.std).tolist()
    assert values == pytest.approx([1, -2], abs=0.1)
    assert scalars("eval/return")[0][1] == pytest.approx(0, abs=0.02)
    assert scalars("charts/episodic_return")[-1][1] == score == pytest.approx(0, abs=0.03)
    assert {length for _, length in scalars("charts/episodic_length")} == {1}


def test_seeds_and_resuming() -> None:
    """The same seed gives the same run, bit for bit, and a resumed one goes on from its steps."""
    runs = []
    for seed in (1, 1, 2):
        ppo_tensors.train(ppo_tensors.Args(**SHORT, seed=seed))
        runs.append(content(latest_run()))
    assert_same(runs[0], runs[1])
    assert not torch.equal(*(run["agent"]["actor.0.weight"] for run in runs[1:]))
    go_on(ppo_tensors, latest_run(), total_timesteps=4096)
    assert [step for step, _ in scalars("charts/SPS", latest_run())] == [1024, 2048, 3072, 4096]
    with pytest.raises(ppo_tensors.UsageError, match="should be module:class"):
        ppo_tensors.train(ppo_tensors.Args(env_id="Pendulum-v1"))


def test_pendulum() -> None:
    """Each step is gymnasium's, until the limit, where another episode begins."""
    envs = tensor_envs.Pendulum(2, "cpu", False, max_episode_steps=30)
    obs, env = envs.reset(1), gym.make("Pendulum-v1").unwrapped
    env.reset()
    env.state = envs.state[0].double().numpy()
    for t in range(30):
        action = torch.full((2, 1), np.sin(t))
        obs, rewards, _, truncations, last_obs = envs.step(action)
        expected, reward, *_ = env.step(2 * action[0].numpy())
        np.testing.assert_allclose(last_obs[0], expected, atol=1e-3)
        assert rewards[0].item() == pytest.approx(reward, abs=1e-3)
        assert truncations.tolist() == [t == 29] * 2
    assert not torch.equal(obs, last_obs) and envs.steps.tolist() == [0, 0]


def test_gymnasium() -> None:
    """All is gymnasium's; where an episode is cut, its last observation and the next's first."""
    keywords = {"env_id": "Pendulum-v1", "max_episode_steps": 3}
    envs, env = tensor_envs.Gymnasium(2, "cpu", False, **keywords), gym.make("Pendulum-v1")
    np.testing.assert_array_equal(envs.reset(7)[0], env.reset(seed=7)[0])
    for t in range(3):
        obs, rewards, _, truncations, last_obs = envs.step(torch.full((2, 1), 0.5))
        expected, reward, *_ = env.step(np.ones(1, np.float32))
        np.testing.assert_allclose(last_obs[0], expected, rtol=1e-5)
        assert rewards[0].item() == pytest.approx(reward, rel=1e-5)
        assert torch.equal(obs, last_obs) == (t < 2) != truncations[0].item()
