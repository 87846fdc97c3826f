# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "tensorboard==2.21.0", "tyro==1.0.17",
#     "tqdm==4.70.1"]
# ///
"""PPO (arXiv:1707.06347) on simulators of thousands of instances in PyTorch's tensors, in one file.

    python ppo_tensors.py --env-id tensor_envs:Pendulum      # a minute, to a return of about -150
    python ppo_tensors.py --resume runs/NAME                 # go on, extend or change the run
    python ppo_tensors.py --evaluate runs/NAME

It is ppo_continuous.py without NumPy: observations, actions and rewards stay on `--device`, and
nothing is done episode by episode. `diff` the two. What a simulator must have is at `make_envs`;
tensor_envs.py, in the same folder, has some.

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
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn, optim
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Train PPO on continuous actions, with thousands of instances."""

    env_id: str = "tensor_envs:Pendulum"  # the simulator, as module:class
    env_kwargs: str = "{}"  # its keywords, as JSON, like '{"max_episode_steps": 500}'
    total_timesteps: int = 3_000_000  # environment steps in all, rounded down to whole rollouts
    seed: int = 1  # seeds the environments, the network, the sampling and the shuffling
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    device: str = "cpu"  # cpu, cuda, cuda:N or mps
    num_threads: int = 1  # CPU threads of PyTorch
    compile: bool = False  # compile the gradient step: seconds to start with, faster then
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
    eval_episodes: int = 100  # episodes of an evaluation; 0: evaluate nothing
    eval_greedy: bool = True  # take the likeliest actions in it, instead of sampling

    num_envs: int = 4096  # environments stepped side by side
    num_steps: int = 16  # steps of each environment in a rollout
    num_minibatches: int = 16  # minibatches that a rollout is split into
    update_epochs: int = 5  # passes over a rollout
    learning_rate: float = 1e-3  # Adam's step size; its epsilon is 1e-5 (detail 3)
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


def make_envs(args: Args, num_envs: int, stagger: bool) -> Any:
    """Make `CLASS(num_envs, device, stagger, **env_kwargs)` of `--env-id MODULE:CLASS`.

    It has the attributes `obs_size` and `action_size`, and three methods of tensors on `device`:

    - `reset(seed)` begins new episodes and returns obs, (num_envs, obs_size).
    - `step(actions)` takes (num_envs, action_size), within -1 and 1, and returns obs, rewards,
      terminations, truncations and final_obs; rewards, terminations, truncations are (num_envs,).
      Where an episode ended, obs is the next one's first, and final_obs, a tensor of its own, has
      its last. A simulator that has lost that may give the observation before. A time limit is no
      termination: of `dones` and `time_outs`, terminations are `dones & ~time_outs`.
    - `close()`.

    With `stagger` the first episodes should end at random steps, or all of them end together.
    """
    module, _, name = args.env_id.partition(":")
    if not name:
        raise UsageError(f"{args.env_id} should be module:class, like tensor_envs:Pendulum")
    kwargs = json.loads(args.env_kwargs)
    return getattr(import_module(module), name)(num_envs, args.device, stagger, **kwargs)


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

    def __init__(self, envs: Any, log_std_init: float) -> None:
        super().__init__()
        obs_size = envs.obs_size
        action_size = envs.action_size
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
    def act(self, obs: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Actions, (B, action_size): samples of what evaluate_actions scores; without rng, means.

        The bounds are at -1 and 1; what is beyond is clipped for the simulator only (detail 27).
        """
        mean, log_std = self.get_distribution(obs)
        if rng:
            mean = mean + log_std.exp() * torch.randn(mean.shape, generator=rng, device=mean.device)
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


@torch.no_grad()
def evaluate(args: Args, folder: str | Path) -> float:
    """Play one episode in each of `eval_episodes` instances; return their mean raw return."""
    envs = make_envs(args, args.eval_episodes, stagger=False)
    agent = Agent(envs, args.log_std_init).to(args.device).eval()
    agent.load_state_dict(load_checkpoint(folder)["agent"])
    rng = None if args.eval_greedy else torch.Generator(args.device).manual_seed(args.seed)
    returns = torch.zeros(args.eval_episodes, device=args.device)
    is_first = torch.ones_like(returns, dtype=torch.bool)  # is it still an instance's first one?
    obs = envs.reset(args.seed + 1_000_000_000)  # other episodes than the training's
    for _ in range(30_000):  # some episodes never end
        actions = agent.act(obs, rng).clamp(-1, 1)
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        returns += rewards * is_first
        is_first &= ~(terminations.bool() | truncations.bool())
        if not is_first.any():
            break
    else:
        tqdm.write("not all ended within 30,000 steps: give the simulator a limit")
    envs.close()
    returns = returns[~is_first].cpu()
    if not len(returns):
        return np.nan
    mean = returns.mean().item()
    std = returns.std(correction=0)
    tqdm.write(f"evaluated at {mean:.1f} +- {std:.1f} over {len(returns)} episodes")
    return mean


def train(args: Args, report: Callable | None = None) -> float:
    """Train an agent in a new folder in `runs`, or go on, by these args, in `args.resume`.

    Returns the mean raw return of the episodes that ended last, nan if none did. After an iteration
    `report(global_step, mean_return)` is called; if it returns True, the run is saved and ends.
    """
    set_up_torch(args)
    gradient_step = torch.compile(update, mode="reduce-overhead", disable=not args.compile)
    envs = make_envs(args, args.num_envs, args.stagger)
    agent = Agent(envs, args.log_std_init).to(args.device)
    lr = torch.tensor(args.learning_rate, device=args.device)  # a new float would recompile
    optimizer = optim.Adam(agent.parameters(), lr, eps=1e-5, fused=not args.compile)

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder = Path("runs", run_name.replace("/", "-").replace(":", "-"))
    config = json.loads(json.dumps(asdict(replace(args, resume=None))))  # numpy.float64 to float
    global_step = 0
    mean_return = np.nan  # of the episodes that ended last
    if args.resume is not None:
        folder = Path(args.resume)
        checkpoint = load_checkpoint(folder)
        agent.load_state_dict(checkpoint["agent"])
        if list(checkpoint["agent"]) != list(agent.state_dict()):  # Adam knows them by position
            raise UsageError(f"parts of the agent are in another order: {[*checkpoint['agent']]}")
        optimizer.load_state_dict(optimizer.state_dict() | {"state": checkpoint["optimizer"]})
        global_step = checkpoint["global_step"]
        mean_return = checkpoint["mean_return"]
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

    # A rollout
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((*shape, envs.obs_size), device=args.device)
    real_next_obs = torch.zeros_like(obs)  # at an episode's end its last, not the next one's first
    actions = torch.zeros((*shape, envs.action_size), device=args.device)
    rewards = torch.zeros(shape, device=args.device)
    terminations = torch.zeros_like(rewards, dtype=torch.bool)
    truncations = torch.zeros_like(terminations)

    start_time = time.time()
    rng = torch.Generator(args.device).manual_seed(args.seed + global_step)
    next_obs = envs.reset(args.seed + global_step)  # a resumed run begins new episodes
    episode_return = torch.zeros_like(rewards[0])  # of each instance, until now
    episode_length = torch.zeros_like(episode_return)
    reward_sum = 0.0
    bar = tqdm(total=args.total_timesteps, initial=global_step, disable=None)
    for iteration in range(1, num_iterations + 1):
        learning_rate = args.learning_rate
        if args.anneal_lr:  # detail 4
            learning_rate *= 1 - global_step / args.total_timesteps
        optimizer.param_groups[0]["lr"].fill_(learning_rate)

        # Rollout
        returns_sum, lengths_sum, num_ended = 0, 0, 0  # of the episodes that end, as tensors
        for t in range(args.num_steps):
            obs[t] = next_obs
            actions[t] = agent.act(obs[t], rng)
            with torch.no_grad():  # a simulator may be differentiable
                step = envs.step(actions[t].clamp(-1, 1))
            for x in step[1:4]:  # rewards, terminations, truncations
                assert x.shape == shape[1:], f"{tuple(x.shape)} isn't {shape[1:]}, (num_envs,)"
            next_obs, rewards[t], terminations[t], truncations[t], final_obs = step
            done = terminations[t] | truncations[t]
            real_next_obs[t] = torch.where(done[:, None], final_obs, next_obs)
            episode_return += rewards[t]
            episode_length += 1
            returns_sum += (episode_return * done).sum()
            lengths_sum += (episode_length * done).sum()
            num_ended += done.sum()
            episode_return *= ~done
            episode_length *= ~done
        not_done = 1.0 - (terminations | truncations).float()
        global_step += batch_size
        for name, x in (("observations", obs), ("final_obs", real_next_obs), ("rewards", rewards)):
            if not x.abs().max() < 1e15:  # false for nan; squares must not overflow
                raise FloatingPointError(f"nan, infinite or huge {name} before {global_step=}")

        # Divide rewards by the deviation of a discounted sum of past ones (details 30, 31). To turn
        # it off: scaled_rewards = rewards. Add a bonus to rewards here, or to scaled_rewards below.
        reward_sums = torch.zeros_like(rewards)
        for t in range(args.num_steps):
            reward_sums[t] = args.gamma * reward_sum + rewards[t]
            reward_sum = reward_sums[t] * not_done[t]
        agent.return_rms.update(reward_sums.flatten())
        scaled_rewards = (rewards / agent.return_rms.std).clamp(-10, 10)

        # Old log-probs, values, and the next values, by which a truncated episode is bootstrapped
        b_obs = obs.flatten(0, 1)  # (num_steps, num_envs, ...) to (batch_size, ...)
        b_actions = actions.flatten(0, 1)
        with torch.no_grad():
            b_logprobs, _, b_values = agent.evaluate_actions(b_obs, b_actions)
            next_values = agent.get_value(real_next_obs.flatten(0, 1)).view(shape)

        # GAE (arXiv:1506.02438; detail 5), within episodes: A[t] = delta[t] + gamma lambda A[t + 1]
        values = b_values.view(shape)
        deltas = scaled_rewards + args.gamma * next_values * ~terminations - values
        advantages = torch.zeros_like(rewards)
        advantage = 0.0
        for t in reversed(range(args.num_steps)):
            advantage = deltas[t] + args.gamma * args.gae_lambda * not_done[t] * advantage
            advantages[t] = advantage
        b_advantages = advantages.flatten()
        b_returns = b_advantages + b_values  # the critic's targets; change b_advantages below

        # Update, in shuffled minibatches (detail 6)
        batch = (b_obs, b_actions, b_logprobs, b_advantages, b_returns, b_values)
        metrics = defaultdict(list)
        for _ in range(args.update_epochs):
            permutation = torch.randperm(batch_size, generator=rng, device=args.device)
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
        if num_ended > 0:
            mean_return = (returns_sum / num_ended).item()
            scalars["charts/episodic_return"] = mean_return
            scalars["charts/episodic_length"] = lengths_sum / num_ended
        for name, x in scalars.items():
            writer.add_scalar(name, x, global_step)
        bar.set_postfix_str(f"return {mean_return:.1f}", refresh=False)
        bar.update(batch_size)

        # Checkpoint
        is_stopped = report and report(global_step, mean_return)  # a break would save nothing
        is_last = is_stopped or iteration == num_iterations
        is_evaluated = is_last or (args.eval_interval and iteration % args.eval_interval == 0)
        if is_evaluated or iteration % args.checkpoint_interval == 0:
            saved = {"args": config, "global_step": global_step, "mean_return": mean_return}
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
    print(f"return {mean_return:.1f} of the episodes that ended last; {folder}")
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
