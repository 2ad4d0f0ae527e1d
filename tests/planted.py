"""Faults that are planted into production code, for tests that have to find them; and changed copies of the package."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """A line of the production code as it is, and as somebody might have written it.

    Attributes:
        owner: the class or module.
        name: of its function.
        line: a part of its source that is there once.
        wrong: what to put there.
    """

    owner: Any
    name: str
    line: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.name}: {self.line} -> {self.wrong}"

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        function = inspect.unwrap(getattr(self.owner, self.name))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.line) == 1, f"{self.name} was rewritten: plant this fault anew"
        made: dict[str, Any] = {}
        code = "from __future__ import annotations\n" + source.replace(self.line, self.wrong)
        exec(code, function.__globals__, made)
        patch.setattr(self.owner, self.name, made[self.name])


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
