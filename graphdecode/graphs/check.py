"""`check`: runs a step under observation and names whatever a graph would get wrong, before anything is captured."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from graphdecode.buffers import Batch, StepBuffers
from graphdecode.graphs.errors import CaptureError, caller
from graphdecode.graphs.observer import HostReadGuard, StepObserver, storage_key

try:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    _KERNEL_CLASSES: tuple[type, ...] = (JITFunction, InterpretedFunction)
except ImportError:
    _KERNEL_CLASSES = ()

Step = Callable[[Batch], None]


@dataclass(frozen=True)
class Finding:
    """One hazard of a step.

    Attributes:
        kind: a key of `HAZARDS`.
        operator: the operator to blame.
        file: of the step's line.
        line: its number.
        why: what a graph would get wrong.
        remedy: what to do instead.
    """

    kind: str
    operator: str
    file: str | None
    line: int | None
    why: str
    remedy: str

    @classmethod
    def of(cls, error: CaptureError) -> Finding:
        """Return the finding that an error stands for."""
        return cls(error.kind, error.operator, error.file, error.line, error.why, error.remedy)

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip() if self.file and self.line else ""
        lines = [f"{self.file}:{self.line}: {self.kind}: {self.operator}"]
        if source:
            lines.append(f"    {source}")
        return "\n".join([*lines, f"  why: {self.why}", f"  instead: {self.remedy}"])


def check(step: Step, buffers: StepBuffers, *, constants: Iterable[Tensor | torch.nn.Module] = ()) -> list[Finding]:
    """Return the hazards of a step, in the order in which they were met; a step that can be captured has none.

    The step is run twice, with different contents in all slots: what a graph would repeat though the second run did
    something else (a number, a slice, a branch) is found by comparing the two. The slots hold the same afterwards as
    before; adopted tensors do not.

    Args:
        step: what would be captured.
        buffers: what it would be captured over.
        constants: tensors and modules that the step only reads.
    """
    tensors = [t for c in constants for t in ([c] if isinstance(c, Tensor) else [*c.parameters(), *c.buffers()])]
    findings: dict[tuple[str, str | None, int | None], Finding] = {}

    def collect(error: CaptureError) -> None:
        # what a method reads on the host shows up again as the operators below it: one line, one finding of a kind
        findings.setdefault((error.kind, error.file, error.line), Finding.of(error))

    runs = []
    with _slots_restored(buffers):
        for seed in range(2):
            _fill(buffers, seed)
            observer = _Tracer(buffers.tensors.values(), tensors, collect)
            _run(step, buffers, observer, collect)
            runs.append(observer.trace)
    if not findings:
        _compare(*runs, collect=collect)
    return list(findings.values())


@dataclass(frozen=True)
class _Call:
    """One operator of a run, in a form that can be compared with another run's."""

    operator: str
    arguments: Any
    file: str | None
    line: int | None


class _Tracer(StepObserver):
    """Collects hazards, and what the step did."""

    def __init__(
        self, owned: Iterable[Tensor], constants: Iterable[Tensor], refuse: Callable[[CaptureError], None]
    ) -> None:
        owned, constants = list(owned), list(constants)
        super().__init__(owned, constants, refuse)
        self.trace: list[_Call] = []
        self.depth = 0
        self._names = {storage_key(tensor): place for place, tensor in enumerate([*owned, *constants])}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.depth += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.depth -= 1

    def seen(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Keep the operator with its numbers, and its tensors by where they are and what they look like."""
        arguments = tree_map(self._describe, (args, kwargs))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self._names.setdefault(storage_key(value), len(self._names))
        self.trace.append(_Call(str(func), arguments, *caller()))

    def _describe(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return str(value) if isinstance(value, float) else value  # NaN equals NaN
        key = storage_key(value)
        place = None if key is None else self._names.setdefault(key, len(self._names))
        layout = None if key is None else (value.storage_offset(), value.stride())
        return ("tensor", place, tuple(value.shape), value.dtype, layout)


def _run(step: Step, buffers: StepBuffers, observer: _Tracer, collect: Callable[[CaptureError], None]) -> None:
    batch = buffers.narrow(buffers.max_batch_size)
    slots = dict(vars(batch))
    moved = {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}
    try:
        with torch.no_grad(), _launches_watched(observer, collect), HostReadGuard(collect), observer:
            step(batch)
    except Exception as error:
        trace, last = error.__traceback__, None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == step.__code__.co_filename:
                last = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            trace = trace.tb_next
        failure = CaptureError("failed", type(error).__name__, str(error).partition("\n")[0])
        failure.file, failure.line = last or (failure.file, failure.line)
        collect(failure)
    for name, value in vars(batch).items():
        if slots.get(name) is not value:
            rebound = CaptureError("moved", f"batch.{name} = ...", "a slot was rebound")
            rebound.file, rebound.line = step.__code__.co_filename, step.__code__.co_firstlineno
            collect(rebound)
    vars(batch).clear()
    vars(batch).update(slots)
    for name, tensor in buffers.tensors.items():
        if tensor.data_ptr() != moved[name]:
            gone = CaptureError("moved", f"buffers.{name}", "its memory was replaced")
            gone.file, gone.line = step.__code__.co_filename, step.__code__.co_firstlineno
            collect(gone)


def _compare(first: list[_Call], second: list[_Call], *, collect: Callable[[CaptureError], None]) -> None:
    for before, after in zip(first, second, strict=False):
        if before.operator != after.operator:
            _blame(after, f"a branch: {before.operator} at first, {after.operator} the next time", collect)
            return
        if before.arguments != after.arguments:
            _blame(after, f"{_difference(before.arguments, after.arguments)}", collect)
    if len(first) != len(second):
        longer = max(first, second, key=len)
        _blame(longer[min(len(first), len(second))], f"{len(first)} operators at first, then {len(second)}", collect)


def _blame(call: _Call, detail: str, collect: Callable[[CaptureError], None]) -> None:
    error = CaptureError("baked-value", call.operator, detail)
    error.file, error.line = call.file, call.line
    collect(error)


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, (tuple, list)) and isinstance(after, (tuple, list)) and len(before) == len(after):
        for old, new in zip(before, after, strict=True):
            if old != new:
                return _difference(old, new)
    if isinstance(before, dict) and isinstance(after, dict):
        return next((_difference(before[key], after.get(key)) for key in before if before[key] != after.get(key)), "")
    return f"{before} at first, {after} the next time"


@contextmanager
def _launches_watched(observer: _Tracer, collect: Callable[[CaptureError], None]) -> Iterator[None]:
    """Report Triton kernels that are launched while no operator is running."""
    originals = [(kernel_class, kernel_class.run) for kernel_class in _KERNEL_CLASSES]  # type: ignore[attr-defined]

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if observer.depth == 0:
                collect(CaptureError("unregistered-launch", getattr(kernel, "__name__", "triton kernel")))
                return None
            return original(kernel, *args, **kwargs)

        return run

    try:
        for kernel_class, original in originals:
            kernel_class.run = watched(original)  # type: ignore[attr-defined]
        yield
    finally:
        for kernel_class, original in originals:
            kernel_class.run = original  # type: ignore[attr-defined]


def _fill(buffers: StepBuffers, seed: int) -> None:
    """Fill the slots with small values, others for each seed, and make other numbers of rows live."""
    generator = torch.Generator().manual_seed(seed)
    for slot in buffers.slots.values():
        tensor = buffers.tensors[slot.name]
        if slot.dtype.is_floating_point:
            values = torch.rand(tensor.shape, generator=generator)
        elif slot.batch_dim is None:
            continue  # counters and flags of the whole batch stay what they are
        else:
            values = torch.randint(0, 2, tensor.shape, generator=generator)
        tensor.copy_(values.to(slot.dtype))
    buffers.live_rows.fill_(max(buffers.max_batch_size - seed, 1))


@contextmanager
def _slots_restored(buffers: StepBuffers) -> Iterator[None]:
    saved = {name: buffers.tensors[name].clone() for name in buffers.slots}
    try:
        yield
    finally:
        for name, values in saved.items():
            if buffers.tensors[name].shape == values.shape:
                buffers.tensors[name].copy_(values)
