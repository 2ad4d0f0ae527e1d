"""The figures line of `graphdecode generate`: it says what did the work, and why it is not what is fast."""

from pathlib import Path

from command_line import spawn_command

from graphdecode.kernels.native.instructions import instructions

SMALL = "[capacity]\nmax_batch_size = 1\nmax_sequence_length = 64\n"


def said_of(folder: Path, **environment: str) -> list[str]:
    """Answer one prompt in a process of its own, and return the lines of standard error."""
    (folder / "small.toml").write_text(SMALL)
    result = spawn_command(
        "generate", "--prompt", "12+30=", "--config", "small.toml", "--device", "cpu", folder=folder, **environment
    )
    assert (result.returncode, result.stdout) == (0, "42\n"), result.stderr
    return result.stderr.splitlines()


def test_losing_the_compiled_kernels_is_said_once_with_the_remedy_and_named_in_the_figures(tmp_path: Path) -> None:
    said = said_of(tmp_path, CC="no-such-compiler", GRAPHDECODE_CACHE_DIR=str(tmp_path / "new"))
    (told,) = [line for line in said if "no compiled kernels" in line]
    for line in (told, said[-1]):
        assert "the C compiler 'no-such-compiler' cannot be run" in line
        assert "install it, or name one in CC" in line
    assert "backend on cpu; torch's operators (" in said[-1]


def test_what_was_asked_for_is_named_and_not_warned_of(tmp_path: Path) -> None:
    said = said_of(tmp_path, GRAPHDECODE_NATIVE="0")
    assert not [line for line in said if "no compiled kernels" in line]
    assert said[-1].endswith("backend on cpu; torch's operators (GRAPHDECODE_NATIVE is 0)")


def test_a_cache_folder_that_is_a_file_costs_a_line_and_not_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')  # in a second
    compiler.chmod(0o755)
    said = said_of(tmp_path, GRAPHDECODE_CACHE_DIR=str(tmp_path / "file"), CC=str(compiler))
    (told,) = [line for line in said if "compiled kernels are kept in" in line]
    assert "GRAPHDECODE_CACHE_DIR names a better folder" in told
    assert said[-1].endswith(f"backend on cpu; compiled kernels ({instructions().name})")


def test_a_log_file_gets_lines_and_no_bars(tmp_path: Path) -> None:
    said = said_of(tmp_path)
    assert len(said) == 1
    assert said[0].endswith(f"compiled kernels ({instructions().name})")
    assert "\r" not in said[0]
