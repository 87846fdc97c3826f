"""Print the README's tables from benchmark/results.

python benchmark/report.py
"""

import statistics
from collections import defaultdict

from provenance import provenance
from run import read

# Mean and standard deviation of the seeds. CleanRL: its documentation, 3 seeds, in training,
# MuJoCo's v4. Tianshou: its documentation, 10 seeds, greedy, the best evaluation within the first
# million steps of longer runs, MuJoCo's v2 and v3.
PUBLISHED = {
    "CleanRL": {
        "CartPole-v1": (490, 6),
        "Acrobot-v1": (-86.4, 1.3),
        "MountainCar-v0": (-200, 0),
        "HalfCheetah-v5": (1443, 46),
        "Hopper-v5": (2383, 272),
        "Walker2d-v5": (2288, 572),
        "Humanoid-v5": (716, 49),
        "InvertedPendulum-v5": (963, 22),
    },
    "Tianshou": {
        "HalfCheetah-v5": (5784, 1244),
        "Hopper-v5": (2609, 701),
        "Walker2d-v5": (3589, 757),
        "Ant-v5": (3258, 1079),
        "Humanoid-v5": (787, 194),
        "Swimmer-v5": (67, 99),
        "Reacher-v5": (-4.1, 0.3),
        "InvertedPendulum-v5": (1000, 0),
        "InvertedDoublePendulum-v5": (9231, 270),
    },
}


def mean_and_spread(x: list[float]) -> str:
    """The mean and, of several numbers, the sample standard deviation."""
    spread = f" ± {statistics.stdev(x):.1f}" if len(x) > 1 else ""
    return f"{statistics.mean(x):.1f}{spread}" if x else "not measured"


def published(env_id: str) -> list[str]:
    """What others report for an environment."""
    found = [figures.get(env_id) for figures in PUBLISHED.values()]
    return [f"{x[0]} ± {x[1]}" if x else "" for x in found]


def median(rows: list[dict[str, str]], key: str) -> float:
    """The median of a column."""
    return statistics.median(float(row[key]) for row in rows)


def paired(script: str, flags: str) -> str:
    """How a variant's mean return over all of a CartPole run differs from ppo.py's, by seed."""
    curves = defaultdict(list)
    for row in read("curves.csv"):
        if row["env_id"] == "CartPole-v1":
            curves[row["script"], row["flags"], row["seed"]].append(float(row["return"]))
    seeds = [seed for name, own, seed in curves if (name, own) == (script, flags)]
    differences = [
        statistics.mean(curves[script, flags, seed]) - statistics.mean(curves["ppo.py", "", seed])
        for seed in seeds
    ]
    error = statistics.stdev(differences) / len(seeds) ** 0.5
    return f"{script} {flags}: {statistics.mean(differences):.1f} ± {error:.1f}, {len(seeds)} seeds"


def main() -> None:
    """Print the tables, in Markdown."""
    groups = defaultdict(list)
    for row in read("runs.csv"):
        groups[row["script"], row["env_id"], row["flags"], row["steps"]].append(row)
    columns = ["environment", "command", "steps", "seeds", "training", "lowest .. highest"]
    columns += ["greedy", *PUBLISHED]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for (script, env_id, flags, steps), rows in groups.items():
        scores = [float(row["score"]) for row in rows]
        greedy = [float(row["greedy"]) for row in rows if row["greedy"]]
        command = f"`{script} --env-id {env_id} {flags}".strip() + "`"
        print(
            f"| {env_id} | {command} | {int(steps):,} | {len(rows)} "
            f"| {mean_and_spread(scores)} | {min(scores):.1f} .. {max(scores):.1f} "
            f"| {mean_and_spread(greedy)} | {' | '.join(published(env_id))} |"
        )
    print("\n| environment | who | steps/s | ratio | first iteration, s | peak, MiB |")
    print("|---|---|---|---|---|---|")
    groups = defaultdict(list)
    for row in read("speed.csv"):
        groups[row["env_id"], row["who"]].append(row)
    for (env_id, who), rows in groups.items():
        peer = median(groups[env_id, "Stable-Baselines3"], "steps_per_s")
        speed = median(rows, "steps_per_s")
        others = ["-", "-"]
        if rows[0]["peak_mib"]:
            others = [f"{median(rows, 'first_iteration_s'):.1f}", f"{median(rows, 'peak_mib'):.0f}"]
        ratio = "-" if "empty cache" in who else f"{speed / peer:.2f}"  # those ran another time
        figures = [f"{speed:,.0f}", ratio, *others]
        print(f"| {env_id} | `{who}` | {' | '.join(figures)} |")
    print("\nMean return over a CartPole run beside ppo.py's (paired, standard error):")
    print(paired("ppo.py", "--compile"))
    print(paired("torchrun --nproc-per-node=2 ppo.py", ""))
    for name in ("phases.csv", "scaling.csv"):
        rows = read(name)
        columns = [x for x in (rows[0] if rows else {}) if x not in provenance()]
        print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for row in rows:
            print(f"| {' | '.join(row[x] for x in columns)} |")


if __name__ == "__main__":
    main()
