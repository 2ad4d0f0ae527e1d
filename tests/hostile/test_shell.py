"""The command line where a shell has closed its streams: one line, exit code 2, and no file gets what was printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import graphdecode
from graphdecode.cli.options import print_error


def shell(closed: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(graphdecode.__file__).parents[1])}
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "graphdecode", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=100)


@pytest.mark.parametrize(
    ("closed", "said"),
    [
        ("<&-", "error: there is no prompt: give --prompt TEXT"),
        (">&-", "error: standard output is closed"),
        ("<&- >&-", "error: standard output is closed"),
        ("<&- >&- 2>&-", ""),
    ],
)
def test_closed_streams_are_an_error_of_one_line(closed: str, said: str, tmp_path: Path) -> None:
    ran = shell(closed, "generate", "-", folder=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.startswith(said)
    assert ran.stderr.count("\n") == bool(said)
    assert not list(tmp_path.iterdir())


def test_an_answer_needs_neither_standard_input_nor_standard_error(tmp_path: Path) -> None:
    ran = shell("<&- 2>&-", "generate", "--prompt", "417+385=", folder=tmp_path)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "802", "")


def test_an_error_moves_no_cursor(capfd: pytest.CaptureFixture[str]) -> None:
    print_error("tensor \x1b[2J\r\ud800 is unexpected")
    assert capfd.readouterr().err == "error: tensor \\x1b[2J\\r\\ud800 is unexpected\n"
