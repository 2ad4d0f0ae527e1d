"""Traces of a step's operators: two runs that differ have a Python number, a branch or a loop baked into a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graphdecode.graphs.errors import CaptureError, Refuse, caller
from graphdecode.graphs.inspect.observer import Given, Schema, StepObserver, flattened
from graphdecode.graphs.inspect.owners import storage_key

# an operator; what of its arguments and results is compared; file and line
Call = tuple[str, Any, tuple[str | None, int | None]]


def numbers_of(observer: StepObserver, args: tuple, kwargs: dict, given: Sequence[Given]) -> list[Any]:
    """Return the numbers and texts among an operator's arguments, and which slots and constants are there.

    Of floats it is their text, since NaN equals NaN.
    """
    found: list[Any] = [observer.owner_of(tensor) for _, tensor, _, key in given if key not in observer.made]
    for leaf in flattened([args, kwargs]):
        if isinstance(leaf, Tensor):
            if observer.literals and (literal := observer.literals.get(storage_key(leaf))) is not None:
                found.append(repr(literal.item()))
        elif isinstance(leaf, float):
            found.append(repr(leaf))
        elif isinstance(leaf, (int, complex, str)):
            found.append(leaf)
    return found


class NumberTracer(StepObserver):
    """Collects the numbers of each operator of a run."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trace: list[Call] = []

    def seen(self, schema: Schema, args: tuple, kwargs: dict, given: Sequence[Given], result: Any) -> None:
        """Add the operator to the trace."""
        self.trace.append((schema.overload, numbers_of(self, args, kwargs, given), caller()))


def compare(first: Sequence[Call], second: Sequence[Call], *, refuse: Refuse) -> None:
    """Refuse each call of the second run that differs from the first run's; after a branch, nothing more."""

    def blame(call: Call, detail: str) -> None:
        refuse(CaptureError("baked-value", call[0], detail, call[2]))

    for before, after in zip(first, second, strict=False):
        if before[0] != after[0]:
            blame(after, f"a branch: {before[0]} at first, {after[0]} the next time")
            return
        if before[1] != after[1]:
            blame(after, _difference(before[1], after[1]))
    if len(first) != len(second):
        longer = max(first, second, key=len)
        detail = f"a branch or a loop: {len(first)} operators at first, {len(second)} the next time"
        blame(longer[min(len(first), len(second))], detail)


def raise_first(error: CaptureError) -> None:
    """Refuse at once."""
    raise error


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        before, after = list(before.values()), [after.get(key) for key in before]
    if isinstance(before, (tuple, list)) and isinstance(after, (tuple, list)) and len(before) == len(after):
        return next((_difference(old, new) for old, new in zip(before, after, strict=True) if old != new), "")
    return f"{before} at first, {after} the next time"
