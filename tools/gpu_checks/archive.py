"""The logs of all parts in one archive that is always complete, a summary, and what was compiled."""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from gpu_checks.part import Part

_REFRESH_S = 20.0
KERNELS = "kernels.tar.xz"  # what Triton and NVRTC compiled, and the choices of products, for a later call
_GROUP = "__grp__"  # files that name those of one kernel, with their folder
_PARTS = (".cubin", ".json", ".so")  # what a launch reads; texts of the compiler's stages are left out


class KernelCache:
    """The caches of compiled kernels and choices, kept as one file in a folder.

    Args:
        caches: folders, each with its name in the file.
        folder: of the file.
    """

    def __init__(self, caches: list[tuple[Path, str]], folder: Path) -> None:
        self._caches, self._file = caches, folder / KERNELS
        self._known: list[tuple[str, int]] = []
        if self._file.exists():
            for cache, name in caches:
                self._give_back(cache, name)
            self._known = self._state()

    def _give_back(self, cache: Path, name: str) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        # files are moved there: one that was written in place would lose what a process has changed of its mapping
        with tempfile.TemporaryDirectory(dir=cache) as scratch, tarfile.open(self._file) as kept:
            for member in kept:
                top, _, rest = member.name.partition("/")
                if top == name and member.isfile():
                    kept.extract(member.replace(name=rest), scratch, filter="data")
                    (cache / rest).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(Path(scratch, rest), cache / rest)
        for group in cache.glob(f"*/{_GROUP}*"):
            names = json.loads(group.read_text())["child_paths"]
            found = {child: str(group.parent / child) for child in names if (group.parent / child).exists()}
            group.write_text(json.dumps({"child_paths": found}))

    def _files(self) -> list[tuple[Path, str]]:
        """Return the files to keep, with their names in the archive."""
        found = (
            (path, f"{name}/{path.relative_to(cache)}") for cache, name in self._caches for path in cache.rglob("*")
        )
        return sorted((path, name) for path, name in found if path.suffix in _PARTS and path.is_file())

    def _state(self) -> list[tuple[str, int]]:
        return [(name, path.stat().st_mtime_ns) for path, name in self._files()]

    def keep(self) -> None:
        """Write the file again if something was added."""
        state = self._state()
        if state == self._known:
            return
        self._known = state
        temporary = self._file.with_name(f".{KERNELS}")
        with tarfile.open(temporary, "w:xz", preset=1) as kept:
            for path, name in self._files():
                kept.add(path, arcname=name)
        os.replace(temporary, self._file)


class Archive:
    """`logs.tar.gz` and `parts.json` in a folder; each is replaced as a whole.

    Args:
        scratch: the archive's content: logs and files of the parts; those of earlier calls are put there.
    """

    SUMMARY, LOGS = "parts.json", "logs.tar.gz"

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self._path, self._summary = folder / self.LOGS, folder / self.SUMMARY
        self._scratch = scratch
        self._refreshed = time.monotonic()
        if self._path.exists():
            with tarfile.open(self._path) as earlier:
                earlier.extractall(scratch, filter="data")

    def refresh(self, parts: Iterable[Part]) -> None:
        """Write both files."""
        summary = json.dumps([asdict(part) for part in parts], indent=1)
        temporary = self._path.with_name(f".{self._path.name}")
        with tarfile.open(temporary, "w:gz") as archive:
            archive.add(self._scratch, arcname=".")
        os.replace(temporary, self._path)
        temporary.write_text(summary)
        os.replace(temporary, self._summary)
        self._refreshed = time.monotonic()

    def refresh_now_and_then(self, parts: Iterable[Part]) -> None:
        """Write both files if the last time was long ago, which keeps the output of a part that hangs."""
        if time.monotonic() - self._refreshed > _REFRESH_S:
            self.refresh(parts)
