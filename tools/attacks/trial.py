"""One attack in one process: a fork of a warm parent that has a single thread, with limits of memory and time."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from graphdecode import GraphdecodeError

MEMORY_BYTES = 3 * 2**30  # beyond what the parent has
CPU_SECONDS = 10
WALL_SECONDS = 120  # a busy machine may give a process little
REFUSED, RIGHT = "refused", "right"


class Wrong(Exception):
    """Something was accepted, and what came of it is not what it should be."""


class Attack(Protocol):
    """One kind of input.

    Attributes:
        name: in tables.
    """

    name: str

    def run(self, rng: random.Random, folder: Path) -> None:
        """Make a hostile input in an empty folder, give it to the library, and compare what it accepts.

        Raises:
            GraphdecodeError: it was refused.
            Wrong: it was accepted, and is wrong.
        """


class Outcome(NamedTuple):
    """What became of one input: "refused", "right", or what is a failure, with a traceback or the like."""

    verdict: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether it is anything but refused or right."""
        return self.verdict not in (REFUSED, RIGHT)


def check_single_thread() -> None:
    """Refuse to fork where there is more than one thread: a child would have the locks of the others.

    Raises:
        RuntimeError: there is.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the process has {threads} threads; set OMP_NUM_THREADS=1 and TOKENIZERS_PARALLELISM=false")


def attempt(attack: Attack, seed: int) -> Outcome:
    """Run one attack in a child, and say what became of it."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        child = os.fork()
        if child == 0:
            os.close(reading)
            _run_child(lambda: attack.run(random.Random(f"{attack.name} {seed}"), Path(folder)), writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0 or not told:
        if -code in (signal.SIGALRM, signal.SIGXCPU):
            return Outcome("hung", f"more than {CPU_SECONDS} s of a processor, or {WALL_SECONDS} s")
        return Outcome("crashed", signal.Signals(-code).name if code < 0 else f"exit code {code}")
    return Outcome(*json.loads(told))


def _run_child(work: Callable[[], None], writing: int) -> None:
    """Do the work under limits, tell the outcome through the pipe, and end; nothing of the parent's is cleaned up."""
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, used + CPU_SECONDS + 5))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(WALL_SECONDS)
        sys.setrecursionlimit(1000)
        os.write(writing, json.dumps(_outcome(work)).encode())
        code = 0
    finally:
        os._exit(code)


def _outcome(work: Callable[[], None]) -> Outcome:
    try:
        work()
    except GraphdecodeError as error:
        if not isinstance(error, (ValueError, RuntimeError)):
            return Outcome(f"raised {type(error).__name__}", traceback.format_exc()[-1500:])
        return Outcome(REFUSED, str(error)[:300])
    except Wrong as error:
        return Outcome("wrong", str(error)[:1500])
    except BaseException as error:  # whatever it is, it is what is looked for
        return Outcome(f"raised {type(error).__name__}", traceback.format_exc()[-1500:])
    return Outcome(RIGHT)
