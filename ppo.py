# /// script
# requires-python = "==3.11.*"
# dependencies = ["torch==2.13.0", "moviepy==2.2.1", "mujoco==3.10.0", "ale-py==0.12.1",
#     "gymnasium[box2d,classic-control,mujoco]==1.4.0", "numpy==2.4.6", "tensorboard==2.21.0",
#     "tqdm==4.70.1", "tyro==1.0.17"]
# ///
"""Proximal Policy Optimization (PPO, arXiv:1707.06347) in a single file.

Actions: Discrete, MultiDiscrete or MultiBinary. Observations: whatever flattens to a vector.

    python ppo.py --env-id CartPole-v1        # under a minute, to a return of 475 to 500
    python ppo.py --resume runs/NAME          # go on with a stopped or killed run, or extend it
    python ppo.py --evaluate runs/NAME --capture-video
    torchrun --nproc-per-node=2 ppo.py        # the same algorithm in two processes

"Detail n": see "The 37 Implementation Details of Proximal Policy Optimization", Huang et al. 2022.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict, namedtuple
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.wrappers.vector import RecordEpisodeStatistics, TransformAction
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Train PPO on discrete actions."""

    env_id: str = "CartPole-v1"  # id of the environment; module:Name-v0 imports module first
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # name value ...
    total_timesteps: int = 500_000  # environment steps, all together; rounded down to rollouts
    seed: int = 1  # seeds the environments, the network, the sampling and the shuffling
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    device: str = "cpu"  # cpu, cuda, cuda:N, mps, or auto: a GPU if there is one
    torch_deterministic: bool = True  # on a GPU, choose deterministic convolutions
    num_threads: int = 1  # CPU threads of PyTorch, 0: its own choice; 1 is fastest for an MLP
    compile: bool = False  # compile the gradient steps: seconds to start with, faster then
    vectorization: Literal["sync", "async", "envpool", "native"] = "sync"  # async: a process each
    mask_actions: bool = False  # never choose an action that info["action_mask"] has a 0 for
    track: bool = False  # mirror the scalars to Weights & Biases
    wandb_project_name: str = "ppo"  # project of Weights & Biases

    checkpoint_interval: int = 100  # iterations between checkpoints, which cut episodes; 0: at end
    eval_episodes: int = 10  # greedy episodes to evaluate, after the training or with --evaluate
    eval_checkpoints: bool = False  # evaluate at every checkpoint, too: a greedy learning curve
    capture_video: bool = False  # record the evaluation's episodes in the run's folder
    resume: str | None = None  # go on with the run in this folder; other flags may change it
    evaluate: str | None = None  # train nothing, evaluate the run in this folder

    num_envs: int = 4  # environments stepped side by side, in all processes of torchrun
    num_steps: int = 128  # steps of each environment in a rollout
    num_minibatches: int = 4  # minibatches that a rollout is split into
    update_epochs: int = 4  # passes over a rollout
    learning_rate: float = 2.5e-4  # Adam's step size
    anneal_lr: bool = True  # let the learning rate fall to 0 linearly; otherwise it is constant
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    recompute_advantages: bool = False  # recompute values and advantages at each epoch
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # clip the probability ratio to 1 - clip_coef .. 1 + clip_coef
    clip_vloss: bool = True  # clip how far a value moves from its old estimate, by clip_coef
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the gradient to this norm
    target_kl: float | None = None  # no more epochs after a KL above this, or 5x it in a minibatch


Array = Tensor | np.ndarray
FIXED = ["env_id", "env_kwargs", "num_envs", "num_steps", "mask_actions"]  # in a resumed run


class UsageError(Exception):
    """A mistake that the user can put right; the message says how, and the exit status is 2."""


def check(args: Args) -> None:
    """Raise `UsageError` for numbers that can't work, and for videos that can't be recorded."""
    positive = ["num_envs", "num_steps", "num_minibatches", "update_epochs", "learning_rate"]
    positive += ["clip_coef", "max_grad_norm", "target_kl"]
    bad = [x for x in positive if getattr(args, x) is not None and not getattr(args, x) > 0]
    natural = ["seed", "num_threads", "checkpoint_interval"]
    bad += [x for x in natural if getattr(args, x) < 0]
    if args.eval_episodes < (1 if args.eval_checkpoints or args.evaluate else 0):
        bad.append("eval_episodes")
    bad += [x for x in ("gamma", "gae_lambda") if not 0 <= getattr(args, x) <= 1]
    if bad:
        raise UsageError(f"out of range: {', '.join(f'{x} {getattr(args, x)}' for x in bad)}")
    batch_size, world_size = args.num_envs * args.num_steps, int(os.environ.get("WORLD_SIZE", 1))
    parts = args.num_minibatches * world_size
    if batch_size % parts or batch_size < 2 * parts or args.num_envs % world_size:
        need = f"num_minibatches * {world_size} processes = {parts} equal parts of 2 or more"
        need += f", num_envs into {world_size}"
        raise UsageError(f"num_envs * num_steps = {batch_size} must divide into {need}")
    if args.total_timesteps < batch_size:
        raise UsageError(f"total_timesteps is less than num_envs * num_steps = {batch_size}")
    if args.capture_video:  # better an error now than after the training
        with TemporaryDirectory() as folder:
            make_envs(args, 1, Path(folder, "videos")).close()


class FlatEnv(gym.Wrapper):
    """Observe float32 vectors that end with the action mask; drop info, which is slow to batch."""

    def __init__(self, env: gym.Env, mask_actions: bool) -> None:
        super().__init__(env)
        self.space, self.mask_actions = env.observation_space, mask_actions
        assert isinstance(env.action_space, Discrete) or not mask_actions, "masks are for Discrete"
        size = gym.spaces.flatdim(self.space) + (env.action_space.n if mask_actions else 0)
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float32)

    def flatten(self, obs: Any, info: dict[str, Any]) -> np.ndarray:
        obs = gym.spaces.flatten(self.space, obs).astype(np.float32)  # a copy: env may reuse it
        return np.append(obs, np.float32(info["action_mask"])) if self.mask_actions else obs

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        return self.flatten(obs, info), {}

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.flatten(obs, info), reward, terminated, truncated, {}


class FastEnvs(gym.vector.VectorWrapper):
    """EnvPool's environments, or gymnasium's CartPole on arrays, with resets in the same step."""

    def __init__(self, args: Args, num_envs: int) -> None:
        # EnvPool takes a failure at its limit of steps for a truncation, so the limit is kept here.
        limit = args.env_kwargs.get("max_episode_steps", gym.spec(args.env_id).max_episode_steps)
        self.limit = 10**9 if limit in (None, -1) else limit
        kwargs = args.env_kwargs | {"num_envs": num_envs, "max_episode_steps": 10**9}
        self.is_native = args.vectorization == "native"
        if self.is_native:
            envs = gym.make_vec(args.env_id, vectorization_mode="vector_entry_point", **kwargs)
        else:
            try:
                import envpool
            except ImportError as error:
                raise ImportError("pip install envpool") from error
            seeds = np.random.randint(2**31, size=num_envs).tolist()  # it takes seeds only here
            envs = envpool.make_gymnasium(args.env_id, seed=seeds, **kwargs)
        super().__init__(envs)
        self.action_space = gym.vector.utils.batch_space(envs.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        self.single_observation_space = Box(-np.inf, np.inf, envs.single_observation_space.shape)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.steps = np.zeros(self.num_envs, int)
        obs, _ = self.env.reset(**kwargs) if self.is_native else self.env.reset()
        return obs.astype(np.float32), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, Any, Any, Any, dict[str, Any]]:
        obs, rewards, terminations, _, _ = self.env.step(actions)
        obs, infos, self.steps = obs.astype(np.float32), {}, self.steps + 1
        truncations = self.steps >= self.limit
        dones = terminations | truncations
        if dones.any():
            infos["final_obs"], self.steps[dones] = obs.copy(), 0
            if self.is_native:  # its reset would be of all environments
                env = self.env
                env.state[:, dones] = env.np_random.uniform(env.low, env.high, (4, dones.sum()))
                obs[dones], env.prev_done[dones] = env.state.T[dones], False
            else:
                obs[dones], _ = self.env.reset(options={"reset_mask": dones})
        return obs, rewards, terminations, truncations, infos


def make_envs(args: Args, num_envs: int, video_folder: Path | None = None) -> gym.vector.VectorEnv:
    """Make environments (detail 1): vectors to observe, the actions of `Agent`, raw rewards.

    One whose episode ends is reset in the same step; `info` has its "final_obs".
    With a `video_folder`, `eval_episodes` episodes are recorded there. Raises `UsageError`.
    """
    if "ALE/" in args.env_id:
        raise UsageError(f"{args.env_id} is a game for ppo_atari.py")
    kwargs = args.env_kwargs | ({"render_mode": "rgb_array"} if video_folder else {})
    options = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def wrap(env: gym.Env) -> gym.Env:  # not those of FastEnvs, which has no single ones
        if args.vectorization == "async" and multiprocessing.current_process().daemon:  # a worker
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it, too: train handles it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if video_folder:
            env.reset()
            env.render()  # fails here if there is no renderer
            env = gym.wrappers.RecordVideo(env, str(video_folder), lambda i: i < args.eval_episodes)
        return FlatEnv(env, args.mask_actions)  # add wrappers above; checkpoints make them anew

    if args.mask_actions and args.vectorization in ("envpool", "native"):
        raise UsageError("masks need --vectorization sync or async")
    try:
        if args.vectorization in ("envpool", "native") and not video_folder:
            envs = FastEnvs(args, num_envs)
        else:
            mode = "async" if args.vectorization == "async" else "sync"
            envs = gym.make_vec(args.env_id, num_envs, mode, options, [wrap], **kwargs)
        if args.mask_actions and not video_folder:  # a reset begins a video
            envs.reset()  # fails here if there are no masks
    except Exception as error:
        raise UsageError(f"cannot make {args.env_id}, {kwargs}: {error!r}") from error
    # One mechanism for three spaces (detail 37): len(nvec) choices at once, the i-th below nvec[i].
    space, shape = envs.single_action_space, envs.action_space.shape
    start = getattr(space, "start", 0)
    if isinstance(space, Discrete):
        nvec = np.array([space.n])
    elif isinstance(space, MultiDiscrete):
        nvec = space.nvec
    elif isinstance(space, MultiBinary):
        nvec = np.full(space.shape, 2)
    else:
        raise UsageError(f"{args.env_id} has actions {space}: ppo_continuous.py is for a Box")
    return TransformAction(
        RecordEpisodeStatistics(envs),
        lambda actions: (actions.reshape(shape) + start).astype(space.dtype),
        single_action_space=MultiDiscrete(nvec.flatten()),
    )


def layer_init(layer: nn.Linear | nn.Conv2d, std: float = 2**0.5) -> nn.Linear | nn.Conv2d:
    """Give the layer orthogonal weights of gain `std` and zero biases (detail 2); return it."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def in_numpy(layer: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """The layer or network for arrays, until its weights change; for few rows, a speed-up."""
    kind = None if layer._forward_hooks or layer._forward_pre_hooks else type(layer)
    if kind is nn.Sequential:
        functions = [in_numpy(x) for x in layer]
        return lambda x: reduce(lambda output, function: function(output), functions, x)
    if kind is nn.Linear and layer.bias is not None:
        weight, bias = layer.weight.numpy(force=True).T, layer.bias.numpy(force=True)
        return lambda x: x @ weight + bias
    if kind is nn.Tanh:
        return np.tanh
    device = next((x.device for x in layer.state_dict().values()), "cpu")
    return lambda x: layer(torch.as_tensor(x, device=device)).numpy(force=True)  # by PyTorch


def gather(x: Tensor) -> Tensor:
    """The tensors of all processes, without gradients, one after another along dimension 0."""
    if not dist.is_initialized():
        return x.detach()
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x.contiguous())
    return torch.cat(gathered)


class Agent(nn.Module):
    """Separate actor and critic (detail 13). Only parameters and buffers are saved."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args) -> None:
        super().__init__()
        obs_size = envs.single_observation_space.shape[0]
        nvec = envs.single_action_space.nvec
        self.num_choices, self.num_options = len(nvec), int(max(nvec))
        self.mask_actions = args.mask_actions
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, self.num_choices * self.num_options), std=0.01),
        )
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )
        # Choices with fewer options are padded: without probability, and so without gradient.
        is_padding = torch.as_tensor(np.arange(self.num_options) >= nvec[:, None])
        self.actor[-1].bias.data[is_padding.flatten()] = -1e8

    def get_logits(self, obs: Array, output: Array) -> Array:
        """Unnormalized log-probabilities from the actor's output, (B, num_choices, num_options)."""
        logits = output.reshape(-1, self.num_choices, self.num_options)
        if self.mask_actions:
            logits = logits + 1e8 * (obs[:, None, -self.num_options :] - 1)
        return logits

    def get_action(self, obs: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """The most probable actions, (B, num_choices); with noise, a sample of the policy."""
        return (self.get_logits(obs, self.actor(obs)) + noise).argmax(-1)

    def make_act(self) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """`get_action` on arrays, made anew for each rollout, which checks that both agree."""
        actor = in_numpy(self.actor)
        return lambda obs, noise: (self.get_logits(obs, actor(obs)) + noise).argmax(-1)

    def sample_noise(self, *shape: int) -> Tensor:
        """Gumbel noise, (*shape, num_choices, num_options): argmax with it samples a softmax."""
        return -torch.empty(*shape, self.num_choices, self.num_options).exponential_().log()

    def get_value(self, obs: Tensor) -> Tensor:
        """Estimated values, (B,)."""
        return self.critic(obs).squeeze(-1)

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and entropies, summed over the choices, and values, each (B,)."""
        logprobs = self.get_logits(obs, self.actor(obs)).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum((-1, -2))
        logprob = logprobs.gather(-1, actions[..., None]).sum((-1, -2))
        return logprob, entropy, self.get_value(obs)

    def scale_rewards(self, rewards: np.ndarray, ends: np.ndarray, gamma: float) -> np.ndarray:
        """Hook: the rewards to learn from, (num_steps, this process's environments); here, raw."""
        return rewards

    def finish_iteration(self, obs: Tensor) -> dict[str, float]:
        """Hook: adapt to this process's observations (`gather` has all), return what to log."""
        return {}


Batch = namedtuple("Batch", "obs actions logprobs advantages returns values")


def update(agent: Agent, optimizer: Adam, batch: Batch, indices: Tensor, args: Args) -> dict:
    """Take a gradient step on the minibatch of these indices; return tensors to log, by name."""
    minibatch = Batch(*(x.index_select(0, indices) for x in batch))
    logprobs, entropy, values = agent.evaluate_actions(minibatch.obs, minibatch.actions)
    assert logprobs.shape == entropy.shape == values.shape == minibatch.advantages.shape, "not (B,)"
    logratio = logprobs - minibatch.logprobs
    ratio = logratio.exp()

    # Policy loss (detail 8)
    advantages = minibatch.advantages
    if args.norm_adv:  # detail 7
        std, mean = torch.std_mean(gather(advantages))
        advantages = (advantages - mean) / (std + 1e-8)
    # A tensor: compiled, clamp would keep its first number for ever (PyTorch 2.13, issue 194976).
    clip = args.clip_coef * torch.ones_like(ratio)
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)
    policy_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio)

    # Value loss
    value_loss = 0.5 * (values - minibatch.returns).square()
    if args.clip_vloss:  # detail 9
        change = (values - minibatch.values).clamp(-clip, clip)
        clipped_loss = 0.5 * (minibatch.values + change - minibatch.returns).square()
        value_loss = torch.max(value_loss, clipped_loss)

    loss = (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).mean()  # detail 10
    with torch.no_grad():  # detail 12; both KL estimates: http://joschu.net/blog/kl-approx.html
        metrics = {
            "losses/policy_loss": policy_loss.mean(),
            "losses/value_loss": value_loss.mean(),
            "losses/entropy": entropy.mean(),
            "losses/old_approx_kl": (-logratio).mean(),
            "losses/approx_kl": (ratio - 1 - logratio).mean(),
            "losses/clipfrac": (ratio != clipped_ratio).float().mean(),
        }

    # All gradients as one vector: averaged over the processes, then clipped; 0 where unused.
    parameters = [x for g in optimizer.param_groups for x in g["params"] if x.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    gradient = gather(torch.cat([x.flatten() for x in gradients])[None]).mean(0)
    metrics["losses/grad_norm"] = norm = gradient.norm()
    gradient = gradient * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)  # detail 11
    for x, part in zip(parameters, gradient.split([x.numel() for x in parameters]), strict=True):
        x.grad = torch.empty_like(x).copy_(part.view_as(x))  # laid out as x is: fused Adam needs it
    optimizer.step()
    return metrics


def seed_everything(seed: int, *key: int) -> int:
    """Seed all generators by seed and key; return a seed for environments."""
    seed, env_seed = np.random.SeedSequence(seed, spawn_key=key).generate_state(2).tolist()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return env_seed // 4  # environment i adds i, which must stay below 2**31


def set_up_torch(args: Args, on_exit: ExitStack) -> torch.device:
    """Set PyTorch up; closing `on_exit` puts threads and generators back. Raises `UsageError`."""
    on_exit.callback(random.setstate, random.getstate())
    on_exit.callback(np.random.set_state, np.random.get_state())
    on_exit.callback(torch.set_rng_state, torch.get_rng_state())
    on_exit.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(args.num_threads or torch.get_num_threads())
    torch.backends.cudnn.deterministic = args.torch_deterministic
    on_exit.enter_context(torch._dynamo.config.patch(trace_autograd_ops=True))  # update's gradients
    name = args.device
    if name == "auto":
        name = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:  # before the training: is there such a device, and a compiler?
        torch.compile(torch.neg, disable=not args.compile)(torch.zeros(1, device=name)).cpu()
    except Exception as error:
        raise UsageError(f"no {name}, or no C++ compiler: {str(error).splitlines()[0]}") from error
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group()  # tensors by their device: NCCL or gloo; objects by gloo
        on_exit.callback(dist.destroy_process_group)
    on_exit.callback(torch.compiler.reset)  # before the group goes: NCCL waits for CUDA graphs
    return torch.device(name)


def catch_signals(on_exit: ExitStack) -> list[int]:
    """Note the first SIGINT or SIGTERM in the list, until `on_exit` closes; a second one kills."""
    signals = []

    def handle(number: int, frame: Any) -> None:
        if signals and not dist.is_torchelastic_launched():  # torchrun sends a second one itself
            os._exit(128 + number)
        signals.append(number)

    if threading.current_thread() is threading.main_thread():  # others can't handle signals
        for number in (signal.SIGINT, signal.SIGTERM):
            previous = signal.signal(number, handle)
            on_exit.callback(signal.signal, number, previous)
    return signals


def log(writer: SummaryWriter, scalars: dict[str, float], step: int) -> None:
    """Write scalars as one event, six times as fast as one `add_scalar` for each."""
    values = [Summary.Value(tag=name, simple_value=x) for name, x in scalars.items()]
    writer.file_writer.add_summary(Summary(value=values), step)


def start_tracking(args: Args, folder: Path, on_exit: ExitStack) -> None:
    """Mirror what is written for TensorBoard to Weights & Biases, until `on_exit` closes."""
    try:
        import wandb

        run = {"project": args.wandb_project_name, "id": folder.name, "resume": "allow"}
        wandb.init(**run, config=asdict(args), sync_tensorboard=True)
    except Exception as error:
        raise UsageError(f"--track: pip install wandb, and wandb login ({error})") from error
    on_exit.callback(wandb.finish)


def load_checkpoint(
    folder: str | Path, agent: Agent | None = None, optimizer: Adam | None = None
) -> dict[str, Any]:
    """Return a run's checkpoint, its "args" as `Args`; load weights and Adam's moments from it."""
    path = Path(folder, "checkpoint.pt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if agent:
            agent.load_state_dict(checkpoint["agent"])
        if optimizer:  # not its settings, which may have changed
            settings = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict(checkpoint["optimizer"] | {"param_groups": settings})
            for x, moments in optimizer.state.items():
                assert moments.get("exp_avg", x).shape == x.shape, "the optimizer's order differs"
        return checkpoint | {"args": Args(**json.loads(checkpoint["args"]))}
    except Exception as error:
        raise UsageError(f"{path} is missing or damaged, or doesn't fit: {error!r}") from error


def evaluate(args: Args, folder: str | Path) -> dict[str, float]:
    """Seed everything, play greedy episodes with a checkpoint; return raw returns' mean and std."""
    seed, returns = seed_everything(args.seed), []
    video_folder = Path(folder, f"videos-{datetime.now():%Y%m%d-%H%M%S-%f}")
    # A single environment: if several raced for the episodes, short ones would be favoured.
    with closing(make_envs(args, 1, video_folder if args.capture_video else None)) as envs:
        agent = Agent(envs, args).requires_grad_(False).eval()
        load_checkpoint(folder, agent)
        obs, _ = envs.reset(seed=seed)
        while len(returns) < args.eval_episodes:
            actions = agent.get_action(torch.as_tensor(obs))
            obs, _, _, _, infos = envs.step(actions.numpy())
            if "episode" in infos:
                returns.append(float(infos["episode"]["r"][0]))
    mean, std, count = float(np.mean(returns)), float(np.std(returns)), len(returns)
    tqdm.write(f"{args.env_id}: greedy return {mean:.1f}, std {std:.1f}, over {count} episodes")
    return {"eval/return": mean, "eval/return_std": std}


def train(args: Args, report: Callable[[int, float], None] | None = None) -> float:
    """Train an agent in a new folder in `runs`, or resume the run in `args.resume` with these.

    Returns the mean raw return of the last 100 episodes, nan if none ended. Each iteration ends
    with `report(global_step, mean_return)`, which may raise to stop the training. Raises
    `UsageError` for what a user can put right, and `SystemExit` after a signal and a checkpoint.
    """
    check(args)
    with ExitStack() as on_exit:  # whatever is raised, what is open is closed
        # Set-up. The processes of torchrun share the environments; the first one logs and saves.
        device = set_up_torch(args, on_exit)
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_num_envs, batch_size = args.num_envs // world_size, args.num_envs * args.num_steps
        num_iterations = args.total_timesteps // batch_size
        interval = args.checkpoint_interval or num_iterations
        time_and_process = f"{datetime.now():%Y%m%d-%H%M%S-%f}-{os.getpid()}"
        run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time_and_process}"
        folder = Path(args.resume or f"runs/{run_name.replace('/', '-').replace(':', '-')}")
        checkpoint = {"iteration": 0, "last_returns": []}
        if args.resume:
            checkpoint = load_checkpoint(folder)
            for name, value in asdict(args).items():
                is_new = name != "resume" and value != getattr(checkpoint["args"], name)
                if is_new and name in FIXED:
                    raise UsageError(f"a resumed run keeps its {name}: leave it out")
                if is_new and rank == 0:
                    print(f"resumed with {name} {value}", file=sys.stderr)
        first_iteration, last_returns = checkpoint["iteration"], checkpoint["last_returns"]

        seed_everything(args.seed, first_iteration, rank)  # for what environments draw when made
        envs = make_envs(args, local_num_envs)
        on_exit.callback(lambda: envs.close(terminate=True))  # the present ones, and their workers
        seed_everything(args.seed)  # the same weights in all processes
        agent = Agent(envs, args).to(device)  # Adam's eps: detail 3; compiled, unfused is faster
        optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=not args.compile)
        if args.resume:
            load_checkpoint(folder, agent, optimizer)
        for group in optimizer.param_groups:  # tensors: each new float would compile again
            group["lr"] = torch.tensor(group["lr"], device=device)
        learning_rates = [group["lr"].item() for group in optimizer.param_groups]
        compiled_update = torch.compile(update, mode="reduce-overhead", disable=not args.compile)

        global_step = start_step = first_iteration * batch_size
        if rank == 0:
            if args.track:
                start_tracking(args, folder, on_exit)
            writer = on_exit.enter_context(SummaryWriter(folder, purge_step=global_step + 1))
            writer.add_text("hyperparameters", str(asdict(args)), global_step)
            run_args = json.dumps(asdict(args) | {"resume": None}, default=np.generic.item)

        # A rollout, on the host, where the environments are; final_obs is of episodes that ended.
        shape = (args.num_steps, local_num_envs)
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        obs, final_obs = np.zeros((2, *shape, *obs_space.shape), obs_space.dtype)
        actions = np.zeros((*shape, *action_space.shape), action_space.dtype)
        rewards = np.zeros(shape, np.float32)
        terminations, truncations = np.zeros((2, *shape), bool)

        in_loop = on_exit.enter_context(ExitStack())  # what ends before the last evaluation
        start_time, mean_return = time.perf_counter(), float(np.mean(last_returns or np.nan))
        signals = catch_signals(in_loop)
        bar = tqdm(total=num_iterations * batch_size, initial=global_step, disable=rank > 0 or None)
        in_loop.enter_context(bar)
        for iteration in range(first_iteration, num_iterations):
            # Environments and wrappers can't be saved. So that a run resumed from a scheduled
            # checkpoint equals an undisturbed one, every `interval` iterations they are made anew,
            # and all generators seeded by the iteration: before making (it may draw) and after.
            if iteration == first_iteration or iteration % interval == 0:
                if iteration > first_iteration:
                    envs.close()
                    seed_everything(args.seed, iteration, rank)
                    envs = make_envs(args, local_num_envs)
                next_obs, _ = envs.reset(seed=seed_everything(args.seed, iteration, rank))
                num_ended, is_whole_interval = 0, iteration % interval == 0
            is_cut, is_last = (iteration + 1) % interval == 0, iteration + 1 == num_iterations
            if args.anneal_lr:  # detail 4; overwrites any other schedule
                for group, base in zip(optimizer.param_groups, learning_rates, strict=True):
                    group["lr"].fill_(base * (1 - iteration / num_iterations))

            # Rollout. The policy stays the same: draw all noise before, only act within, and
            # compute log-probabilities and values after, in one batch.
            episodes, metrics = [], defaultdict(list)
            with torch.no_grad():
                act, noise = agent.make_act(), agent.sample_noise(*shape).numpy()
                for t in range(args.num_steps):
                    obs[t] = next_obs
                    actions[t] = act(next_obs, noise[t])
                    next_obs, rewards[t], terminated, truncated, infos = envs.step(actions[t])
                    terminations[t], truncations[t] = terminated, truncated & ~terminated
                    global_step += args.num_envs
                    for i in np.flatnonzero(terminated | truncated):
                        final_obs[t, i] = infos["final_obs"][i]  # next_obs is of the next episodes
                    if "episode" in infos:  # nan where ppo_continuous.py's --stagger cut
                        returns, lengths = infos["episode"]["r"], infos["episode"]["l"]
                        for i in np.flatnonzero(infos["_episode"] & ~np.isnan(returns)):
                            episodes.append((global_step, float(returns[i]), int(lengths[i])))
                tensors = [torch.tensor(x, device=device) for x in (obs, actions, noise)]
                b_obs, b_actions, b_noise = (x.flatten(0, 1) for x in tensors)
                again = agent.get_action(b_obs[::17].clone(), b_noise[::17])  # of all environments
                bad = ~again.isclose(b_actions[::17], 1e-3, 1e-3, equal_nan=True)  # 1 may be a tie
                assert bad.sum(0).max() < max(2, len(bad) / 20), "make_act and get_action differ"
                b_logprobs, _, b_values = agent.evaluate_actions(b_obs.clone(), b_actions)
                again = agent.get_value(b_obs[::17].clone())  # clones, as hacks may change them
                close = torch.isclose(again, b_values[::17], 0.05, 0.05, equal_nan=True)
                assert close.float().mean() > 0.95, "get_value and evaluate_actions differ"
            dones = terminations | truncations
            ends = dones.copy()  # where returns restart: at each scheduled checkpoint, too
            ends[-1] |= is_cut
            scaled_rewards = agent.scale_rewards(rewards, ends, args.gamma)  # add a bonus here
            for epoch in range(args.update_epochs):
                # Generalized advantage estimation (arXiv:1506.02438, eq. 16; detail 5). The value
                # after termination is 0, after truncation that of the true last observation.
                if epoch == 0 or args.recompute_advantages:
                    last_obs = torch.from_numpy(np.concatenate([next_obs, final_obs[truncations]]))
                    with torch.no_grad():
                        last_values = agent.get_value(last_obs.to(device)).cpu().numpy()
                        b_values = agent.get_value(b_obs.clone()) if epoch > 0 else b_values
                    values = b_values.view(shape).cpu().numpy()
                    next_values = np.concatenate([values[1:], last_values[None, :local_num_envs]])
                    next_values[truncations] = last_values[local_num_envs:]
                    deltas = scaled_rewards + args.gamma * next_values * ~terminations - values
                    discounts = args.gamma * args.gae_lambda * ~dones
                    advantages, advantage = np.zeros_like(deltas), 0.0
                    for t in reversed(range(args.num_steps)):
                        advantages[t] = advantage = deltas[t] + discounts[t] * advantage
                    b_advantages = torch.as_tensor(advantages, device=device).flatten()
                    b_returns = b_advantages + b_values
                    batch = Batch(b_obs, b_actions, b_logprobs, b_advantages, b_returns, b_values)
                if epoch == 0:
                    explained = 1 - b_advantages.var() / (b_returns.var() + 1e-8)
                    metrics["losses/explained_variance"].append(explained)
                    for name in ("values", "returns", "advantages"):
                        metrics[f"debug/{name}"].append(getattr(batch, name).mean())

                b_indices = torch.randperm(len(b_obs), device=device)  # detail 6
                for indices in b_indices.chunk(args.num_minibatches):
                    for name, x in compiled_update(agent, optimizer, batch, indices, args).items():
                        metrics[name].append(x.clone())  # the next CUDA graph overwrites x
                    kls = metrics["losses/approx_kl"]
                    if args.target_kl and gather(kls[-1][None]).max() > 5 * args.target_kl:
                        break  # end a collapse early: after tiny gradients, Adam's steps are large
                if args.target_kl:
                    recent_kls = gather(torch.stack(kls[-args.num_minibatches :]))
                    if recent_kls.mean() > args.target_kl or recent_kls.max() > 5 * args.target_kl:
                        break  # the epoch's mean is too large, or the loop above was left

            # Log
            means = gather(torch.stack([torch.stack(x).mean() for x in metrics.values()])[None])
            scalars = dict(zip(metrics, means.mean(0).tolist(), strict=True))
            for name, x in {"observation": obs, "reward": rewards, **scalars}.items():
                if not np.isfinite(x).all():
                    where = f"in iteration {iteration}, up to step {global_step}"
                    raise UsageError(f"{name} became infinite or nan {where}")
            scalars |= agent.finish_iteration(b_obs)  # last, as it changes the agent
            scalars["losses/epochs"] = epoch + 1  # begun: target_kl may end the last one early
            scalars["charts/learning_rate"] = float(optimizer.param_groups[0]["lr"])
            scalars["charts/SPS"] = (global_step - start_step) / (time.perf_counter() - start_time)
            gathered = [(episodes, signals)] * world_size
            if world_size > 1:  # all processes count all episodes, and stop together
                dist.all_gather_object(gathered, (episodes, signals))
            stop_signals = [number for _, numbers in gathered for number in numbers]
            episodes = sorted((x for theirs, _ in gathered for x in theirs), key=lambda x: x[0])
            last_returns = [*last_returns, *(total for _, total, _ in episodes)][-100:]
            mean_return = float(np.mean(last_returns or np.nan))
            if rank == 0:
                for step, total, length in episodes:
                    charts = {"charts/episodic_return": total, "charts/episodic_length": length}
                    log(writer, charts, step)
                log(writer, scalars, global_step)
            bar.set_postfix_str(f"return {mean_return:.1f}", refresh=False)
            bar.update(batch_size)

            # Checkpoint (to stop early, set is_last above it and break below)
            num_ended += len(episodes)
            if is_cut and is_whole_interval and not is_last and not num_ended and rank == 0:
                hint = "raise --checkpoint-interval, as each checkpoint cuts all episodes"
                tqdm.write(f"no whole episode ended in {interval} iterations: {hint}", sys.stderr)
            if rank == 0 and (is_cut or is_last or stop_signals):
                writer.flush()
                saved = {"iteration": iteration + 1, "last_returns": last_returns, "args": run_args}
                saved |= {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(saved, folder / "checkpoint.tmp")
                os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")  # all or nothing
                if args.eval_checkpoints and is_cut and not is_last:  # only here: it seeds all
                    log(writer, evaluate(args, folder), global_step)
            if report:
                report(global_step, mean_return)
            if stop_signals:
                if rank == 0:
                    tqdm.write(f"stopped: go on with --resume {folder}", sys.stderr)
                sys.exit(128 + stop_signals[0])
        in_loop.close()
        if rank == 0:
            seconds, steps = time.perf_counter() - start_time, global_step - start_step
            score = f"return {mean_return:.1f} over the last {len(last_returns)} episodes"
            speed = f"{steps:,} steps in {seconds:.1f} s, {steps / seconds:,.0f} steps/s"
            print(f"{args.env_id}, seed {args.seed}: mean {score}; {speed}; {folder}")
            if args.eval_episodes:
                log(writer, evaluate(args, folder), global_step)
        return mean_return


if __name__ == "__main__":
    try:
        args = tyro.cli(Args)
        if folder := args.resume or args.evaluate:  # parse again, by default the run's arguments
            saved = load_checkpoint(folder)["args"]
            args = tyro.cli(Args, default=replace(saved, env_kwargs={}))
            args.env_kwargs = saved.env_kwargs | args.env_kwargs  # tyro merges no dictionaries
        if args.evaluate:
            check(args)
            evaluate(args, args.evaluate)
        else:
            train(args)
    except (UsageError, OSError) as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
