"""Print the README's tables of learning results and speed from benchmark/results.

python benchmark/report.py
"""

import statistics
from collections import defaultdict

from run import read

PUBLISHED = {  # CleanRL's documentation, mean ± std of 3 seeds; MuJoCo on the v4 environments
    "CartPole-v1": "490 ± 6",
    "Acrobot-v1": "-86.4 ± 1.3",
    "HalfCheetah-v5": "1443 ± 46",
    "Hopper-v5": "2383 ± 272",
    "InvertedDoublePendulum-v5": "7350 to 9230",
    "ALE/Pong-v5": "20.4 after 10M steps",
}


def mean_and_spread(x: list[float]) -> str:
    """The mean and, of several numbers, the sample standard deviation."""
    spread = f" ± {statistics.stdev(x):.1f}" if len(x) > 1 else ""
    return f"{statistics.mean(x):.1f}{spread}" if x else "not measured"


def main() -> None:
    """Print both tables, in Markdown."""
    groups = defaultdict(list)
    for row in read("runs.csv"):
        groups[row["script"], row["env_id"], row["flags"], row["steps"]].append(row)
    columns = ["environment", "command", "steps", "seeds", "training", "lowest .. highest"]
    columns += ["greedy", "published"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for (script, env_id, flags, steps), rows in groups.items():
        scores = [float(row["score"]) for row in rows]
        greedy = [float(row["greedy"]) for row in rows if row["greedy"]]
        command = f"`{script} --env-id {env_id} {flags}".strip() + "`"
        print(
            f"| {env_id} | {command} | {int(steps):,} | {len(rows)} "
            f"| {mean_and_spread(scores)} | {min(scores):.1f} .. {max(scores):.1f} "
            f"| {mean_and_spread(greedy)} | {PUBLISHED.get(env_id, '')} |"
        )
    print("\n| environment | ours, steps/s | Stable-Baselines3 | ratio | rounds |")
    print("|---|---|---|---|---|")
    groups = defaultdict(list)
    for row in read("speed.csv"):
        groups[row["env_id"], row["commit"]].append(row)
    for (env_id, _), rows in groups.items():
        ours, peer = (statistics.median(float(r[key]) for r in rows) for key in ("ours", "sb3"))
        print(f"| {env_id} | {ours:,.0f} | {peer:,.0f} | {ours / peer:.2f} | {len(rows)} |")


if __name__ == "__main__":
    main()
