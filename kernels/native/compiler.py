"""The user's C compiler: which it is, and one run of it that leaves nothing behind."""

import errno
import os
import platform
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .instructions import instructions

# Vectors and threads are GCC's and Clang's own; nothing of these is x86's.
PORTABLE_FLAGS = ("-O3", "-fno-math-errno", "-std=gnu11", "-Wno-psabi", "-pthread", "-fPIC", "-shared")
COMPILE_SECONDS = 300  # of the clock: some 20 of one core, which others may want too
_VERSION_SECONDS = 20
_DISK_ERRORS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


class NotCompiled(Exception):
    """The compiler cannot make the kernels, in whichever folder."""


class Compiler(NamedTuple):
    """One compiler with its options.

    Attributes:
        command: program and options, without input and output.
        version: what it says about itself.
        processor: what "native" among the options depends on.
    """

    command: list[str]
    version: str
    processor: str

    @classmethod
    def found(cls) -> "Compiler":
        """Return the one that CC names, else the first of cc, gcc and clang, for the instructions that are chosen.

        Raises:
            NotCompiled: there is none, or it cannot be run.
            MissingInstructions: this processor does not have the chosen instructions.
        """
        if platform.system() != "Linux":
            raise NotCompiled(f"compiled kernels are made on Linux alone, this is {platform.system()}")
        named = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
        if named is None:
            raise NotCompiled("no C compiler was found: install gcc or clang, or name one in CC")
        try:
            words = shlex.split(named)
        except ValueError as error:
            raise NotCompiled(f"CC is {named!r}, which is no command: {error}") from None
        if not words:
            raise NotCompiled(f"CC is {named!r}, which is no command")
        flags = (*instructions().flags, *PORTABLE_FLAGS)
        try:
            version = subprocess.run(
                [*words, "--version"], capture_output=True, timeout=_VERSION_SECONDS, check=True, encoding="utf-8",
                errors="replace", env=_environment(),
            )  # fmt: skip
            return cls([*words, *flags], version.stdout, _processor())
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            told = f"the C compiler {words[0]!r} cannot be run ({error})"
            raise NotCompiled(f"{told}: install it, or name one in CC") from error

    def compile(self, text: str, options: list[str], made: Path) -> None:
        """Compile a source text into the file `made`, with no other file but in its folder.

        Raises:
            NotCompiled: the compiler refuses it, or takes too long.
            OSError: there is no room in that folder.
        """
        command = [*self.command, *options, "-x", "c", "-", "-lm", "-o", str(made)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
            errors="replace", start_new_session=True, env={**_environment(), "TMPDIR": str(made.parent)},
        )  # fmt: skip
        try:
            _, told = process.communicate(text, timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise NotCompiled(f"{self.command[0]} was stopped after {COMPILE_SECONDS} s") from None
        finally:  # its own children are of its group, and may outlive it
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode != 0:
            said = told.strip()[-500:]
            if any(problem in told for problem in _DISK_ERRORS):
                raise OSError(said)
            said = said or f"exit code {process.returncode}"
            raise NotCompiled(f"{self.command[0]} could not compile the kernels: {said}; CC names another")


def _environment() -> dict[str, str]:
    """Return what the compiler runs in: messages in English, and nothing that was preloaded into Python."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {"LC_ALL": "C"}


def _processor() -> str:
    described = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    told = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "\n".join(line for line in described if line.startswith(told))
