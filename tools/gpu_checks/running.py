"""Runs the parts of a call in sequence, and stores the results."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpu_checks.archive import Archive, KernelCache
from gpu_checks.part import Part

FIGURES = "figures.jsonl"  # in the folder
CALL_S = 510.0  # limit of a call, well below the machine's ten minutes
LEAST_S = 10.0  # no part is started with less time
LINES_OF_A_FAILURE = 12


def run_call(
    name: str, parts_in: Callable[[Path], list[Part]], folder: Path, *, has_gpu: bool, limit_s: float = CALL_S
) -> bool:
    """Run the parts of a call, or their rehearsals, within its time.

    Args:
        name: of the call and its two files.
        parts_in: returns the parts, given a folder for their files.
        folder: for the archive and the summary.
        has_gpu: whether the parts are run or rehearsed.
        limit_s: for all of them.

    Returns:
        Whether all went well.
    """
    deadline = time.monotonic() + limit_s
    kernels = KernelCache(Path(os.environ.get("TRITON_CACHE_DIR", folder / "triton")), folder)
    done = _done_before(folder / f"{name}.json", has_gpu=has_gpu)
    with tempfile.TemporaryDirectory(prefix=f"gpu-check-{name}-") as scratch:
        parts = parts_in(Path(scratch))
        archive = Archive(folder, name, Path(scratch))
        archive.refresh(parts)
        for part in parts:
            if part.name in done:
                part.state, part.on_gpu = "ok", has_gpu
                continue
            run_part(part, Path(scratch), deadline, archive, parts, has_gpu=has_gpu)
            archive.refresh(parts)
            kernels.keep()
            print(f"{name} {part.name:24} {part.state:18} {part.seconds:7.1f} s", flush=True)
            if not part.is_well:
                print("\n".join("    " + line for line in part.tail.splitlines()[-LINES_OF_A_FAILURE:]), flush=True)
        archive.refresh(parts)
    return all(part.is_well for part in parts)


def _done_before(summary: Path, *, has_gpu: bool) -> set[str]:
    """Return the parts that an earlier run of the call has finished on the same kind of device."""
    found = json.loads(summary.read_text()) if summary.exists() else []
    return {part["name"] for part in found if part["state"] == "ok" and part["on_gpu"] == has_gpu}


class _Shown:
    """Prints new figures of parts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._place = file.stat().st_size if file.exists() else 0

    def show(self) -> None:
        """Print the lines added since the last call."""
        if self._file.exists():
            with self._file.open() as file:
                file.seek(self._place)
                print(file.read(), end="", flush=True)
                self._place = file.tell()


def run_part(part: Part, scratch: Path, deadline: float, archive: Archive, parts: list[Part], *, has_gpu: bool) -> None:
    """Run one part or its rehearsal, if there is one and time is left."""
    command, left = part.command if has_gpu else part.rehearsal, deadline - time.monotonic()
    if not command:
        return
    if left < LEAST_S:
        part.state = "no time left"
        return
    part.on_gpu = has_gpu
    log, shown = scratch / f"{part.name.replace(' ', '-')}.log", _Shown(archive.folder / FIGURES)

    def meanwhile() -> None:
        archive.refresh_now_and_then(parts)
        shown.show()

    part.run(command, log, min(part.limit_s, left), meanwhile)
    shown.show()
