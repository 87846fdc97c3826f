"""Write the tables of README.md and benchmark/README.md from benchmark/results.

    python benchmark/report.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; `TABLES` has the names.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence

from provenance import provenance
from run import (
    ABLATED,
    ATARI,
    CHANGES,
    EXPERIMENTS,
    FRESH,
    HELD_OUT,
    MAIN,
    MEMORY,
    MUJOCO,
    NO_FLOOR,
    PENDULUMS,
    RECIPES,
    ROOT,
    SOURCES,
    compiled,
    label,
    read,
)

# Mean and standard deviation of the seeds. CleanRL: its documentation, 3 seeds, in training,
# MuJoCo's v4. Tianshou: its documentation, 10 seeds, greedy, the highest mean over the seeds within
# the first million steps of longer runs, MuJoCo's v2 and v3.
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
        "Pusher-v5": (-40.4, 7.2),
        "ALE/Breakout-v5": (415, 28),
        "ALE/Pong-v5": (20.4, 0.2),
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

HEADINGS = {"CleanRL": "CleanRL, training", "Tianshou": "Tianshou, best greedy"}
PAGES = ["README.md", "benchmark/README.md", "benchmark/SEARCH.md"]  # that have tables

Run = tuple[str, str, Sequence[int], str]  # script, environment, seeds, flags

# The rows of README.md.
SHOWN = ["CartPole-v1", "Acrobot-v1", "LunarLander-v3", "HalfCheetah-v5", "Hopper-v5"]
SHOWN += ["Walker2d-v5", "Ant-v5", "Humanoid-v5", "Swimmer-v5", "InvertedDoublePendulum-v5"]
SHOWN += ATARI
SPEEDS = [  # environment, who, name in the table
    ("CartPole-v1", "ppo.py", "CartPole-v1, 4 environments"),
    ("HalfCheetah-v5", "ppo_continuous.py (canonical)", "HalfCheetah-v5, one environment"),
    ("ALE/Breakout-v5", "ppo_atari.py", "ALE/Breakout-v5"),
    ("ALE/Breakout-v5", "ppo_atari.py --bf16", "ALE/Breakout-v5, `--bf16`"),
]


def mean_and_spread(x: list[float]) -> str:
    """The mean and, of several numbers, the sample standard deviation."""
    spread = f" ± {statistics.stdev(x):.1f}" if len(x) > 1 else ""
    return f"{statistics.mean(x):.1f}{spread}" if x else "not measured"


def published(env_id: str) -> dict[str, str]:
    """What others report for an environment."""
    found = {who: figures.get(env_id) for who, figures in PUBLISHED.items()}
    return {who: f"{x[0]} ± {x[1]}" if x else "" for who, x in found.items()}


def best(rows: list[dict[str, str]]) -> list[float]:
    """The seeds' evaluations at the time whose mean is highest, as Tianshou's analysis.py has it.

    There are 5 times to choose from; Tianshou has more.
    """
    times = zip(*([float(x) for x in row["evaluations"].split()] for row in rows), strict=True)
    return list(max(times, key=statistics.mean))


def median(rows: list[dict[str, str]], key: str) -> float:
    """The median of a column."""
    return statistics.median(float(row[key]) for row in rows)


def rows_of(run: Run) -> list[dict[str, str]]:
    """What is on file of a run's seeds."""
    script, env_id, seeds, flags = run
    key = {"script": script, "env_id": env_id, "flags": flags}
    rows = [row for row in read("runs.csv") if key.items() <= row.items()]
    return [row for row in rows if int(row["seed"]) in seeds]


def table(columns: Sequence[str], rows: list[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results(runs: list[Run], without: tuple[str, ...] = ()) -> str:
    """The table of some of the runs, with what others published for as many steps."""
    columns = ["environment", "command", "steps", "seeds", "training", "lowest .. highest"]
    columns += ["greedy", "best", "minutes", "commit", *PUBLISHED]
    columns = [x for x in columns if x not in without]
    lines = []
    for run in runs:
        script, env_id, _, flags = run
        rows = rows_of(run)
        if not rows:
            continue
        scores = [float(row["score"]) for row in rows]
        greedy = [float(row["greedy"]) for row in rows if row["greedy"]]
        cells = {
            "environment": env_id,
            "command": f"`{label(script, flags)}`",
            "steps": f"{int(rows[0]['steps']):,}",
            "seeds": str(len(rows)),
            "training": mean_and_spread(scores),
            "lowest .. highest": f"{min(scores):.1f} .. {max(scores):.1f}",
            "greedy": mean_and_spread(greedy),
            "best": mean_and_spread(best(rows)) if "eval-ch" in flags else "",
            "minutes": f"{median(rows, 'wall_clock_s') / 60:.1f}",
            "commit": ", ".join(sorted({row["commit"][:7] + row["commit"][10:] for row in rows})),
        }
        cells |= published(env_id) if "timesteps" not in flags else dict.fromkeys(PUBLISHED, "")
        lines.append([cells[x] for x in columns])
    return table([HEADINGS.get(x, x) for x in columns], lines)


def ablation(changes: list[str], tasks: list[str]) -> str:
    """What each change of a default does, training (greedy), on the same seeds."""
    lines = []
    for change in ["", *changes]:
        cells = []
        for task in tasks:
            flags = f"{compiled(task)} {change}".strip()
            rows = rows_of(("ppo_continuous.py", task, FRESH[:5], flags))
            training, greedy = ([float(x[key]) for x in rows] for key in ("score", "greedy"))
            cells.append(f"{mean_and_spread(training)} ({mean_and_spread(greedy)})")
        lines.append([f"`{label('', change)}`" if change else "nothing", *cells])
    return table(["defaults but for", *tasks], lines)


def searches(tasks: list[str]) -> str:
    """What search.csv has, by flags and task: training (greedy) of each seed."""
    groups = defaultdict(lambda: defaultdict(list))
    for row in sorted(read("search.csv"), key=lambda row: row["seed"]):
        cell = f"{float(row['score']):.4g} ({float(row['greedy']):.4g})"
        groups[row["flags"]][row["env_id"]].append(cell)
    lines = []
    for flags, cells in groups.items():
        if cells.keys() & set(tasks):
            row = [", ".join(cells[task]) or "-" for task in tasks]
            lines.append([f"`{flags}`" if flags else "none", *row])
    return table(["flags", *tasks], lines)


def speed_rows() -> dict[tuple[str, str, str], list[dict[str, str]]]:
    """The rows of speed.csv by machine, environment and who ran; a round's stand at one place."""
    groups = defaultdict(list)
    for row in read("speed.csv"):
        groups[row["machine"], row["env_id"], row["who"]].append(row)
    return groups


def ratios(rows: list[dict[str, str]], peer: list[dict[str, str]]) -> list[float]:
    """How many times as fast as a peer, in each round, as the machine's speed changes."""
    pairs = zip(rows, peer, strict=True)
    return [float(a["steps_per_s"]) / float(b["steps_per_s"]) for a, b in pairs]


def speeds() -> str:
    """Medians of speed.csv, with the range of the ratios, and of peaks of memory."""
    groups, lines = speed_rows(), []
    first_machine = next(iter(groups))[0]
    env_ids = list(dict.fromkeys(env_id for _, env_id, _ in groups))

    def place(key: tuple[str, str, str]) -> tuple:
        return "empty cache" in key[2], env_ids.index(key[1]), key[0] != first_machine

    for machine, env_id, who in sorted(groups, key=place):
        rows, peer = groups[machine, env_id, who], groups[machine, env_id, "Stable-Baselines3"]
        name = env_id if machine == first_machine else f"{env_id}, on {machine}"
        ratio = "-"  # for those of another time and for other hyper-parameters
        if "empty cache" not in who and who.split(" --")[0] != "ppo_continuous.py":
            found = ratios(rows, peer)
            ratio = f"{statistics.median(found):.2f}"
            ratio += f" ({min(found):.2f} .. {max(found):.2f})" if rows is not peer else ""
        ours = rows[0]["peak_mib"]
        start = f"{median(rows, 'first_iteration_s'):.1f}" if ours else "-"
        peak = f"{median(rows, 'peak_mib'):.0f}" if ours else "-"
        lines.append([name, f"`{who}`", f"{median(rows, 'steps_per_s'):,.0f}", ratio, start, peak])
    columns = ["steps/s", "ratio", "first iteration, s", "peak, MiB"]
    return table(["environment", "who", *columns], lines)


def cleanrl_speeds() -> str:
    """Medians of the ratios to CleanRL's scripts and to environments one after another."""
    groups, lines = speed_rows(), []
    first_machine = next(iter(groups))[0]
    for (machine, env_id, who), rows in groups.items():
        cleanrl = groups.get((machine, env_id, "CleanRL"))
        if not cleanrl or who in ("CleanRL", "Stable-Baselines3") or "empty cache" in who:
            continue
        same = who.split(" --")[0] != "ppo_continuous.py"  # our defaults aren't CleanRL's
        peers = [
            cleanrl if same else None,
            groups.get((machine, env_id, "CleanRL, one thread")) if same else None,
            groups.get((machine, env_id, "CleanRL, EnvPool")) if same else None,
            groups[machine, env_id, who.split(" --vec")[0]] if "--vec" in who else None,
        ]
        cells = []
        for peer in peers:
            found = ratios(rows, peer) if peer else []
            spread = f"{min(found):.2f} .. {max(found):.2f}" if peer else ""
            cells.append(f"{statistics.median(found):.2f} ({spread})" if peer else "")
        name = env_id if machine == first_machine else f"{env_id}, on {machine}"
        if any(cells):
            lines.append([name, f"`{who}`", *cells])
    columns = ["of CleanRL's", "of CleanRL's, one thread", "of CleanRL's, EnvPool", "of sync's"]
    return table(["environment", "who", *columns], lines)


def short_speeds() -> str:
    """Medians of the speeds and of the ratios, on the first machine that ran both."""
    groups, lines = speed_rows(), []
    for env_id, who, name in SPEEDS:
        cells = []
        for ours in (who, f"{who} --compile"):
            machines = [machine for machine, *run in groups if run == [env_id, ours]]
            cells.append(f"{median(groups[machines[0], env_id, ours], 'steps_per_s'):,.0f}")
            for peer in ("CleanRL", "Stable-Baselines3"):
                both = [x for x in machines if (x, env_id, peer) in groups]
                pairs = [(groups[x, env_id, ours], groups[x, env_id, peer]) for x in both]
                cells.append(f"{statistics.median(ratios(*pairs[0])):.1f}" if pairs else "")
        lines.append([name, *cells])
    columns = ["of CleanRL's", "of Stable-Baselines3's"]
    return table(["", "steps/s", *columns, "`--compile`: steps/s", *columns], lines)


def sources() -> str:
    """Medians of sources.csv: speed, and memory, by the number of environments."""
    groups = defaultdict(list)
    for row in read("sources.csv"):
        groups[row["env_id"], row["source"], int(row["num_envs"])].append(row)
    numbers = sorted({number for _, _, number in groups})
    lines = []
    for env_id, source in dict.fromkeys((x, y) for x, y, _ in groups):
        found = [groups[env_id, source, number] for number in numbers]
        cells = [f"{median(x, 'steps_per_s'):,.0f} ({median(x, 'peak_mib'):.0f})" for x in found]
        lines.append([env_id, source, *cells])
    return table(["environment", "source", *(f"{x}" for x in numbers)], lines)


def slow() -> str:
    """Medians of slow.csv, and of the ratios, with their range."""
    groups, lines = defaultdict(list), []
    for row in read("slow.csv"):
        groups[row["milliseconds"], row["source"]].append(row)
    for milliseconds in dict.fromkeys(x for x, _ in groups):
        cells = [milliseconds]
        for alone in ("", " alone"):
            pair = [groups[milliseconds, f"{source}{alone}"] for source in ("sync", "async")]
            found = ratios(*reversed(pair))
            cells += [f"{median(x, 'steps_per_s'):,.0f}" for x in pair]
            cells.append(f"{statistics.median(found):.2f} ({min(found):.2f} .. {max(found):.2f})")
        lines.append(cells)
    columns = ["sync, steps/s", "async, steps/s", "ratio"]
    return table(["ms a step", *columns, *(f"{x}, alone" for x in columns)], lines)


def measured(rows: list[dict[str, str]]) -> str:
    """The table of rows as they are, but for what `provenance` has."""
    columns = [x for x in rows[0] if x not in provenance()]
    return table(columns, [[row[x] for x in columns] for row in rows])


def phases() -> str:
    """The rows of phases.csv, with what part of the environments' own speed is reached."""
    rows = []
    for row in read("phases.csv"):
        share = f"{float(row['alone']) / float(row['total']):.0%}"
        rows.append(row | {"who": f"`{row['who']}`", "of the ceiling": share})
    return measured(rows)


def recurrent_peers() -> str:
    """What sb3-contrib's RecurrentPPO reaches where a memory is needed."""
    groups, lines = defaultdict(list), []
    for row in read("sb3-recurrent.csv"):
        groups[row["env_id"], row["steps"]].append(row)
    for (env_id, steps), rows in groups.items():
        training, greedy = (
            mean_and_spread([float(x[key]) for x in rows]) for key in ("score", "greedy")
        )
        lines.append([env_id, f"{int(steps):,}", str(len(rows)), training, greedy])
    return table(["environment", "steps", "seeds", "training", "greedy"], lines)


def recurrent_speeds() -> str:
    """Medians of memory-speed.csv, and of the ratios to RecurrentPPO, with their range."""
    groups, lines = defaultdict(list), []
    for row in read("memory-speed.csv"):
        groups[row["who"]].append(row)
    peers = [who for who in groups if who.startswith("RecurrentPPO")]
    for who, rows in groups.items():
        cells = []
        for peer in peers:
            found = ratios(rows, groups[peer])
            cells.append(f"{statistics.median(found):.2f} ({min(found):.2f} .. {max(found):.2f})")
        lines.append([f"`{who}`", f"{median(rows, 'steps_per_s'):,.0f}", *cells])
    return table(["who", "steps/s", *(f"ratio to {peer}" for peer in peers)], lines)


def tuned() -> str:
    """What Optuna found, beside the documented commands, on other seeds."""
    groups, lines = defaultdict(list), []
    for row in read("tuned.csv"):
        groups[row["env_id"], row["who"]].append(row)
    for (env_id, who), rows in groups.items():
        steps = [float(x["steps_to_goal"] or "inf") for x in rows]  # inf: never reached
        reached = sum(x < math.inf for x in steps)
        goal = f"{statistics.median(steps):,.0f} ({reached} of {len(rows)})" if reached else ""
        score = mean_and_spread([float(x["score"]) for x in rows])
        flags = f"`{rows[0]['flags']}`"
        lines.append([env_id, who, str(len(rows)), goal, score, rows[0]["search_s"], flags])
    columns = ["environment", "settings", "seeds", "steps to 475, median", "training"]
    return table([*columns, "search, s", "flags"], lines)


def populations() -> str:
    """The best member of each population, and of as many independent ones."""
    groups, lines = defaultdict(list), []
    for row in read("population.csv"):
        groups[row["who"]].append(row)
    for who, rows in groups.items():
        found = [[float(x[key]) for x in rows] for key in ("greedy", "score", "seconds")]
        each = ", ".join(f"{x:.0f}" for x in found[0])
        lines.append([who, each, *(mean_and_spread(x) for x in found)])
    means = ["greedy", "training", "seconds"]
    return table(["who", "greedy, each repetition", *means], lines)


SHORT = [run for run in MAIN if run[1] in SHOWN]
TABLES = {
    "short": lambda: results(SHORT, without=("lowest .. highest", "best", "commit")),
    "defaults": lambda: results(MAIN),
    "held-out": lambda: results(HELD_OUT, without=("Tianshou",)),
    "ablation": lambda: ablation(CHANGES, ABLATED),
    "ablation-floor": lambda: ablation([NO_FLOOR], PENDULUMS),
    "search": lambda: searches(MUJOCO),
    "search-acrobot": lambda: searches(["Acrobot-v1"]),
    "memory": lambda: results(MEMORY, without=(*PUBLISHED, "best")),
    "memory-peers": recurrent_peers,
    "memory-speed": recurrent_speeds,
    "tuned": tuned,
    "populations": populations,
    "experiments": lambda: results(EXPERIMENTS, without=tuple(PUBLISHED)),
    "speed": speeds,
    "speed-short": short_speeds,
    "speed-cleanrl": cleanrl_speeds,
    "sources": sources,
    "sources-learning": lambda: results(SOURCES, without=(*PUBLISHED, "best")),
    "recipes": lambda: results(RECIPES, without=(*PUBLISHED, "best")),
    "slow": slow,
    "phases": phases,
}


def renewed(text: str) -> str:
    """The text with its tables made anew. Raises `KeyError` for one that isn't in `TABLES`."""
    return re.sub(
        r"(<!-- table: (\S+) -->\n).*?(?=<!-- end -->)",
        lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    """Write the tables into the pages."""
    for page in PAGES:
        (ROOT / page).write_text(renewed((ROOT / page).read_text()))


if __name__ == "__main__":
    main()
