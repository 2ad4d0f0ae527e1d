"""`check`: reports what a graph would get wrong in a step, before anything is captured."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphdecode.buffers import StepBuffers
from graphdecode.graphs.errors import CaptureError, Refuse, caller, definition_of
from graphdecode.graphs.inspect.observer import Schema, StepObserver, TensorArg, observed
from graphdecode.graphs.inspect.owners import Owners
from graphdecode.graphs.inspect.trace import StepTracer, compare
from graphdecode.graphs.step_graph import Step, check_arguments, slots_restored

# magnitudes of hostile values: finite in float16, as masks may multiply; one is small, as a step may saturate
_HOSTILE = (1e4, 3e4, 2.0)
_MORE_THAN_A_RACE = 4.0  # rows that are mixed differ more than repetitions do
# these explain a difference between two runs
_EXPLAIN_DIFFERENCES = {"host-read", "data-dependent-shape", "failed"}

_Location = tuple[str | None, int | None]


@dataclass(frozen=True)
class Finding:
    """One hazard of a step."""

    kind: str  # a key of `HAZARDS`
    operator: str  # the operator to blame
    file: str | None  # file and line in the step's code
    line: int | None  # its number
    reason: str  # what a graph would get wrong
    remedy: str  # what to do instead

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file else ""
        source = linecache.getline(self.file, self.line).strip() if self.file and self.line else ""
        lines = [f"{where}{self.kind}: {self.operator}"]
        if source:
            lines.append(f"    {source}")
        return "\n".join([*lines, f"  why: {self.reason}", f"  instead: {self.remedy}"])


def check(
    step: Step,
    buffers: StepBuffers,
    *,
    constants: Iterable[Tensor | torch.nn.Module] = (),
    between_steps: Callable[[], None] | None = None,
) -> list[Finding]:
    """Return the hazards of a step in order; a step that can be captured has none.

    The step runs twice, with different contents of all slots and different numbers of live rows: baked numbers, slices
    and branches differ between the runs. If nothing is found, further runs have hostile values in padding rows. Slots
    are restored; adopted tensors are not.

    Args:
        step: the step to capture.
        buffers: its buffers.
        constants: tensors and modules that the step only reads.
        between_steps: host code that runs between two steps (counters, other lengths).
    """
    check_arguments(step, buffers)
    owners = Owners(buffers, constants)
    findings: dict[tuple[str, str | None, int | None], Finding] = {}

    def collect(error: CaptureError) -> None:
        # one finding per kind and line: a method and the operators that it calls are one
        finding = Finding(error.kind, error.operator, error.file, error.line, error.reason, error.remedy)
        findings.setdefault((error.kind, error.file, error.line), finding)

    traces, lost = [], []
    with slots_restored(buffers):
        for seed in range(2):
            if seed and between_steps is not None:
                between_steps()
            _fill(buffers, seed)
            tracer = StepTracer(owners, collect)
            lost.append(_run(step, buffers, tracer))
            traces.append(tracer.trace)
    if not any(finding.kind in _EXPLAIN_DIFFERENCES for finding in findings.values()):
        compare(*traces, refuse=collect)
    if not findings and not any(traces):
        collect(CaptureError("unseen-work", "the step", "it ran no operator", definition_of(step)))
    if not findings and (error := lost[0] or lost[1]) is not None:
        collect(error)
    if not findings:  # else the runs are not comparable
        with slots_restored(buffers):
            _find_mixed_rows(step, buffers, owners, collect)
    return list(findings.values())


def _run(step: Step, buffers: StepBuffers, tracer: StepTracer) -> CaptureError | None:
    """Run the step; return why its result is lost, if it is."""
    lost = None
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}
    try:
        with observed(tracer, buffers.narrow(buffers.max_batch_size), step=step) as batch:
            result = step(batch)
        lost = tracer.lost_result(result, tracer.trace[-1][2] if tracer.trace else definition_of(step))
    except CaptureError as error:
        tracer.refuse(error)
    for name, tensor in buffers.tensors.items():
        if tensor.data_ptr() != addresses[name]:
            detail = f"the memory of {name} was replaced"
            tracer.refuse(CaptureError("moved", f"buffers.{name}", detail, definition_of(step)))
    return lost


def _fill(buffers: StepBuffers, seed: int) -> None:
    """Fill the slots with small values, and set the number of live rows, both by the seed."""
    generator = torch.Generator().manual_seed(seed)
    for slot in buffers.slots.values():
        tensor = buffers.tensors[slot.name]
        if slot.dtype.is_floating_point:
            values = torch.rand(tensor.shape, generator=generator)
        elif slot.batch_dim is None:
            continue  # counters and flags of the whole batch stay
        else:
            values = torch.randint(0, 2, tensor.shape, generator=generator)
        tensor.copy_(values.to(slot.dtype))
    buffers.set_live_rows(max(buffers.max_batch_size - seed, 1))


def _distance(before: Tensor, after: Tensor) -> float:
    """Return the largest difference; 0 only for the same bits, and infinite where one is no number."""
    if torch.equal(before.view(-1).view(torch.uint8), after.view(-1).view(torch.uint8)):
        return 0.0
    off = (before.double() - after.double()).abs().max().item()
    return off if 0.0 < off < math.inf else math.inf


class _RowWatcher(StepObserver):
    """Records the live rows of a slot (all of it, if it has no rows) after each operator that writes into it."""

    def __init__(self, owners: Owners, live_rows: int) -> None:
        super().__init__(owners, lambda _: None)
        self.writes: list[tuple[str, str, _Location, Tensor]] = []
        self._buffers, self._live_rows = owners.buffers, live_rows

    def on_operator(self, schema: Schema, args: tuple, kwargs: dict, inputs: Sequence[TensorArg], result: Any) -> None:
        """Record the slots that the operator has written."""
        for _, tensor, is_written, _ in inputs:
            slot = self._buffers.slots.get((is_written and self.owner_of(tensor)) or "")
            if slot is not None:
                live = self._buffers.tensors[slot.name]
                if slot.batch_dim is not None:
                    live = live.narrow(slot.batch_dim, 0, slot.rows(self._live_rows))
                written = live.clone(memory_format=torch.contiguous_format)
                self.writes.append((slot.name, schema.overload, caller(), written))


def _find_mixed_rows(step: Step, buffers: StepBuffers, owners: Owners, refuse: Refuse) -> None:
    """Refuse writes to live rows that depend on the contents of padding rows (hostile floats, pads, 0 or 1)."""
    live_rows = max(buffers.max_batch_size // 2, 1)
    if live_rows == buffers.max_batch_size:
        return
    with_rows = {slot.name for slot, _ in buffers.tails(live_rows)}
    saved = {name: tensor.clone() for name, tensor in buffers.tensors.items() if name not in with_rows}

    def restore() -> None:
        for name, values in saved.items():
            buffers.tensors[name].copy_(values)

    def written(seed: int, hostile: float) -> list[tuple[str, str, _Location, Tensor]]:
        restore()
        _fill(buffers, 0)
        numbers = torch.Generator().manual_seed(seed)
        buffers.set_live_rows(live_rows)
        for slot, tail in buffers.tails(live_rows):
            if slot.dtype.is_floating_point:
                tail.copy_(((torch.rand(tail.shape, generator=numbers) * 2 - 1) * hostile).to(slot.dtype))
            else:
                tail.fill_(slot.pad if not seed else slot.pad == 0)
        watcher = _RowWatcher(owners, live_rows)
        with suppress(CaptureError), observed(watcher, buffers.narrow(buffers.max_batch_size), step=step) as batch:
            step(batch)
        return watcher.writes

    def mixed(runs: list[list[tuple[str, str, _Location, Tensor]]]) -> dict[str, tuple[str, _Location, float]]:
        differing: dict[str, tuple[str, _Location, float]] = {}
        for (slot_name, operator, location, before), *others in zip(*runs, strict=False):
            if off := max(_distance(before, after) for *_, after in others):
                differing.setdefault(slot_name, (operator, location, off))
        return differing

    runs = [written(*each) for each in enumerate(_HOSTILE)]
    mixed_slots = mixed(runs)
    # on a GPU rows that name the same memory, by ids of 0 and 1, race for it: a run differs as much from its repetition
    again = enumerate(_HOSTILE) if mixed_slots else ()
    repeated = [mixed([run, written(*each)]) for run, each in zip(runs, again, strict=False)]
    restore()
    for slot_name, (operator, location, off) in mixed_slots.items():
        if off > _MORE_THAN_A_RACE * max((each[slot_name][2] for each in repeated if slot_name in each), default=0.0):
            whose = "live rows of slot" if slot_name in with_rows else "slot"
            refuse(CaptureError("mixed-rows", operator, f"{whose} {slot_name!r}", location))
