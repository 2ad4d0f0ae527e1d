"""The user's C compiler: which it is, and one run of it that leaves nothing behind."""

import errno
import os
import platform
import shlex
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from . import system
from .instructions import instructions

# Vectors and threads are GCC's and Clang's own; nothing of these is x86's.
PORTABLE_FLAGS = ("-O3", "-fno-math-errno", "-std=gnu11", "-Wno-psabi", "-pthread", "-fPIC")
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
        if not system.IS_KNOWN:
            raise NotCompiled(f"compiled kernels are made on Linux and macOS alone, this is {platform.system()}")
        named = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
        if named is None:
            raise NotCompiled(
                f"no C compiler was found: install gcc or clang (`{system.INSTALLS_COMPILER}`), or name one in CC"
            )
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
            return cls([*words, *flags], version.stdout, system.processor())
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            told = f"the C compiler {words[0]!r} cannot be run ({why})"
            raise NotCompiled(f"{told}: install it, or name one in CC") from error

    def compile(self, texts: Mapping[Path, str], options: list[str]) -> None:
        """Make libraries of source texts, one on a core, with no file but in their folders.

        Raises:
            NotCompiled: the compiler refuses one, or takes too long.
            OSError: there is no room in that folder.
        """
        end, cores = time.monotonic() + COMPILE_SECONDS, system.num_cores()
        running: deque[subprocess.Popen[str]] = deque()
        try:
            for made, text in texts.items():
                source = made.with_suffix(".c")
                source.write_text(text, encoding="utf-8")
                if len(running) == cores:
                    self._finish(running.popleft(), end)
                running.append(self._started([*options, "-shared", "-x", "c", "-", "-lm", "-o", str(made)], source))
            while running:
                self._finish(running.popleft(), end)
        finally:
            for process in running:
                _stop(process)

    def _started(self, arguments: list[str], source: Path) -> subprocess.Popen[str]:
        with source.open("rb") as given:
            return subprocess.Popen(
                [*self.command, *arguments], stdin=given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                encoding="utf-8", errors="replace", start_new_session=True,
                env={**_environment(), "TMPDIR": str(source.parent)},
            )  # fmt: skip

    def _finish(self, process: subprocess.Popen[str], end: float) -> None:
        """Wait for a compiler; raise what it says if it fails, or is not done at the end."""
        try:
            _, told = process.communicate(timeout=max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            raise NotCompiled(f"{self.command[0]} was stopped after {COMPILE_SECONDS} s") from None
        finally:
            _stop(process)
        if process.returncode != 0:
            said = told.strip()[-500:] or f"exit code {process.returncode}"
            if any(problem in told for problem in _DISK_ERRORS):
                raise OSError(said)
            raise NotCompiled(f"{self.command[0]} could not compile the kernels: {said}; CC names another")


def _stop(process: subprocess.Popen[str]) -> None:
    """End a compiler, and what it started, which is of its group and may outlive it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def _environment() -> dict[str, str]:
    """Return what the compiler runs in: messages in English, and nothing that was preloaded into Python."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {"LC_ALL": "C"}
