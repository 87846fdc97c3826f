"""Write the tables of README.md and benchmark/README.md from benchmark/results.

    python benchmark/report.py

A table stands below `<!-- table: NAME -->`; `TABLES` has the names.
"""

import re
from collections.abc import Callable, Collection
from functools import cache

import numpy as np
import pandas as pd
from run import LISTS, RESULTS, ROOT, Run, label, runs_of

PAGES = ["README.md", "benchmark/README.md"]  # that have tables

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
FIGURES = ["command", "steps", "seeds", "training", "lowest .. highest", "greedy"]
EVERYTHING = [*FIGURES, "minutes", "commit", "CleanRL, training", "Tianshou, best greedy"]
SOLVED = ["solved after (seeds)", "by CleanRL after (seeds)"]
PEER = "CleanRL's script (seeds)"
SHORT = ["steps", "seeds", "training", "greedy", PEER, *SOLVED]
LESS_TELLING = {"InvertedPendulum-v5", "Reacher-v5"}  # only in benchmark/README.md
PEERS = ["CleanRL", "LeanRL", "Stable-Baselines3"]


@cache
def load(name: str) -> pd.DataFrame:
    """A results file; without flags is "", not nan."""
    return pd.read_csv(RESULTS / name).fillna({"flags": ""})


def rows_of(run: Run, seeds: Collection[int], name: str = "runs.csv") -> pd.DataFrame:
    """What a results file has of a run's seeds."""
    frame = load(name)
    return frame[(frame[[*Run._fields]] == run).all(axis=1) & frame.seed.isin(seeds)]


def mean_and_spread(x: pd.Series) -> str:
    """The mean and, of several numbers, the sample standard deviation."""
    digits = 2 if x.abs().max() < 2 else 1
    spread = f" ± {x.std():.{digits}f}" if len(x) > 1 else ""
    return f"{x.mean():.{digits}f}{spread}" if len(x) else ""


def published(who: str, run: Run) -> str:
    """What others report of an environment."""
    figures = PUBLISHED[who].get(run.env_id)
    return "{} ± {}".format(*figures) if figures else ""


def task(run: Run) -> str:
    """The name of an environment without its version, which CleanRL has others of."""
    return run.env_id.rsplit("-v", 1)[0]


def peer(run: Run) -> str:
    """What CleanRL's own script reached on a task in training, after as many steps."""
    for other, seeds in runs_of("cleanrl").items():
        rows = rows_of(other, seeds)
        if task(other) == task(run) and len(rows):
            return f"{mean_and_spread(rows.score)} ({len(rows)})"
    return ""


def table(rows: list[dict[str, str]]) -> str:
    """A table in Markdown."""
    return pd.DataFrame(rows).fillna("").to_markdown(index=False, disable_numparse=True)


def seconds(env_id: str, who: str) -> str:
    """The median of the seeds' seconds until a task is solved, nothing if it wasn't tried.

    Where the median seed doesn't solve it, the steps after which it ended or was given up.
    """
    frame = load("solved.csv")
    rows = frame[(frame.case == env_id.split("-")[0]) & (frame.who == who)]
    median = rows.seconds.fillna(np.inf).median()
    unsolved = f"not in {rows.steps.max():,} steps"
    found = f"{median:.0f} s" if np.isfinite(median) else unsolved
    return f"{found} ({len(rows)})" if len(rows) else ""


def results(names: list[str], *columns: str, without: Collection[str] = ()) -> str:
    """The table of lists of runs.toml, with these columns beside the environment."""
    cells: dict[str, Callable[[Run, pd.DataFrame], str]] = {
        "command": lambda run, rows: f"`{label(run.script, run.flags)}`",
        "steps": lambda run, rows: f"{rows.steps.iloc[0]:,}",
        "seeds": lambda run, rows: str(len(rows)),
        "training": lambda run, rows: mean_and_spread(rows.score),
        "lowest .. highest": lambda run, rows: f"{rows.score.min():.1f} .. {rows.score.max():.1f}",
        "greedy": lambda run, rows: mean_and_spread(rows.greedy),
        "minutes": lambda run, rows: f"{rows.wall_clock_s.median() / 60:.1f}",
        "commit": lambda run, rows: ", ".join(rows.commit.str[:7].unique()),
        "CleanRL, training": lambda run, rows: published("CleanRL", run),
        PEER: lambda run, rows: peer(run),
        "Tianshou, best greedy": lambda run, rows: published("Tianshou", run),
        SOLVED[0]: lambda run, rows: seconds(
            run.env_id, "ours, compiled" if "--compile" in run.flags else "ours"
        ),
        SOLVED[1]: lambda run, rows: seconds(run.env_id, "CleanRL's"),
    }
    lines = []
    for run, seeds in runs_of(*names).items():
        if len(rows := rows_of(run, seeds)) and run.env_id not in without:
            line = {"environment": run.env_id}
            lines.append(line | {x: cells[x](run, rows) for x in columns})
    return table(lines)


def ablation(name: str) -> str:
    """What each change of a default does, training (greedy), on the same seeds and version."""
    evaluated, lines = LISTS["settings"]["evaluated"], {}
    for run, seeds in runs_of(name).items():
        rows = rows_of(run, seeds)
        change = label("", run.flags.removeprefix(evaluated))
        line = lines.setdefault(
            change, {"defaults but for": f"`{change}`" if change else "nothing"}
        )
        figures = f"{mean_and_spread(rows.score)} ({mean_and_spread(rows.greedy)})"
        line[run.env_id] = figures if len(rows) else "not measured"
    return table([*lines.values()])


def ratio(rows: pd.DataFrame, peer: pd.DataFrame) -> str:
    """How many times as fast as a peer: median of the rounds' ratios, and their range."""
    found = (rows.set_index("round").steps_per_s / peer.set_index("round").steps_per_s).dropna()
    return f"{found.median():.2f} ({found.min():.2f} .. {found.max():.2f})" if len(found) else ""


def newest(case: str, who: str) -> dict[str, str]:
    """The speed of a script in the newest batch of a case, and its ratios in those with peers."""
    frame, line = load("speed.csv"), {}
    frame = frame[(frame.table == "peers") & (frame.case == case)]
    for (commit, _), batch in frame.groupby(["commit", "machine"], sort=False):
        if len(rows := batch[batch.who == who]):
            line["steps/s"] = f"{rows.steps_per_s.median():,.0f}"
            for peer in PEERS:
                found = ratio(rows, batch[batch.who == peer])
                line[f"of {peer}'s"] = found or line.get(f"of {peer}'s", "")
            if rows.peak_mib.notna().all():
                line["first iteration, s"] = f"{rows.first_iteration_s.median():.1f}"
                line["peak, MiB"] = f"{rows.peak_mib.median():.0f}"
            line["commit"] = commit[:7]
    return line


def speeds() -> str:
    """All of ours that took turns with peers."""
    frame = load("speed.csv")
    frame = frame[(frame.table == "peers") & ~frame.who.isin(PEERS)]
    keys = sorted(set(zip(frame.case, frame.who, strict=True)))
    return table([{"": case, "who": f"`{who}`"} | newest(case, who) for case, who in keys])


def solved() -> str:
    """Seconds until a task is solved: the median of the seeds, by who learns it."""
    frame, lines = load("solved.csv"), {}
    for case, goal, who in dict.fromkeys(zip(frame.case, frame.goal, frame.who, strict=True)):
        line = lines.setdefault(case, {"": case, "solved at": f"{goal:g}"})
        line[who] = seconds(case, who)
    return table([*lines.values()])


def tensors() -> str:
    """ppo_tensors.py and rsl_rl's PPO, which took turns."""
    frame, lines = load("tensors.csv").rename(columns={"seed": "round"}), []
    for (case, who), rows in frame.groupby(["case", "who"], sort=False):
        peer = frame[(frame.case == case) & (frame.who == who.replace("ours", "rsl_rl"))]
        line = {"": case.split(":")[1], "who": who, "steps": f"{rows.steps.iloc[0]:,}"}
        line |= {"seeds": str(len(rows)), "steps/s": f"{rows.steps_per_s.median():,.0f}"}
        line["of rsl_rl's"] = ratio(rows, peer) if "ours" in who else ""
        lines.append(line | {"greedy": mean_and_spread(rows.greedy)})
    return table(lines)


def breakout() -> str:
    """Breakout's first steps: the mean training return in each whole 50,000 of them."""
    lines = []
    for who, rows in load("breakout_start.csv").groupby("who", sort=False):
        ends = range(50_000, rows.step.max() + 1, 50_000)
        parts = {x: rows[rows.step.between(x - 49_999, x)]["return"].mean() for x in ends}
        lines.append({"": who} | {f"to {x // 1000}k": f"{y:.1f}" for x, y in parts.items()})
    return table(lines)


def sources() -> str:
    """Speed, and memory, by the number of environments, for each of their sources."""
    frame, lines = load("speed.csv"), {}
    medians = frame[frame.table == "sources"].groupby(["case", "who"], sort=False)
    for (case, who), row in medians[["steps_per_s", "peak_mib"]].median().iterrows():
        env_id, number = case.split(", ")
        line = lines.setdefault((env_id, who), {"environment": env_id, "source": who})
        line[number] = f"{row.steps_per_s:,.0f} ({row.peak_mib:.0f})"
    return table([*lines.values()])


def gpu() -> str:
    """Speed on a GPU, whose name stands in the last column."""
    frame, lines = load("speed.csv"), []
    medians = frame[frame.table == "gpu"].groupby(["case", "who", "commit", "machine"], sort=False)
    for (case, who, commit, machine), speed in medians.steps_per_s.median().items():
        line = {"": case, "who": who, "steps/s": f"{speed:,.0f}", "commit": commit}
        lines.append(line | {"GPU": machine.split(", ")[-1]})
    return table(lines)


def searches() -> str:
    """The best member of populations and of others, over the repetitions."""
    lines = []
    for who, rows in load("searches.csv").groupby("who", sort=False):
        line = {"best of 8": who, "repetitions": str(len(rows))}
        line |= {x: mean_and_spread(rows[x]) for x in ("training", "greedy")}
        lines.append(line | {"commit": rows.commit.iloc[0][:7]})
    return table(lines)


TABLES = {
    "main-short": lambda: results(["classic", "main"], *SHORT, without=LESS_TELLING),
    "main": lambda: results(["classic", "main", "pong"], *EVERYTHING),
    "ablation": lambda: ablation("ablation"),
    "held-out": lambda: results(["held-out"], *EVERYTHING[:-1]),
    "sparse": lambda: results(["sparse"], *FIGURES, "minutes", "commit"),
    "experiments": lambda: results(["experiments"], *FIGURES, "minutes", "commit"),
    "drift": lambda: results(["drift"], *FIGURES, "commit"),
    "cleanrl": lambda: results(["cleanrl"], *FIGURES[:5]),
    "memory": lambda: results(["memory"], *FIGURES, "minutes", "commit"),
    "speed": speeds,
    "solved": solved,
    "tensors": tensors,
    "breakout": breakout,
    "sources": sources,
    "gpu": gpu,
    "tuned": lambda: results(["tuned"], *FIGURES, "commit"),
    "searches": searches,
}


def renewed(text: str) -> str:
    """The text with its tables made anew. Raises `KeyError` for one that isn't in `TABLES`."""
    return re.sub(
        r"(<!-- table: (\S+) -->)(?:\n\|.*)*",
        lambda match: f"{match[1]}\n{TABLES[match[2]]()}".strip(),
        text,
    )


def main() -> None:
    """Write the tables into the pages."""
    for page in PAGES:
        (ROOT / page).write_text(renewed((ROOT / page).read_text()))


if __name__ == "__main__":
    main()
