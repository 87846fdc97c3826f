"""Draw the figure of the READMEs from benchmark/results, and print what all MuJoCo tasks say.

    python benchmark/plot.py

curves.png has the mean return of the training episodes, over the seeds, with a bootstrap interval
of 95%. Printed is the interquartile mean over the MuJoCo tasks, with a stratified bootstrap
interval (rliable; Agarwal et al. 2021, arXiv:2108.13264).
"""

from collections.abc import Collection

import matplotlib.pyplot as plt
import numpy as np
from report import PUBLISHED, rows_of, task
from rliable import library, metrics
from run import RESULTS, Run, runs_of

RESAMPLES = 2000


def curves_of(run: Run, seeds: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
    """Steps, (parts,), and each seed's mean return before them, (seeds, parts).

    Where no episode ended in a part, it is that of the part before; nan at the beginning.
    """
    parts = rows_of(run, seeds, "curves.csv").pivot(index="seed", columns="step", values="return")
    return parts.columns.to_numpy(), parts.ffill(axis=1).to_numpy()


def mean_of(name: str, returns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the seeds, (parts,), and its bootstrap interval, (2, parts), of (seeds, parts)."""
    np.random.seed(0)  # rliable draws from NumPy's global generator
    mean, interval = library.get_interval_estimates(
        {name: returns[:, None, :]},  # seeds, tasks, steps
        lambda x: x.mean((0, 1)),
        reps=RESAMPLES,
    )
    return mean[name], interval[name]


def draw_curves() -> None:
    """One small plot a task, with CleanRL's own script, and our greedy evaluations as dots."""
    runs = {x: seeds for x, seeds in runs_of("classic", "main").items() if len(rows_of(x, seeds))}
    peers = {task(x): (x, seeds) for x, seeds in runs_of("cleanrl").items()}
    legend = {}
    rows = -(-len(runs) // 5)
    figure, axes = plt.subplots(rows, 5, figsize=(14, 2.2 * rows + 0.8), layout="constrained")
    for axis, (run, seeds) in zip(axes.flat, runs.items(), strict=False):
        drawn = {"ours, in training": (run, seeds, "tab:blue")}
        if task(run) in peers and len(rows_of(*peers[task(run)])):
            drawn["CleanRL's script, in training"] = (*peers[task(run)], "tab:orange")
        for name, (one, its_seeds, color) in drawn.items():
            steps, returns = curves_of(one, its_seeds)
            mean, interval = mean_of(name, returns)
            axis.plot(steps / 1e6, mean, color=color, label=name)
            axis.fill_between(steps / 1e6, *interval, color=color, alpha=0.25, linewidth=0)
        row = rows_of(run, seeds)
        end = row.steps.iloc[0] / 1e6
        axis.plot(end, row.greedy.mean(), "o", color="tab:blue", label="ours, greedy, at the end")
        figures = PUBLISHED["Tianshou"]
        if run.env_id in figures:
            label = "Tianshou, greedy, best evaluation"
            axis.axhline(figures[run.env_id][0], color="gray", linestyle="--", label=label)
        count = f"{len(row)} seeds" if len(row) > 1 else "one seed"
        axis.set_title(f"{run.env_id}, {count}", fontsize=10)
        axis.tick_params(labelsize=8)
        legend |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    for axis in axes.flat[len(runs) :]:
        axis.axis("off")
    figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=4, fontsize=9)
    figure.supxlabel("million steps", fontsize=10)
    figure.supylabel("return", fontsize=10)
    figure.savefig(RESULTS / "curves.png", dpi=110)


def print_intervals() -> None:
    """Median, interquartile mean and mean of what greedy policies reach, on the seeds of all tasks.

    0 is the mean return of the first episodes in training, 1 is Tianshou's figure.
    """
    runs = {x: y for x, y in runs_of("main").items() if x.env_id in PUBLISHED["Tianshou"]}
    common = set.intersection(*(set(rows_of(*x).seed) for x in runs.items()))
    if len(common) < 2:
        return  # nothing to compare
    columns = []
    for run in runs:
        _, returns = curves_of(run, common)
        low = np.mean([x[np.isfinite(x)][0] for x in returns])  # however late
        high, rows = PUBLISHED["Tianshou"][run.env_id][0], rows_of(run, common)
        columns.append((rows.greedy.to_numpy() - low) / (high - low))
    name = f"{len(common)} seeds"
    scores = {name: np.array(columns).T}  # seeds, tasks
    kinds = {"Median": metrics.aggregate_median, "IQM": metrics.aggregate_iqm}
    kinds |= {"Mean": metrics.aggregate_mean}
    np.random.seed(0)  # rliable draws from NumPy's global generator
    points, intervals = library.get_interval_estimates(
        scores, lambda x: np.array([kind(x) for kind in kinds.values()]), reps=RESAMPLES
    )
    for kind, point, low, high in zip(kinds, points[name], *intervals[name], strict=True):
        print(f"{kind}: {point:.2f} [{low:.2f}, {high:.2f}], {name}")


if __name__ == "__main__":
    draw_curves()
    print_intervals()
