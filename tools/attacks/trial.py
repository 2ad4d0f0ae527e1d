"""Runs an attack in a fork of a warm parent with a single thread, with limits of memory and time."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from graphdecode import GraphdecodeError

MEMORY_BYTES = 3 * 2**30  # beyond the parent's memory
CPU_SECONDS = 10
WALL_SECONDS = 120  # long, since the machine may be busy
REFUSED, RIGHT = "refused", "right"


class Wrong(Exception):
    """An input was accepted, and the result is wrong."""


class Attack(Protocol):
    """One kind of input.

    Attributes:
        name: shown in tables.
    """

    name: str

    def run(self, rng: random.Random, folder: Path) -> None:
        """Make a hostile input in an empty folder, give it to the library, and check the result.

        Raises:
            GraphdecodeError: it was refused.
            Wrong: it was accepted, and the result is wrong.
        """


class Outcome(NamedTuple):
    """The outcome of one input: "refused", "right", or a failure with its details."""

    verdict: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether it is neither refused nor right."""
        return self.verdict not in (REFUSED, RIGHT)


def check_single_thread() -> None:
    """Refuse to fork with several threads: a child would inherit locks that nobody releases.

    Raises:
        RuntimeError: there are several threads.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the process has {threads} threads; set OMP_NUM_THREADS=1 and TOKENIZERS_PARALLELISM=false")


def attempts(attack: Attack, seeds: Sequence[int]) -> list[Outcome]:
    """Run attacks in a child, one after another, and return their outcomes; after a crash, go on in another child.

    A single attack starts from the parent's state. Several need fewer forks, but see the state that the previous ones
    left.
    """
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as folder:
        while len(outcomes) < len(seeds):
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reading)
                _run_child(attack, seeds[len(outcomes) :], Path(folder), writing)
            os.close(writing)
            with os.fdopen(reading, "rb") as pipe:
                told = [line for line in pipe.read().split(b"\n") if line]
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            outcomes += [Outcome(*json.loads(line)) for line in told]
            if code != 0:
                outcomes.append(_ended_by(code))
    return outcomes


def _ended_by(code: int) -> Outcome:
    if -code in (signal.SIGALRM, signal.SIGXCPU):
        return Outcome("hung", f"more than {CPU_SECONDS} s of a processor, or {WALL_SECONDS} s")
    return Outcome("crashed", signal.Signals(-code).name if code < 0 else f"exit code {code}")


def _run_child(attack: Attack, seeds: Sequence[int], folder: Path, writing: int) -> None:
    """Run the attacks under limits, send each outcome through the pipe, and exit without cleanup."""
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for seed in seeds:
            used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            resource.setrlimit(resource.RLIMIT_CPU, (int(used) + CPU_SECONDS, resource.RLIM_INFINITY))
            signal.alarm(WALL_SECONDS)
            place = folder / f"{seed}-{os.getpid()}"
            place.mkdir()
            rng = random.Random(f"{attack.name} {seed}")
            told = _outcome(lambda rng=rng, place=place: attack.run(rng, place))  # type: ignore[misc]
            os.write(writing, json.dumps(told).encode() + b"\n")
            shutil.rmtree(place, ignore_errors=True)
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
    except BaseException as error:  # any error is what the attack looks for
        return Outcome(f"raised {type(error).__name__}", traceback.format_exc()[-1500:])
    return Outcome(RIGHT)
