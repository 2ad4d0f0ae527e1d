"""Copies of the package in which some lines are others: what an extension changes, counted in files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def changed_copy(folder: Path, edits: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Copy the package; in some of its files, put something in the place of texts that stand there once."""
    for name in ("graphdecode", "kernels"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in edits.items():
        file = folder / name
        text = file.read_text()
        for before, after in changes:
            assert text.count(before) == 1, f"{name} was rewritten: make this change anew: {before}"
            text = text.replace(before, after)
        file.write_text(text)


def run_copy(folder: Path, *arguments: str, **environment: str) -> str:
    """Run Python with a copy of the package; return its standard output."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
