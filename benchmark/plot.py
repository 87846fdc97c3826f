"""Draw learning curves and intervals from benchmark/results.

    python benchmark/plot.py
    python benchmark/plot.py runs/NAME    # a run's debugging plots, to results/debugging.png

benchmark/results/curves.png has, for each task, the mean return of the last 100 training episodes,
over the seeds, with a 95% bootstrap interval; benchmark/results/intervals.png the interquartile
mean over the MuJoCo tasks, with a stratified bootstrap interval (rliable; Agarwal et al. 2021,
arXiv:2108.13264).
"""

import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from report import PUBLISHED, best, rows_of
from rliable import library, metrics, plot_utils
from run import MAIN, MUJOCO, RESULTS, events_of, read

RESAMPLES = 2000
CUT = 100 * 64 * 32  # steps from one scheduled checkpoint of ppo_continuous.py to the next
LINES = {"CleanRL": "CleanRL, in training", "Tianshou": "Tianshou, greedy, best evaluation"}
DEBUGGING = {
    "losses/explained_variance": "explained variance",
    "losses/entropy": "entropy",
    "losses/value_loss": "value loss",
    "losses/policy_loss": "policy loss",
    "debug/returns": "value targets",
    "debug/values": "value predictions",
    "losses/grad_norm": "gradient norm",
    "debug/advantages": "advantages",
}


def last_hundred(points: list[tuple[float, int]]) -> float:
    """The mean return of a run's last 100 episodes, the first ones by the mean of their part."""
    total, left = 0.0, 100
    for mean, episodes in reversed(points):
        total += mean * min(episodes, left)
        left -= min(episodes, left)
    return total / (100 - left)


def curves() -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """By task and flags: the steps, (50,), and each seed's mean of its last 100 returns there.

    These are (seeds, 50), nan where no episode has ended yet. Not the mean of each part alone, as
    none but short episodes can end soon after a checkpoint.
    """
    points = defaultdict(lambda: defaultdict(dict))
    for row in read("curves.csv"):
        if row["script"].startswith("ppo"):
            point = float(row["return"]), int(row["episodes"])
            points[row["env_id"], row["flags"]][row["seed"]][float(row["step"])] = point
    result = {}
    for key, seeds in points.items():
        last = max(step for seed in seeds.values() for step in seed)
        steps = np.linspace(last / 50, last, 50)
        returns = np.full((len(seeds), 50), np.nan)
        for i, seed in enumerate(seeds.values()):
            for j, step in enumerate(steps):
                so_far = [point for when, point in seed.items() if when < step + 1]
                if so_far:
                    returns[i, j] = last_hundred(so_far)
        result[key] = steps, returns
    return result


def draw_curves() -> None:
    """One small plot a task, with the greedy evaluations as dots, published figures as lines."""
    everything, legend = curves(), {}
    runs = [run for run in MAIN if (run[1], run[3]) in everything]
    rows = -(-len(runs) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(12, 2.4 * rows), layout="constrained")
    for axis, run in zip(axes.flat, runs, strict=False):
        _, task, _, flags = run
        steps, returns = everything[task, flags]
        np.random.seed(0)  # rliable draws from NumPy's global generator
        mean, interval = library.get_interval_estimates(
            {task: returns[:, None, :]},  # runs, tasks, frames
            lambda x: x.mean((0, 1)),
            reps=RESAMPLES,
        )
        axis.plot(steps / 1e6, mean[task], color="tab:blue", label="ours, in training")
        axis.fill_between(steps / 1e6, *interval[task], alpha=0.25, linewidth=0)
        greedy = np.mean([np.array(x["evaluations"].split(), float) for x in rows_of(run)], axis=0)
        when = np.array([*(CUT * i for i in range(1, len(greedy))), steps[-1]])
        axis.plot(when / 1e6, greedy, "o", color="tab:blue", markersize=4, label="ours, greedy")
        for style, (who, figures) in zip((":", "--"), PUBLISHED.items(), strict=True):
            if task in figures:
                axis.axhline(figures[task][0], color="gray", linestyle=style, label=LINES[who])
        count = f"{len(returns)} seeds" if len(returns) > 1 else "one seed"
        axis.set_title(f"{task}, {count}", fontsize=10)
        axis.tick_params(labelsize=8)
        legend |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    for axis in axes.flat[len(runs) :]:
        axis.axis("off")
    figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=4, fontsize=9)
    figure.supxlabel("million steps", fontsize=10)
    figure.supylabel("return", fontsize=10)
    figure.savefig(RESULTS / "curves.png", dpi=110)


def draw_intervals() -> None:
    """Median, interquartile mean and mean of what the defaults' greedy policies reach.

    0 is the mean return of the first episodes in training, 1 is Tianshou's figure.
    """
    measures = {
        "at the end": lambda rows: [float(row["greedy"]) for row in rows],
        "best of five evaluations": best,
    }
    everything, columns = curves(), defaultdict(list)
    found = {run[1]: (run, rows_of(run)) for run in MAIN if run[1] in MUJOCO}
    count = min(len(rows) for _, rows in found.values())
    print(f"{count} seeds")
    for task, ((_, _, _, flags), rows) in found.items():
        low = np.mean([x[np.isfinite(x)][0] for x in everything[task, flags][1]])  # however late
        high = PUBLISHED["Tianshou"][task][0]
        for name, measure in measures.items():
            columns[name].append([(x - low) / (high - low) for x in measure(rows[:count])])
    scores = {name: np.array(column).T for name, column in columns.items()}  # runs, tasks
    kinds = ["Median", "IQM", "Mean"]
    functions = [metrics.aggregate_median, metrics.aggregate_iqm, metrics.aggregate_mean]
    np.random.seed(0)  # rliable draws from NumPy's global generator
    points, intervals = library.get_interval_estimates(
        scores,
        lambda x: np.array([function(x) for function in functions]),
        reps=RESAMPLES,
    )
    for name in scores:
        for kind, point, low, high in zip(kinds, points[name], *intervals[name], strict=True):
            print(f"{name}, {kind}: {point:.2f} [{low:.2f}, {high:.2f}]")
    figure, _ = plot_utils.plot_interval_estimates(
        points,
        intervals,
        metric_names=kinds,
        algorithms=list(scores),
        colors=dict(zip(scores, ("tab:blue", "tab:green"), strict=True)),
        xlabel="greedy return of the defaults, in units of Tianshou's",
        xlabel_y_coordinate=-0.75,
    )
    figure.savefig(RESULTS / "intervals.png", dpi=80, bbox_inches="tight")


def draw_run(run: Path) -> None:
    """The plots that say how a run is going, from its events."""
    events = events_of(run)
    figure, axes = plt.subplots(2, 4, figsize=(12, 4.8), layout="constrained")
    for axis, (tag, name) in zip(axes.flat, DEBUGGING.items(), strict=True):
        points = [(x.step / 1e6, x.value) for x in events.Scalars(tag)]
        axis.plot(*zip(*points, strict=True), linewidth=0.8)
        axis.set_title(f"{name} ({tag})", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    figure.supxlabel("million steps", fontsize=10)
    figure.savefig(RESULTS / "debugging.png", dpi=110)


if __name__ == "__main__":
    if sys.argv[1:]:
        draw_run(Path(sys.argv[1]))
    else:
        draw_curves()
        draw_intervals()
