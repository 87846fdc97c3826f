"""The recipe exact_resume: a run that was killed and resumed equals one that never stopped."""

import signal

import pytest
from conftest import SCRIPTS
from helpers import SHORT, assert_same, command, content, crash, go_on, latest_run, load, wait_for
from test_recipes import patched

# Runs of eight iterations, which are saved after every second one.
RUNS = {
    "ppo": {"env_id": "LunarLander-v3", "total_timesteps": 4096},
    "ppo_continuous": {"env_id": "Hopper-v5", "num_steps": 128},
    "ppo_atari": {"num_steps": 16, "total_timesteps": 256, "update_epochs": 1},
}
RUNS = {name: SHORT[name] | flags | {"checkpoint_interval": 2} for name, flags in RUNS.items()}


@pytest.mark.parametrize(
    ("name", "flags", "saved_at"),
    [
        *((name, {}, 2) for name in SCRIPTS),
        ("ppo", {"env_id": "probe_envs:Careless-v0", "eval_interval": 3, "eval_episodes": 2}, 3),
        ("ppo", {"vectorization": "async"}, 2),
        pytest.param("ppo", {"compile": True}, 2, marks=pytest.mark.slow),
    ],
)
def test_crashed(name: str, flags: dict, saved_at: int) -> None:
    """A run that crashes in its fourth and sixth iteration ends as the whole one, bit for bit."""
    script, flags = load(patched(name, "exact_resume")), RUNS[name] | flags
    batch_size = flags["num_envs"] * flags["num_steps"]
    script.train(script.Args(**flags))
    expected = content(latest_run())
    with pytest.raises(ZeroDivisionError):
        script.train(script.Args(**flags), crash(4))
    run = latest_run()
    assert script.load_checkpoint(run)["global_step"] == saved_at * batch_size
    with pytest.raises(ZeroDivisionError):
        go_on(script, run, crash(6 - saved_at))
    assert script.load_checkpoint(run)["global_step"] == 4 * batch_size
    go_on(script, run)
    assert_same(content(run), expected)
    assert len(expected["losses/value_loss"]) == 8


@pytest.mark.parametrize("name", SCRIPTS)
def test_killed(name: str) -> None:
    """The same for a process that is killed (SIGKILL) where it happens to be."""
    path, flags = patched(name, "exact_resume"), RUNS[name]
    flags = flags | {"total_timesteps": 2 * flags["total_timesteps"]}
    process = command(str(path.with_suffix("")), *(f"--{flag}={x}" for flag, x in flags.items()))
    wait_for(process, "runs/*/checkpoint.pt")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    run, script = latest_run(), load(path)
    assert 0 < script.load_checkpoint(run)["global_step"] < flags["total_timesteps"]
    go_on(script, run)
    script.train(script.Args(**flags))
    assert_same(content(run), content(latest_run()))
