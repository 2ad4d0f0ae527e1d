"""Figures as they are measured: printed, and a line of JSON each in a file that outlives whatever comes next."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = "GPU_CHECK_FIGURES"  # names the file


class Figures:
    """The figures of a folder; a key that is known need not be measured again.

    Args:
        file: None: the one that the environment names.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = Path(os.environ[FILE]) if file is None else file
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.known: dict[str, dict[str, Any]] = {}
        for line in lines:
            try:
                found = json.loads(line)
            except ValueError:  # the last one, where a machine was taken away
                continue
            self.known[found.pop("key")] = found

    def __contains__(self, key: str) -> bool:
        return key in self.known

    def add(self, key: str, **found: Any) -> None:
        """Keep a figure."""
        self.known[key] = found
        line = json.dumps({"key": key} | found, default=str)
        with self._file.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
