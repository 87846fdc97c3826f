"""Train a population, of which the weak go on as mutated copies of the strong: Population Based
Training (arXiv:1711.09846), by Ray Tune: pip install "ray[tune]"

    python search/population.py ppo_continuous.py --env-id LunarLanderContinuous-v3
    python search/population.py ppo.py --address auto --folder shared    # on a Ray cluster

Edit `MUTATIONS`. Members, with the logs of their runs, and the best one are in the folder. The same
command goes on with a population that was stopped or killed. At an exchange all members begin new
episodes, so a part between two should be several episodes of each environment: else take fewer.
"""

import shlex
import shutil
import sys
import traceback
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tyro
from ray import init, tune
from ray.tune.schedulers import PopulationBasedTraining

# Flags of the script, but not sizes of networks and rollouts. A copy's are moved: by a factor of
# 0.8 or 1.2, to a neighbour, or drawn anew.
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
    exchanges: int = 10  # times at which a member may become a copy
    mutate: bool = True  # otherwise, members are independent: a random search
    workers: int = 2  # processes on this machine
    address: str | None = None  # of a Ray cluster, instead
    folder: Path = Path("population")  # for all that is left


def train_member(config: dict[str, Any], options: Options, flags: list[str], trained: int) -> None:
    """Train in a process of Ray's; exchange first where all have more parts than were `trained`."""
    sys.path.insert(0, str(options.script.parent))
    script = import_module(options.script.stem)
    values = {name: np.asarray(x).item() for name, x in config.items()}  # plain numbers
    args = replace(tyro.cli(script.Args, args=flags), eval_episodes=0, **values)
    iterations = max(1, args.total_timesteps // (args.num_envs * args.num_steps))
    args.checkpoint_interval = -(-iterations // options.exchanges)  # one at the end of each part
    size, own = args.checkpoint_interval * args.num_envs * args.num_steps, 0
    parts = -(-iterations // args.checkpoint_interval)
    with TemporaryDirectory() as folder, chdir(folder):
        if checkpoint := tune.get_checkpoint():
            args.resume = checkpoint.to_directory("run")
            own = -(-script.load_checkpoint("run")["global_step"] // size)
        for part in range(max(own + 1, min(trained + 1, parts)), parts + 1):
            result, saved = {"score": -1e9, "part": part, "turn": part - trained}, None
            try:
                score = script.train(args, lambda step, _, part=part: step >= part * size)
                args.resume = args.resume or str(next(Path("runs").glob("*/checkpoint.pt")).parent)
                result["score"] = score if score == score else -1e9  # nan: no episode ended
                saved = tune.Checkpoint.from_directory(args.resume)
            except Exception:  # costs this member only, whose place a copy takes
                with (options.folder / "errors.txt").open("a") as errors:
                    traceback.print_exc(file=errors)
            tune.report(result, checkpoint=saved)


if __name__ == "__main__":
    options, flags = tyro.cli(Options, return_unknown_args=True)
    path, folder = options.script.resolve(), options.folder.resolve()
    sys.path.insert(0, str(path.parent))
    script = import_module(path.stem)
    tyro.cli(script.Args, args=flags)  # mistakes show here
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "search.txt"
    search = f"{path.stem} {flags} {options.members} {options.exchanges} {options.mutate}"
    if (before := file.read_text() if file.exists() else search) != search:
        sys.exit(f"population.py: {options.folder} has another one, {before}: change the folder")
    file.write_text(search)
    workers = None if options.address else options.workers
    init(options.address, num_cpus=workers, include_dashboard=False, log_to_driver=False)
    settings = {"options": replace(options, script=path, folder=folder), "flags": flags}
    member = partial(tune.with_parameters, train_member, **settings)
    if tune.Tuner.can_restore(folder):
        members = tune.Tuner.restore(str(folder), member(trained=0)).get_results()
        trained = max((x.metrics or {}).get("part", 0) for x in members)
        tuner = tune.Tuner.restore(str(folder), member(trained=trained))
    else:
        scheduler = PopulationBasedTraining(
            time_attr="turn",  # Ray restores no scheduler
            synch=True,  # a copy of one behind would be behind itself, and chosen again
            perturbation_interval=1,
            hyperparam_mutations=MUTATIONS,
        )
        domains = {x: tune.choice(y) if isinstance(y, list) else y for x, y in MUTATIONS.items()}
        tune_config = tune.TuneConfig(
            mode="max",
            metric="score",
            num_samples=options.members,
            scheduler=scheduler if options.mutate else None,
            reuse_actors=True,  # five times faster than a new process after each exchange
        )
        forever = tune.FailureConfig(max_failures=-1)  # killed processes are replaced
        place = {"name": folder.name, "storage_path": str(folder.parent)}
        tuner = tune.Tuner(
            member(trained=0),
            param_space={**domains, "seed": tune.randint(0, 10**9)},
            tune_config=tune_config,
            run_config=tune.RunConfig(**place, failure_config=forever),
        )
    best = tuner.fit().get_best_result()
    if not best.checkpoint:
        sys.exit(f"population.py: all members failed, see {options.folder}/errors.txt")
    shutil.copytree(best.checkpoint.path, folder / "best", dirs_exist_ok=True)
    args = script.load_checkpoint(folder / "best")["args"]
    values = {name: args[name] for name in MUTATIONS}
    print(f"best, {best.metrics['score']:g}, with {values} at the end; evaluate it:")
    command = [options.script, "--evaluate", options.folder / "best", "--eval-episodes", 10]
    print("python", shlex.join(map(str, command)))
