"""variants/ppo_atari_recurrent.py remembers games, over lost lives, and learns from what it did."""

from typing import Any

import ppo_atari_recurrent
import pytest
import torch
from helpers import SHORT, scalars, watching


@pytest.mark.parametrize("num_screens", [1, 4])
def test_rollouts(num_screens: int) -> None:
    """States go on, over lost lives, too, until a game ends; and what is learned from was done."""
    script, rollouts = ppo_atari_recurrent, []
    flags = SHORT["ppo_atari"] | {"env_id": "ALE/SpaceInvaders-v5", "env_kwargs": "{}", "seed": 3}
    flags |= {"num_steps": 320, "total_timesteps": 1280, "update_epochs": 1, "eval_episodes": 1}

    def see(agent: Any, batch: tuple, indices: torch.Tensor) -> None:
        obs, states, is_first, actions, logprobs, *_ = (x[indices] for x in batch)
        with torch.no_grad():
            _, after = agent.remember(agent.encode(batch[0])[None], batch[1])
            features = agent.get_features(agent.encode(obs), states, is_first)
            now, _, _ = agent.evaluate_actions(features, actions)
        torch.testing.assert_close(now, logprobs)
        assert obs.shape[1:] == (num_screens, 84, 84)
        rollouts.append((batch, batch[1].clone().view(320, 2, -1), after.view(320, 2, -1)))

    with watching(script, see, once=True):
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
