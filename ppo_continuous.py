# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch==2.13.0", "gymnasium[box2d,classic-control,mujoco]==1.4.0",
#     "mujoco==3.10.0", "numpy==2.4.6", "tensorboard==2.21.0", "tyro==1.0.17", "tqdm==4.70.1",
#     "moviepy==2.2.1"]
# ///
"""Proximal Policy Optimization (PPO, arXiv:1707.06347) for continuous actions, in a single file.

    python ppo_continuous.py --env-id HalfCheetah-v5    # minutes, to a return of about 5500
    python ppo_continuous.py --resume runs/NAME         # go on, extend or change the run
    python ppo_continuous.py --evaluate runs/NAME --capture-video

Each iteration has three parts: the policy acts for `num_steps` in each of `num_envs` environments;
generalized advantage estimation tells how much better each action was than expected; and gradient
steps on shuffled minibatches of these samples, `update_epochs` times over, make the better ones
more probable and the worse ones less. What they maximize is the advantage times the ratio of the
action's new probability to its old one, clipped so that nothing is gained by moving it far from 1.

"Detail n" is the n-th of "The 37 Implementation Details of Proximal Policy Optimization", Huang et
al. 2022: 1-13 core, 14-22 Atari, 23-31 continuous (28-31 normalize), 32-36 LSTM, 37 MultiDiscrete.
https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
"""

import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import FlattenObservation, RecordVideo
from gymnasium.wrappers.vector import RecordEpisodeStatistics, TransformAction
from torch import Tensor, nn, optim
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Train PPO on continuous actions, by defaults tuned for MuJoCo (README)."""

    env_id: str = "HalfCheetah-v5"  # id of the environment; module:Name-v0 imports module first
    env_kwargs: str = "{}"  # its keywords, as JSON, like '{"max_episode_steps": 500}'
    total_timesteps: int = 1_000_000  # environment steps in all, rounded down to whole rollouts
    seed: int = 1  # seeds the environments, the network, the sampling and the shuffling
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    device: str = "cpu"  # cpu, cuda, cuda:N or mps
    num_threads: int = 1  # CPU threads of PyTorch; 1 is fastest for an MLP
    compile: bool = False  # compile the gradient step: seconds to start with, faster then
    vectorization: Literal["sync", "async", "vector_entry_point"] = "sync"  # see gym.make_vec
    track: bool = False  # mirror the scalars to Weights & Biases
    wandb_project_name: str = "ppo"  # project of Weights & Biases
    stagger: bool = True  # cut the first episodes at random steps, so that not all end together
    log_std_init: float = -0.5  # logarithm of the policy's standard deviation at first
    log_std_min: float = -2.0  # its floor
    log_std_max: float = 1.0  # its ceiling

    checkpoint_interval: int = 10  # iterations between checkpoints
    resume: str | None = None  # go on with the run in this folder; other flags change it
    evaluate: str | None = None  # train nothing, evaluate the run in this folder
    eval_interval: int = 0  # iterations between evaluations in the training; 0: only at its end
    eval_episodes: int = 10  # episodes of an evaluation; 0: evaluate nothing
    eval_greedy: bool = True  # take the likeliest actions in it, instead of sampling
    capture_video: bool = False  # record the evaluation's episodes in the run's folder

    num_envs: int = 64  # environments stepped side by side
    num_steps: int = 32  # steps of each environment in a rollout
    num_minibatches: int = 32  # minibatches that a rollout is split into
    update_epochs: int = 10  # passes over a rollout
    learning_rate: float = 4e-4  # Adam's step size; its epsilon is 1e-5 (detail 3)
    anneal_lr: bool = True  # let the learning rate fall to 0 linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    norm_adv: bool = False  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # probability ratios gain nothing outside 1 - clip_coef .. 1 + clip_coef
    clip_vloss: bool = False  # clip the move of a value from its old estimate to +-clip_coef
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 5.0  # clip the gradient to this norm
    target_kl: float | None = 0.02  # stop the epochs after one whose mean KL is above this

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            least = -100 if "log_std" in name else 0  # a logarithm may be negative
            if isinstance(x, int | float) and not x >= least:  # true for nan
                raise ValueError(f"{name}={x} must be a number from {least} on")
        batch_size = self.num_envs * self.num_steps
        if 0 in (batch_size, self.num_minibatches, self.update_epochs, self.checkpoint_interval):
            raise ValueError(
                "num_envs, num_steps, num_minibatches, update_epochs, checkpoint_interval exceed 0"
            )
        if batch_size % self.num_minibatches:
            raise ValueError(f"num_minibatches={self.num_minibatches} must divide {batch_size=}")
        json.loads(self.env_kwargs)


class UsageError(Exception):
    """A mistake that the user can put right; it is shown as one sentence, with exit status 2."""


class Stagger(gym.Wrapper):
    """Truncates once, at a random step up to the time limit: else all episodes end together."""

    steps_left = None

    def reset(self, **kwargs: Any) -> tuple:
        obs, info = self.env.reset(**kwargs)
        if self.steps_left is None:  # at the first reset
            rng = np.random.default_rng(kwargs.get("seed"))
            self.steps_left = rng.integers(self.spec.max_episode_steps) + 1
        return obs, info

    def step(self, action: np.ndarray) -> tuple:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps_left -= 1
        return obs, reward, terminated, truncated or self.steps_left == 0, info


def make_envs(args: Args, num_envs: int, videos: Path | None = None) -> VectorEnv:
    """Make environments (detail 1) with flat observations, (num_envs, obs_size), and raw rewards.

    Where an episode ends, obs is the next one's first; its own last is in `infos["final_obs"]`.
    """

    def wrap(env: gym.Env) -> gym.Env:
        space = env.observation_space
        if not space.is_np_flattenable or gym.spaces.flatdim(space) > 2000:
            raise UsageError(f"too large, or no vector: {space}; for images: docs/environments.md")
        if videos:  # at most 3000 frames of each episode, as they are kept in memory
            env = RecordVideo(env, videos, lambda i: i < args.eval_episodes, video_length=3000)
        if args.stagger and num_envs > 1:
            if env.spec.max_episode_steps:
                env = Stagger(env)
            else:
                gym.logger.warn(
                    f"no time limit of {args.env_id} is known, so its episodes stay in lockstep: "
                    "give one, by --env-kwargs '{\"max_episode_steps\": 1000}'"
                )
        return FlattenObservation(env)  # add wrappers here; Normalize...'s state wouldn't be saved

    mode = args.vectorization
    if videos or (mode == "async" and num_envs == 1):
        mode = "sync"
    kwargs = json.loads(args.env_kwargs)
    if videos:
        kwargs["render_mode"] = "rgb_array"
    if mode != "vector_entry_point":
        kwargs["wrappers"] = [wrap]
        kwargs["vector_kwargs"] = {"autoreset_mode": AutoresetMode.SAME_STEP}
    try:
        envs = gym.make_vec(args.env_id, num_envs, mode, **kwargs)
    except gym.error.UnregisteredEnv as error:
        raise UsageError(f"{error} (Is its package imported? --env-id PACKAGE:ID)") from None
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        raise UsageError(f"{args.env_id} doesn't reset in the same step: see docs/environments.md")
    space = envs.single_action_space
    is_vector = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
    if not is_vector or not space.is_bounded() or space.dtype.kind != "f":
        raise UsageError(
            f"{args.env_id} has actions {space}, not a vector of floats within bounds: "
            "see docs/environments.md"
        )
    # The policy's -1 .. 1 are the bounds; what is beyond is clipped for the environment only, as
    # the sample itself is what has the probability that is learned (detail 27).
    center = (space.low + space.high) / 2
    half = (space.high - space.low) / 2
    envs = TransformAction(envs, lambda x: (center + half * x).clip(space.low, space.high))
    return RecordEpisodeStatistics(envs, stats_key="episode_stats")


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    """Give the layer orthogonal weights of gain `std` and zero biases (detail 2); return it."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class RunningMeanStd(nn.Module):
    """Normalizes by the mean and standard deviation of what it was updated with (detail 28)."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))
        self.register_buffer("count", torch.tensor(0.0))

    def update(self, samples: Tensor) -> None:
        """Take in samples, (B, *shape) (Chan et al. 1979, equation 1.5)."""
        if self.count > 0:  # clamp wild samples, of which one would outweigh all others
            limit = 100 * self.std.clamp(0.01)
            samples = samples.clamp(self.mean - limit, self.mean + limit)
        var, mean = torch.var_mean(samples, 0, correction=0)
        self.count += len(samples)
        share = len(samples) / self.count
        delta = mean - self.mean
        self.mean += share * delta
        old_var = self.std**2
        new_var = old_var + share * (var - old_var + (1 - share) * delta**2)
        self.std.copy_(new_var.sqrt().clamp(1e-4))  # never 0

    def forward(self, samples: Tensor) -> Tensor:
        return ((samples - self.mean) / self.std).clamp(-10, 10)  # detail 29; off: return samples


class Agent(nn.Module):
    """Separate actor and critic (detail 13). They take raw observations, and normalize them.

    What you add that learns or counts belongs here, as a parameter or a buffer: these are saved.
    """

    def __init__(self, envs: VectorEnv, log_std_init: float) -> None:
        super().__init__()
        obs_size = envs.single_observation_space.shape[0]
        action_size = envs.single_action_space.shape[0]
        self.obs_rms = RunningMeanStd(obs_size)
        self.return_rms = RunningMeanStd()
        self.log_std = nn.Parameter(torch.full((action_size,), log_std_init))  # detail 24
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, action_size), std=0.01),
        )
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )

    def get_distribution(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations of Gaussians, each (B, action_size)."""
        mean = self.actor(self.obs_rms(obs))
        return mean, self.log_std.expand_as(mean)

    def get_value(self, obs: Tensor) -> Tensor:
        """Estimated values, (B,)."""
        return self.critic(self.obs_rms(obs)).squeeze(-1)

    @torch.no_grad()
    def act(self, obs: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        """Actions, (B, action_size): samples of what evaluate_actions scores; without rng, means.

        The bounds are at -1 and 1; what is beyond is clipped by the environment's wrapper.
        """
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.obs_rms.mean.device)
        mean, log_std = self.get_distribution(obs)
        mean = mean.numpy(force=True)
        if rng:
            std = log_std.exp().numpy(force=True)
            mean = mean + std * rng.standard_normal(mean.shape, np.float32)
        return mean

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values, each (B,)."""
        mean, log_std = self.get_distribution(obs)
        # The dimensions are independent, so their log-probabilities add up (detail 25)
        log_norm = (log_std + 0.5 * math.log(2 * math.pi)).sum(-1)
        logprobs = -0.5 * ((actions - mean) / log_std.exp()).square().sum(-1) - log_norm
        entropy = log_norm + 0.5 * actions.shape[-1]
        return logprobs, entropy, self.get_value(obs)


def update(agent: Agent, optimizer: optim.Adam, batch: tuple, indices: Tensor, args: Args) -> dict:
    """Take a gradient step on the minibatch of these indices; return tensors to log, by name."""
    obs, actions, old_logprobs, advantages, returns, old_values = (x[indices] for x in batch)
    logprobs, entropy, values = agent.evaluate_actions(obs, actions)
    assert logprobs.shape == values.shape == returns.shape, "not (B,) all: they would broadcast"
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()

    # Policy loss (equation 7, detail 8). Minimum: where the ratio left the range by improving the
    # objective, its gradient is 0; where it left by worsening it, the gradient stays.
    if args.norm_adv:  # detail 7
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clip = args.clip_coef * torch.ones_like(ratio)  # a compiled clamp keeps a float's first value
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)
    policy_loss = -torch.min(advantages * ratio, advantages * clipped_ratio).mean()

    # Value loss
    squared_errors = (values - returns) ** 2
    if args.clip_vloss:  # detail 9
        clipped_values = old_values + (values - old_values).clamp(-clip, clip)
        squared_errors = torch.max(squared_errors, (clipped_values - returns) ** 2)
    value_loss = 0.5 * squared_errors.mean()

    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()  # detail 10
    with torch.no_grad():  # detail 12: for the log, and target_kl
        metrics = {
            "losses/policy_loss": policy_loss.detach(),
            "losses/value_loss": value_loss.detach(),
            "losses/entropy": entropy.mean(),
            "losses/approx_kl": (ratio - 1 - logratio).mean(),  # joschu.net/blog/kl-approx.html
            "losses/clipfrac": (ratio != clipped_ratio).float().mean(),
        }

    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # detail 11
    metrics["losses/grad_norm"] = grad_norm
    optimizer.step()
    return metrics


def set_up_torch(args: Args) -> None:
    """Seed the global generators, which some environments use, too, and set the threads."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.num_threads)
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # backward() within a compiled graph


def load_checkpoint(folder: str | Path) -> dict:
    """The checkpoint of the run in this folder. Raises `UsageError` if there is none."""
    path = Path(folder, "checkpoint.pt")
    if not path.is_file():
        raise UsageError(f"there is no {path} (the first comes after --checkpoint-interval)")
    return torch.load(path, "cpu")


def evaluate(args: Args, folder: str | Path) -> float:
    """Play episodes with the run's checkpoint; return their mean raw return, nan if none ends."""
    videos = Path(folder, f"videos-{datetime.now():%Y%m%d-%H%M%S}") if args.capture_video else None
    envs = make_envs(args, 1, videos)
    agent = Agent(envs, args.log_std_init).to(args.device).eval()
    agent.load_state_dict(load_checkpoint(folder)["agent"])
    rng = None if args.eval_greedy else np.random.default_rng(args.seed)
    returns = []
    obs, _ = envs.reset(seed=args.seed + 1_000_000_000)  # other episodes than the training's
    for _ in range(30_000 * args.eval_episodes):  # some episodes never end
        obs, _, _, _, infos = envs.step(agent.act(obs, rng))
        if "episode_stats" in infos:
            ended = infos["_episode_stats"]
            returns.extend(infos["episode_stats"]["r"][ended])
        if len(returns) >= args.eval_episodes:
            break
    else:
        tqdm.write("not all ended: limit episodes, by --env-kwargs '{\"max_episode_steps\": 1000}'")
    envs.close()
    if not returns:
        return np.nan
    mean = np.mean(returns)
    tqdm.write(f"evaluated at {mean:.1f} +- {np.std(returns):.1f} over {len(returns)} episodes")
    return mean


def train(args: Args, report: Callable | None = None) -> float:
    """Train an agent in a new folder in `runs`, or go on, by these args, in `args.resume`.

    Returns the mean raw return of the last 100 episodes, nan if none ended. After each iteration
    `report(global_step, mean_return)` is called; if it returns True, the run is saved and ends.
    """
    set_up_torch(args)
    gradient_step = torch.compile(update, mode="reduce-overhead", disable=not args.compile)
    envs = make_envs(args, args.num_envs)
    agent = Agent(envs, args.log_std_init).to(args.device)
    lr = torch.tensor(args.learning_rate, device=args.device)  # a new float would recompile
    optimizer = optim.Adam(agent.parameters(), lr, eps=1e-5, fused=not args.compile)

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder = Path("runs", run_name.replace("/", "-").replace(":", "-"))
    config = json.loads(json.dumps(asdict(replace(args, resume=None))))  # numpy.float64 to float
    global_step = 0
    last_returns = []  # of the last 100 episodes
    if args.resume is not None:
        folder = Path(args.resume)
        checkpoint = load_checkpoint(folder)
        agent.load_state_dict(checkpoint["agent"])
        if list(checkpoint["agent"]) != list(agent.state_dict()):  # Adam knows them by position
            raise UsageError(f"parts of the agent are in another order: {[*checkpoint['agent']]}")
        optimizer.load_state_dict(optimizer.state_dict() | {"state": checkpoint["optimizer"]})
        global_step = checkpoint["global_step"]
        last_returns = checkpoint["last_returns"]
    batch_size = args.num_envs * args.num_steps
    num_iterations = (args.total_timesteps - global_step) // batch_size
    if num_iterations < 1:
        raise UsageError(f"nothing to train after {global_step=}: raise --total-timesteps")
    if args.track:
        import wandb

        run = {"project": args.wandb_project_name, "id": folder.name, "config": config}
        wandb.init(**run, resume="allow", reinit="finish_previous", sync_tensorboard=True)
    writer = SummaryWriter(folder, purge_step=global_step + 1)
    writer.add_text("hyperparameters", str(config))
    print(f"training in {folder}")

    def flatten(x: np.ndarray) -> Tensor:  # (num_steps, num_envs, ...) to (batch_size, ...)
        return torch.as_tensor(x, device=args.device).flatten(0, 1)

    # A rollout, in NumPy, as the environments are
    shape = (args.num_steps, args.num_envs)
    obs = np.zeros((*shape, *envs.single_observation_space.shape), np.float32)
    real_next_obs = np.zeros_like(obs)  # at an episode's end its last, not the next one's first
    actions = np.zeros((*shape, *envs.single_action_space.shape), np.float32)
    rewards = np.zeros(shape, np.float32)
    terminations = np.zeros(shape, bool)
    truncations = np.zeros_like(terminations)

    start_time = time.time()
    rng = np.random.default_rng([args.seed, global_step])
    next_obs, _ = envs.reset(seed=args.seed + global_step)  # a resumed run begins new episodes
    reward_sum = 0.0
    bar = tqdm(total=args.total_timesteps, initial=global_step, disable=None)
    for iteration in range(1, num_iterations + 1):
        learning_rate = args.learning_rate
        if args.anneal_lr:  # detail 4
            learning_rate *= 1 - global_step / args.total_timesteps
        optimizer.param_groups[0]["lr"].fill_(learning_rate)

        # Rollout
        episode_returns, episode_lengths = [], []
        for t in range(args.num_steps):
            obs[t] = next_obs
            action = agent.act(next_obs, rng)
            actions[t] = action
            next_obs, rewards[t], terminations[t], truncations[t], infos = envs.step(action)
            real_next_obs[t] = next_obs
            if "_episode_stats" in infos:
                ended = infos["_episode_stats"]  # in which environments
                real_next_obs[t, ended] = np.stack(infos["final_obs"][ended])
                episode_returns.extend(infos["episode_stats"]["r"][ended].tolist())
                episode_lengths.extend(infos["episode_stats"]["l"][ended].tolist())
        not_done = 1.0 - (terminations | truncations)
        global_step += batch_size
        for name, x in ("observations", [obs, real_next_obs]), ("rewards", rewards):
            if not np.abs(x).max() < 1e15:  # false for nan; squares must not overflow
                raise FloatingPointError(f"nan, infinite or huge {name} before {global_step=}")

        # Divide rewards by the deviation of a discounted sum of past ones (details 30, 31). To turn
        # it off: scaled_rewards = rewards. Add a bonus to rewards here, or to scaled_rewards below.
        reward_sums = np.zeros_like(rewards)
        for t in range(args.num_steps):
            reward_sums[t] = args.gamma * reward_sum + rewards[t]
            reward_sum = reward_sums[t] * not_done[t]
        agent.return_rms.update(flatten(reward_sums))
        scaled_rewards = (rewards / agent.return_rms.std.item()).clip(-10, 10)

        # Old log-probs, values, and the next values, by which a truncated episode is bootstrapped
        b_obs = flatten(obs)
        b_next_obs = flatten(real_next_obs)
        b_actions = flatten(actions)
        with torch.no_grad():
            b_logprobs, _, b_values = agent.evaluate_actions(b_obs, b_actions)
            values = b_values.view(shape).numpy(force=True)
            next_values = agent.get_value(b_next_obs).view(shape).numpy(force=True)

        # GAE (arXiv:1506.02438; detail 5), within episodes: A[t] = delta[t] + gamma lambda A[t + 1]
        deltas = scaled_rewards + args.gamma * np.where(terminations, 0, next_values) - values
        advantages = np.zeros_like(rewards)
        advantage = 0.0
        for t in reversed(range(args.num_steps)):
            advantage = deltas[t] + args.gamma * args.gae_lambda * not_done[t] * advantage
            advantages[t] = advantage
        b_advantages = flatten(advantages)
        b_returns = b_advantages + b_values  # the critic's targets; change b_advantages below

        # Update, in shuffled minibatches (detail 6)
        batch = (b_obs, b_actions, b_logprobs, b_advantages, b_returns, b_values)
        metrics = defaultdict(list)
        for _ in range(args.update_epochs):
            permutation = torch.as_tensor(rng.permutation(batch_size), device=args.device)
            for indices in permutation.chunk(args.num_minibatches):
                optimizer.zero_grad()  # here, as a compiled update can't
                step_metrics = gradient_step(agent, optimizer, batch, indices, args)
                for name, x in step_metrics.items():
                    metrics[name].append(x.clone())  # CUDA graphs reuse x
            kls = torch.stack(metrics["losses/approx_kl"][-args.num_minibatches :])
            if args.target_kl and kls.mean() > args.target_kl:
                break
        agent.log_std.data.clamp_(args.log_std_min, args.log_std_max)
        grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), np.inf)  # measures, clips nothing
        if not grad_norm < np.inf or (args.compile and grad_norm == 0):
            raise FloatingPointError(f"gradient of 0 (by zero_grad?), inf or nan, {global_step=}")
        agent.obs_rms.update(b_obs)  # not before: log-probs are those of the policy that acted

        # Log
        scalars = {name: torch.stack(x).mean() for name, x in metrics.items()}
        scalars["losses/explained_variance"] = 1 - (b_returns - b_values).var() / b_returns.var()
        scalars["losses/minibatches"] = len(metrics["losses/approx_kl"])
        scalars["charts/learning_rate"] = learning_rate
        scalars["charts/SPS"] = iteration * batch_size / (time.time() - start_time)
        if episode_returns:
            scalars["charts/episodic_return"] = np.mean(episode_returns)
            scalars["charts/episodic_length"] = np.mean(episode_lengths)
        for name, x in scalars.items():
            writer.add_scalar(name, x, global_step)
        last_returns = (last_returns + episode_returns)[-100:]
        mean_return = float(np.mean(last_returns)) if last_returns else np.nan
        bar.set_postfix_str(f"return {mean_return:.1f}", refresh=False)
        bar.update(batch_size)

        # Checkpoint
        is_stopped = report and report(global_step, mean_return)  # a break would save nothing
        is_last = is_stopped or iteration == num_iterations
        is_evaluated = is_last or (args.eval_interval and iteration % args.eval_interval == 0)
        if is_evaluated or iteration % args.checkpoint_interval == 0:
            saved = {"args": config, "global_step": global_step, "last_returns": last_returns}
            saved["agent"] = agent.state_dict()
            saved["optimizer"] = optimizer.state_dict()["state"]
            torch.save(saved, folder / "checkpoint.tmp")
            (folder / "checkpoint.tmp").replace(folder / "checkpoint.pt")  # all or nothing
        if is_last:
            envs.close()  # first: some simulators exist only once
        if is_evaluated and args.eval_episodes:
            writer.add_scalar("eval/return", evaluate(args, folder), global_step)
        if is_last:
            break
    bar.close()
    writer.close()
    print(f"return {mean_return:.1f} over the last {len(last_returns)} episodes; {folder}")
    return mean_return


if __name__ == "__main__":
    try:
        args = tyro.cli(Args)
        folder = args.evaluate or args.resume
        if folder:  # parse again: the run's arguments are the defaults
            args = tyro.cli(Args, default=Args(**load_checkpoint(folder)["args"]))
        if args.evaluate is not None:
            set_up_torch(args)
            evaluate(args, args.evaluate)
        else:
            train(args)
    except UsageError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
