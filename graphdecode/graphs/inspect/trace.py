"""Traces of a step's operators: two runs that differ have a Python number, a branch or a loop baked into a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphdecode.graphs.errors import CaptureError, Refuse, caller
from graphdecode.graphs.inspect.observer import Schema, StepObserver, TensorArg, mapped
from graphdecode.graphs.inspect.owners import Owners, storage_key

# an operator; its arguments and results; file and line
Call = tuple[str, Any, tuple[str | None, int | None]]
# values that are compared; others (script objects, generators) are the same object or not
_PLAIN = (int, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Object:
    """An object, kept alive, and equal to itself alone; torch wraps a script object anew for each call."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash(self._value) if isinstance(self._value, torch.ScriptObject) else id(self._value)

    def __str__(self) -> str:
        return f"an object of {type(self._value).__name__}"

    __repr__ = __str__


class StepTracer(StepObserver):
    """Collects a trace of operators, in which values and layouts are as they will be in another run."""

    def __init__(self, owners: Owners, collect: Refuse | None = None) -> None:
        super().__init__(owners, collect)
        self.trace: list[Call] = []
        self._intermediates: dict[int | None, str] = {}

    def on_operator(self, schema: Schema, args: tuple, kwargs: dict, inputs: Sequence[TensorArg], result: Any) -> None:
        """Add the operator with its arguments and results to the trace."""
        self.trace.append((schema.overload, mapped(self._describe, (args, kwargs, result)), caller()))

    def _describe(self, value: Any) -> Any:
        if isinstance(value, float):
            return repr(value)  # NaN equals NaN
        if not isinstance(value, Tensor):
            return value if isinstance(value, _PLAIN) else _Object(value)
        key = storage_key(value)
        if key is None:
            return f"opaque {list(value.shape)}"
        if key in self.literals:
            return repr(self.literals[key].item())
        name = self.owner_of(value)
        name = name or self._intermediates.setdefault(key, f"intermediate {len(self._intermediates)}")
        return f"{name} {list(value.shape)} {value.dtype}, offset {value.storage_offset()}, strides {value.stride()}"


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
