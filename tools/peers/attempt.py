"""Calls into other people's code, which may raise anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_REASON_LENGTH = 200


def attempt(call: Callable[[], Result]) -> tuple[Result | None, str]:
    """Return what a call gives and "", or None and why it gives nothing, in one line."""
    try:
        return call(), ""
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        return None, f"{type(error).__name__}: {first_line}"[:_REASON_LENGTH]
