"""Errors: one base class for what a user can put right, and how the command line tells them from bugs."""

import ast
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import spawn_command
from typer.main import get_command
from typer.testing import CliRunner

import graphdecode
from graphdecode import ArgumentError, GraphdecodeError
from graphdecode.cli import main
from graphdecode.cli.app import app

ROOT = Path(__file__).parent.parent
SOURCES = [path for folder in ("graphdecode", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_error_of_the_package_has_the_one_base() -> None:
    classes = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
    }
    ours = {"GraphdecodeError"}
    for _ in classes:
        ours |= {name for name, bases in classes.items() if bases & ours}
    assert set(classes) == ours
    assert len(ours) > 8


@pytest.mark.parametrize("name", ["ConfigError", "CacheFullError", "ArgumentError"])
def test_an_error_about_a_value_is_a_value_error_too(name: str) -> None:
    error = getattr(graphdecode, name)
    assert issubclass(error, GraphdecodeError)
    assert issubclass(error, ValueError)


@pytest.mark.parametrize("package", ["cli", "config", "engine", "graphs", "models", "profiling", "text"])
def test_what_commands_call_refuses_arguments_by_the_projects_own_error(package: str) -> None:
    for path in (ROOT / "graphdecode" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                assert ast.unparse(node.exc.func) != "ValueError", f"{path}:{node.lineno}"


def run_main(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> object:
    """Let a command's body raise, or get SIGTERM, and return the exit code."""

    def fail(*_: object) -> None:
        if error is None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        else:
            raise error

    monkeypatch.setattr("sys.argv", ["graphdecode", "generate"])
    monkeypatch.setattr("graphdecode.cli.generate._collect_prompts", fail)
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ArgumentError("rows must be >= 1,\n got 0"), 2, "error: rows must be >= 1, got 0\n"),
        (OSError(28, "No space left on device", "profile.json"), 2, "error: profile.json: no space left on device\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_of_the_user_is_one_line_at_most(
    monkeypatch, capfd, error: BaseException, code: int, told: str
) -> None:
    assert run_main(monkeypatch, error) == code
    assert capfd.readouterr().err.strip() == told.strip()


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_sigterm_is_143_and_leaves_as_ctrl_c_does(monkeypatch, capfd):
    before = signal.getsignal(signal.SIGTERM)
    assert run_main(monkeypatch, None) == 143  # by an exception, so that what was begun is cleaned up
    assert capfd.readouterr().err.strip() == ""
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("error", [ValueError("no user's"), KeyError("row"), RuntimeError("torn")])
def test_a_bug_shows_its_traceback_and_how_to_report_it(monkeypatch, capfd, error):
    assert run_main(monkeypatch, error) == 1
    shown = capfd.readouterr().err
    assert "Traceback" in shown
    assert "in fail" in shown
    assert "please report it" in shown.splitlines()[-1]
    assert "graphdecode --version --debug" in shown.splitlines()[-1]


def test_debug_lets_a_users_error_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["graphdecode", "--debug", "generate", "--config", "none.toml", "-p", "a"])
    with pytest.raises(GraphdecodeError, match=r"none\.toml"):
        main()


@pytest.mark.skipif(os.name != "posix", reason="closes a pipe")
def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "graphdecode", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_version_and_debug_tell_what_a_report_needs(monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["graphdecode", "--version", "--debug"])
    with pytest.raises(SystemExit):
        main()
    told = dict(line.split(": ", 1) for line in capfd.readouterr().out.splitlines())
    assert told["graphdecode"] == graphdecode.__version__
    assert {"python", "torch", "triton", "cuda-bindings", "device", "compiled kernels", "platform"} <= set(told)


def test_a_report_says_that_the_processor_lacks_what_the_environment_asks_for() -> None:
    result = spawn_command("--version", "--debug", GRAPHDECODE_ISA="more")
    assert result.returncode == 0
    assert "error: GRAPHDECODE_ISA is 'more'" in result.stdout.splitlines()[-1]


def commands(group: object, *path: str) -> dict[tuple[str, ...], object]:
    found: dict[tuple[str, ...], object] = {path: group}
    for name, command in getattr(group, "commands", {}).items():
        found |= commands(command, *path, name)
    return found


def test_every_help_shows_an_example_that_its_command_takes() -> None:
    root = get_command(app)
    for path, command in commands(root).items():
        example = command.epilog  # type: ignore[attr-defined]
        assert example.startswith("Example: graphdecode"), path
        shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"}).output
        assert " ".join(example.split()[:4]) in shown
        assert CliRunner().invoke(app, [*shlex.split(example)[2:], "--help"]).exit_code == 0
