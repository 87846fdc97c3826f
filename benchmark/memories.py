"""variants/ppo_recurrent.py with another memory, for comparison: "gru", or "stepwise", whose LSTM
goes step by step through the sequences of a minibatch, as that of CleanRL's ppo_atari_lstm.py does.

    python benchmark/memories.py --memory gru --env-id CartPole-v1 --mask-velocity
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent.parent / "variants"))
import ppo_recurrent


@dataclass
class Args(ppo_recurrent.Args):
    """Train ppo_recurrent.py with another memory."""

    memory: Literal["gru", "stepwise"] = "gru"  # which one


class GRU(nn.GRU):
    """Takes and returns states as an LSTM does: its output is its cell."""

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs, (T, B, hidden_size), and the state after them, twice."""
        outputs, state = super().forward(x, states[0])
        return outputs, (state, state)


class Stepwise(ppo_recurrent.Agent):
    """The script's, but for the order of the work."""

    def get_features(self, obs: Tensor, states: Tensor, is_first: Tensor) -> Tensor:
        """As the script's."""
        sequences = [x.unflatten(0, (-1, args.sequence_length)) for x in (obs, states, is_first)]
        steps, state = [], sequences[1][:, 0]
        for x, begun, first in zip(*(x.unbind(1) for x in sequences), strict=True):
            features, state = self.remember(x, torch.where(first[:, None], begun, state))
            steps.append(features)
        return torch.stack(steps, 1).flatten(0, 1)


if __name__ == "__main__":
    args = tyro.cli(Args)
    ppo_recurrent.Args = Args  # for checkpoints
    if args.memory == "gru":
        nn.LSTM = GRU  # in this process
    else:
        ppo_recurrent.Agent = Stepwise
    ppo_recurrent.train(args)
