"""Measure where the time of a step goes, in our scripts, with the flags that speed.py times.

    python benchmark/phases.py

The calls of the environments' step, of the policy and of the gradient step are timed from outside,
in the second half of a run; "advantages" is what passes before the first gradient step of an epoch:
values, log-probabilities, advantages, the shuffling. "alone" is what the same environments take for
actions of the trained policy, drawn before, where nothing else is done, the least of ten tries: the
ceiling. Rows, in microseconds for a step of one environment, go to benchmark/results/phases.csv.
Nothing else should run on the machine.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import tyro
from provenance import provenance
from run import ROOT, append, label
from speed import CASES

PHASES = ["environments", "act", "advantages", "update", "rest"]


def measure(name: str, flags: list[str]) -> dict[str, float]:
    """Train, and return each phase's microseconds a step."""
    script = importlib.import_module(name)
    args = tyro.cli(script.Args, args=flags)
    spent = dict.fromkeys(PHASES, 0.0)
    last_end, num_updates = 0.0, 0  # of the calls that are timed; of this update's gradient steps
    marks, agents = [], []  # what was spent at the end of each iteration; the agent that is trained

    def timed(phase: str, function: Callable) -> Callable:
        def call(*arguments: Any, **kwargs: Any) -> Any:
            nonlocal last_end, num_updates
            start = time.perf_counter()
            if phase == "update":
                if num_updates % args.num_minibatches == 0:  # the first of an epoch
                    spent["advantages"] += start - last_end
                num_updates += 1
            result = function(*arguments, **kwargs)
            last_end = time.perf_counter()
            spent[phase] += last_end - start
            return result

        return call

    def make_envs(*arguments: Any) -> Any:
        envs = original_make_envs(*arguments)
        envs.step = timed("environments", envs.step)
        return envs

    def make_act(agent: Any) -> Callable:
        agents[:] = [agent]
        return timed("act", original_make_act(agent))

    def compile_update(function: Callable, **kwargs: Any) -> Callable:
        compiled = original_compile(function, **kwargs)
        return timed("update", compiled) if function is script.update else compiled

    original_make_envs, script.make_envs = script.make_envs, make_envs
    original_make_act, script.Agent.make_act = script.Agent.make_act, make_act
    original_compile, torch.compile = torch.compile, compile_update

    def mark(*_: Any) -> None:
        nonlocal num_updates
        num_updates = 0  # an update can end within an epoch
        marks.append({**spent, "total": time.perf_counter()})

    script.train(args, mark)

    middle = len(marks) // 2
    steps = (len(marks) - middle) * args.num_envs * args.num_steps
    micros = {key: 1e6 * (marks[-1][key] - marks[middle - 1][key]) / steps for key in marks[0]}
    micros["rest"] = micros["total"] - sum(micros[phase] for phase in PHASES)
    envs, agent = original_make_envs(args, args.num_envs), agents[0]
    obs, _ = envs.reset(seed=1)
    actions, count = [], args.total_timesteps // 4 // args.num_envs
    with torch.no_grad():
        for _ in range(count):
            noise = agent.sample_noise(args.num_envs)
            action = agent.get_action(torch.from_numpy(obs).to(noise.device), noise)
            actions.append(action.cpu().numpy())
            obs = envs.step(actions[-1])[0]
    tries = []
    for _ in range(10):
        envs.reset(seed=1)  # so that the same happens
        start = time.perf_counter()
        for action in actions:
            envs.step(action)
        tries.append(1e6 * (time.perf_counter() - start) / count / args.num_envs)
    micros["alone"] = min(tries)
    envs.close()
    return {key: round(value, 1) for key, value in micros.items()}


def main() -> None:
    """Measure all cases, each in a process of its own, and append the rows."""
    if sys.argv[1:]:
        print(json.dumps(measure(sys.argv[1], sys.argv[2:])))
        return
    rows = []
    for env_id, (script, steps, variants) in CASES.items():
        for flags in variants:
            words = [
                script.removesuffix(".py"),
                "--env-id",
                env_id.split(",")[0],
                "--eval-episodes",
                "0",
            ]
            words += ["--total-timesteps", str(steps), *flags.split()]
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    [sys.executable, __file__, *words],
                    cwd=folder,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                    capture_output=True,
                    text=True,
                    check=True,
                )
            times = json.loads(done.stdout.splitlines()[-1])
            rows.append({"env_id": env_id, "who": label(script, flags)} | times)
            print(rows[-1], flush=True)
    append("phases.csv", [row | provenance() for row in rows])


if __name__ == "__main__":
    main()
