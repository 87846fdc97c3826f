"""variants/ppo_atari_recurrent.py remembers games, over lost lives, and learns from what it did."""

import subprocess
from typing import Any

import ppo_atari_recurrent
import pytest
import torch
from helpers import SHORT, scalars

import ppo_atari


def test_difference() -> None:
    """`diff` with the script shows at most 135 lines."""
    command = ["diff", ppo_atari.__file__, ppo_atari_recurrent.__file__]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    assert 0 < sum(line[0] in "<>" for line in lines) <= 135


@pytest.mark.parametrize("num_screens", [1, 4])
def test_rollouts(num_screens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """States go on, over lost lives, too, until a game ends; and what is learned from was done."""
    script, rollouts = ppo_atari_recurrent, []
    update, flags = script.update, SHORT["ppo_atari"] | {"num_steps": 320, "total_timesteps": 1280}
    flags |= {"env_id": "ALE/SpaceInvaders-v5", "seed": 3, "update_epochs": 1, "eval_episodes": 1}

    def see(agent: Any, optimizer: Any, batch: tuple, indices: torch.Tensor, args: Any) -> dict:
        if not rollouts or batch is not rollouts[-1][0]:
            obs, states, is_first, actions, logprobs, *_ = (x[indices] for x in batch)
            with torch.no_grad():
                _, after = agent.remember(agent.encode(batch[0])[None], batch[1])
                features = agent.get_features(agent.encode(obs), states, is_first)
                now, _, _ = agent.evaluate_actions(features, actions)
            torch.testing.assert_close(now, logprobs)
            assert obs.shape[1:] == (num_screens, 84, 84)
            rollouts.append((batch, batch[1].clone().view(320, 2, -1), after.view(320, 2, -1)))
        return update(agent, optimizer, batch, indices, args)

    monkeypatch.setattr(script, "update", see)
    script.train(script.Args(**flags, num_screens=num_screens))
    (_, first, last), (batch, states, after) = rollouts
    assert not first[0].any()
    ended = ~states[1:].any(-1)
    torch.testing.assert_close(states[1:], after[:-1] * ~ended[..., None])
    assert (states[0] - last[-1]).abs().max() < 0.1  # it goes on; the agent has changed a little
    begins = batch[2].view(320, 2)[1:]
    begins[31::32] = False  # sequences
    assert 0 < ended.sum() < begins.sum() and begins[ended].all()
    assert len(scalars("eval/return")) == 1
