"""Search hyper-parameters of a script with Optuna 5 (pip install optuna matplotlib).

    python tune.py ../ppo.py --env-id CartPole-v1 --total-timesteps 100000

Edit `suggest`. Study, plots and runs are left here; the same command goes on if stopped or killed.
Another search needs another folder, and another --storage.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import optuna
import tyro
from optuna.visualization import matplotlib as plots


def suggest(trial: optuna.Trial) -> str:
    """Flags of the script for one trial: what to search, and where."""
    return f"""--num-envs {trial.suggest_categorical("num_envs", [4, 8, 16])}
        --num-steps {trial.suggest_categorical("num_steps", [32, 64, 128])}
        --update-epochs {trial.suggest_int("update_epochs", 4, 20)}
        --learning-rate {trial.suggest_float("learning_rate", 2e-4, 5e-3, log=True)}
        --gamma {trial.suggest_categorical("gamma", [0.98, 0.99, 0.995, 0.999])}
        --gae-lambda {trial.suggest_categorical("gae_lambda", [0.8, 0.9, 0.95, 0.98])}
        --ent-coef {trial.suggest_categorical("ent_coef", [0.0, 0.001, 0.01])}"""


@dataclass
class Options:
    """Search hyper-parameters of a script. What isn't a flag here is one of the script's."""

    script: tyro.conf.Positional[Path]  # ppo.py, ppo_continuous.py, ppo_atari.py or a copy
    seeds: tuple[int, ...] = (1, 2, 3)  # of a trial: its value is their mean, from 4 interquartile
    goal: float | None = None  # search the least steps to this mean return
    trials: int = 40  # in all, with those of before
    jobs: int = 2  # processes
    storage: str | None = None  # URL of a database, for many machines; without it, journal.log


class GoalReached(Exception):
    """Ends the training of a seed."""


def work(number: int, study: optuna.Study, options: Options, flags: list[str]) -> None:
    """Run trials, one after the other, until there are enough."""
    script = import_module(options.script.stem)
    study.sampler.reseed_rng()  # or all processes would try the same
    sys.stdout = sys.stderr = open(f"log-{number}.txt", "a")  # noqa: SIM115 (all the while)

    def objective(trial: optuna.Trial) -> float:
        args, values, steps = tyro.cli(script.Args, args=[*flags, *suggest(trial).split()]), [], []

        def report(global_step: int, mean_return: float) -> None:
            steps.append(global_step)
            if options.goal is not None and mean_return >= options.goal:
                raise GoalReached
            share = 100 * global_step // args.total_timesteps  # as rollouts differ in size
            if mean_return == mean_return:  # nan: no episode has ended
                trial.report(mean_return, 100 * len(values) + share)
            if share >= 10 and trial.should_prune():
                raise optuna.TrialPruned

        for seed in options.seeds:
            with suppress(GoalReached):
                score = script.train(replace(args, seed=seed, eval_episodes=0), report)
                steps.append(args.total_timesteps)  # the goal wasn't reached
            values.append(score if options.goal is None else -steps[-1])
        cut = len(values) // 4
        return float(np.mean(sorted(values)[cut : len(values) - cut]))

    enough = optuna.study.MaxTrialsCallback(options.trials, states=None)
    study.optimize(objective, callbacks=[enough], catch=Exception)


if __name__ == "__main__":
    options, flags = tyro.cli(Options, return_unknown_args=True)
    sys.path.insert(0, str(options.script.resolve().parent))
    tyro.cli(import_module(options.script.stem).Args, args=flags)  # mistakes show here
    file = optuna.storages.journal.JournalFileBackend("journal.log")
    storage = options.storage or optuna.storages.JournalStorage(file)
    named = {"study_name": options.script.stem, "load_if_exists": True}
    study = optuna.create_study(storage=storage, direction="maximize", **named)
    search = {"flags": flags, "seeds": [*options.seeds], "goal": options.goal}
    before = study.user_attrs.get("search", search)
    if before != search:
        print(f"tune.py: another search, {before}, is here: change the folder", file=sys.stderr)
        sys.exit(2)
    study.set_user_attr("search", search)
    arguments = study, options, flags
    workers = [SpawnProcess(target=work, args=[i, *arguments]) for i in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if not study.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
        sys.exit("tune.py: no trial was completed, see above and log-*.txt")
    best = study.best_trial
    print(f"best, {best.value:g}: python", options.script, *flags, *suggest(best).split())
    plots.plot_optimization_history(study).figure.savefig("history.png", bbox_inches="tight")
    plots.plot_param_importances(study).figure.savefig("importances.png", bbox_inches="tight")
