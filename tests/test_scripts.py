"""The scripts as files: their text, their errors, and what they do alone in a folder."""

import ast
import csv
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections import defaultdict
from operator import itemgetter
from pathlib import Path

import probe_envs
import pytest
from conftest import MODULES, ROOT, SCRIPTS, SHORT, VARIANTS, only_run, scalars
from helpers import refusal, trained
from report import PAGES, renewed
from run import label

DIFFERENT = {"Args", "FIXED", "FlatEnv", "make_envs", "Agent"}  # by intent


def definitions(name: str) -> dict[str, str]:
    """The source of the functions, classes and constants at the top level of a script."""
    source = (ROOT / f"{name}.py").read_text()
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
        text = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = text
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = text
        elif isinstance(node, ast.If):
            found["main"] = text
    return found


def test_results_are_on_file() -> None:
    """Every mean return in the READMEs' tables is of as many rows on file."""
    scores, shown = defaultdict(list), 0
    key = itemgetter("env_id", "script", "flags")
    with (ROOT / "benchmark/results/runs.csv").open() as file:
        for row in csv.DictReader(file):
            scores[key(row)].append((int(row["seed"]), float(row["score"])))
    filed = set()  # a table may have the first seeds only
    for run, seeds in scores.items():
        values = [score for _, score in sorted(seeds)]
        for n in range(1, len(values) + 1):
            mean = f"{statistics.mean(values[:n]):.1f}"
            filed.add((run[0], label(run[1], run[2]), str(n), mean))
    for readme in (ROOT / "README.md", ROOT / "benchmark/README.md"):
        for line in readme.read_text().splitlines() if readme.exists() else []:
            cells = [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
            # Environment, command, steps, seeds, mean.
            is_result = len(cells) > 4 and re.fullmatch(r"[\w/:.-]+-v\d+", cells[0])
            if is_result and cells[3].isdigit():
                assert (*cells[:2], cells[3], cells[4].split(" ±")[0]) in filed, line
                shown += 1
    assert shown >= 8


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_the_reports(name: str) -> None:
    """The tables between markers are what benchmark/report.py makes of the files."""
    text = (ROOT / name).read_text()
    assert text.count("<!-- table: ") == text.count("<!-- end -->") > 0
    assert renewed(text) == text


def test_a_trained_policy_in_a_program() -> None:
    """The program in benchmark/README.md acts with a run's policy."""
    text = (ROOT / "benchmark/README.md").read_text()
    (code,) = re.findall(r"^```python\n(.+?)^```", text, re.DOTALL | re.MULTILINE)
    assert "range(1000)" in code
    run = trained("ppo_continuous")
    names = {}
    exec(code.replace("runs/NAME", str(run)).replace("range(1000)", "range(10)"), names)
    assert names["actions"].shape == (1, 1)
    names["envs"].close()


def test_requirements() -> None:
    """What each script says that it needs is what is pinned in requirements.txt."""
    blocks = set()
    for name in SCRIPTS:
        (block,) = re.findall(
            r"^# /// script\n((?:#.*\n)+?)# ///$", (ROOT / f"{name}.py").read_text(), re.MULTILINE
        )
        blocks.add(block)
    assert len(blocks) == 1
    needs = tomllib.loads(re.sub("^# ?", "", blocks.pop(), flags=re.MULTILINE))
    assert set(needs) == {"requires-python", "dependencies"}
    assert re.fullmatch(r"[=><~]=?3\.11(\.\*)?", needs["requires-python"])
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").open()]
    pinned = [line for line in lines if line]
    assert set(needs["dependencies"]) == set(pinned)
    assert len(needs["dependencies"]) == len(pinned)


def test_same_job_same_text() -> None:
    """Whatever has the same name in two scripts is the same text, but for what is named here."""
    scripts = [definitions(name) for name in SCRIPTS]
    shared = {name for script in scripts for name in script} - DIFFERENT
    for name in shared:
        texts = {script[name] for script in scripts if name in script}
        assert len(texts) == 1, f"{name} differs between scripts"
    everywhere = set.intersection(*(set(script) for script in scripts))
    assert everywhere >= {"UsageError", "check", "layer_init", "gather", "Batch", "update", "main"}
    assert everywhere >= {"seed_everything", "set_up_torch", "catch_signals", "log", "evaluate"}
    assert everywhere >= {"load_checkpoint", "train", *DIFFERENT} - {"FlatEnv"}
    assert scripts[0].keys() & scripts[1].keys() >= {"in_numpy", "Array", "FlatEnv"}


def test_same_flag_same_help() -> None:
    """Flags of the same name have the same type and the same help; only defaults differ."""
    texts = {}
    for name in SCRIPTS:
        pattern = r"^    (\w+): (.+?) = .+?  # (.+)$"
        found = re.findall(pattern, definitions(name)["Args"], re.MULTILINE)
        fields = MODULES[name].Args.__dataclass_fields__
        assert [field for field, *_ in found] == list(fields)  # every flag has its help
        for field, *rest in found:
            texts.setdefault(field, set()).add(tuple(rest))
    assert {field: text for field, text in texts.items() if len(text) > 1} == {}


def test_same_methods() -> None:
    """The training loop uses the same interface of every agent."""
    for name in SCRIPTS:
        (agent,) = ast.parse(definitions(name)["Agent"]).body
        methods = {x.name for x in agent.body if isinstance(x, ast.FunctionDef)}
        assert methods >= {"sample_noise", "get_action", "get_value", "evaluate_actions"}
        assert methods >= {"make_act", "scale_rewards", "finish_iteration"}


FIXED = {
    "ppo": {"mask_actions"},
    "ppo_continuous": {"squash", "state_std", "log_std_init"},
    "ppo_atari": {"repeat_action_probability"},
}
FIXED |= {name: FIXED[base] | {"hidden_size", "mask_velocity"} for name, base in VARIANTS.items()}


@pytest.mark.parametrize("name", MODULES)
def test_what_is_fixed(name: str) -> None:
    """A resumed run must keep the environments, the rollout's shape and the kind of policy."""
    expected = {"env_id", "env_kwargs", "num_envs", "num_steps"} | FIXED[name]
    assert set(MODULES[name].FIXED) == expected <= set(MODULES[name].Args.__dataclass_fields__)


ALONE = {
    "ppo": "--total-timesteps 2048",
    "ppo_continuous": "--env-id InvertedPendulum-v5 --total-timesteps 2048",
    "ppo_atari": "--total-timesteps 6144 --num-threads 1 --update-epochs 1 --eval-episodes 0",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_alone_in_an_empty_folder(name: str, folder: Path) -> None:
    """A copy of one script runs, says what it reached, and leaves episode returns in its events."""
    shutil.copy(ROOT / f"{name}.py", folder)
    command = [sys.executable, f"{name}.py", *ALONE[name].split()]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"return -?[\d.]+ over the last \d+ episodes; [\d,]+ steps in", done.stdout)
    evaluated = len(
        re.findall(r"greedy return -?[\d.]+, std [\d.]+, over 10 episodes", done.stdout)
    )
    assert evaluated == (name != "ppo_atari")
    assert len(done.stdout.splitlines()) == 1 + evaluated
    assert len(scalars("charts/episodic_return")) > 0
    assert "Traceback" not in done.stderr


def run(name: str, flags: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a script as a user does, with flags, and return its exit status."""
    short = "" if "--total-timesteps" in flags else "--total-timesteps 2048"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *short.split(), *flags.split()])
    with pytest.raises(SystemExit) as exit_:  # a run that isn't refused raises nothing, and fails
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    return exit_.value.code


ERRORS = [
    ("ppo", "--env-id CartPol-v1", "`CartPole`"),
    ("ppo", "--env-id CartPole-v7", "`v1`"),
    ("ppo", "--env-id cart!pole", "cart!pole"),
    ("ppo", "--env-id no_such_module:CartPole-v1", "no_such_module"),
    ("ppo", "--env-id Pendulum-v1", "ppo_continuous.py"),
    ("ppo", "--env-id probe_envs:Spaces-v0 --env-kwargs kind sequence", "flatten"),
    ("ppo", "--env-id probe_envs:Spaces-v0 --env-kwargs kind opaque", "NotImpl"),
    ("ppo_continuous", "--env-id probe_envs:Spaces-v0 --env-kwargs kind opaque", "NotImpl"),
    ("ppo", "--env-kwargs gravity_of_the_moon 1.6", "gravity_of_the_moon"),
    ("ppo", "--num-envs 3 --num-steps 5 --num-minibatches 4", "num_minibatches"),
    ("ppo", "--num-envs 2 --num-steps 4 --num-minibatches 8", "2 or more"),
    ("ppo", "--num-envs 0", "num_envs"),
    ("ppo", "--num-steps -1", "num_steps"),
    ("ppo", "--num-minibatches 0", "num_minibatches"),
    ("ppo", "--update-epochs 0", "update_epochs"),
    ("ppo", "--learning-rate 0", "learning_rate"),
    ("ppo", "--total-timesteps 0", "total_timesteps"),
    ("ppo", "--num-envs 64 --total-timesteps 1000", "total_timesteps"),
    ("ppo", "--seed -1", "seed"),
    ("ppo", "--device cuda:99", "cuda:99"),
    ("ppo", "--device gpu", "gpu"),
    ("ppo", "--gamma 1.1", "gamma"),
    ("ppo", "--gae-lambda -0.1", "gae_lambda"),
    ("ppo", "--clip-coef 0", "clip_coef"),
    ("ppo", "--target-kl 0", "target_kl 0.0"),
    ("ppo_continuous", "--target-kl -1", "target_kl -1.0"),
    ("ppo", "--env-id FrozenLake-v1 --env-kwargs map_name 9x9", "9x9"),
    ("ppo", "--env-id LunarLander-v3 --env-kwargs gravity 5", "gravity"),
    ("ppo", "--env-id probe_envs:Unusable-v0 --env-kwargs kind dict", "actions Dict"),
    ("ppo", "--learning-rate nan", "learning_rate nan"),
    ("ppo", "--num-threads -1", "num_threads -1"),
    ("ppo", "--device meta", "meta"),
    ("ppo", "--env-id :", "cannot make :"),
    ("ppo", "--env-id ALE/Pong-v5", "ppo_atari.py"),
    ("ppo", "--mask-actions", "action_mask"),
    *(
        (
            "ppo",
            f"--env-id probe_envs:Choices-v0 --env-kwargs kind {kind} --mask-actions",
            "masks are for Discrete",
        )
        for kind in ("multi_discrete", "multi_binary")
    ),
    ("ppo_continuous", "--env-id probe_envs:Unusable-v0 --env-kwargs kind huge", "bounds"),
    ("ppo_continuous", "--env-id probe_envs:Unusable-v0 --env-kwargs kind integer", "int8"),
    ("ppo_continuous", "--env-id HalfCheeta-v5", "`HalfCheetah`"),
    ("ppo_continuous", "--env-id CartPole-v1", "ppo.py"),
    ("ppo_continuous", "--env-id probe_envs:Unbounded-v0", "bounds"),
    ("ppo_continuous", "--env-kwargs legs 5", "legs"),
    ("ppo_atari", "--env-id ALE/Pongg-v5", "`Pong`"),
    ("ppo_atari", "--env-id CartPole-v1", "ppo.py"),
    ("ppo_atari", "--env-id gymnasium:CartPole-v1", "ppo.py"),
    ("ppo_atari", "--env-id Breakout-v5", "ALE/Breakout-v5"),
    ("ppo_atari", "--env-id BreakoutNoFrameskip-v4", "ALE/Breakout-v5"),
    ("ppo_atari", "--env-kwargs legs 5", "legs"),
    ("ppo", "--checkpoint-interval -1", "checkpoint_interval"),
    ("ppo", "--eval-episodes -1", "eval_episodes"),
    ("ppo", "--eval-checkpoints --eval-episodes 0", "eval_episodes 0"),
    ("ppo_continuous", "--evaluate nothing --eval-episodes 0", "nothing"),
    ("ppo", "--resume nothing", "nothing"),
    ("ppo_continuous", "--evaluate nothing", "nothing"),
    ("ppo", "--env-id probe_envs:Dark-v0 --capture-video", "no screen"),
    (
        "ppo_continuous",
        "--env-id probe_envs:Dark-v0 --env-kwargs continuous True --capture-video",
        "no screen",
    ),
    ("ppo", "--env-id probe_envs:Probe-v0 --capture-video", "render_mode"),
    ("ppo_atari", "--env-kwargs stack_num 3", "stack_num"),
    ("ppo_atari", "--env-kwargs continuous True", "continuous"),
    ("ppo_atari", "--env-kwargs episodic_life True", "leave these out"),
    ("ppo_atari", "--env-kwargs life_loss_info True", "leave these out"),
    (
        "ppo_atari",
        "--repeat-action-probability 2 --eval-episodes 0",
        "repeat_action_probability",
    ),
]


@pytest.mark.parametrize(("name", "flags", "expected"), ERRORS)
def test_bad_input(
    name: str,
    flags: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    folder: Path,
) -> None:
    """Bad input ends in one sentence with what to do, exit status 2, and no run folder."""
    assert run(name, flags, monkeypatch) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"{name}.py: ")
    assert expected in lines[-1]
    assert len([line for line in lines if "Warn" not in line and "logger" not in line]) == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
def test_a_game_of_another_script(name: str, folder: Path) -> None:
    """An Atari game is sent to its script (in a process where no other script is imported)."""
    assert "ppo_atari.py" in refusal(name, "--env-id", "ALE/Pong-v5")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_to_evaluate(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A run that was trained without an evaluation is evaluated over a number that is given."""
    script = MODULES[name]
    script.train(script.Args(**SHORT[name]))
    assert run(name, f"--evaluate {only_run()}", monkeypatch) == 2
    assert "eval_episodes 0" in capsys.readouterr().err.splitlines()[-1]


def test_unknown_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, folder: Path
) -> None:
    """So does a flag that isn't there."""
    assert run("ppo", "--learning-rat 1", monkeypatch) == 2
    assert "learning-rat" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "flags", "module", "expected"),
    [
        ("ppo", "--track", "wandb", "pip install wandb"),
        ("ppo", "--env-id LunarLander-v3", "Box2D", "gymnasium[box2d]"),
        ("ppo_continuous", "--env-id Hopper-v5", "mujoco", "gymnasium[mujoco]"),
    ],
)
def test_missing_package(name: str, flags: str, module: str, expected: str, folder: Path) -> None:
    """A package that isn't installed is named, with the command that installs it."""
    code = (
        f"import sys, runpy; sys.modules[{module!r}] = None; sys.argv = {['x', *flags.split()]}; "
    )
    code += f"runpy.run_path({str(ROOT / f'{name}.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert expected in done.stderr.splitlines()[-1]
    assert "pip install" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists()


def test_a_bug_in_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step of the user's own environment can't import isn't the user's mistake in flags."""

    def reward(self: probe_envs.Probe, action: int) -> float:
        raise ImportError("no such solver")

    monkeypatch.setattr(probe_envs.Probe, "reward", reward)
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--env-id", "probe_envs:Probe-v0"])
    with pytest.raises(ImportError, match="no such solver"):
        runpy.run_path(str(ROOT / "ppo.py"), run_name="__main__")


def test_track(folder: Path) -> None:
    """Weights & Biases, offline, gets the scalars too: every episode and every iteration."""
    command = [sys.executable, ROOT / "ppo.py", "--track", "--total-timesteps", "1024"]
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (record,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = record.read_bytes()
    episodes = len(scalars("charts/episodic_return"))
    assert content.count(b"charts/episodic_return") >= episodes
    assert content.count(b"losses/approx_kl") >= 2
    assert b"global_step" in content


def test_track_without_an_account(folder: Path) -> None:
    """Without a login, it says how to log in, and writes no run."""
    unset = {name: x for name, x in os.environ.items() if not name.startswith("WANDB")}
    environment = unset | {"HOME": str(folder), "WANDB_MODE": "online"}
    assert "wandb login" in refusal("ppo", "--track", env=environment, stdin=subprocess.DEVNULL)
    assert not (folder / "runs").exists()


def test_a_large_seed(folder: Path) -> None:
    """Seeds have no largest one, and none that is as good as another."""
    losses = []
    for seed in (10**23 - 1, 10**23):
        command = [sys.executable, ROOT / "ppo.py", "--total-timesteps", "512", "--seed", seed]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (run,) = folder.glob(f"runs/*__{seed}__*")
        losses.append(scalars("losses/value_loss", run))
    assert len(losses[0]) == 1
    assert losses[0] != losses[1]


def test_env_kwargs() -> None:
    """Keywords for the environment arrive with the types that they look like."""
    command = [sys.executable, ROOT / "ppo.py", "--env-id", "FrozenLake-v1", "--env-kwargs"]
    flags = "is_slippery False map_name 8x8 --total-timesteps 1024"
    subprocess.run([*command, *flags.split()], check=True, capture_output=True)
    text = next(only_run().glob("events*")).read_bytes()
    assert b"{'is_slippery': False, 'map_name': '8x8'}" in text
