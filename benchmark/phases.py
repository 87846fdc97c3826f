"""Measure where the time of a step goes, in our scripts, with the flags that speed.py times.

    python benchmark/phases.py

Each phase's functions are timed from outside, in the second half of a run; "alone" is what the same
environments take for actions of the trained policy, drawn before, where nothing else is done, the
least of ten tries: the ceiling. Rows, in microseconds for a step of one environment, go to
benchmark/results/phases.csv. Nothing else should run on the machine.
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
from run import append
from speed import CASES, ROOT, label

PHASES = ["environments", "act", "advantages", "update", "rest"]


def measure(name: str, flags: list[str]) -> dict[str, float]:
    """Train, and return each phase's microseconds a step."""
    script = importlib.import_module(name)
    args = tyro.cli(script.Args, args=flags)
    spent = dict.fromkeys(PHASES, 0.0)
    marks = []  # what was spent at the end of each iteration

    def timed(phase: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            spent[phase] += time.perf_counter() - start
            return result

        return call

    def make_envs(*args: Any) -> Any:
        envs = original_make_envs(*args)
        envs.step = timed("environments", envs.step)
        return envs

    def check_finite(where: str, **values: Any) -> None:
        marks.append({**spent, "total": time.perf_counter()})
        original_check_finite(where, **values)

    original_make_envs, script.make_envs = script.make_envs, make_envs
    original_check_finite, script.check_finite = script.check_finite, check_finite
    original_make_act, agents = script.Agent.make_act, []

    def make_act(agent: Any) -> Callable:
        agents[:] = [agent]
        return timed("act", original_make_act(agent))

    script.Agent.make_act = make_act
    script.make_batch = timed("advantages", script.make_batch)
    original_compile = torch.compile
    if args.compile:
        torch.compile = lambda f, **kwargs: timed("update", original_compile(f, **kwargs))
    else:
        script.gradient_step = timed("update", script.gradient_step)
    script.train(args)

    middle = len(marks) // 2
    steps = (len(marks) - middle) * args.num_envs * args.num_steps
    micros = {key: 1e6 * (marks[-1][key] - marks[middle - 1][key]) / steps for key in marks[0]}
    micros["rest"] = micros["total"] - sum(micros[phase] for phase in PHASES)
    envs = original_make_envs(args)
    act, (obs, _) = original_make_act(agents[0]), envs.reset(seed=1)
    actions, count = [], args.total_timesteps // 4 // args.num_envs
    for _ in range(count):
        actions.append(act(obs, agents[0].sample_noise(args.num_envs)))
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
            words = [script.removesuffix(".py"), "--env-id", env_id, "--eval-episodes", "0"]
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
