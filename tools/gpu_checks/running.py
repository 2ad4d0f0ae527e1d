"""Runs the parts of a call one after the other, and keeps what was seen."""

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
    """Return the parts that an earlier run of the call brought to an end, on a device of this kind."""
    found = json.loads(summary.read_text()) if summary.exists() else []
    return {part["name"] for part in found if part["state"] == "ok" and part["on_gpu"] == has_gpu}


class _Shown:
    """Prints what parts add to the figures, as they do."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._place = file.stat().st_size if file.exists() else 0

    def show(self) -> None:
        """Print the lines that came since."""
        if self._file.exists():
            with self._file.open() as file:
                file.seek(self._place)
                print(file.read(), end="", flush=True)
                self._place = file.tell()


def run_part(part: Part, scratch: Path, deadline: float, archive: Archive, parts: list[Part], *, has_gpu: bool) -> None:
    """Run one part, or its rehearsal; nothing where there is none, or no time."""
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
