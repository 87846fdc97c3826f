"""Train a population, of which the weak go on as mutated copies of the strong: Population Based
Training (arXiv:1711.09846), by Ray Tune (pip install "ray[tune]").

    python population.py ../ppo_continuous.py --env-id LunarLanderContinuous-v3
    python population.py ../ppo.py --address auto     # on a cluster that shares this folder

Edit `MUTATIONS`. Networks keep their sizes, as weights are copied. Members, logs and the best one
are in the folder; the same command goes on with a population that was stopped or killed.
"""

import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import tyro

try:
    from ray import init, tune
    from ray.tune.schedulers import PopulationBasedTraining
except ImportError as error:
    print(f'population.py: pip install "ray[tune]" ({error})', file=sys.stderr)
    sys.exit(2)

# Flags of the script. A copy's are moved: by a factor of 0.8 or 1.2, to a neighbour, or drawn anew.
MUTATIONS = {
    "learning_rate": tune.loguniform(1e-4, 2e-3),
    "num_minibatches": [8, 16, 32],
    "clip_coef": tune.uniform(0.1, 0.3),
    "ent_coef": tune.loguniform(1e-5, 1e-2),
}


@dataclass
class Options:
    """Train a population with a script. What isn't a flag here is one of the script's."""

    script: tyro.conf.Positional[Path]  # ppo.py, ppo_continuous.py, ppo_atari.py or a copy
    members: int = 8  # of the population; each trains for --total-timesteps
    exchanges: int = 10  # times at which a member may become a copy; they cut its episodes
    mutate: bool = True  # otherwise, members are independent: a random search
    workers: int = 2  # processes on this machine
    address: str | None = None  # of a Ray cluster, instead
    folder: Path = Path("population")  # for all that is left


def train_member(config: dict[str, Any], options: Options, flags: list[str], start: int) -> None:
    """Train in a process of Ray's; before a restart, the population has trained `start` parts."""
    sys.path.insert(0, str(options.script.parent))
    script = import_module(options.script.stem)
    args = replace(tyro.cli(script.Args, args=flags), eval_episodes=0, **config)
    iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    args.checkpoint_interval = -(-iterations // options.exchanges)
    run, part = None, 0
    if tune.get_checkpoint():
        name = f"{tune.get_context().get_trial_id()}-{len([*Path('runs').glob('*')])}"
        run = Path("runs", name)
        tune.get_checkpoint().to_directory(run)
        args.resume = str(run)
        part = script.load_checkpoint(run)["iteration"] // args.checkpoint_interval

    def report(global_step: int, mean_return: float) -> None:
        nonlocal part
        iteration = global_step // (args.num_envs * args.num_steps)
        if iteration % args.checkpoint_interval == 0 or iteration == iterations:
            latest = run or max(Path("runs").iterdir(), key=lambda x: x.stat().st_mtime)
            score = mean_return if mean_return == mean_return else -1e9  # nan: no episode ended
            part = -(-iteration // args.checkpoint_interval)
            result = {"score": score, "part": part, "turn": part - start}
            tune.report(result, checkpoint=tune.Checkpoint.from_directory(latest))

    try:
        script.train(args, report)
    except Exception as error:  # costs this member only, whose place a copy takes
        result = {"score": -1e9, "part": part + 1, "turn": part + 1 - start}
        tune.report(result | {"error": repr(error)})  # in the member's result.json


if __name__ == "__main__":
    options, flags = tyro.cli(Options, return_unknown_args=True)
    options.script, folder = options.script.resolve(), options.folder.resolve()
    sys.path.insert(0, str(options.script.parent))
    script = import_module(options.script.stem)
    tyro.cli(script.Args, args=flags)  # mistakes show here
    workers = None if options.address else options.workers
    init(options.address, num_cpus=workers, include_dashboard=False, log_to_driver=False)
    train = partial(tune.with_parameters, train_member, options=options, flags=flags)
    if tune.Tuner.can_restore(folder):
        members = tune.Tuner.restore(str(folder), train(start=0)).get_results()
        start = min((x.metrics or {}).get("part", 0) for x in members)  # the scheduler forgets it
        tuner = tune.Tuner.restore(str(folder), train(start=start), resume_errored=True)
    else:
        scheduler = PopulationBasedTraining(
            time_attr="turn",
            synch=options.mutate,  # a copy of one behind would be behind itself, and chosen again
            perturbation_interval=1 if options.mutate else sys.maxsize,
            hyperparam_mutations=MUTATIONS,
        )
        domains = {x: tune.choice(y) if isinstance(y, list) else y for x, y in MUTATIONS.items()}
        tuner = tune.Tuner(
            train(start=0),
            param_space={**domains, "seed": tune.randint(0, 2**31)},
            tune_config=tune.TuneConfig(
                mode="max",
                metric="score",
                num_samples=options.members,
                scheduler=scheduler,
                reuse_actors=True,  # five times faster than a new process after each exchange
            ),
            run_config=tune.RunConfig(
                name=folder.name,
                storage_path=str(folder.parent),
                failure_config=tune.FailureConfig(max_failures=-1),  # of processes, killed ones
            ),
        )
    best = tuner.fit().get_best_result()
    shutil.copytree(best.checkpoint.path, folder / "best", dirs_exist_ok=True)
    args = script.load_checkpoint(folder / "best")["args"]
    values = {name: getattr(args, name) for name in MUTATIONS}
    print(f"best, {best.metrics['score']:g}, with {values} at the end; evaluate it:")
    print(f"python {options.script} --evaluate {folder / 'best'} --eval-episodes 10")
