# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "numpy==2.4.6",
#     "tensorboard==2.21.0", "tyro==1.0.17", "tqdm==4.70.1", "moviepy==2.2.1"]
# ///
"""Proximal Policy Optimization (PPO, arXiv:1707.06347) for Atari games, in a single file.

    python ppo_atari.py --env-id ALE/Breakout-v5     # hours; try --bf16 and --compile
    python ppo_atari.py --resume runs/NAME           # go on with a stopped run, or change it
    python ppo_atari.py --evaluate runs/NAME --capture-video

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
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics, RecordVideo
from torch import Tensor, nn, optim
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Train PPO on an Atari game."""

    env_id: str = "ALE/Breakout-v5"  # id of the game
    env_kwargs: str = "{}"  # AtariVectorEnv's keywords, as JSON, like '{"full_action_space": true}'
    total_timesteps: int = 10_000_000  # environment steps in all, rounded down to whole rollouts
    seed: int = 1  # seeds the environments, the network, the sampling and the shuffling
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    device: str = "cpu"  # cpu, cuda, cuda:N or mps
    num_threads: int = torch.get_num_threads()  # CPU threads of PyTorch
    compile: bool = False  # compile the gradient step: seconds to start with, faster then
    bf16: bool = False  # compute the CNN in bfloat16: faster where the processor has it
    repeat_action_probability: float = 0.0  # probability that a game repeats the last action
    track: bool = False  # mirror the scalars to Weights & Biases
    wandb_project_name: str = "ppo"  # project of Weights & Biases

    checkpoint_interval: int = 10  # iterations between checkpoints
    resume: str | None = None  # go on with the run in this folder; other flags change it
    evaluate: str | None = None  # train nothing, evaluate the run in this folder
    eval_interval: int = 0  # iterations between evaluations in the training; 0: only at its end
    eval_episodes: int = 10  # episodes of an evaluation; 0: evaluate nothing
    eval_greedy: bool = True  # take the likeliest actions in it, instead of sampling
    capture_video: bool = False  # record the evaluation's episodes in the run's folder

    num_envs: int = 8  # environments stepped side by side
    num_steps: int = 128  # steps of each environment in a rollout
    num_minibatches: int = 4  # minibatches that a rollout is split into
    update_epochs: int = 4  # passes over a rollout
    learning_rate: float = 2.5e-4  # Adam's step size; its epsilon is 1e-5 (detail 3)
    anneal_lr: bool = True  # let the learning rate fall to 0 linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.1  # probability ratios gain nothing outside 1 - clip_coef .. 1 + clip_coef
    clip_vloss: bool = True  # clip the move of a value from its old estimate to +-clip_coef
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the gradient to this norm
    target_kl: float | None = None  # stop the epochs after one whose mean KL is above this

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            if isinstance(x, int | float) and not x >= 0:  # true for nan
                raise ValueError(f"{name}={x} must be a number from 0 on")
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


class LifeLoss(VectorWrapper):
    """Terminates at each lost life (detail 16), without a reset, and then presses fire (17)."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self.has_fire = env.unwrapped.ale.get_action_set()[1] == ale_py.Action.FIRE

    def reset(self, **kwargs: Any) -> tuple:
        obs, infos = self.env.reset(**kwargs)
        self.lives = infos["lives"]
        self.lost = np.zeros(self.num_envs, bool)
        return obs, infos

    def step(self, actions: np.ndarray) -> tuple:
        if self.has_fire:
            actions = np.where(self.lost, 1, actions)  # the agent's own is what is stored
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        # After a game's end, the lives are the next one's
        self.lost = (infos["lives"] < self.lives) & ~terminations & ~truncations
        self.lives = infos["lives"]
        return obs, rewards, terminations | self.lost, truncations, infos


class RenderScreens(VectorWrapper):
    """Renders the agent's view, enlarged: ALE's vector environment renders nothing."""

    render_mode = "rgb_array"

    def reset(self, **kwargs: Any) -> tuple:
        self.obs, infos = self.env.reset(**kwargs)
        return self.obs, infos

    def step(self, actions: np.ndarray) -> tuple:
        self.obs, *others = self.env.step(actions)
        return self.obs, *others

    def render(self) -> list[np.ndarray]:
        """The last screen of each game, (168, 168, 3)."""
        return [np.kron(x[-1, ..., None], np.ones((2, 2, 3), np.uint8)) for x in self.obs]


def make_envs(args: Args, num_envs: int, videos: Path | None = None) -> VectorEnv:
    """Make games (detail 1) by ALE's vector environment: (num_envs, 4, 84, 84) bytes, raw rewards.

    Where an episode ends, obs is the next one's first; its own last is in `infos["final_obs"]`.
    """
    if "ALE/" not in args.env_id:
        raise UsageError(f"{args.env_id} isn't one of ALE's games, like ALE/Breakout-v5")
    # ALE skips 4 frames and takes the maximum of the last two (detail 15), scales, greys and stacks
    # the screens (18, 20), and presses fire and no-ops after a reset (17, 14).
    try:
        envs = gym.make_vec(
            args.env_id,
            num_envs,
            "vector_entry_point",
            autoreset_mode=AutoresetMode.SAME_STEP,
            repeat_action_probability=args.repeat_action_probability,
            reward_clipping=False,
            episodic_life=False,
            **json.loads(args.env_kwargs),
        )
    except gym.error.UnregisteredEnv as error:
        raise UsageError(f"{error}") from None
    envs = RecordEpisodeStatistics(envs, stats_key="episode_stats")  # of games, not of lives
    if videos:  # at most 10,000 steps of each game, as they are kept in memory
        envs = RecordVideo(
            RenderScreens(envs),
            videos,
            episode_trigger=lambda game: game < args.eval_episodes,
            video_length=10_000,
            fps=15,
        )
    return LifeLoss(envs)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    """Give the layer orthogonal weights of gain `std` and zero biases (detail 2); return it."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Actor and critic on one CNN, of Mnih et al. 2015. Its parameters are what is saved."""

    def __init__(self, envs: VectorEnv, bf16: bool) -> None:
        super().__init__()
        self.bf16 = bf16
        self.network = nn.Sequential(  # shared (details 13, 21)
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, envs.single_action_space.n), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, (B, num_actions), and values, (B,), of bytes, (B, 4, 84, 84)."""
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        obs = obs.contiguous(memory_format=torch.channels_last).to(dtype) / 255  # detail 22
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            features = self.network(obs).float()
        return self.actor(features), self.critic(features).squeeze(-1)

    def get_value(self, obs: Tensor) -> Tensor:
        """Estimated values, (B,)."""
        return self(obs)[1]

    @torch.no_grad()
    def act(self, obs: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        """Actions, (B,): samples of what evaluate_actions scores; without rng, the likeliest."""
        logits, _ = self(torch.as_tensor(obs, device=self.critic.weight.device))
        logits = logits.numpy(force=True)
        if rng:  # Gumbel-max trick: the argmax is a sample of the softmax
            logits = logits + rng.gumbel(size=logits.shape)
        return logits.argmax(-1)

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values, each (B,)."""
        logits, values = self(obs)
        log_softmax = logits.log_softmax(-1)
        logprobs = log_softmax.gather(-1, actions[:, None]).squeeze(-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        return logprobs, entropy, values


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
    agent = Agent(envs, args.bf16).to(args.device).eval()
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
        tqdm.write("not all ended: limit episodes, by max_num_frames_per_episode in --env-kwargs")
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
    agent = Agent(envs, args.bf16).to(args.device)
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
    obs = np.zeros((*shape, *envs.single_observation_space.shape), np.uint8)
    real_next_obs = np.zeros_like(obs)  # at an episode's end its last, not the next one's first
    actions = np.zeros(shape, np.int64)
    rewards = np.zeros(shape, np.float32)
    terminations = np.zeros(shape, bool)
    truncations = np.zeros_like(terminations)

    start_time = time.time()
    rng = np.random.default_rng([args.seed, global_step])
    next_obs, _ = envs.reset(seed=args.seed + global_step)  # a resumed run begins new episodes
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

        # Old log-probs, values, and the next values, by which a truncated episode is bootstrapped
        b_obs = flatten(obs)
        b_next_obs = flatten(real_next_obs)
        b_actions = flatten(actions)
        with torch.no_grad():
            b_logprobs, _, b_values = agent.evaluate_actions(b_obs, b_actions)
            values = b_values.view(shape).numpy(force=True)
            next_values = agent.get_value(b_next_obs).view(shape).numpy(force=True)

        # GAE (arXiv:1506.02438; detail 5), within episodes: A[t] = delta[t] + gamma lambda A[t + 1]
        # Only the signs of rewards count (detail 19)
        deltas = np.sign(rewards) + args.gamma * np.where(terminations, 0, next_values) - values
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
        grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), np.inf)  # measures, clips nothing
        if not grad_norm < np.inf or (args.compile and grad_norm == 0):
            raise FloatingPointError(f"gradient of 0 (by zero_grad?), inf or nan, {global_step=}")

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
