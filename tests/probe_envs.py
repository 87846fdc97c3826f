"""Small environments whose values and best policies are known, registered when imported."""

import itertools
import random
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

Step = tuple[np.ndarray, float, bool, bool, dict]


class Probe(gym.Env):
    """An environment that is done after one step, with -1 or 1 to observe at random."""

    observation_space = Box(-1, 1, (1,), np.float32)
    length = 1

    def __init__(self, continuous: bool = False) -> None:
        self.action_space = Box(-1, 1, (1,)) if continuous else Discrete(2)

    def observe(self) -> Any:
        return np.array([self.state], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.state = float(self.np_random.choice([-1, 1]))
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Step:
        reward = self.reward(action)
        self.steps += 1
        return self.observe(), reward, self.steps == self.length, False, {}

    def reward(self, action: Any) -> float:
        return 1.0


class Observed(Probe):
    """The reward is what was observed."""

    def reward(self, action: Any) -> float:
        return self.state


class Acted(Probe):
    """One action is better: 1 of the two, or 0.5 of -1 .. 1; or, by what is observed, another."""

    def __init__(self, observed: bool = False, continuous: bool = False) -> None:
        super().__init__(continuous)
        self.observed = observed

    def reward(self, action: Any) -> float:
        best = self.state if self.observed else 1
        if isinstance(self.action_space, Box):
            return -float((action[0] - 0.5 * best) ** 2)
        return 1.0 if (action == 1) == (best == 1) else -1.0


class Endless(Probe):
    """Worth 1 a step where 1 is observed, 0 where -1 is; it is cut after four, never terminates."""

    def step(self, action: Any) -> Step:
        self.steps += 1
        return self.observe(), float(self.state == 1), False, self.steps == 4, {}


class Overwriting(Probe):
    """Counts to each of `lengths` in turn; worth 1 a step. It returns one array, takes no seed."""

    observation_space = Box(0, 99, (1,), np.float32)

    def __init__(
        self, lengths: tuple[int, ...] = (7,), terminates: bool = False, continuous: bool = False
    ) -> None:
        super().__init__(continuous)
        self.lengths, self.terminates = itertools.cycle(lengths), terminates
        self.count = np.zeros(1, np.float32)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        self.length = next(self.lengths)
        self.count[:] = 0
        return self.count, {}

    def step(self, action: Any) -> Step:
        self.count += 1
        ends = bool(self.count[0] == self.length)
        return self.count, 1.0, ends and self.terminates, ends and not self.terminates, {}


class Choices(Probe):
    """Several choices, of which the state decides; and actions that a script can't choose."""

    def __init__(self, kind: str) -> None:
        self.action_space = {
            "multi_discrete": MultiDiscrete([2, 3, 4], start=[5, 0, -2]),
            "multi_discrete_2d": MultiDiscrete([[2, 3], [4, 2]]),
            "multi_binary": MultiBinary(4),
            "discrete": Discrete(3, start=7),
            "dict": Dict({"a": Discrete(2)}),
            "integers": Box(0, 3, (2,), np.int64),
            "scalar": Box(-1, 1, ()),
            "matrix": Box(-1, 1, (2, 3)),
            "unbounded": Box(-np.inf, np.inf, (1,)),
            "half": Box(0, np.inf, (1,)),
        }[kind]

    def reward(self, action: Any) -> float:
        """The share of right choices: the lowest values where -1 is seen, or the highest."""
        assert self.action_space.contains(action), action
        space = self.action_space
        low = np.asarray(getattr(space, "start", 0))
        sizes = np.asarray(getattr(space, "nvec", 2 if isinstance(space, MultiBinary) else 3))
        best = low if self.state == -1 else low + sizes - 1
        return float(np.mean(np.asarray(action) == best))


class Masked(Probe):
    """Four actions, the higher the better, of which a random half, masked, breaks it."""

    observation_space = Box(-1, 1, (1,), np.int8)

    def __init__(self) -> None:
        self.action_space = Discrete(4)

    def observe(self) -> np.ndarray:
        return np.array([self.state], np.int8)

    def draw(self) -> dict[str, np.ndarray]:
        """An info with a mask, two ones and two zeros."""
        self.mask = self.np_random.permutation(np.array([0.0, 0.0, 1.0, 1.0]))
        return {"action_mask": self.mask}

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        obs, _ = super().reset(**kwargs)
        return obs, self.draw()

    def step(self, action: Any) -> Step:
        assert self.mask[action] == 1, f"{action} was masked"
        self.steps += 1
        return self.observe(), float(action), self.steps == 5, False, self.draw()


class MaskedChoices(Masked):
    """Two choices, a free one of two, and then Masked's."""

    def __init__(self) -> None:
        self.action_space = MultiDiscrete([2, 4])

    def draw(self) -> dict[str, np.ndarray]:
        return {"action_mask": np.append([1, 1], super().draw()["action_mask"])}

    def step(self, action: np.ndarray) -> Step:
        return super().step(action[1])


class Bounded(Probe):
    """Continuous actions within 2 .. 10 and -0.3 .. 0, all of which it keeps."""

    received: ClassVar[list[np.ndarray]] = []

    def __init__(self, continuous: bool = True) -> None:
        self.action_space = Box(np.array([2, -0.3], np.float32), np.array([10, 0], np.float32))

    def reward(self, action: Any) -> float:
        """Minus the squared distance from 8 and -0.1, in units of the range."""
        assert self.action_space.contains(action), action
        self.received.append(np.array(action))
        return -float(((action[0] - 8) / 8) ** 2 + ((action[1] + 0.1) / 0.3) ** 2)


class Spaces(Probe):
    """Observations of a space by name, which the tests can look into: `seen` has all of them."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, kind: str, continuous: bool = False) -> None:
        super().__init__(continuous)
        self.observation_space = {
            "image": Dict({"camera": Box(0, 1, (30, 30, 3))}),
            "integers": Box(-1000, 1000, (2,), np.int64),
            "float64": Box(-1, 1, (2,), np.float64),
            "discrete": Discrete(7, start=3),
            "dict": Dict({"a": Box(-1, 1, (2, 2)), "b": Discrete(3)}),
            "sides": Dict({"actor": Box(-1, 1, (2,)), "critic": Box(-1, 1, (3,))}),
            "tuple": Tuple((MultiBinary(4), MultiDiscrete([2, 5]), Box(0, 9, (1,), np.int64))),
            "sequence": gym.spaces.Sequence(Discrete(2)),
            "graph": gym.spaces.Graph(Discrete(2), None),
        }[kind]

    def observe(self) -> Any:
        self.seen.append(self.observation_space.sample())
        return self.seen[-1]


class Signs(Probe):
    """Right is 1 where the image's lit half and the vector's sign agree; no part of it tells."""

    observation_space = Dict(
        place=Box(-1, 1, (3,), np.float32), eye=Box(0, 255, (8, 8, 3), np.uint8), kind=Discrete(2)
    )
    length = 8

    def observe(self) -> dict[str, np.ndarray]:
        self.side, self.sign = self.np_random.integers(2, size=2)
        image, vector = np.zeros((8, 8, 3), np.uint8), np.zeros(3, np.float32)
        image[:, 4 * self.side : 4 * self.side + 4] = 255
        vector[1] = 2 * self.sign - 1
        return {"eye": image, "place": vector, "kind": 1}

    def reward(self, action: int) -> float:
        return float(action == (self.side == self.sign))


class Lit(Probe):
    """Right is the lit side of an image, of 12 x 10 and dark by the step; always one array."""

    length = 8

    def __init__(self, shape: tuple[int, ...] = (12, 10, 3), continuous: bool = False) -> None:
        super().__init__(continuous)
        self.observation_space = Box(0, 255, tuple(shape), np.uint8)
        self.image = np.zeros(shape, np.uint8)

    def observe(self) -> np.ndarray:
        self.image[:] = self.steps
        self.side = self.np_random.integers(2)
        columns = np.moveaxis(self.image, self.image.shape.index(10), 0)
        columns[5 * self.side : 5 * self.side + 5] += 200
        return self.image

    def reward(self, action: Any) -> float:
        return float((np.squeeze(action) > 0) == self.side)


class Scripted(Probe):
    """Ends steps as a pattern says, over and over: - goes on, t terminates, c cuts, b does both.

    Patterns, of one environment each, are separated by commas. Observations and rewards are drawn;
    `played` has, of each environment, (obs, reward, next obs, terminated, truncated) of each step.
    """

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    played: ClassVar[list[list[tuple]]] = []

    def __init__(self, patterns: str, continuous: bool = False) -> None:
        super().__init__(continuous)
        every = patterns.split(",")
        self.pattern, self.steps_taken = every[len(self.played) % len(every)], []
        self.played.append(self.steps_taken)

    def observe(self) -> np.ndarray:
        self.seen = self.np_random.normal(size=3).astype(np.float32)
        return self.seen

    def step(self, action: Any) -> Step:
        end = self.pattern[len(self.steps_taken) % len(self.pattern)]
        before, reward = self.seen, float(np.float32(self.np_random.normal()))
        result = self.observe(), reward, end in "tb", end in "cb"
        self.steps_taken.append((before, reward, *(result[i] for i in (0, 2, 3))))
        return *result, {}


class Careless(Probe):
    """Draws its worth from global generators, seeds them at each episode; infos come and go."""

    worths: ClassVar[list[float]] = []

    def __init__(self, continuous: bool = False) -> None:
        super().__init__(continuous)
        self.worth = float(random.random() + np.random.rand() + torch.rand(()))
        self.worths.append(self.worth)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return super().reset(**kwargs)

    def step(self, action: Any) -> Step:
        infos = {}, {"winner": 1, "end": "lost"}, {"end": "won", "episode": {"r": -9.0}}
        return self.observe(), self.worth, True, False, infos[self.np_random.integers(3)]


class Threaded(Probe):
    """Computes by PyTorch, in its threads."""

    def reward(self, action: Any) -> float:
        """1, after a product that is large enough for several threads."""
        return float(torch.ones(300, 300).mm(torch.ones(300, 300)).mean() / 300)


class Remembered(Probe):
    """Which action is right at the fourth step is shown at the first one alone."""

    length, right = 4, 1.0

    def observe(self) -> np.ndarray:
        return np.array([self.state if self.steps == 0 else 0], np.float32)

    def pays(self) -> bool:
        """Whether it is the step that counts; `right` is what decides there."""
        self.right = self.state
        return self.steps == 3

    def reward(self, action: Any) -> float:
        """1 for the right action, or minus the squared distance from the best."""
        if not self.pays():
            return 0.0
        if isinstance(self.action_space, Box):
            return -float((action[0] - 0.5 * self.right) ** 2)
        return float((action == 1) == (self.right == 1))


class Leaking(Remembered):
    """Which action is right at the first step was shown at the last one of the episode before."""

    length = 2

    def observe(self) -> np.ndarray:
        return np.array([self.state if self.steps == 1 else 0], np.float32)

    def pays(self) -> bool:
        """The first step counts; the second one shows what does next."""
        if self.steps == 1:
            self.right = self.state
        return self.steps == 0


class Rewriting(gym.vector.SyncVectorEnv):
    """Writes into the actions that it gets."""

    def step(self, actions: np.ndarray) -> tuple:
        """Step, and make all actions 0."""
        result = super().step(actions)
        actions[:] = 0
        return result


def make_vector(num_envs: int, **kwargs: Any) -> gym.vector.VectorEnv:
    """A vector environment of `Acted`, by what is observed, that resets in the same step."""
    make = [lambda: Acted(observed=True, **kwargs)] * num_envs
    return Rewriting(make, autoreset_mode="SameStep")


for probe in [Leaking, MaskedChoices, Probe, *Probe.__subclasses__()]:
    gym.register(f"{probe.__name__}-v0", probe)
gym.register("Vector-v0", Acted, vector_entry_point=make_vector)
