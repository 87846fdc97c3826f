"""Proximal Policy Optimization (PPO; Schulman et al. 2017, arXiv:1707.06347) in a single file.

Actions: Box, with finite bounds. Observations: whatever flattens to a vector.

    python ppo_continuous.py --env-id HalfCheetah-v5    # minutes, to a return of about 5500
    python ppo_continuous.py --env-id Hopper-v5 --seed 2
    python ppo_continuous.py --env-id Pendulum-v1 --env-kwargs g 9.81
    python ppo_continuous.py --resume runs/NAME    # go on with a run that was stopped or killed
    python ppo_continuous.py --evaluate runs/NAME --capture-video
    tensorboard --logdir runs

"Detail n" is the n-th of "The 37 Implementation Details of Proximal Policy Optimization" (Huang
et al. 2022). `diff ppo.py ppo_continuous.py` shows what continuous actions change.
"""

import contextlib
import gc
import io
import logging
import math
import os
import random
import signal
import sys
import threading
import time
from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.spaces import Box
from gymnasium.wrappers import RecordVideo
from gymnasium.wrappers.vector import RecordEpisodeStatistics, TransformAction
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Train PPO on continuous actions."""

    env_id: str = "HalfCheetah-v5"  # id of the environment; module:Name-v0 imports module first
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # name value ...
    total_timesteps: int = 1_000_000  # environment steps, all together; rounded down to rollouts
    seed: int = 1  # seeds the environments, the network, the sampling and the shuffling
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    device: str = "cpu"  # cpu, cuda, cuda:N, mps, auto; an MLP is faster on cpu, a CNN on a GPU
    torch_deterministic: bool = True  # on a GPU, choose deterministic convolutions
    num_threads: int = 1  # CPU threads of PyTorch, 0: its own choice; 1 is fastest for an MLP
    compile: bool = False  # compile the gradient steps: seconds to start with, faster then
    vectorization: Literal["sync", "async"] = "sync"  # environments in this process or one each
    squash: bool = False  # bound actions by tanh, with the density to match, instead of clipping
    state_std: bool = False  # let the policy's standard deviation depend on the state
    log_std_init: float = -0.5  # logarithm of the standard deviation at first
    log_std_min: float = -2.0  # it falls no lower: without noise, what was learned is easily lost
    track: bool = False  # mirror the scalars to Weights & Biases
    wandb_project_name: str = "ppo"  # project there
    wandb_entity: str | None = None  # team there

    checkpoint_interval: int = 100  # iterations between checkpoints, which cut episodes; 0: at end
    eval_episodes: int = 10  # greedy episodes to evaluate, after the training or with --evaluate
    capture_video: bool = False  # record those episodes in the run's folder
    resume: str | None = None  # go on with this run (its folder or its checkpoint)
    evaluate: str | None = None  # train nothing, evaluate this run (its folder or its checkpoint)

    num_envs: int = 64  # environments stepped side by side, in all processes of torchrun
    num_steps: int = 32  # steps of each environment in a rollout
    num_minibatches: int = 32  # minibatches that a rollout is split into
    update_epochs: int = 10  # passes over a rollout
    learning_rate: float = 3e-4  # Adam's step size
    anneal_lr: bool = True  # let the learning rate fall to 0; otherwise it is constant
    lr_schedule: Literal["linear", "cosine"] = "linear"  # how it falls
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    recompute_advantages: bool = True  # recompute values and advantages at each epoch
    norm_adv: bool = False  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # clip the probability ratio to 1 - clip_coef .. 1 + clip_coef
    clip_vloss: bool = False  # clip how far a value moves from its old estimate, by clip_coef
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    smooth_l1: bool = False  # value loss: linear above an error of 1, instead of quadratic
    max_grad_norm: float = 0.5  # clip the gradient to this norm
    target_kl: float | None = None  # begin no further epoch after one with a larger mean KL


class UsageError(Exception):
    """What a user can put right, told in a sentence that says how; the exit status is 2."""


def make_vec(args: Args, **kwargs: Any) -> gym.vector.VectorEnv:
    """Call `gym.make_vec`; the mistakes that a user can make in it are raised as `UsageError`."""
    try:
        return gym.make_vec(args.env_id, num_envs=args.num_envs, **(kwargs | args.env_kwargs))
    except (gym.error.Error, ImportError) as error:  # names a near id, or a package to install
        hint = " Its script is ppo_atari.py." if "Namespace ALE" in str(error) else ""
        raise UsageError(f"cannot make {args.env_id}: {error}{hint}") from error
    except Exception as error:
        refused = [f"--env-kwargs {name} {value}" for name, value in args.env_kwargs.items()]
        if "render_mode" in kwargs:
            refused.append("--capture-video (MuJoCo may want MUJOCO_GL=egl or osmesa set)")
        if not refused or isinstance(error, UsageError):
            raise
        refused = " or ".join(refused)
        hint = "mend the environment, or leave that out"
        raise UsageError(f"cannot make {args.env_id} with {refused}: {error!r}; {hint}") from error


class WithoutInfo(gym.Wrapper):
    """Drop `info`: nothing here needs it, and not every one can be batched, nor is it free."""

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return self.env.reset(**kwargs)[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return obs, reward, terminated, truncated, {}


def make_envs(args: Args, video_folder: Path | None = None) -> gym.vector.VectorEnv:
    """Make the environments (detail 1): vectors to observe, actions around -1 .. 1, raw rewards.

    One that finishes is reset in the same step; `info["final_obs"]` has its last observation.
    With a `video_folder`, `eval_episodes` episodes are recorded there. Raises `UsageError` where
    the environment doesn't exist, isn't one for this script, or cannot be rendered for a video.
    """
    vector_kwargs = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "copy": False}
    mode = {"vectorization_mode": args.vectorization, "vector_kwargs": vector_kwargs}
    mode |= {"render_mode": "rgb_array"} if video_folder else {}

    def prepare(env: gym.Env) -> gym.Env:
        try:  # it copies, too: an environment may overwrite its last observation in the reset
            env = gym.wrappers.FlattenObservation(env)
        except NotImplementedError as error:
            need = f"a wrapper, for observations that flatten: it has {env.observation_space}"
            raise UsageError(f"{args.env_id} needs {need}") from error
        if video_folder:
            env.reset()
            env.render()  # to fail here, before the training, where no renderer is
            video = str(video_folder / f"video-{datetime.now():%Y%m%d-%H%M%S-%f}")
            env = RecordVideo(env, video, episode_trigger=lambda i: i < args.eval_episodes)
        return WithoutInfo(env)

    envs = make_vec(args, **mode, wrappers=[prepare])
    obs_space, space = envs.single_observation_space, envs.single_action_space
    usable = isinstance(space, Box) and space.dtype.kind == "f"
    usable = usable and np.abs([space.low, space.high]).max() < 1e9  # more means: no bounds
    if not usable or not isinstance(obs_space, Box):
        envs.close()
        wrap = "a wrapper, for float actions with bounds and observations that flatten"
        need = wrap if isinstance(space, Box) else "ppo.py"
        raise UsageError(f"{args.env_id} needs {need}: it has {obs_space} and {space}")
    # The policy's -1 .. 1 stand for the bounds; beyond them, actions are clipped (detail 27).
    low, high, shape, dtype = space.low, space.high, envs.action_space.shape, space.dtype
    middle, half_range = (low + high) / 2, (high - low) / 2

    def to_env(actions: np.ndarray) -> np.ndarray:
        actions = np.tanh(actions) if args.squash else actions
        actions = middle + half_range * actions.reshape(shape)
        return np.minimum(np.maximum(actions, low), high).astype(dtype, copy=False)

    unbounded = Box(-np.inf, np.inf, (space.low.size,))
    return TransformAction(RecordEpisodeStatistics(envs), to_env, None, unbounded)


def layer_init(layer: nn.Linear | nn.Conv2d, std: float = 2**0.5) -> nn.Linear | nn.Conv2d:
    """Give the layer orthogonal weights of gain `std` and zero biases (detail 2); return it."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def gather(x: Tensor) -> Tensor:
    """The tensors of all processes, of equal shapes, one after another; in a single one, `x`."""
    if not dist.is_initialized():
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class MLP(nn.Sequential):
    """Two tanh layers without `nn.Module.__call__`, which takes a few percent of the time here."""

    def __init__(self, num_inputs: int, num_outputs: int, std: float) -> None:
        first, second = layer_init(nn.Linear(num_inputs, 64)), layer_init(nn.Linear(64, 64))
        last = layer_init(nn.Linear(64, num_outputs), std)
        super().__init__(first, nn.Tanh(), second, nn.Tanh(), last)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs) to (B, outputs)."""
        for layer in self:
            x = layer.forward(x)
        return x

    def numpy(self) -> Callable[[np.ndarray], np.ndarray]:
        """The same function of arrays, until the weights change; much faster for a few rows."""
        w1, b1, w2, b2, w3, b3 = (x.detach().cpu().numpy().T for x in self.parameters())

        def forward(x: np.ndarray) -> np.ndarray:
            return np.tanh(np.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3

        x = torch.linspace(-3, 3, len(w1))[None]
        expected = self(x.to(self[0].weight.device)).detach().cpu()
        same = np.allclose(forward(x.numpy()), expected, 1e-3, 1e-4, equal_nan=True)
        assert same, "the layers were changed: change numpy, too"
        return forward


class RunningStatistics(nn.Module):
    """Mean and variance, per element, of all the batches that it was updated with."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.tensor(1e-4))

    def update(self, batch: Tensor) -> None:
        """Take in (B, *shape) samples (Chan et al. 1979, equation 1.5)."""
        batch = gather(batch)
        var, mean = torch.var_mean(batch, 0, correction=0)
        self.count += len(batch)
        share, delta = len(batch) / self.count, mean - self.mean
        self.mean += share * delta
        self.var += share * (var - self.var + (1 - share) * delta.square())


def log_slope_of_tanh(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), exact for large u too, summed over the last dimension."""
    return 2 * (math.log(2) - u - nn.functional.softplus(-2 * u)).sum(-1)


class Agent(nn.Module):
    """Separate actor and critic (details 13, 26); in its shapes, B is the batch, k the actions."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args) -> None:
        super().__init__()
        obs_size, k = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        self.actor = MLP(obs_size, 2 * k if args.state_std else k, std=0.01)
        self.critic = MLP(obs_size, 1, std=1.0)
        self.log_std = nn.Parameter(torch.full((k,), float(args.log_std_init)))
        self.squash, self.state_std = args.squash, args.state_std
        self.log_std_min = min(args.log_std_min, args.log_std_init)
        self.obs_statistics = RunningStatistics((obs_size,))
        self.return_statistics = RunningStatistics(())
        self.discounted_returns = np.zeros(envs.num_envs, np.float32)  # not saved: 0 after a cut

    def normalize(self, obs: Tensor) -> Tensor:
        """Observations in units of the standard deviations seen so far (details 28 and 29)."""
        mean, var = self.obs_statistics.mean, self.obs_statistics.var
        return ((obs.float() - mean) / (var + 1e-8).sqrt()).clamp(-10, 10)

    def policy(self, obs: Any, actor: Callable[[Any], Any], log_std: Any) -> tuple[Any, Any]:
        """Mean, (B, k), and log standard deviation, (k,) or (B, k), for normalized obs.

        The three arguments are PyTorch's, to learn, or NumPy's, to act.
        """
        mean, k = actor(obs), len(log_std)  # log_std is the same in every state (detail 24)
        if self.state_std:  # the floor stops the gradient of what is below it
            mean, log_std = mean[:, :k], (log_std + mean[:, k:]).clip(self.log_std_min)
        return mean, log_std

    def sample_noise(self, *shape: int) -> np.ndarray:
        """Standard Gaussian noise for `make_act`, (*shape, k)."""
        return torch.randn(*shape, len(self.log_std)).numpy()

    def make_act(self) -> Callable[..., np.ndarray]:
        """A function of observations and noise, valid until the weights change: actions, (B, k),
        as `make_envs` takes them, the mode or, with noise, a sample (detail 23).
        """
        network = self.actor.numpy(), self.log_std.detach().cpu().numpy()
        center = self.obs_statistics.mean.cpu().numpy()
        scale = (self.obs_statistics.var + 1e-8).sqrt().cpu().numpy()

        def act(obs: np.ndarray, noise: np.ndarray | float = 0.0) -> np.ndarray:
            obs = (np.asarray(obs, np.float32) - center) / scale
            mean, log_std = self.policy(np.minimum(np.maximum(obs, -10), 10), *network)
            return mean + noise * np.exp(log_std)

        return act

    def value(self, obs: Tensor) -> Tensor:
        """Estimated values, (B,)."""
        return self.critic(self.normalize(obs)).squeeze(-1)

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        """Log-probability and entropy, summed over the k actions (detail 25), and value, (B,)."""
        obs = self.normalize(obs)
        mean, log_std = self.policy(obs, self.actor, self.log_std)
        std, k = log_std.exp(), len(self.log_std)
        log_scale = log_std.sum(-1) + 0.5 * math.log(2 * math.pi) * k
        logprobs = -0.5 * ((actions - mean) / std).square().sum(-1) - log_scale
        entropy = (log_scale + 0.5 * k).expand_as(logprobs)
        if self.squash:  # p(tanh u) = p(u) / (1 - tanh(u)^2); the entropy by one sample of u
            logprobs = logprobs - log_slope_of_tanh(actions)
            entropy = entropy + log_slope_of_tanh(mean + std * torch.randn_like(mean))
        return logprobs, entropy, self.critic(obs).squeeze(-1)

    def scale_rewards(self, rewards: np.ndarray, dones: np.ndarray, gamma: float) -> np.ndarray:
        """The rewards to learn from, (num_steps, num_envs): here, in units of the standard
        deviation of the discounted return so far, restarted by each episode (details 30 and 31).
        """
        returns = np.zeros_like(rewards)
        for t in range(len(rewards)):
            returns[t] = self.discounted_returns = gamma * self.discounted_returns + rewards[t]
            self.discounted_returns = self.discounted_returns * ~dones[t]
        self.return_statistics.update(torch.as_tensor(returns.ravel()).to(self.log_std.device))
        return (rewards / math.sqrt(self.return_statistics.var + 1e-8)).clip(-10, 10)

    def finish_iteration(self, obs: Tensor) -> dict[str, float]:
        """Adapt to a rollout that was learned from; return scalars to log: here, the policy's std.

        Only now, so that the policy is the same function throughout a rollout and its update.
        """
        obs = obs.flatten(0, 1).float()
        self.log_std.data.clamp_(self.log_std_min)
        with torch.no_grad():
            log_std = self.policy(self.normalize(obs), self.actor, self.log_std)[1]
            std = gather(log_std.exp()).mean().item()
        self.obs_statistics.update(obs)
        return {"charts/policy_std": std}


# What num_envs environments did in num_steps steps. Arrays and tensors are (num_steps, num_envs,
# ...), but obs has the next step's too; final_obs maps the (step, environment) of a truncation to
# the last observation there, which the reset keeps out of obs.
Rollout = namedtuple("Rollout", "obs actions rewards terminations dones final_obs")
# Samples to learn from, along the first dimension of each tensor.
Batch = namedtuple("Batch", "obs actions logprobs advantages returns values")


def compute_advantages(
    rollout: Rollout, values: np.ndarray, next_values: np.ndarray, args: Args
) -> np.ndarray:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16; detail 5).

    Arrays are (num_steps, num_envs). `next_values` are of what a step led to, before any reset;
    after a termination they don't count. `dones` has truncations, too: the sum ends at both.
    """
    deltas = rollout.rewards + args.gamma * next_values * ~rollout.terminations - values
    discounts = args.gamma * args.gae_lambda * ~rollout.dones
    advantages, last_advantage = np.zeros_like(values), 0.0
    for t in reversed(range(len(values))):
        advantages[t] = last_advantage = deltas[t] + discounts[t] * last_advantage
    return advantages


# The means that `ppo_loss` reports, of (B,) numbers each, in this order; `gradient_step` adds one.
LOSSES = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
METRICS = [*LOSSES, "grad_norm"]


def ppo_loss(agent: Agent, batch: Batch, args: Args) -> tuple[Tensor, Tensor]:
    """The loss of a minibatch, and the means that `LOSSES` names."""
    logprobs, entropy, values = agent.evaluate_actions(batch.obs, batch.actions)
    log_ratio = logprobs - batch.logprobs
    ratio = log_ratio.exp()

    advantages = batch.advantages
    if args.norm_adv:  # detail 7
        std, mean = torch.std_mean(gather(advantages))
        advantages = (advantages - mean) / (std + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(advantages * ratio, advantages * clipped_ratio)  # detail 8

    # Half the squared error, up to an error of delta.
    huber = {"reduction": "none", "delta": 1.0 if args.smooth_l1 else math.inf}
    value_loss = nn.functional.huber_loss(values, batch.returns, **huber)
    if args.clip_vloss:  # detail 9
        clipped = values.clamp(batch.values - args.clip_coef, batch.values + args.clip_coef)
        clipped_loss = nn.functional.huber_loss(clipped, batch.returns, **huber)
        value_loss = torch.max(value_loss, clipped_loss)

    # Detail 10. One mean of the sum, rather than a sum of means: fewer operations.
    loss = (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).mean()
    with torch.no_grad():  # detail 12; KL estimators k1 and k3 of joschu.net/blog/kl-approx.html
        kl, is_clipped = ratio - 1 - log_ratio, ratio != clipped_ratio
        metrics = (policy_loss, value_loss, entropy, -log_ratio, kl, is_clipped)
        return loss, torch.stack(metrics).mean(1)


def gradient_step(
    agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, indices: Tensor, args: Args
) -> Tensor:
    """Learn from the minibatch of these indices; return the means that `METRICS` names."""
    loss, metrics = ppo_loss(agent, Batch(*(x.index_select(0, indices) for x in batch)), args)
    parameters = [x for g in optimizer.param_groups for x in g["params"] if x.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    flat = torch.cat([x.flatten() for x in gradients])  # fewer operations, and one message
    if dist.is_initialized():  # the mean over all processes
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
    norm = flat.norm()
    flat *= (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)  # detail 11
    parts = flat.split([x.numel() for x in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    optimizer.step()
    return torch.cat([metrics, norm[None]])


@torch.no_grad()
def make_batch(agent: Agent, rollout: Rollout, args: Args, logprobs: Tensor | None = None) -> Batch:
    """Value a rollout with the agent as it is, and flatten it to num_steps x num_envs samples.

    `logprobs` are those of the policy that acted, (samples,): the agent's, unless given.
    """
    obs, final_obs = rollout.obs, rollout.final_obs
    samples = obs[:-1].flatten(0, 1), rollout.actions.flatten(0, 1)
    # In slices, so that the memory for activations doesn't grow with the rollout.
    slices = [x.split(256) for x in samples]
    if logprobs is None:
        parts = map(agent.evaluate_actions, *slices)
        logprobs, _, values = (torch.cat(x) for x in zip(*parts, strict=True))
    else:
        values = torch.cat([agent.value(x) for x in slices[0]])
    values = torch.cat([values, agent.value(obs[-1])]).view(obs.shape[:2]).cpu().numpy()
    values, next_values = values[:-1], values[1:].copy()
    if final_obs:
        truncated_obs = torch.as_tensor(np.stack(list(final_obs.values()))).to(obs)
        next_values[tuple(np.transpose(list(final_obs)))] = agent.value(truncated_obs).cpu()
    advantages = compute_advantages(rollout, values, next_values, args)
    targets = torch.as_tensor(np.stack([advantages, advantages + values, values]))
    return Batch(*samples, logprobs, *targets.to(obs.device).flatten(1))


def set_up(args: Args, on_exit: contextlib.ExitStack) -> torch.device:
    """Check sizes, set PyTorch up, return the device. Raises `UsageError`."""
    sizes = "num_envs num_steps num_minibatches update_epochs"
    for name in f"{sizes} learning_rate clip_coef max_grad_norm".split():
        if getattr(args, name) <= 0:
            raise UsageError(f"{name} is {getattr(args, name)}, and must be above 0")
    if not 0 <= args.gamma <= 1 or not 0 <= args.gae_lambda <= 1:
        raise UsageError("gamma and gae_lambda must be from 0 to 1")
    if min(args.seed, args.num_threads, args.checkpoint_interval, args.eval_episodes) < 0:
        raise UsageError("seed, num_threads, checkpoint_interval, eval_episodes: none below 0")
    if args.eval_episodes == 0 and (args.evaluate or args.capture_video):
        raise UsageError("--evaluate and --capture-video need eval_episodes above 0")
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # processes, where torchrun started them
    batch_size, num_parts = args.num_envs * args.num_steps, world_size * args.num_minibatches
    rollout = f"num_envs * num_steps = {args.num_envs} * {args.num_steps}"
    if args.num_envs % world_size or batch_size % num_parts or batch_size < 2 * num_parts:
        parts = f"num_minibatches = {args.num_minibatches} equal parts of 2 or more"
        parts += f" for each of {world_size} processes" if world_size > 1 else ""
        raise UsageError(f"{rollout} samples don't divide into {parts}: change one of these")
    if args.total_timesteps < batch_size:
        raise UsageError(f"total_timesteps is less than {rollout}: raise it or lower these")
    if args.evaluate and world_size > 1:
        raise UsageError("--evaluate takes one process: start it without torchrun")
    device = args.device
    if device == "auto":
        device = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    # Forget what an earlier call of train compiled. Were the compiler, which Adam needs too, first
    # imported later, it would keep the process group's threads alive, which abort the process.
    torch.compiler.reset()
    if world_size > 1 and device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        probe = torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise UsageError(f"there is no device {device} here: use cpu, or auto to choose") from None
    if world_size > 1:
        if probe.is_cuda:
            torch.cuda.set_device(probe.device)
        dist.init_process_group("nccl" if probe.is_cuda else "gloo")
        on_exit.callback(dist.destroy_process_group)
        on_exit.callback(torch.compiler.reset)  # before: NCCL waits for CUDA graphs that use it
    on_exit.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(args.num_threads or torch.get_num_threads())
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.compile and not args.evaluate:
        # Otherwise the gradients' computation would be left out of the compiled code.
        on_exit.enter_context(torch._dynamo.config.patch(trace_autograd_ops=True))
        quiet = logging.getLogger("torch._dynamo.variables.ctx_manager")
        quiet.setLevel(logging.ERROR)  # it warns of Adam's profiler marks
        try:
            torch.compile(lambda x: x + 1)(probe)
        except Exception as error:
            needs = "--compile needs a C++ compiler and Python's headers, on a GPU Triton"
            raise UsageError(f"{needs}: {str(error).splitlines()[0]}") from error
    return probe.device


def seed_all(*numbers: int) -> int:
    """Seed all generators by the numbers; return another seed, below 2**30, for environments."""
    first, second = np.random.SeedSequence(numbers).generate_state(2).tolist()
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(first)
    return second // 4


def check_finite(where: str, **arrays: np.ndarray | float) -> None:
    """Raise `UsageError` with the name of an array of floats that isn't finite."""
    for name, x in arrays.items():
        if np.result_type(x).kind == "f" and not np.isfinite(x).all():
            hint = "mend the environment, or lower learning_rate; no checkpoint has it"
            raise UsageError(f"{name} became infinite or nan in {where}: {hint}")


def load_checkpoint(run: str) -> tuple[Path, dict[str, Any]]:
    """The path and the content of a run's checkpoint, given its folder or its file."""
    path = Path(run, "checkpoint.pt") if Path(run).is_dir() else Path(run)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        kind = type(error).__name__
        raise UsageError(f"{path} is no checkpoint, or a damaged one ({kind})") from error
    args = checkpoint.get("args") if isinstance(checkpoint, dict) else None
    if not isinstance(args, dict) or args.keys() != asdict(Args()).keys():
        raise UsageError(f"{path} is of another script or version: use the one that wrote it")
    return path, checkpoint


def evaluate(agent: Agent, envs: gym.vector.VectorEnv, args: Args) -> dict[str, float]:
    """Play `eval_episodes` whole episodes greedily; print and return what their raw returns are.

    `envs` is a single environment: if several raced for the episodes, short ones would win.
    Raises `UsageError` where an episode goes on for 100,000 steps.
    """
    act, returns, steps = agent.make_act(), [], 0
    obs, _ = envs.reset(seed=args.seed % 2**30)
    while len(returns) < args.eval_episodes:
        obs, _, _, _, info = envs.step(act(obs))
        steps += 1
        if steps == 100_000:
            limit = "--env-kwargs max_episode_steps 1000, for --evaluate or a new run, sets a limit"
            raise UsageError(f"a greedy episode of {args.env_id} doesn't end: {limit}")
        if "episode" in info:
            returns.append(float(info["episode"]["r"][0]))
            steps = 0
    mean, std, count = float(np.mean(returns)), float(np.std(returns)), len(returns)
    print(f"{args.env_id}: greedy return {mean:.1f}, std {std:.1f}, over {count} episodes")
    return {"eval/return": mean, "eval/return_std": std, "eval/episodes": count}


def train(args: Args) -> float:
    """Train an agent; return the mean raw return of the last 100 training episodes, or nan.

    Writes events and `checkpoint.pt` to a new folder in `runs`, or to that of `args.resume`; with
    `args.evaluate`, only evaluates that run, and returns its greedy return. Raises `UsageError` for
    what a user can put right, `SystemExit` after a first SIGINT or SIGTERM and a checkpoint.
    """
    with contextlib.ExitStack() as on_exit:
        # --------------------------------------- set-up ---------------------------------------
        def plain(values: dict[str, Any]) -> dict[str, Any]:  # NumPy's numbers wouldn't load again
            return {k: x.item() if isinstance(x, np.generic) else x for k, x in values.items()}

        args = replace(args, **plain(vars(args) | {"env_kwargs": plain(args.env_kwargs)}))
        device = set_up(args, on_exit)
        rank, world_size, stamp = 0, 1, [f"{datetime.now():%Y%m%d-%H%M%S-%f}"]
        if dist.is_initialized():  # torchrun: each process has its share; the first one reports
            rank, world_size = dist.get_rank(), dist.get_world_size()
            dist.broadcast_object_list(stamp)  # one name of the run for all
            args = replace(args, eval_episodes=0, track=False) if rank else args
        own_args = replace(args, num_envs=args.num_envs // world_size)
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{stamp[0]}"
        path, saved = Path("runs", name.replace("/", "-").replace(":", "-"), "checkpoint.pt"), None
        if args.resume or args.evaluate:
            path, saved = load_checkpoint(args.resume or args.evaluate)
        if args.resume:
            free = {"resume", "device", "num_threads", "track", "eval_episodes", "capture_video"}
            changed = sorted({k for k, v in asdict(args).items() if v != saved["args"][k]} - free)
            if changed:
                raise UsageError(f"{path} goes on as it began: leave out {', '.join(changed)}")
            if saved["finished"]:
                raise UsageError(f"{path} is of a finished run: evaluate it, or begin another")

        caught: list[int] = []

        def catch(number: int, frame: Any) -> None:
            caught.append(number)
            if "WORLD_SIZE" not in os.environ:  # torchrun sends a second one itself
                for either in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(either, signal.SIG_DFL)  # which ends the process at once

        training = on_exit.enter_context(contextlib.ExitStack())
        if threading.current_thread() is threading.main_thread() and not args.evaluate:
            for either in (signal.SIGINT, signal.SIGTERM):
                training.callback(signal.signal, either, signal.signal(either, catch))

        eval_envs = None
        if args.eval_episodes:
            video_folder = path.parent if args.capture_video else None
            seed_all(args.seed)
            eval_envs = make_envs(replace(args, num_envs=1), video_folder)
            on_exit.callback(eval_envs.close)
        progress = saved or {"iteration": 0, "step": 0, "returns": [], "finished": False}
        begin, global_step = progress["iteration"], progress["step"]
        last_returns = deque(progress["returns"], maxlen=100)
        seed_all(args.seed, begin, rank)
        envs = eval_envs if args.evaluate else make_envs(own_args)
        on_exit.callback(lambda: envs.close())
        torch.manual_seed(args.seed)  # all processes of a job begin with the same weights
        agent = Agent(envs, args).to(device)
        adam = {"lr": args.learning_rate, "eps": 1e-5, "fused": not args.compile}  # detail 3
        adam["capturable"] = adam["foreach"] = args.compile and device.type == "cuda"
        optimizer = torch.optim.Adam(agent.parameters(), **adam)
        rates = [group["lr"] for group in optimizer.param_groups]
        if saved:
            try:
                agent.load_state_dict(saved["agent"])
                optimizer.load_state_dict(saved["optimizer"])
            except (RuntimeError, ValueError) as error:
                raise UsageError(f"{path} is for another environment or network") from error
        if args.evaluate:
            return evaluate(agent, eval_envs, args)["eval/return"]
        # Fused Adam goes wrong, silently, where these lie in another order than the gradients.
        moments = [x for state in optimizer.state.values() for x in state.values()]
        for x in [*agent.parameters(), *moments]:
            x.data = x.data.contiguous()

        for group in optimizer.param_groups:  # a tensor: compiled code doesn't depend on its value
            group["lr"] = torch.as_tensor(group["lr"], device=device)
        # On a GPU, as CUDA graphs; without --compile, it is gradient_step itself.
        learn = torch.compile(gradient_step, mode="reduce-overhead", disable=not args.compile)

        if args.track:
            where = {"project": args.wandb_project_name, "entity": args.wandb_entity}
            run = path.resolve().parent.name
            where |= {"name": run, "id": run, "resume": "allow"}
            try:
                import wandb

                wandb_run = wandb.init(**where, config=asdict(args))
            except ImportError:
                raise UsageError("--track needs Weights & Biases: pip install wandb") from None
            except wandb.Error as error:
                raise UsageError(f"--track failed at Weights & Biases: {error}") from error
            wandb_run.define_metric("*", step_metric="global_step")
            on_exit.callback(wandb_run.finish)
        if rank == 0:  # what the run logged after its checkpoint is purged: it is logged again
            writer = on_exit.enter_context(SummaryWriter(path.parent, purge_step=global_step + 1))
        if rank == 0 and not saved:
            table = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
            writer.add_text("hyperparameters", f"|name|value|\n|-|-|\n{table}")

        def log(step: int, scalars: dict[str, float]) -> None:
            if rank > 0:
                return
            # As one event, which costs a tenth of an add_scalar for each.
            values = [Summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
            writer.file_writer.add_summary(Summary(value=values), step)
            if args.track:
                wandb_run.log({**scalars, "global_step": step})

        # The rollout is kept on the host, where environments and advantages need it.
        space, action_space = envs.single_observation_space, envs.single_action_space
        shape = (args.num_steps, own_args.num_envs)
        dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        obs_shape, pin = (shape[0] + 1, shape[1], *space.shape), device.type == "cuda"
        obs = torch.zeros(obs_shape, dtype=dtype, pin_memory=pin).numpy()  # pinned: sent faster
        actions = np.zeros((*shape, *action_space.shape), action_space.dtype)
        rewards = np.zeros(shape, np.float32)
        terminations, dones = np.zeros(shape, bool), np.zeros(shape, bool)

        batch_size = args.num_envs * args.num_steps
        num_iterations = args.total_timesteps // batch_size
        interval = args.checkpoint_interval or num_iterations

        def save() -> None:
            if rank > 0:
                return
            # First to another file: at any moment, the one at path is whole. By way of a buffer,
            # as torch.save raises a RuntimeError where a disk is full, which could mean anything.
            writer.flush()
            state = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            state = progress | state | {"args": asdict(replace(args, resume=None))}
            content, temporary = io.BytesIO(), path.with_suffix(".tmp")
            torch.save(state, content)
            try:
                with temporary.open("wb") as file:
                    file.write(content.getbuffer())
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

        def save_if_worker_died(kind: type, error: BaseException, trace: Any) -> None:
            interrupted = caught and kind is KeyboardInterrupt  # a worker was, too
            whole = global_step < progress["step"] + batch_size  # no update has begun
            if whole and (isinstance(error, EOFError | ConnectionError) or interrupted):
                for vector_env in filter(None, (envs, eval_envs)):
                    for process in getattr(vector_env.unwrapped, "processes", ()):
                        process.kill()
                    vector_env.unwrapped.closed = True  # its processes couldn't be closed
                save()
                died = f"a process, or the connection to one, died ({error!r})"
                raise UsageError(f"{died}: go on with --resume {path.parent}") from error

        on_exit.push(save_if_worker_died)
        bar = {"total": num_iterations * batch_size, "initial": global_step, "unit": "step"}
        bar = training.enter_context(tqdm(**bar, unit_scale=True, disable=rank > 0 or None))
        start_time = time.perf_counter()
        for iteration in range(begin, num_iterations):
            # Environments can't be saved. So that a resumed run goes the same way, every run makes
            # them anew at a scheduled checkpoint, and seeds all generators by the iteration.
            if iteration == begin or iteration % interval == 0:
                if iteration > begin:
                    envs.close()
                    seed_all(args.seed, iteration, rank)
                    envs = make_envs(own_args)  # some keep more than a reset resets
                obs[-1], _ = envs.reset(seed=seed_all(args.seed, iteration, rank))

            # ------------------------------------- rollout -------------------------------------
            # The policy stays the same throughout: draw all noise before, only act within, and
            # compute values and log-probabilities after, in one batch.
            obs[0] = obs[-1]
            act, noise = agent.make_act(), agent.sample_noise(*shape)
            final_obs, episodes = {}, []
            for t in range(args.num_steps):
                actions[t] = act(obs[t], noise[t])
                obs[t + 1], rewards[t], terminated, truncated, info = envs.step(actions[t])
                terminations[t], dones[t] = terminated, terminated | truncated
                global_step += args.num_envs
                if dones[t].any():
                    for i in np.flatnonzero(truncated & ~terminated):
                        final_obs[t, i] = np.array(info["final_obs"][i])
                    for i in np.flatnonzero(info.get("_episode", ())):
                        total, length = info["episode"]["r"][i], info["episode"]["l"][i]
                        episodes.append((global_step, float(total), int(length)))

            # --------------------------------- advantages, update ---------------------------------
            is_due = (iteration + 1) % interval == 0
            dones[-1] |= is_due  # the next iteration makes the environments anew
            if args.anneal_lr:  # detail 4
                past = iteration / num_iterations  # of the training, from 0 to 1
                factors = {"linear": 1 - past, "cosine": 0.5 + 0.5 * math.cos(math.pi * past)}
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"].fill_(rate * factors[args.lr_schedule])
            scaled_rewards = agent.scale_rewards(rewards, dones, args.gamma)
            tensors = (torch.as_tensor(x, device=device) for x in (obs, actions))
            rollout = Rollout(*tensors, scaled_rewards, terminations, dones, final_obs)
            first = batch = make_batch(agent, rollout, args)
            metrics = []
            for epoch in range(args.update_epochs):
                if args.recompute_advantages and epoch > 0:
                    batch = make_batch(agent, rollout, args, batch.logprobs)
                order = torch.randperm(len(batch.obs), device=device)  # detail 6
                for indices in order.chunk(args.num_minibatches):
                    # A copy: the next replay of a CUDA graph overwrites what this one returns.
                    metrics.append(learn(agent, optimizer, batch, indices, args).clone())
                if args.target_kl is not None:
                    means = gather(torch.stack(metrics[-args.num_minibatches :])).mean(0)
                    if means[METRICS.index("approx_kl")] > args.target_kl:
                        break

            # --------------------------------------- log ---------------------------------------
            news = [(episodes, caught)] * world_size
            if dist.is_initialized():
                dist.all_gather_object(news, news[0])
            stop = next((numbers for _, numbers in news if numbers), [])
            # By step alone: by return, too, last_returns would lose the worst of a step first.
            ended = sorted((x for own, _ in news for x in own), key=lambda x: x[0])
            for step, total, length in ended:
                last_returns.append(total)
                log(step, {"charts/episodic_return": total, "charts/episodic_length": length})
            sps = (global_step - begin * batch_size) / (time.perf_counter() - start_time)
            means = gather(torch.stack(metrics)).mean(0).tolist()
            metrics = dict(zip(METRICS, means, strict=True))
            where = f"iteration {iteration}, up to step {global_step:,}"
            check_finite(where, observation=obs, reward=rewards, **metrics)
            values, targets = gather(first.values), gather(first.returns)
            metrics["explained_variance"] = (1 - (targets - values).var() / targets.var()).item()
            scalars = {f"losses/{name}": x for name, x in metrics.items()}
            scalars |= agent.finish_iteration(rollout.obs[:-1])
            learning_rate = optimizer.param_groups[0]["lr"].item()
            scalars |= {"charts/learning_rate": learning_rate, "charts/SPS": sps}
            debug = {"value": values, "value_target": targets, "advantage": targets - values}
            scalars |= {f"debug/{name}": x.mean().item() for name, x in debug.items()}
            log(global_step, scalars)
            bar.update(batch_size)
            bar.set_postfix_str(f"return {np.mean(last_returns or np.nan):.1f}", refresh=False)

            # ------------------------------------ checkpoint ------------------------------------
            progress.update(iteration=iteration + 1, step=global_step, returns=[*last_returns])
            if is_due or stop or iteration + 1 == num_iterations:
                save()
            if stop:
                bar.close()
                if rank == 0:
                    print(f"stopped: go on with --resume {path.parent}", file=sys.stderr)
                sys.exit(128 + stop[0])
        seconds = time.perf_counter() - start_time
        training.close()

        # ------------------------------------- evaluation -------------------------------------
        score = float(np.mean(last_returns or np.nan))
        summary = f"mean return {score:.1f} over the last {len(last_returns)} episodes"
        if args.eval_episodes:
            log(global_step, evaluate(agent, eval_envs, args))
        progress["finished"] = True
        save()
    steps = global_step - begin * batch_size
    speed = f"{steps:,} steps in {seconds:.1f} s, {steps / seconds:,.0f} steps/s"
    if rank == 0:
        print(f"{args.env_id}, seed {args.seed}: {summary}; {speed}; {path.parent}")
    return score


if __name__ == "__main__":
    # TensorBoard's thread on a full disk: the same error is raised here, too.
    threading.excepthook = lambda x: isinstance(x.exc_value, OSError) or sys.excepthook(*x[:3])
    try:
        args = tyro.cli(Args)
        if run := args.resume or args.evaluate:  # whose own arguments take the defaults' place
            own = load_checkpoint(run)[1]["args"]
            args = tyro.cli(Args, default=Args(**own | {"env_kwargs": {}}))
            args.env_kwargs = own["env_kwargs"] | args.env_kwargs
        train(args)
        gc.freeze()  # to exit sooner: no search for cycles in all that was imported
    except (UsageError, OSError) as error:
        kept = "; any checkpoint is untouched" if isinstance(error, OSError) else ""
        print(f"{Path(__file__).name}: {error}{kept}", file=sys.stderr)
        sys.exit(2)
