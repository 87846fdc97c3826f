"""Time variants/ppo_tensors.py beside rsl_rl's PPO, and see what both learn: results/tensors.csv.

    python -m venv /tmp/rsl
    /tmp/rsl/bin/pip install torch==2.13.0 rsl-rl-lib==5.5.1 gymnasium==1.4.0 mujoco-warp==4.0.0 \
        tensorboard tyro tqdm
    /tmp/rsl/bin/python benchmark/tensors.py

Both have the same simulators, network and hyper-parameters, no annealing and no limit of the KL.
What differs is what each is: here rewards are scaled, there advantages are normalized. Nothing else
should run on the machine. They take turns, with a seed each; the first two iterations don't count.
"""

import contextlib
import io
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from run import ROOT, append, provenance
from tensordict import TensorDict

sys.path.insert(0, str(ROOT / "variants"))
import ppo_tensors

CASES = {  # simulator: instances, iterations
    "tensor_envs:Pendulum": (4096, 60),
    "tensor_envs:InvertedPendulum": (512, 60),
}


@dataclass
class Options:
    """Time and train both."""

    rounds: int = 3  # each with another seed
    num_threads: int = 2  # of PyTorch
    only: str = ""  # simulators whose name contains this


class Simulator(VecEnv):
    """A simulator of ours, as rsl_rl wants it."""

    def __init__(self, args: ppo_tensors.Args) -> None:
        self.envs = ppo_tensors.make_envs(args, args.num_envs, stagger=True)
        self.num_envs = args.num_envs
        self.num_actions = self.envs.action_size
        self.device = args.device
        self.cfg = {}
        self.obs = self.envs.reset(args.seed)

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self.obs}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple:
        step = self.envs.step(actions.clamp(-1, 1))
        self.obs, rewards, terminations, truncations, _ = step
        dones = (terminations | truncations).long()
        return self.get_observations(), rewards, dones, {"time_outs": truncations.float()}


def rsl_rl(args: ppo_tensors.Args, iterations: int) -> tuple[float, float]:
    """Train with rsl_rl; return steps a second and the mean return of greedy episodes."""
    network = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh"}
    network["obs_normalization"] = True
    gaussian = {"class_name": "GaussianDistribution", "std_type": "log"}
    gaussian["init_std"] = float(np.exp(args.log_std_init))
    config = {
        "num_steps_per_env": args.num_steps,
        "save_interval": args.checkpoint_interval,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "torch_compile_mode": "default" if args.compile else None,
        "actor": network | {"distribution_cfg": gaussian},
        "critic": dict(network),
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": args.update_epochs,
            "num_mini_batches": args.num_minibatches,
            "clip_param": args.clip_coef,
            "gamma": args.gamma,
            "lam": args.gae_lambda,
            "value_loss_coef": 0.5 * args.vf_coef,
            "entropy_coef": args.ent_coef,
            "learning_rate": args.learning_rate,
            "max_grad_norm": args.max_grad_norm,
            "use_clipped_value_loss": args.clip_vloss,
            "schedule": "fixed",
        },
    }
    ppo_tensors.set_up_torch(args)
    runner = OnPolicyRunner(Simulator(args), config, "logs", args.device)
    runner.learn(2)
    start = time.perf_counter()
    runner.learn(iterations - 2)
    seconds = time.perf_counter() - start
    policy = runner.get_inference_policy()
    envs = ppo_tensors.make_envs(args, args.eval_episodes, stagger=False)
    obs = envs.reset(args.seed + 10**9)
    returns = torch.zeros(args.eval_episodes)
    is_first = torch.ones_like(returns, dtype=torch.bool)
    while is_first.any():
        with torch.no_grad():
            actions = policy(TensorDict({"policy": obs}, batch_size=[args.eval_episodes]))
        obs, rewards, terminations, truncations, _ = envs.step(actions.clamp(-1, 1))
        returns += rewards * is_first
        is_first &= ~(terminations | truncations)
    return (iterations - 2) * args.num_envs * args.num_steps / seconds, returns.mean().item()


def ours(args: ppo_tensors.Args, iterations: int) -> tuple[float, float]:
    """Train with ppo_tensors.py; return the same."""
    times = []

    def report(global_step: int, mean_return: float) -> None:
        times.append(time.perf_counter())

    ppo_tensors.train(args, report)
    (folder,) = Path("runs").iterdir()
    speed = (iterations - 2) * args.num_envs * args.num_steps / (times[-1] - times[1])
    return speed, ppo_tensors.evaluate(args, folder)


def main(options: Options) -> None:
    """Take turns."""
    print(f"{'simulator':30} {'who':22} steps/s  greedy return")
    for case, (num_envs, iterations) in CASES.items():
        if options.only not in case:
            continue
        for seed in range(1, options.rounds + 1):
            for who, train in (("ours", ours), ("rsl_rl", rsl_rl)):
                for is_compiled in (False, True):
                    args = ppo_tensors.Args(
                        env_id=case,
                        num_envs=num_envs,
                        total_timesteps=iterations * num_envs * 16,
                        seed=seed,
                        num_threads=options.num_threads,
                        compile=is_compiled,
                        anneal_lr=False,
                        target_kl=None,
                    )
                    name = f"{who}, compiled" if is_compiled else who
                    torch.compiler.reset()
                    with (
                        tempfile.TemporaryDirectory() as folder,
                        contextlib.chdir(folder),
                        contextlib.redirect_stdout(io.StringIO()),
                    ):
                        speed, score = train(args, iterations)
                    print(f"{case:30} {name:22} {speed:7.0f}  {score:.1f}", flush=True)
                    row = {"case": case, "who": name, "seed": seed, "steps": args.total_timesteps}
                    row |= {"steps_per_s": round(speed), "greedy": round(score, 2)}
                    row["threads"] = options.num_threads
                    append("tensors.csv", [row | provenance()])


if __name__ == "__main__":
    main(tyro.cli(Options))
