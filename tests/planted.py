"""Faults that are planted into production code, for tests that have to find them."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest


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
