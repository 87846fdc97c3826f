"""Search hyper-parameters of a script with Optuna 5: pip install optuna matplotlib

    python search/tune.py ppo.py --env-id Acrobot-v1 --total-timesteps 100000
    python search/tune.py ppo.py --env-id CartPole-v1 --goal 475 --folder tune-goal

Edit `suggest`. A trial trains with all seeds, and is pruned where it is worse than half of those
before. The best command is printed; study, plots, logs and runs are in the folder. The same command
goes on with a search that was stopped or killed, without the trials that were running then, and on
several machines that share the folder it is one search.
"""

import os
import shlex
import signal
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

import numpy as np
import optuna
import tyro
from optuna.visualization import matplotlib as plots


def suggest(trial: optuna.Trial) -> str:
    """Flags of the script for one trial: what to search, and where."""
    return f"""--num-envs {trial.suggest_categorical("num_envs", [4, 8, 16])}
        --num-steps {trial.suggest_categorical("num_steps", [32, 64, 128])}
        --num-minibatches {trial.suggest_categorical("num_minibatches", [4, 8, 16, 32])}
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
    workers: int = 2  # processes
    folder: Path = Path("tune")  # for all that is left


def work(number: int, study: optuna.Study, options: Options, flags: list[str], trials: int) -> None:
    """Run trials, one after the other, until there are so many."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a worker ends after the process that started it
    script = import_module(options.script.stem)
    study.sampler.reseed_rng()  # or all workers would try the same
    sys.stdout = sys.stderr = open(f"log-{number}.txt", "a")  # noqa: SIM115 (all the while)

    def objective(trial: optuna.Trial) -> float:
        args = tyro.cli(script.Args, args=[*flags, *suggest(trial).split()])
        args = replace(args, exp_name=f"{args.exp_name}-{trial.number}", eval_episodes=0)
        values, steps, share, pruned = [], 0, 0, False

        def report(global_step: int, mean_return: float) -> bool:
            nonlocal steps, share, pruned
            if not parent_process().is_alive():
                sys.exit()
            if options.goal is not None and mean_return >= options.goal:
                steps = global_step
                return True
            before, share = share, 100 * global_step // args.total_timesteps  # as rollouts differ
            if share != before and mean_return == mean_return:  # nan: no episode has ended
                trial.report(mean_return, 100 * len(values) + share)
                pruned = share >= 10 and trial.should_prune()
            return pruned

        for seed in options.seeds:
            steps = args.total_timesteps  # if the goal isn't reached
            score = script.train(replace(args, seed=seed), report)
            if pruned:
                raise optuna.TrialPruned
            values.append(score if options.goal is None else -steps)
        cut = len(values) // 4
        return float(np.mean(sorted(values)[cut : len(values) - cut]))

    while len(study.get_trials(deepcopy=False)) < trials:
        study.optimize(objective, n_trials=1, catch=Exception)


if __name__ == "__main__":
    options, flags = tyro.cli(Options, return_unknown_args=True)
    sys.path.insert(0, str(options.script.resolve().parent))
    tyro.cli(import_module(options.script.stem).Args, args=flags)  # mistakes show here
    options.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(options.folder)
    file = optuna.storages.journal.JournalFileBackend("journal.log")
    storage = optuna.storages.JournalStorage(file)
    named = {"study_name": "tune", "direction": "maximize", "load_if_exists": True}
    study = optuna.create_study(storage=storage, **named)
    search = [options.script.stem, flags, [*options.seeds], options.goal]
    if (before := study.user_attrs.get("search", search)) != search:
        sys.exit(f"tune.py: {options.folder} has another search, {before}: change the folder")
    study.set_user_attr("search", search)
    states = optuna.trial.TrialState
    trials = options.trials + len(study.get_trials(states=[states.RUNNING]))  # which were killed
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends this process, and the workers see it
    for i in range(options.workers):
        get_context("spawn").Process(target=work, args=(i, study, options, flags, trials)).start()
    for worker in active_children():
        worker.join()
    if not study.get_trials(states=[states.COMPLETE]):
        sys.exit(f"tune.py: no trial was completed, see above and {options.folder}/log-*.txt")
    best = study.best_trial
    command = ["python", str(options.script), *flags, *suggest(best).split()]
    print(f"best, {best.value:g}: {shlex.join(command)}")
    plots.plot_optimization_history(study).figure.savefig("history.png", bbox_inches="tight")
    plots.plot_param_importances(study).figure.savefig("importances.png", bbox_inches="tight")
