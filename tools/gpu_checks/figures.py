"""Measured figures: printed, and appended at once to a file as a line of JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = "GPU_CHECK_FIGURES"  # the environment variable that names the file


class Figures:
    """The figures in a file, by key.

    Args:
        file: None: the file that the environment names.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = Path(os.environ[FILE]) if file is None else file
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.known: dict[str, dict[str, Any]] = {}
        for line in lines:
            try:
                found = json.loads(line)
            except ValueError:  # the last line, incomplete if the machine was lost
                continue
            self.known[found.pop("key")] = found

    def __contains__(self, key: str) -> bool:
        return key in self.known

    def add(self, key: str, **found: Any) -> None:
        """Print and store a figure."""
        self.known[key] = found
        line = json.dumps({"key": key} | found, default=str)
        with self._file.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
