"""variants/ppo_recurrent.py with a memory that goes step by step through the sequences of a
minibatch, as CleanRL's ppo_atari_lstm.py does, for the comparison of speed by memory.py.

With --lstm the memory is an LSTM, whose two states share --hidden-size.
"""

import sys
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent.parent / "variants"))
import ppo_recurrent
from ppo_recurrent import Args


class Agent(ppo_recurrent.Agent):
    """The script's, but for the order of the work."""

    def step(self, obs: Tensor, states: Tensor) -> Tensor:
        """The states after one more observation each, (B, hidden_size)."""
        return self.gru(obs[None], states[None])[0][0]

    def get_features(self, obs: Tensor, states: Tensor, is_first: Tensor | None = None) -> Tensor:
        """As the script's."""
        if is_first is None:
            return torch.cat([self.step(obs, states), obs], -1)
        sequences = [x.unflatten(0, (-1, args.sequence_length)) for x in (obs, states, is_first)]
        steps, state = [], sequences[1][:, 0]
        for x, begun, first in zip(*(x.unbind(1) for x in sequences), strict=True):
            state = self.step(x, torch.where(first[:, None], begun, state))
            steps.append(torch.cat([state, x], -1))
        return torch.stack(steps, 1).flatten(0, 1)


class AgentWithLSTM(Agent):
    """With an LSTM of half the size, as it has two states."""

    def __init__(self, envs: ppo_recurrent.gym.vector.VectorEnv, args: Args) -> None:
        super().__init__(envs, args)
        self.gru = nn.LSTMCell(self.gru.input_size, args.hidden_size // 2)
        for name, x in self.gru.named_parameters():
            nn.init.zeros_(x) if "bias" in name else nn.init.orthogonal_(x)

    def step(self, obs: Tensor, states: Tensor) -> Tensor:
        """As above: the output, then the cell."""
        return torch.cat(self.gru(obs, states.chunk(2, -1)), -1)


if __name__ == "__main__":
    args = tyro.cli(Args, args=[x for x in sys.argv[1:] if x != "--lstm"])
    ppo_recurrent.Agent = AgentWithLSTM if "--lstm" in sys.argv else Agent
    ppo_recurrent.train(args)
