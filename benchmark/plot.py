"""Draw the README's learning curves and intervals from benchmark/results.

    python benchmark/plot.py

benchmark/results/curves.png has, for each task, the mean training return over the seeds with a 95%
bootstrap interval; benchmark/results/intervals.png the interquartile mean over the MuJoCo tasks, with
a stratified bootstrap interval over seeds (rliable; Agarwal et al. 2021, arXiv:2108.13264).
"""

from collections import defaultdict

import matplotlib.pyplot as plt
import numpy as np
from rliable import library, metrics, plot_utils
from run import CLASSIC, MUJOCO, PRESET, RESULTS, read

from report import PUBLISHED

VARIANTS = {"": ("defaults", "tab:blue"), PRESET: ("preset", "tab:orange")}  # by their flags
RESAMPLES = 2000


def curves() -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """By environment and flags: the steps, (50,), and the seeds' mean returns there, (seeds, 50)."""
    points = defaultdict(lambda: defaultdict(list))
    for row in read("curves.csv"):
        if row["script"].startswith("ppo"):
            point = float(row["step"]), float(row["return"])
            points[row["env_id"], row["flags"]][row["seed"]].append(point)
    result = {}
    for key, seeds in points.items():
        last = max(step for seed in seeds.values() for step, _ in seed)
        steps = np.linspace(last / 50, last, 50)
        # A part of the run in which no episode ended has no point: it is bridged.
        returns = [np.interp(steps, *zip(*seed, strict=True)) for seed in seeds.values()]
        result[key] = steps, np.array(returns)
    return result


def draw_curves() -> None:
    """One small plot a task, the published figures as lines."""
    everything = curves()
    tasks = [task for task in CLASSIC + MUJOCO if any(task == key[0] for key in everything)]
    rows = -(-len(tasks) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(12, 2.4 * rows), layout="constrained")
    for axis, task in zip(axes.flat, tasks, strict=False):
        for flags, (name, color) in VARIANTS.items():
            if (task, flags) not in everything:
                continue
            steps, returns = everything[task, flags]
            scores = {name: returns[:, None, :]}  # runs, tasks, frames
            mean, interval = library.get_interval_estimates(
                scores, lambda x: x.mean((0, 1)), reps=RESAMPLES
            )
            axis.plot(steps / 1e6, mean[name], color=color, label=f"{name}, {len(returns)} seeds")
            axis.fill_between(steps / 1e6, *interval[name], color=color, alpha=0.25, linewidth=0)
        for style, (who, figures) in zip((":", "--"), PUBLISHED.items(), strict=True):
            if task in figures:
                axis.axhline(figures[task][0], color="gray", linestyle=style, label=who)
        axis.set_title(task, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7, loc="lower right", framealpha=0.6)
    for axis in axes.flat[len(tasks) :]:
        axis.axis("off")
    figure.supxlabel("million steps", fontsize=10)
    figure.supylabel("return in training", fontsize=10)
    figure.savefig(RESULTS / "curves.png", dpi=110)


def draw_intervals() -> None:
    """Median, interquartile mean and mean of what the greedy policies reach at the end.

    0 is the mean return in the first fiftieth of the defaults' training, 1 is Tianshou's figure.
    """
    everything = curves()
    scores = {}
    for flags, (name, _) in VARIANTS.items():
        columns = []
        for task in MUJOCO:
            rows = [r for r in read("runs.csv") if (r["env_id"], r["flags"]) == (task, flags)]
            if rows and (task, "") in everything:
                low, high = everything[task, ""][1][:, 0].mean(), PUBLISHED["Tianshou"][task][0]
                columns.append([(float(r["greedy"]) - low) / (high - low) for r in rows])
        if len(columns) == len(MUJOCO):
            seeds = min(map(len, columns))
            scores[f"{name}, {seeds} seeds"] = np.array([column[:seeds] for column in columns]).T
    if not scores:
        print("intervals.png needs runs of all MuJoCo tasks")
        return
    kinds = ["Median", "IQM", "Mean"]
    functions = [metrics.aggregate_median, metrics.aggregate_iqm, metrics.aggregate_mean]
    points, intervals = library.get_interval_estimates(
        scores, lambda x: np.array([function(x) for function in functions]), reps=RESAMPLES
    )
    for name in scores:
        figures = zip(kinds, points[name], *intervals[name], strict=True)
        print(name, "; ".join(f"{k} {x:.2f} [{low:.2f}, {high:.2f}]" for k, x, low, high in figures))
    colors = dict(zip(scores, ("tab:blue", "tab:orange"), strict=False))
    figure, _ = plot_utils.plot_interval_estimates(
        points,
        intervals,
        metric_names=kinds,
        algorithms=list(scores),
        colors=colors,
        xlabel="greedy return, 1: Tianshou's",
        xlabel_y_coordinate=-0.35,
    )
    figure.savefig(RESULTS / "intervals.png", dpi=80, bbox_inches="tight")


if __name__ == "__main__":
    draw_curves()
    draw_intervals()
