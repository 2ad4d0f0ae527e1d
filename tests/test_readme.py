"""Every command and example of the README runs as it stands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line.strip()]
OWN_TEST_COMMAND = "tools/test"  # what runs this
SLOW = "graphdecode profile"  # measures every bucket


def environment() -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    return inherited | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("source", [text for kind, text in BLOCKS if kind == "python"])
def test_python_examples_run(source: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", source], env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, one after another: some read what earlier ones wrote."""
    place = tmp_path_factory.mktemp("readme")
    (place / "my-buckets.toml").write_text(next(text for kind, text in BLOCKS if kind == "toml"))
    return place


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow) if command.startswith(SLOW) else command
        for command in COMMANDS
        if not command.startswith(OWN_TEST_COMMAND)
    ],
)
def test_commands_run(command: str, folder: Path) -> None:
    if command.startswith("tools/") and not (ROOT / ".venv").exists():
        pytest.skip("would install an environment: run it by hand, or with .ci/run")
    if shutil.which("graphdecode", path=environment()["PATH"]) is None:
        command = command.replace("graphdecode ", f"{sys.executable} -m graphdecode ", 1)
    result = subprocess.run(
        ["bash", "-c", command],
        env=environment(),
        cwd=ROOT if command.startswith("tools/") else folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_readme_names_both_commands() -> None:
    assert {command.split()[0] for command in COMMANDS} >= {"tools/quickstart", "tools/test", "graphdecode"}


def test_the_performance_table_is_the_committed_results() -> None:
    command = [sys.executable, "tools/show_results.py"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip() in (ROOT / "README.md").read_text()
