"""variants/ppo_recurrent.py with a GRU that goes step by step through the sequences of a minibatch,
as CleanRL's ppo_atari_lstm.py does, for the comparison of speed by memory.py.
"""

import sys
from pathlib import Path

import torch
import tyro
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "variants"))
import ppo_recurrent
from ppo_recurrent import Agent, Args

in_pieces = Agent.get_features


def get_features(
    self: Agent, obs: Tensor, states: Tensor, is_first: Tensor | None = None
) -> Tensor:
    """As the script's, but for the order of the work."""
    if is_first is None:
        return in_pieces(self, obs, states)
    sequences = [x.unflatten(0, (-1, args.sequence_length)) for x in (obs, states, is_first)]
    steps, state = [], sequences[1][:, 0]
    for x, begun, first in zip(*(x.unbind(1) for x in sequences), strict=True):
        state = torch.where(first[:, None], begun, state)
        state = self.gru(x[None], state[None])[0][0]
        steps.append(torch.cat([state, x], -1))
    return torch.stack(steps, 1).flatten(0, 1)


if __name__ == "__main__":
    args = tyro.cli(Args)
    Agent.get_features = get_features
    ppo_recurrent.train(args)
