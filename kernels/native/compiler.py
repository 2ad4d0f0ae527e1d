"""The user's C compiler, and running it without leaving files or processes behind."""

import errno
import os
import platform
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from . import system
from .instructions import instructions

# vectors and threads are extensions of GCC and Clang; none of these is specific to x86
PORTABLE_FLAGS = ("-O3", "-fno-math-errno", "-std=gnu11", "-Wno-psabi", "-pthread", "-fPIC")
COMPILE_SECONDS = 300  # wall time; some 20 s of one core, which may be shared
_VERSION_SECONDS = 20
_DISK_ERRORS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


class NotCompiled(Exception):
    """The compiler cannot compile the kernels, in any folder."""


class Compiler(NamedTuple):
    """A compiler with its options.

    Attributes:
        command: program and options, without input and output.
        version: its version string.
        processor: the processor, on which the option "native" depends.
    """

    command: list[str]
    version: str
    processor: str

    @classmethod
    def detect(cls) -> "Compiler":
        """Return the compiler named by CC, else the first of cc, gcc and clang, for the chosen instruction set.

        Raises:
            NotCompiled: there is none, or it cannot be run.
            MissingInstructions: this processor does not have the chosen instructions.
        """
        if not system.IS_SUPPORTED:
            raise NotCompiled(f"compiled kernels are made on Linux and macOS alone, this is {platform.system()}")
        named = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
        if named is None:
            raise NotCompiled(
                f"no C compiler was found: install gcc or clang (`{system.INSTALLS_COMPILER}`), or name one in CC"
            )
        try:
            words = shlex.split(named)
        except ValueError as error:
            raise NotCompiled(f"CC is {named!r}, which is not a command: {error}") from None
        if not words:
            raise NotCompiled(f"CC is {named!r}, which is not a command")
        flags = (*instructions().flags, *PORTABLE_FLAGS)
        try:
            version = subprocess.run(
                [*words, "--version"], capture_output=True, timeout=_VERSION_SECONDS, check=True, encoding="utf-8",
                errors="replace", env=_environment(),
            )  # fmt: skip
            return cls([*words, *flags], version.stdout, system.processor())
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            if isinstance(error, subprocess.CalledProcessError):
                reason = f"`{words[0]} --version` ended with {error.returncode}"
            problem = f"the C compiler {words[0]!r} cannot be run ({reason})"
            raise NotCompiled(f"{problem}: install it, or name one in CC") from error

    def compile(self, texts: Mapping[Path, str], options: list[str]) -> None:
        """Compile source texts to libraries in parallel, in this order; all files stay in their folders.

        Raises:
            NotCompiled: the compiler fails or takes too long.
            OSError: a folder is full.
        """
        end, cores = time.monotonic() + COMPILE_SECONDS, system.num_cores()
        running: list[subprocess.Popen[str]] = []
        try:
            for library, text in texts.items():
                source = library.with_suffix(".c")
                source.write_text(text, encoding="utf-8")
                if len(running) == cores:
                    self._finish_one(running, end)
                running.append(self._started([*options, "-shared", "-x", "c", "-", "-lm", "-o", str(library)], source))
            while running:
                self._finish_one(running, end)
        finally:
            for process in running:
                _stop(process)

    def _started(self, arguments: list[str], source: Path) -> subprocess.Popen[str]:
        with source.open("rb") as stdin:
            return subprocess.Popen(
                [*self.command, *arguments], stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                encoding="utf-8", errors="replace", start_new_session=True,
                env={**_environment(), "TMPDIR": str(source.parent)},
            )  # fmt: skip

    def _finish_one(self, running: list[subprocess.Popen[str]], end: float) -> None:
        """Wait for the first compiler that ends or says something; raise NotCompiled if it fails or times out."""
        with selectors.DefaultSelector() as messages:
            for process in running:
                assert process.stderr is not None
                messages.register(process.stderr, selectors.EVENT_READ, process)
            ready_fds = messages.select(max(end - time.monotonic(), 0))
        process = ready_fds[0][0].data if ready_fds else running[0]
        try:
            _, output = process.communicate(timeout=max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            raise NotCompiled(f"{self.command[0]} was stopped after {COMPILE_SECONDS} s") from None
        _stop(process)
        running.remove(process)
        if process.returncode != 0:
            message = output.strip()[-500:] or f"exit code {process.returncode}"
            if any(problem in output for problem in _DISK_ERRORS):
                raise OSError(message)
            raise NotCompiled(f"{self.command[0]} could not compile the kernels: {message}; CC names another")


def _stop(process: subprocess.Popen[str]) -> None:
    """Kill a compiler and its children, by process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def _environment() -> dict[str, str]:
    """Return the compiler's environment: messages in English, no LD_PRELOAD."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {"LC_ALL": "C"}
