"""A part of the check: a process with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.2
_TAIL_CHARACTERS = 4000
_REFUSALS = ("ERR_NVGPUCTRPERM", "No module named", "not permitted", "Operation not supported")


@dataclass
class Part:
    """A command with its limit and result.

    Attributes:
        name: of the part, and of its log.
        command: for a GPU; may be empty.
        limit_s: seconds after which it is stopped.
        rehearsal: a small version for a CPU; may be empty.
        state: "not run", "ok", "failed (CODE)", "over its LIMIT s", "no time left", "could not start", "not permitted".
        is_optional: where it is missing or not permitted, nothing is wrong.
        is_planned: whether it is among the parts of a first call, whose limits are their budgets.
        on_gpu: whether it was run, or rehearsed.
        seconds: that it took.
        tail: of what it said.
    """

    name: str
    command: list[str]
    limit_s: float
    rehearsal: list[str]
    is_optional: bool = False
    is_planned: bool = True
    state: str = "not run"
    on_gpu: bool = False
    seconds: float = 0.0
    tail: str = ""

    def run(self, command: list[str], log: Path, limit_s: float, meanwhile: Callable[[], None]) -> None:
        """Run a command with its output in a log, stop its session at the limit, and record the result."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
        }
        began = time.monotonic()
        with log.open("w") as output:
            try:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
                )
            except OSError as error:
                self.state, self.tail = "not permitted" if self.is_optional else "could not start", str(error)
                return
            try:
                self.state = self._wait(process, began + limit_s, limit_s, meanwhile)
            finally:
                stop(process)
        self.seconds = time.monotonic() - began
        self.tail = log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
        if self.is_optional and any(sign in self.tail for sign in _REFUSALS):
            self.state = "not permitted"

    @property
    def is_well(self) -> bool:
        """Whether it succeeded."""
        return self.state in ("ok", "not run", "not permitted")

    def _wait(self, process: subprocess.Popen, deadline: float, limit_s: float, meanwhile: Callable[[], None]) -> str:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return f"over its {limit_s:.0f} s"
            meanwhile()
            time.sleep(_POLL_S)
        return "ok" if process.returncode == 0 else f"failed ({process.returncode})"


def stop(process: subprocess.Popen) -> None:
    """End a process and its session."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
