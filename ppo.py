# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch==2.13.0", "gymnasium[box2d,classic-control]==1.4.0", "numpy==2.4.6",
#     "tensorboard==2.21.0", "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1"]
# ///
"""Proximal Policy Optimization (PPO, arXiv:1707.06347) for discrete actions, in a single file.

    python ppo.py --env-id CartPole-v1             # half a minute, to a return of 475 to 500
    python ppo.py --resume runs/NAME               # go on with a stopped run, extend or change it
    python ppo.py --evaluate runs/NAME --capture-video

"Detail n": see "The 37 Implementation Details of Proximal Policy Optimization", Huang et al. 2022,
numbered through: 1-13 core, 14-22 Atari, 23-31 continuous actions, 32-36 LSTM.
"""

import json
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial, reduce
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import FlattenObservation, RecordVideo
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, nn, optim
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Train PPO on discrete actions."""

    env_id: str = "CartPole-v1"  # id of the environment; module:Name-v0 imports module first
    env_kwargs: str = "{}"  # its keywords, as JSON, like '{"is_slippery": false}'
    total_timesteps: int = 500_000  # environment steps, all together; rounded down to rollouts
    seed: int = 1  # seeds the environments, the network, the sampling and the shuffling
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    device: str = "cpu"  # cpu, cuda, cuda:N, mps, or auto: a GPU if there is one
    num_threads: int = 1  # CPU threads of PyTorch, 0: its own choice; 1 is fastest for an MLP
    compile: bool = False  # compile the gradient step: seconds to start with, faster then
    vectorization: Literal["sync", "async", "vector_entry_point"] = "sync"  # see gym.make_vec
    track: bool = False  # mirror the scalars to Weights & Biases
    wandb_project_name: str = "ppo"  # project of Weights & Biases

    checkpoint_interval: int = 1000  # iterations between checkpoints; each cuts running episodes
    eval_episodes: int = 10  # episodes to evaluate, after the training or with --evaluate
    eval_greedy: bool = True  # take the most probable actions in them, instead of sampling
    eval_checkpoints: bool = False  # evaluate at every checkpoint, too: a learning curve
    capture_video: bool = False  # record the evaluation's episodes in the run's folder
    resume: str | None = None  # go on with the run in this folder; other flags change it
    evaluate: str | None = None  # train nothing, evaluate the run in this folder

    num_envs: int = 4  # environments stepped side by side
    num_steps: int = 128  # steps of each environment in a rollout
    num_minibatches: int = 4  # minibatches that a rollout is split into
    update_epochs: int = 4  # passes over a rollout
    learning_rate: float = 2.5e-4  # Adam's step size; its epsilon is 1e-5 (detail 3)
    anneal_lr: bool = True  # let the learning rate fall to 0 linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    recompute_advantages: bool = False  # recompute values and advantages at each epoch
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # clip the probability ratio to 1 - clip_coef .. 1 + clip_coef
    clip_vloss: bool = True  # clip the move of a value from its old estimate to +-clip_coef
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the gradient to this norm
    target_kl: float | None = None  # no more epochs in this iteration after a mean KL above this


class UsageError(Exception):
    """A mistake that the user can put right; the message says how, and the exit status is 2."""


def check(args: Args) -> None:
    """Raise `UsageError` for numbers that can't work."""
    counts = "num_envs num_steps num_minibatches update_epochs checkpoint_interval"
    rest = "seed num_threads eval_episodes learning_rate clip_coef ent_coef vf_coef max_grad_norm"
    for names, low, high in (counts, 1, 1e9), (rest, 0, 1e9), ("gamma gae_lambda target_kl", 0, 1):
        for name in names.split():
            if not low <= (getattr(args, name) or 0) <= high:  # nan fails
                raise UsageError(f"{name} must be {low} to {high:g}, not {getattr(args, name)}")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches or batch_size < 2 * args.num_minibatches:
        raise UsageError(f"{args.num_minibatches=} must divide {batch_size=} into 2 or more each")


def make_envs(args: Args, num_envs: int, videos: Path | None = None) -> VectorEnv:
    """Make environments (detail 1) with flat observations, (num_envs, obs_size), and raw rewards.

    Where an episode ends, step returns the next one's first obs; `infos["final_obs"]` has its last.
    """

    def wrap(env: gym.Env) -> gym.Env:
        # Add wrappers here (vector_entry_point has none). Each checkpoint and evaluation makes new
        # ones: keep lasting state in Agent, as a buffer. Reported returns sum the wrapped rewards.
        if videos:  # at most 3000 frames of each episode, as they are kept in memory
            env = RecordVideo(env, videos, lambda i: i < args.eval_episodes, video_length=3000)
        return FlattenObservation(env)  # copies, as some environments overwrite what they return

    mode = "sync" if videos else args.vectorization
    try:
        kwargs = json.loads(args.env_kwargs) | ({"render_mode": "rgb_array"} if videos else {})
        if mode != "vector_entry_point":
            kwargs |= {"vector_kwargs": {"autoreset_mode": "SameStep"}, "wrappers": [wrap]}
        envs = gym.make_vec(args.env_id, num_envs, mode, **kwargs)
    except (gym.error.Error, ModuleNotFoundError, json.JSONDecodeError) as error:
        raise UsageError(f"cannot make {args.env_id} with {args.env_kwargs}: {error}") from error
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        raise UsageError(f"{args.env_id} doesn't reset in the same step: {envs.metadata}")
    space = envs.single_action_space
    if not isinstance(space, gym.spaces.Discrete) or space.start:
        other = "see recipes/multi_discrete.diff, or ppo_continuous.py for a Box"
        raise UsageError(f"{args.env_id} has actions {space}, not 0 to n - 1: {other}")
    return RecordEpisodeStatistics(envs)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    """Give the layer orthogonal weights of gain `std` and zero biases (detail 2); return it."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def in_numpy(layer: nn.Module) -> Callable:
    """The layer as a NumPy function, faster for few rows; make it anew after each update."""
    kind = None if layer._forward_hooks or layer._forward_pre_hooks else type(layer)
    if kind is nn.Sequential:
        functions = [in_numpy(x) for x in layer]
        return lambda x: reduce(lambda y, function: function(y), functions, x)
    if kind is nn.Linear and layer.bias is not None:
        weight, bias = (x.numpy(force=True) for x in (layer.weight.T, layer.bias))
        return lambda x: x @ weight + bias
    if kind is nn.Tanh:
        return np.tanh
    device = next(layer.parameters(), torch.zeros(0)).device
    return lambda x: layer(torch.as_tensor(x, device=device)).numpy(force=True)  # others: PyTorch


class Agent(nn.Module):
    """Separate actor and critic (detail 13). Its parameters and buffers are what is saved."""

    def __init__(self, envs: VectorEnv) -> None:
        super().__init__()
        obs_size = envs.single_observation_space.shape[0]
        self.num_actions = envs.single_action_space.n
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, self.num_actions), std=0.01),
        )
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )

    def get_logits(self, obs: Tensor, actor: Callable) -> Tensor:
        """Logits, (B, num_actions): of NumPy arrays to act, of tensors to learn. Mask both here."""
        return actor(obs)

    def sample_noise(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        """Gumbel noise, (*shape, num_actions): argmax(logits + noise) samples softmax."""
        return rng.gumbel(size=(*shape, self.num_actions)).astype(np.float32)

    def make_act(self) -> Callable:
        """The policy, until its next update, as act(obs, noise) -> actions; noise 0: the mode."""
        actor = in_numpy(self.actor)
        return lambda obs, noise: (self.get_logits(obs, actor) + noise).argmax(-1)

    def get_value(self, obs: Tensor) -> Tensor:
        """Estimated values, (B,)."""
        return self.critic(obs).squeeze(-1)

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values, each (B,)."""
        log_softmax = self.get_logits(obs, self.actor).log_softmax(-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        logprobs = log_softmax.gather(-1, actions[:, None]).squeeze(-1)
        return logprobs, entropy, self.get_value(obs)


def update(agent: Agent, optimizer: optim.Adam, batch: tuple, indices: Tensor, args: Args) -> dict:
    """Take a gradient step on the minibatch of these indices; return tensors to log, by name."""
    minibatch = (x.index_select(0, indices) for x in batch)
    obs, actions, old_logprobs, advantages, returns, old_values = minibatch
    logprobs, entropy, values = agent.evaluate_actions(obs, actions)
    assert logprobs.shape == entropy.shape == values.shape == returns.shape  # (B,)
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()

    # Policy loss (detail 8)
    if args.norm_adv:  # detail 7
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clip = args.clip_coef * torch.ones_like(ratio)  # a tensor: clamp, compiled, freezes a number
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)
    policy_loss = -torch.min(advantages * ratio, advantages * clipped_ratio).mean()

    # Value loss
    squared_errors = (values - returns) ** 2
    if args.clip_vloss:  # detail 9
        clipped_values = old_values + (values - old_values).clamp(-clip, clip)
        squared_errors = torch.max(squared_errors, (clipped_values - returns) ** 2)
    value_loss = 0.5 * squared_errors.mean()

    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()  # detail 10
    # backward() and clip_grad_norm_(), by hand: one graph for torch.compile (detail 11)
    parameters = [x for group in optimizer.param_groups for x in group["params"] if x.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    grad_norm = sum(x.square().sum() for x in gradients) ** 0.5
    scale = (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(scale * gradient)  # same memory layout
    with torch.no_grad():  # detail 12; both KL estimates: http://joschu.net/blog/kl-approx.html
        metrics = {
            "losses/policy_loss": policy_loss.detach(),
            "losses/value_loss": value_loss.detach(),
            "losses/entropy": entropy.mean(),
            "losses/old_approx_kl": -logratio.mean(),
            "losses/approx_kl": (ratio - 1 - logratio).mean(),
            "losses/clipfrac": (ratio != clipped_ratio).float().mean(),
            "losses/grad_norm": grad_norm,
        }
    optimizer.step()
    return metrics


def seed_everything(seed: int) -> None:
    """Seed the global generators: networks draw from them, some environments too (async: alike)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def set_up_torch(args: Args) -> torch.device:
    """Seed, set the number of threads, and return the device. Raises `UsageError`."""
    seed_everything(args.seed)
    torch.set_num_threads(args.num_threads or torch.get_num_threads())
    name = args.device
    try:
        if name == "auto":
            name = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        return torch.zeros(1, device=name).device
    except Exception as error:
        raise UsageError(f"no device {name}: {str(error).splitlines()[0]}") from error


def load_checkpoint(folder: str | Path, agent: Agent | None = None) -> dict:
    """The checkpoint of the run in this folder; loads the agent's weights. Raises `UsageError`."""
    try:
        checkpoint = torch.load(Path(folder, "checkpoint.pt"), "cpu", weights_only=True)
        if agent:
            agent.load_state_dict(checkpoint["agent"])
        return checkpoint | {"args": Args(**checkpoint["args"])}
    except Exception as error:
        raise UsageError(f"no checkpoint that fits in {folder}: {error!r}") from error


def log(writer: SummaryWriter, scalars: dict, step: int) -> None:
    """Write scalars as one event, and wait: the writer's thread would slow the next steps."""
    values = [Summary.Value(tag=name, simple_value=x) for name, x in scalars.items()]
    writer.file_writer.add_summary(Summary(value=values), step)
    writer.flush()


def evaluate(args: Args, folder: str | Path) -> float:
    """Play episodes with a run's checkpoint; return their mean raw return, nan if none ends."""
    device, rng = set_up_torch(args), np.random.default_rng(args.seed)
    videos = Path(folder, f"videos-{datetime.now():%Y%m%d-%H%M%S}")
    envs = make_envs(args, 1, videos if args.capture_video else None)
    agent = Agent(envs).to(device).eval()
    load_checkpoint(folder, agent)
    act, returns = agent.make_act(), []
    obs, _ = envs.reset(seed=args.seed)
    for _ in range(30_000 * args.eval_episodes):  # some episodes never end
        noise = 0.0 if args.eval_greedy else agent.sample_noise(rng, 1)
        obs, _, _, _, infos = envs.step(act(np.float32(obs), noise))
        if "episode" in infos:
            returns.append(infos["episode"]["r"][0])
            if len(returns) == args.eval_episodes:
                break
    envs.close()
    mean = float(np.mean(returns or np.nan))
    text = f"evaluated at {mean:.1f} ± {np.std(returns or 0):.1f} over {len(returns)} episodes"
    with suppress(OSError):  # a closed pipe must not cost the result
        tqdm.write(text)
    return mean


STOP = []  # train ends once there is something in it


def stop(number: int, frame: object) -> None:
    """After Ctrl-C or another signal, finish the iteration, save, stop; the same again kills."""
    STOP.append(signal.signal(number, signal.SIG_DFL))


def train(args: Args, report: Callable | None = None) -> float:
    """Train an agent in a new folder in `runs`, or resume the one in `args.resume`, with args.

    Returns the mean raw return of the last 100 episodes, nan if none ended. After each iteration
    `report(global_step, mean_return)` is called; if it returns True, the run is saved and ends.
    """
    check(args)
    config = json.loads(json.dumps(asdict(args)))  # plain numbers, which can be loaded safely
    device, batch_size = set_up_torch(args), args.num_envs * args.num_steps
    tensor = partial(torch.tensor, device=device)
    envs = make_envs(args, 1)  # for its spaces; the loop makes all
    agent = Agent(envs).to(device)
    envs.close()
    learning_rate = tensor(args.learning_rate)  # a float would recompile
    optimizer = optim.Adam(agent.parameters(), learning_rate, eps=1e-5, fused=not args.compile)
    torch._dynamo.config.trace_autograd_ops = args.compile  # autograd.grad within one graph
    torch._logging.set_logs(dynamo=40)  # errors only: else it warns of the optimizer's profiling
    torch.compiler.reset()  # forget what an earlier call of train compiled
    gradient_step = torch.compile(update, mode="reduce-overhead", disable=not args.compile)

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder = Path("runs", run_name.replace("/", "-").replace(":", "-"))
    first_step, last_returns = 0, []
    if args.resume:
        folder, checkpoint = Path(args.resume), load_checkpoint(args.resume, agent)
        first_step, last_returns = checkpoint["global_step"], checkpoint["last_returns"]
        optimizer.load_state_dict(optimizer.state_dict() | {"state": checkpoint["optimizer"]})
    num_iterations = (args.total_timesteps - first_step) // batch_size
    if num_iterations < 1:
        raise UsageError(f"nothing to train: raise total_timesteps to {first_step + batch_size}")
    # The time limit of an episode, 1 if there is none
    limit = max(1, envs.spec.kwargs.get("max_episode_steps", envs.spec.max_episode_steps) or 1)
    if args.checkpoint_interval * args.num_steps < 2 * limit:
        print(f"resets at checkpoints cut episodes of {limit} steps: raise --checkpoint-interval")

    if args.track:
        import wandb

        run = {"project": args.wandb_project_name, "id": folder.name, "resume": "allow"}
        wandb.init(**run, config=config, sync_tensorboard=True)
    writer = SummaryWriter(folder, purge_step=first_step + 1)
    writer.add_text("hyperparameters", str(config), first_step)

    # A rollout, on the CPU; real_next_obs has the last observation of an episode that ends
    shape = args.num_steps, args.num_envs
    obs, real_next_obs = np.zeros((2, *shape, *envs.single_observation_space.shape), np.float32)
    actions = np.zeros((*shape, *envs.single_action_space.shape), envs.action_space.dtype)
    rewards = np.zeros(shape, np.float32)
    terminations, truncations = np.zeros((2, *shape), bool)

    global_step, start_time = first_step, time.time()
    print(f"training in {folder}")
    bar = tqdm(total=args.total_timesteps, initial=global_step, unit="step", disable=None)
    try:
        for iteration in range(num_iterations):
            # Environments can't be saved: after each scheduled checkpoint every run makes new ones,
            # seeded by the step. So a run resumed there equals one that never stopped.
            if iteration % args.checkpoint_interval == 0:
                rng = np.random.default_rng([args.seed, global_step])
                env_seed = int(rng.integers(2**30))
                seed_everything(env_seed)
                envs = make_envs(args, args.num_envs)
                next_obs, _ = envs.reset(seed=env_seed)
            if args.anneal_lr:  # detail 4; for all groups without a rate of their own
                share_left = 1 - global_step / args.total_timesteps
                optimizer.param_groups[0]["lr"].fill_(args.learning_rate * share_left)

            # Rollout. Weights don't change in it: noise comes before, log-probs and values after.
            # evaluate_actions must score what act does: the KL wouldn't show a difference.
            act, noise = agent.make_act(), agent.sample_noise(rng, *shape)
            for t in range(args.num_steps):
                obs[t] = next_obs
                actions[t] = act(obs[t], noise[t])
                next_obs, rewards[t], terminations[t], truncations[t], infos = envs.step(actions[t])
                real_next_obs[t] = next_obs
                global_step += args.num_envs
                for i in np.flatnonzero(infos.get("_episode", [])):  # whose episode ended
                    real_next_obs[t, i] = infos["final_obs"][i]  # next_obs is the next one's first
                    total, length = (float(infos["episode"][x][i]) for x in "rl")  # return, length
                    last_returns = [*last_returns[-99:], total]
                    charts = {"charts/episodic_return": total, "charts/episodic_length": length}
                    log(writer, charts, global_step)
            dones = terminations | truncations  # of step t; CleanRL's dones[t] are of step t - 1
            b_obs, b_actions = (tensor(x).flatten(0, 1) for x in (obs, actions))
            is_cut = truncations.copy()  # where real_next_obs gives the next values
            is_cut[-1] = True  # the last row, too
            with torch.no_grad():
                b_logprobs, _, rollout_values = agent.evaluate_actions(b_obs, b_actions)

            optimizer.zero_grad()  # Adam would repeat the last gradient of what is frozen by now
            metrics = defaultdict(list)
            for epoch in range(args.update_epochs):
                # GAE (arXiv:1506.02438, eq. 16; detail 5), once or at each epoch. The value after a
                # termination is 0, after a truncation that of the episode's last observation.
                if epoch == 0 or args.recompute_advantages:
                    with torch.no_grad():
                        b_values = agent.get_value(b_obs) if epoch > 0 else rollout_values
                        end_values = agent.get_value(tensor(real_next_obs[is_cut]))
                    values = b_values.view(shape).numpy(force=True)
                    next_values = np.roll(values, -1, 0)  # row t + 1; the last row's come below
                    next_values[is_cut] = end_values.numpy(force=True)
                    deltas = rewards + args.gamma * next_values * ~terminations - values
                    discounts = args.gamma * args.gae_lambda * ~dones
                    advantages, advantage = np.zeros_like(deltas), 0.0
                    for t in reversed(range(args.num_steps)):
                        advantages[t] = advantage = deltas[t] + discounts[t] * advantage
                    b_advantages = tensor(advantages).flatten()
                    b_returns = b_advantages + b_values  # the critic's targets
                    batch = b_obs, b_actions, b_logprobs, b_advantages, b_returns, rollout_values
                if epoch == 0:  # before the fit
                    debug = {"values": b_values, "returns": b_returns, "advantages": b_advantages}
                    explained_variance = 1 - b_advantages.var() / b_returns.var()

                # Update (detail 6)
                for indices in tensor(rng.permutation(batch_size)).chunk(args.num_minibatches):
                    for name, x in gradient_step(agent, optimizer, batch, indices, args).items():
                        metrics[name].append(x.clone())  # CUDA graphs reuse x
                kls = torch.stack(metrics["losses/approx_kl"][-args.num_minibatches :])
                if args.target_kl and kls.mean() > args.target_kl:
                    break

            # Log
            scalars = {name: torch.stack(x).mean().item() for name, x in metrics.items()}
            if bad := [name for name, x in scalars.items() if not np.isfinite(x)]:
                raise UsageError(f"infinite or nan at step {global_step}: {bad}")
            scalars |= {f"debug/{name}": x.mean().item() for name, x in debug.items()}
            scalars["losses/explained_variance"] = explained_variance.item()
            scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"].item()
            scalars["charts/SPS"] = (global_step - first_step) / (time.time() - start_time)
            log(writer, scalars, global_step)
            mean_return = float(np.mean(last_returns or np.nan))

            # Checkpoint
            stops = STOP or (report and report(global_step, mean_return))
            ends = iteration + 1 == num_iterations or stops
            if (iteration + 1) % args.checkpoint_interval == 0 or ends:
                saved = {"args": config, "global_step": global_step, "last_returns": last_returns}
                saved |= {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()["state"]}
                torch.save(saved, folder / "checkpoint.tmp")
                (folder / "checkpoint.tmp").replace(folder / "checkpoint.pt")  # all or nothing
                envs.close()
                if args.eval_episodes and (args.eval_checkpoints or ends) and not stops:
                    writer.add_scalar("eval/return", evaluate(args, folder), global_step)
            bar.set_postfix_str(f"return {mean_return:.1f}", False)
            bar.update(batch_size)
            if ends:
                break
    finally:
        envs.close()
        writer.close()
        bar.close()
    print(f"return {mean_return:.1f} over the last {len(last_returns)} episodes; {folder}")
    return mean_return


if __name__ == "__main__":
    try:
        args = tyro.cli(Args)
        if folder := args.resume or args.evaluate:  # parse again: the run's arguments are defaults
            args = tyro.cli(Args, default=load_checkpoint(folder)["args"])
        if args.evaluate:
            evaluate(args, args.evaluate)
        else:
            for number in signal.valid_signals() & {1, 2, 15}:  # SIGHUP, SIGINT, SIGTERM
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores the first
                    signal.signal(number, stop)
            train(args)
    except UsageError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
