"""The results of a call, in one archive that is always complete, and a summary."""

from __future__ import annotations

import json
import os
import tarfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from gpu_checks.part import Part

_REFRESH_S = 20.0
KERNELS = "kernels.tar.xz"  # Triton's compiled kernels, for a later call
_GROUP = "__grp__"  # files that name those of one kernel, with their folder
_PARTS = (".cubin", ".json", ".so")  # what a launch reads; texts of the compiler's stages are left out


class KernelCache:
    """Triton's cache, kept as one file in a folder.

    Args:
        cache: Triton's folder.
        folder: of the file.
    """

    def __init__(self, cache: Path, folder: Path) -> None:
        self._cache, self._file = cache, folder / KERNELS
        self._count = 0
        if self._file.exists():
            with tarfile.open(self._file) as kept:
                kept.extractall(cache, filter="data")
            for group in cache.glob(f"*/{_GROUP}*"):
                names = json.loads(group.read_text())["child_paths"]
                found = {name: str(group.parent / name) for name in names if (group.parent / name).exists()}
                group.write_text(json.dumps({"child_paths": found}))
            self._count = self._entries()

    def _entries(self) -> int:
        return sum(1 for _ in self._cache.iterdir()) if self._cache.exists() else 0

    def keep(self) -> None:
        """Write the file again if something was compiled."""
        if self._entries() == self._count:
            return
        self._count = self._entries()
        temporary = self._file.with_name(f".{KERNELS}")
        with tarfile.open(temporary, "w:xz", preset=1) as kept:
            for path in sorted(self._cache.glob("*/*")):
                if path.suffix in _PARTS and path.is_file():
                    kept.add(path, arcname=str(path.relative_to(self._cache)))
        os.replace(temporary, self._file)


class Archive:
    """`CALL.tar.gz` and `CALL.json` in a folder; each is replaced as a whole.

    Args:
        call: "A" to "D".
        scratch: the archive's content: logs and files of the parts.
    """

    def __init__(self, folder: Path, call: str, scratch: Path) -> None:
        self.folder = folder
        self._path, self._summary = folder / f"{call}.tar.gz", folder / f"{call}.json"
        self._call, self._scratch = call, scratch
        self._refreshed = time.monotonic()

    def refresh(self, parts: Iterable[Part]) -> None:
        """Write both files."""
        summary = json.dumps([asdict(part) for part in parts], indent=1)
        (self._scratch / "summary.json").write_text(summary)
        temporary = self._path.with_name(f".{self._path.name}")
        with tarfile.open(temporary, "w:gz") as archive:
            archive.add(self._scratch, arcname=f"gpu-check-{self._call}")
        os.replace(temporary, self._path)
        temporary.write_text(summary)
        os.replace(temporary, self._summary)
        self._refreshed = time.monotonic()

    def refresh_now_and_then(self, parts: Iterable[Part]) -> None:
        """Write both files if the last time was long ago, which keeps the output of a part that hangs."""
        if time.monotonic() - self._refreshed > _REFRESH_S:
            self.refresh(parts)
