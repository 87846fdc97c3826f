"""Print the tables of README.md and benchmark/README.md from benchmark/results.

python benchmark/report.py
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from provenance import provenance
from run import ABLATED, CHANGES, EXPERIMENTS, FRESH, HELD_OUT, MAIN, MUJOCO, compiled, read
from speed import label

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

Run = tuple[str, str, Sequence[int], str]  # script, environment, seeds, flags

# The rows of README.md, of the defaults, and Breakout's of three seeds.
SHOWN = ["CartPole-v1", "Acrobot-v1", "LunarLander-v3", "HalfCheetah-v5", "Hopper-v5"]
SHOWN += ["Walker2d-v5", "Ant-v5", "Humanoid-v5", "Swimmer-v5"]
WITHOUT_BF16 = "2 x Intel(R) Xeon(R) Processor"  # the one that phases.csv has lacks the units


def mean_and_spread(x: list[float]) -> str:
    """The mean and, of several numbers, the sample standard deviation."""
    spread = f" ± {statistics.stdev(x):.1f}" if len(x) > 1 else ""
    return f"{statistics.mean(x):.1f}{spread}" if x else "not measured"


def published(env_id: str) -> dict[str, str]:
    """What others report for an environment."""
    found = {who: figures.get(env_id) for who, figures in PUBLISHED.items()}
    return {who: f"{x[0]} ± {x[1]}" if x else "" for who, x in found.items()}


def curves() -> dict[tuple[str, ...], list[tuple[float, int]]]:
    """By script, environment, flags and seed: the mean return and number of a part's episodes."""
    points = defaultdict(list)
    for row in read("curves.csv"):
        key = tuple(row[x] for x in ("script", "env_id", "flags", "seed"))
        points[key].append((float(row["return"]), int(row["episodes"])))
    return points


def last_hundred(points: list[tuple[float, int]]) -> float:
    """The mean return of a run's last 100 episodes, the first ones by the mean of their part.

    Not the `score` of runs.csv, as the scripts reported one too high before commit 546487f: of
    episodes that ended in the same step, they counted the better ones.
    """
    total, left = 0.0, 100
    for mean, episodes in reversed(points):
        total += mean * min(episodes, left)
        left -= min(episodes, left)
    return total / (100 - left)


def median(rows: list[dict[str, str]], key: str) -> float:
    """The median of a column."""
    return statistics.median(float(row[key]) for row in rows)


def rows_of(run: Run) -> list[dict[str, str]]:
    """What is on file of a run's seeds."""
    script, env_id, seeds, flags = run
    key = {"script": script, "env_id": env_id, "flags": flags}
    rows = [row for row in read("runs.csv") if key.items() <= row.items()]
    return [row for row in rows if int(row["seed"]) in seeds]


def results(runs: list[Run], without: tuple[str, ...] = ()) -> None:
    """Print the table of some of the runs, with what others published for as many steps."""
    columns = ["environment", "command", "steps", "seeds", "training", "lowest .. highest"]
    columns = [x for x in [*columns, "greedy", "minutes", "commit", *PUBLISHED] if x not in without]
    points = curves()
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for run in runs:
        script, env_id, _, flags = run
        rows = rows_of(run)
        if not rows:
            continue
        scores = [last_hundred(points[script, env_id, flags, row["seed"]]) for row in rows]
        greedy = [float(row["greedy"]) for row in rows if row["greedy"]]
        cells = {
            "environment": env_id,
            "command": f"`{label(script, flags)}`",
            "steps": f"{int(rows[0]['steps']):,}",
            "seeds": str(len(rows)),
            "training": mean_and_spread(scores),
            "lowest .. highest": f"{min(scores):.1f} .. {max(scores):.1f}",
            "greedy": mean_and_spread(greedy),
            "minutes": f"{median(rows, 'wall_clock_s') / 60:.1f}",
            "commit": ", ".join(sorted({row["commit"][:7] + row["commit"][10:] for row in rows})),
        }
        cells |= published(env_id) if "timesteps" not in flags else dict.fromkeys(PUBLISHED, "")
        print(f"| {' | '.join(cells[x] for x in columns)} |")


def ablation() -> None:
    """Print what each change of a default does, training (greedy), on the same seeds."""
    points = curves()
    print(f"\n| defaults but for | {' | '.join(ABLATED)} |\n|---|{'---|' * len(ABLATED)}")
    for change in ["", *CHANGES]:
        cells = []
        for task in ABLATED:
            flags = f"{compiled(task)} {change}".strip()
            rows = rows_of(("ppo_continuous.py", task, FRESH[:5], flags))
            seeds = [points["ppo_continuous.py", task, flags, row["seed"]] for row in rows]
            training = mean_and_spread([last_hundred(x) for x in seeds])
            cells.append(f"{training} ({mean_and_spread([float(x['greedy']) for x in rows])})")
        print(f"| {f'`{change}`' if change else 'nothing'} | {' | '.join(cells)} |")


def searches() -> None:
    """Print what search.csv has, by flags and task: training (greedy) of each seed."""
    groups = defaultdict(lambda: defaultdict(list))
    for row in sorted(read("search.csv"), key=lambda row: row["seed"]):
        cell = f"{float(row['score']):.4g} ({float(row['greedy']):.4g})"
        groups[row["flags"]][row["env_id"]].append(cell)
    for tasks in (MUJOCO, ["Acrobot-v1"]):
        print(f"\n| flags | {' | '.join(tasks)} |\n|---|{'---|' * len(tasks)}")
        for flags, cells in groups.items():
            if cells.keys() & set(tasks):
                row = [", ".join(cells[task]) or "-" for task in tasks]
                print(f"| {f'`{flags}`' if flags else 'none'} | {' | '.join(row)} |")


def speeds() -> None:
    """Print the table of speed.csv: medians on each machine, and the largest peak of memory.

    A ratio is the median of the rounds' own, as the machine's speed changes; then their range.
    """
    groups = defaultdict(list)
    for row in read("speed.csv"):
        groups[row["machine"], row["env_id"], row["who"]].append(row)
    machines, env_ids, _ = (list(dict.fromkeys(x)) for x in zip(*groups, strict=True))
    columns = ["environment", "who"]
    for machine in machines:
        columns += [f"{machine}: steps/s", "ratio", "first iteration, s"]
    columns.append("peak, MiB")
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    cases = dict.fromkeys((env_id, who) for _, env_id, who in groups)
    for env_id, who in sorted(cases, key=lambda x: ("empty cache" in x[1], env_ids.index(x[0]))):
        cells, peaks = [env_id, f"`{who}`"], []
        # No ratio for those of another time, nor for other hyper-parameters.
        comparable = "empty cache" not in who
        comparable = comparable and who.removesuffix(" --compile") != "ppo_continuous.py"
        for machine in machines:
            rows = groups.get((machine, env_id, who), [])
            peer = groups.get((machine, env_id, "Stable-Baselines3"))
            cells.append(f"{median(rows, 'steps_per_s'):,.0f}" if rows else "-")
            if rows and peer and comparable:  # the rows of a round stand at the same place
                pairs = zip(rows, peer, strict=True)
                ratios = [float(a["steps_per_s"]) / float(b["steps_per_s"]) for a, b in pairs]
                cells.append(f"{statistics.median(ratios):.2f}")
                if rows is not peer:
                    cells[-1] += f" ({min(ratios):.2f} .. {max(ratios):.2f})"
            else:
                cells.append("-")
            ours = rows and rows[0]["peak_mib"]
            cells.append(f"{median(rows, 'first_iteration_s'):.1f}" if ours else "-")
            peaks += [median(rows, "peak_mib")] if ours else []
        cells.append(f"{max(peaks):.0f}" if peaks else "-")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Print the tables, in Markdown."""
    short = [run for run in MAIN if run[1] in SHOWN]
    short += [run for run in EXPERIMENTS if run[1] == "ALE/Breakout-v5"]
    results(short, without=("lowest .. highest", "commit"))
    results(MAIN)
    results(HELD_OUT, without=tuple(PUBLISHED))
    ablation()
    searches()
    results(EXPERIMENTS, without=tuple(PUBLISHED))
    speeds()
    phases = {}  # the last of each, on a machine that is meant for it
    for row in read("phases.csv"):
        if "--bf16" not in row["who"] or row["machine"] != WITHOUT_BF16:
            phases[row["env_id"], row["who"]] = row
    phases = list(phases.values())
    for row in phases:
        row["of the ceiling"] = f"{float(row['alone']) / float(row['total']):.0%}"
    for rows in (phases, read("scaling.csv")):
        columns = [x for x in (rows[0] if rows else {}) if x not in provenance()]
        print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for row in rows:
            print(f"| {' | '.join(row[x] for x in columns)} |")


if __name__ == "__main__":
    main()
