"""What all tests share: each runs in an empty folder, and slow ones only with --slow."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["ppo", "ppo_continuous", "ppo_atari"]
BOTH = pytest.mark.parametrize("name", ["ppo", "ppo_continuous"])
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --slow."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", "slow: takes long; runs only with --slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is slow, unless it is asked for."""
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("runs with --slow")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in an empty folder, PyTorch in one thread, and processes with probe_envs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    torch.set_num_threads(1)
    return tmp_path
