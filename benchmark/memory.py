"""Time the recurrent variants beside sb3-contrib's RecurrentPPO, and let that learn, too.

    python -m venv /tmp/sb3
    /tmp/sb3/bin/pip install sb3-contrib==2.9.2 torch==2.13.0 popgym==1.0.7 \
        "gymnasium[box2d,classic-control]"
    python benchmark/memory.py --peer-python /tmp/sb3/bin/python           # speed
    python benchmark/memory.py --peer-python /tmp/sb3/bin/python --learn   # its returns

Nothing else should run on the machine while speed is measured. All have the same settings and take
turns; speeds are as in speed.py. "stepwise" and "gru" are ours with another memory (memories.py).
Rows go to benchmark/results/memory-speed.csv and sb3-recurrent.csv; what ours reach is
in runs.csv (run.py).
"""

import json
import statistics
import subprocess
from dataclasses import dataclass

import tyro
from provenance import provenance
from run import ROOT, append, read
from speed import measure

STEPS = 12_800
FLAGS = f"--mask-velocity --total-timesteps {STEPS} --num-envs 8 --num-steps 32 --num-minibatches 1"
FLAGS += " --update-epochs 20 --learning-rate 1e-3 --gamma 0.98 --gae-lambda 0.8 --ent-coef 0"
OURS = {
    "ppo_recurrent.py": ("variants/ppo_recurrent.py", FLAGS),
    "stepwise": ("benchmark/memories.py", f"--memory stepwise {FLAGS}"),
    "gru": ("benchmark/memories.py", f"--memory gru {FLAGS}"),
}
LEARNED = {  # steps of three seeds
    "LunarLander-v3": 300_000,
    "popgym-RepeatPreviousEasy-v0": 300_000,
    "popgym-RepeatFirstEasy-v0": 300_000,
}


@dataclass
class Args:
    """Measure speed, or what the peer learns."""

    peer_python: str  # the python of an environment with sb3-contrib, see above
    rounds: int = 5  # alternations; the median counts
    learn: bool = False  # train the peer, instead of timing
    env_id: str | None = None  # task to learn; all of them by default


def peer(args: Args, env_id: str, steps: int, seed: int, *words: str) -> dict[str, float]:
    """Run RecurrentPPO."""
    script = ROOT / "benchmark/sb3_recurrent.py"
    command = [args.peer_python, script, env_id, str(steps), str(seed), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def speed(args: Args) -> None:
    """Time all of them on CartPole, alternately."""
    rows = []
    for turn in range(args.rounds):
        peers = {"RecurrentPPO": [], "RecurrentPPO, one LSTM": ["one"]}
        found = {
            who: round(peer(args, "CartPole-v1", STEPS, 1, *words)["steps_per_s"])
            for who, words in peers.items()
        }
        found |= {who: measure(*command)["steps_per_s"] for who, command in OURS.items()}
        rows += [{"round": turn, "who": who, "steps_per_s": x} for who, x in found.items()]
        print(found, flush=True)
    append("memory-speed.csv", [row | provenance() for row in rows])
    for who in OURS:
        pair = who, "RecurrentPPO, one LSTM"
        by = [[x["steps_per_s"] for x in rows if x["who"] == y] for y in pair]
        print(who, f"{statistics.median(a / b for a, b in zip(*by, strict=True)):.2f} x")


def learn(args: Args) -> None:
    """Train RecurrentPPO where a row is missing, and record what it reaches."""
    for env_id in [args.env_id] if args.env_id else LEARNED:
        for seed in (1, 2, 3):
            done = {(row["env_id"], row["seed"]) for row in read("sb3-recurrent.csv")}
            if (env_id, str(seed)) not in done:
                row = {"env_id": env_id, "seed": seed} | peer(args, env_id, LEARNED[env_id], seed)
                print(row, flush=True)
                append("sb3-recurrent.csv", [row | provenance()])


if __name__ == "__main__":
    args = tyro.cli(Args)
    learn(args) if args.learn else speed(args)
