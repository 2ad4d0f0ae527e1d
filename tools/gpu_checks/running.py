"""Runs the parts of a call one after the other, and keeps what was seen."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpu_checks.archive import Archive
from gpu_checks.part import Part

CALL_S = 510.0  # of a call in all: less than nine minutes, so that nothing is lost at a limit of ten
LEAST_S = 10.0  # a part is not begun with less time than this
LINES_OF_A_FAILURE = 12


def run_call(
    name: str, parts_in: Callable[[Path], list[Part]], folder: Path, *, has_gpu: bool, limit_s: float = CALL_S
) -> bool:
    """Run the parts of a call, or their rehearsals, within its time.

    Args:
        name: of the call, and of the two files that it leaves in the folder.
        parts_in: lists them, given a folder for what they write.
        folder: for the archive and the summary.
        has_gpu: whether the parts are run, or rehearsed.
        limit_s: for all of them.

    Returns:
        Whether all went well.
    """
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix=f"gpu-check-{name}-") as scratch:
        parts = parts_in(Path(scratch))
        archive = Archive(folder, name, Path(scratch))
        archive.refresh(parts)
        for part in parts:
            run_part(part, Path(scratch), deadline, archive, parts, has_gpu=has_gpu)
            archive.refresh(parts)
            print(f"{name} {part.name:24} {part.state:18} {part.seconds:7.1f} s", flush=True)
            if part.state not in ("ok", "not run"):
                print("\n".join("    " + line for line in part.tail.splitlines()[-LINES_OF_A_FAILURE:]), flush=True)
    return all(part.state in ("ok", "not run") for part in parts)


def run_part(part: Part, scratch: Path, deadline: float, archive: Archive, parts: list[Part], *, has_gpu: bool) -> None:
    """Run one part, or its rehearsal; nothing where there is none, or no time."""
    command, left = part.command if has_gpu else part.rehearsal, deadline - time.monotonic()
    if not command:
        return
    if left < LEAST_S:
        part.state = "no time left"
        return
    log = scratch / f"{part.name.replace(' ', '-')}.log"
    part.run(command, log, min(part.limit_s, left), lambda: archive.refresh_now_and_then(parts))
