"""Runs the parts of the check in sequence, and stores the results."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from gpu_checks.archive import Archive, KernelCache
from gpu_checks.part import Part

FIGURES = "figures.jsonl"  # in the device's folder
REHEARSAL = "rehearsal"
LEAST_S = 5.0  # no part is started with less time
LINES_OF_A_FAILURE = 12


def folder_of(device_name: str | None) -> str:
    """Return the name of a device's folder, such as gpu-h200; None: no GPU, a rehearsal."""
    if device_name is None:
        return REHEARSAL
    return "gpu-" + re.sub(r"[^a-z0-9]+", "-", device_name.lower().removeprefix("nvidia")).strip("-")


def chosen_parts(parts: list[Part], names: Collection[str], done: Collection[str]) -> list[Part]:
    """Return the parts to run: those that were named, else the planned ones, and if all are done the others."""
    if names:
        return [part for part in parts if part.name in names]
    waiting = [part for part in parts if part.is_planned and part.name not in done]
    return waiting or [part for part in parts if not part.is_planned]


def run_plan(
    parts_in: Callable[[Path], list[Part]],
    folder: Path,
    *,
    has_gpu: bool,
    limit_s: float,
    names: Collection[str] = (),
) -> bool:
    """Run parts, or their rehearsals, within the time of a call.

    Args:
        parts_in: returns all parts, given a folder for their files.
        folder: of the device; what it holds is not done again, unless it was named.
        has_gpu: whether the parts are run or rehearsed.
        limit_s: for all of them.
        names: the parts to run; see `chosen_parts`.

    Returns:
        Whether all went well.
    """
    deadline = time.monotonic() + limit_s
    caches = [(Path(os.environ.get("TRITON_CACHE_DIR", folder / "triton")), "triton")]
    if "GRAPHDECODE_CACHE_DIR" in os.environ:
        caches.append((Path(os.environ["GRAPHDECODE_CACHE_DIR"]), "graphdecode"))
    kernels = KernelCache(caches, folder)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        parts = parts_in(Path(scratch))
        done = _take_done(parts, folder / Archive.SUMMARY, has_gpu=has_gpu)
        archive = Archive(folder, Path(scratch))
        archive.refresh(parts)
        ran = [part for part in chosen_parts(parts, names, done) if part.name in names or part.name not in done]
        for part in ran:
            run_part(part, Path(scratch), deadline, archive, parts, has_gpu=has_gpu)
            archive.refresh(parts)
            kernels.keep()
            print(f"{part.name:24} {part.state:18} {part.seconds:7.1f} of {part.limit_s:.0f} s", flush=True)
            if not part.is_well:
                print("\n".join("    " + line for line in part.tail.splitlines()[-LINES_OF_A_FAILURE:]), flush=True)
        archive.refresh(parts)
    return all(part.is_well for part in ran)


def _take_done(parts: list[Part], summary: Path, *, has_gpu: bool) -> set[str]:
    """Take over what an earlier call has finished on the same kind of device; return the names of those parts."""
    found = {each["name"]: each for each in json.loads(summary.read_text())} if summary.exists() else {}
    done = set()
    for part in parts:
        known = found.get(part.name)
        if known is not None and known["state"] == "ok" and known["on_gpu"] == has_gpu:
            part.state, part.on_gpu, part.seconds, part.tail = "ok", has_gpu, known["seconds"], known["tail"]
            done.add(part.name)
    return done


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

    part.run(command, log, min(part.limit_s, left) if has_gpu else left, meanwhile)
    shown.show()
