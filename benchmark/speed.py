"""Measure speed: beside Stable-Baselines3 and CleanRL, and against the sizes of a run.

    pip install -r benchmark/requirements.txt
    python -m venv /tmp/sb3
    /tmp/sb3/bin/pip install stable-baselines3==2.9.2 torch==2.13.0 "gymnasium[mujoco]" \
        mujoco==3.10.0 tensorboard ale-py==0.12.1 opencv-python-headless
    git clone https://github.com/vwxyzjn/cleanrl /tmp/cleanrl/repo  # measured: commit fe8d8a0
    python -m venv /tmp/cleanrl/venv
    /tmp/cleanrl/venv/bin/pip install torch==2.13.0 gymnasium==0.29.1 "numpy<2" tyro tensorboard \
        mujoco==3.10.0 imageio opencv-python-headless ale-py==0.8.1 "shimmy[atari]==1.3.0" \
        envpool==0.8.4 gym==0.23.1
    cp .venv/lib/python3.11/site-packages/ale_py/roms/breakout.bin \
        /tmp/cleanrl/venv/lib/python3.11/site-packages/ale_py/roms  # this ale-py has no games
    python benchmark/speed.py --peer-python /tmp/sb3/bin/python \
        --cleanrl-python /tmp/cleanrl/venv/bin/python --cleanrl /tmp/cleanrl/repo/cleanrl

Nothing else should run on the machine meanwhile. Ours and the peers run alternately, with the same
settings. A speed of ours is of the second half of a run, Stable-Baselines3's of all but its first
iteration, CleanRL's what it prints, so that neither imports nor compilation count; what they take
is recorded beside it. Rows go to benchmark/results/speed.csv and scaling.csv, the plot of the
latter to scaling.png. Rows with --vectorization envpool need `pip install envpool==1.2.5`.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import torch
import tyro
from provenance import provenance
from run import CANONICAL, RESULTS, ROOT, append, events_of, label, read

NATIVE, ENVPOOL = " --vectorization native", " --vectorization envpool"
# bfloat16 says nothing about a script on a processor without units for it.
BF16 = ["--bf16", "--bf16 --compile"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else []
CASES = {  # environment: script, steps, variants of ours
    "CartPole-v1": ("ppo.py", 102_400, ["", "--compile"]),
    "CartPole-v1, 64 environments": (
        "ppo.py",
        819_200,
        [f"--num-envs 64 --compile{x}" for x in ("", NATIVE, ENVPOOL)],
    ),
    "HalfCheetah-v5": (
        "ppo_continuous.py",
        24_576,
        [CANONICAL, f"{CANONICAL} --compile", "", "--compile"],
    ),
    "ALE/Breakout-v5": ("ppo_atari.py", 8192, ["", "--compile", *BF16]),
}
PEER_STEPS = {  # environment: steps of Stable-Baselines3
    "CartPole-v1": 25_600,
    "CartPole-v1, 64 environments": 81_920,
    "HalfCheetah-v5": 16_384,
    "ALE/Breakout-v5": 8192,
}
CLEANRL = {  # environment: its script, flags; its HalfCheetah is v4, as gymnasium's was then
    "CartPole-v1": "ppo.py --total-timesteps 25600",
    "CartPole-v1, 64 environments": "ppo.py --num-envs 64 --total-timesteps 163840",
    "HalfCheetah-v5": "ppo_continuous_action.py --env-id HalfCheetah-v4 --total-timesteps 16384",
    "ALE/Breakout-v5": "ppo_atari.py --env-id BreakoutNoFrameskip-v4 --total-timesteps 8192",
}
CLEANRL_ENVPOOL = "ppo_atari_envpool.py --env-id Breakout-v5 --total-timesteps 8192"
FIGURES = ["first_iteration_s", "peak_mib", "steps_per_s"]
ENVS, STEPS = (1, 4, 16, 64, 256), (32, 128, 512, 2048)
SCALES = {  # what varies: its sizes, with steps enough for a few iterations
    "num_envs": {n: f"--num-envs {n} --total-timesteps {max(20_480, 1024 * n)}" for n in ENVS},
    "num_steps": {n: f"--num-steps {n} --total-timesteps {max(40_960, 32 * n)}" for n in STEPS},
    "processes": dict.fromkeys((1, 2), "--num-envs 16 --total-timesteps 81920"),
}


@dataclass
class Args:
    """Measure speed."""

    peer_python: str = ""  # the python of an environment with stable-baselines3, see above
    cleanrl_python: str = ""  # the python of one for CleanRL
    cleanrl: str = ""  # the folder of its scripts
    rounds: int = 5  # alternations; the median counts
    only: Literal["peer", "cold", "scaling"] | None = None  # part to do; all by default
    env_id: str | None = None  # environment to compare on; all of them by default


def measure(script: str, flags: str, processes: int = 1, scripts: Path = ROOT) -> dict[str, float]:
    """Run a script, of the folder `scripts`, in an empty folder: its speed, its first iteration and
    its peak memory.
    """
    words = [sys.executable]
    if processes > 1:
        words += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    words += [str(scripts / script), *flags.split(), "--eval-episodes", "0"]
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silence:
        process = subprocess.Popen(words, cwd=folder, stdout=silence, stderr=subprocess.PIPE)
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError(f"{' '.join(words)} failed:\n{errors.decode()}")
        (run,) = Path(folder, "runs").iterdir()
        events = events_of(run)
        iterations = events.Scalars("charts/SPS")
    middle, last = iterations[len(iterations) // 2 - 1], iterations[-1]
    return {
        "steps_per_s": round((last.step - middle.step) / (last.wall_time - middle.wall_time)),
        "first_iteration_s": round(iterations[0].step / iterations[0].value, 2),
        "peak_mib": round(usage.ru_maxrss / 1024),
    }


def cleanrl(args: Args, run: str, folder: str, variables: dict[str, str]) -> dict[str, int]:
    """Run a script of CleanRL's with its flags in a folder, with these environment variables: what
    it prints last.
    """
    command = f"{args.cleanrl_python} {args.cleanrl}/{run} --no-cuda"
    variables = variables | {"PYTHONPATH": str(Path(args.cleanrl).parent)}
    done = subprocess.run(
        command.split(),
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return {"steps_per_s": int(re.findall(r"SPS: (\d+)", done.stdout)[-1])}


def compare(args: Args) -> None:
    """Time ours, Stable-Baselines3's and CleanRL's, alternately; these have canonical settings."""
    cases = {args.env_id: CASES[args.env_id]} if args.env_id else CASES
    for env_id, (script, steps, variants) in cases.items():
        rows = []
        for round_number in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                speeds = {}
                if args.peer_python:
                    sb3 = ROOT / "benchmark/sb3_ppo.py"
                    command = [args.peer_python, sb3, env_id, str(PEER_STEPS[env_id])]
                    peer = subprocess.run(
                        command, cwd=folder, capture_output=True, text=True, check=True
                    )
                    steps_per_s = round(float(peer.stdout.split()[-1]))
                    speeds["Stable-Baselines3"] = {"steps_per_s": steps_per_s}
                if args.cleanrl:
                    run = CLEANRL[env_id]
                    speeds["CleanRL"] = cleanrl(args, run, folder, {})
                    if "ALE/" in env_id:
                        speeds["CleanRL, EnvPool"] = cleanrl(args, CLEANRL_ENVPOOL, folder, {})
                    else:  # small networks can be faster so
                        one = cleanrl(args, run, folder, {"OMP_NUM_THREADS": "1"})
                        speeds["CleanRL, one thread"] = one
            for flags in variants:
                task = env_id.split(",")[0]
                run = f"--env-id {task} --total-timesteps {steps} {flags}"
                speeds[label(script, flags)] = measure(script, run)
            blank = dict.fromkeys(FIGURES, "")
            for who, figures in speeds.items():
                row = {"env_id": env_id, "round": round_number, "who": who}
                rows.append(row | blank | figures)
                print(rows[-1], flush=True)
        append("speed.csv", [row | provenance() for row in rows])
        by = {who: [r["steps_per_s"] for r in rows if r["who"] == who] for who in speeds}
        medians = {who: statistics.median(x) for who, x in by.items()}
        for who, speed in medians.items():
            first = next(iter(medians))  # a peer
            print(f"{env_id} {who}: {speed:,.0f}, {speed / medians[first]:.2f} x {first}")


def cold() -> None:
    """What compilation takes where nothing was compiled before."""
    rows = []
    for env_id, (script, steps, variants) in CASES.items():
        for flags in (x for x in variants if "--compile" in x and "--vec" not in x):
            run = f"--env-id {env_id.split(',')[0]} --total-timesteps {steps} {flags}"
            with tempfile.TemporaryDirectory() as cache:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                figures = measure(script, run)
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            row = {"env_id": env_id, "round": 0, "who": f"{label(script, flags)}, empty cache"}
            rows.append(row | {key: figures[key] for key in FIGURES})
            print(rows[-1], flush=True)
    append("speed.csv", [row | provenance() for row in rows])


def scaling() -> None:
    """Speed and memory of CartPole against sizes, and a plot of them."""
    for what, runs in SCALES.items():
        rows = []
        for size, flags in runs.items():
            processes = size if what == "processes" else 1
            figures = measure("ppo.py", flags, processes)
            rows.append({"what": what, "size": size, "flags": flags} | figures)
            print(rows[-1], flush=True)
        append("scaling.csv", [row | provenance() for row in rows])
    plot()


def plot() -> None:
    """Draw scaling.png from the last rows of scaling.csv."""
    rows = read("scaling.csv")
    figure, axes = plt.subplots(2, 2, figsize=(8, 5), sharex="col")
    for column, what in enumerate(["num_envs", "num_steps"]):
        points = {int(r["size"]): r for r in rows if r["what"] == what}
        for axis, key in zip(axes[:, column], ["steps_per_s", "peak_mib"], strict=True):
            values = [float(row[key]) for row in points.values()]
            axis.plot(list(points), values, "o-")
            axis.set_xscale("log", base=2)
            axis.set_xticks(list(points), [str(x) for x in points])
            axis.set_ylim(0, 1.1 * max(values))
            axis.grid(alpha=0.3)
        axes[1, column].set_xlabel(what)
    axes[0, 0].set_ylabel("steps a second")
    axes[1, 0].set_ylabel("peak memory, MiB")
    figure.suptitle("ppo.py on CartPole-v1, otherwise at its defaults")
    figure.tight_layout()
    figure.savefig(RESULTS / "scaling.png", dpi=110)


def main(args: Args) -> None:
    """Do the parts that were asked for."""
    if args.only in (None, "peer"):
        if not (args.peer_python or args.cleanrl):
            sys.exit("--peer-python or --cleanrl is missing: see the top of this file")
        compare(args)
    if args.only in (None, "cold"):
        cold()
    if args.only in (None, "scaling"):
        scaling()


if __name__ == "__main__":
    main(tyro.cli(Args))
