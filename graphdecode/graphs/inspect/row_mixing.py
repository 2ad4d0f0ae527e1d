"""Finds steps in which live rows, or what all rows share, depend on the rows past them: wrong in a padded bucket."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from graphdecode.buffers import StepBuffers
from graphdecode.graphs.errors import CaptureError, Refuse, caller
from graphdecode.graphs.inspect.observer import StepObserver, leaves, named_arguments, observed
from graphdecode.graphs.inspect.owners import Owners
from graphdecode.graphs.step_graph import Step

# at most, finite also in float16: what a mask multiplies away must be away; and small ones, for a step may saturate
_HOSTILE = (1e4, 3e4, 2.0)


class _RowWatcher(StepObserver):
    """Keeps what the live rows of a slot, or all of one without rows, hold after each operator that writes into it."""

    def __init__(self, owners: Owners, live_rows: int) -> None:
        super().__init__(owners, lambda _: None)
        self.writes: list[tuple[str, str, tuple[str | None, int | None], Tensor]] = []
        self._buffers = owners.buffers
        self._live_rows = live_rows

    def seen(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Look at the slots that the operator has written."""
        for argument, value in named_arguments(func, args, kwargs):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in leaves(value):
                name = self.owner_of(tensor) if isinstance(tensor, Tensor) else None
                slot = self._buffers.slots.get(name or "")
                if slot is not None:
                    live = self._buffers.tensors[slot.name]
                    if slot.batch_dim is not None:
                        live = live.narrow(slot.batch_dim, 0, slot.rows(self._live_rows))
                    with self.working():
                        bits = live.contiguous().view(-1).view(torch.uint8).clone()
                    self.writes.append((slot.name, str(func), caller(), bits))


def find_mixed_rows(
    step: Step, buffers: StepBuffers, owners: Owners, fill: Callable[[StepBuffers, int], None], refuse: Refuse
) -> None:
    """Run a step several times, with other values in the rows past the live ones, and refuse what differs in live rows.

    Slots and adopted tensors are the same at the beginning of all runs, but for those rows: floating-point numbers are
    large there, or small; others, which may be indices, are what the slot declares as its pad, and else 0 or 1.
    Nothing is found where the buffers have one row alone, for then no bucket is padded. The step has no other hazard;
    `fill` fills all slots, in a way that a seed decides; `refuse` takes one error for each slot and line.
    """
    live_rows = max(buffers.max_batch_size // 2, 1)
    if live_rows == buffers.max_batch_size:
        return
    rowless = {
        name: tensor
        for name, tensor in buffers.tensors.items()
        if name not in buffers.slots or buffers.slots[name].batch_dim is None
    }
    saved = {name: tensor.clone() for name, tensor in rowless.items()}
    runs = []
    for seed, hostile in enumerate(_HOSTILE):
        for name, values in saved.items():
            rowless[name].copy_(values)
        _fill_rows(buffers, live_rows, seed, hostile, fill)
        watcher = _RowWatcher(owners, live_rows)
        with suppress(CaptureError), observed(watcher, buffers.narrow(buffers.max_batch_size), step=step) as batch:
            step(batch)
        runs.append(watcher.writes)
    for name, values in saved.items():
        rowless[name].copy_(values)
    told: set[str] = set()
    for (slot, operator, place, before), *others in zip(*runs, strict=False):
        if slot not in told and not all(torch.equal(before, after) for *_, after in others):
            told.add(slot)
            whose = "slot" if buffers.slots[slot].batch_dim is None else "live rows of slot"
            refuse(CaptureError("mixed-rows", operator, f"{whose} {slot!r}", place))


def _fill_rows(
    buffers: StepBuffers, live_rows: int, seed: int, hostile: float, fill: Callable[[StepBuffers, int], None]
) -> None:
    """Fill the live rows alike for all seeds, and the others by the seed, each entry with a number of its own.

    Of equal ones the mean, the softmax and the difference are the same, however large they are.
    """
    numbers = torch.Generator().manual_seed(seed)
    fill(buffers, 0)
    buffers.set_live_rows(live_rows)
    for slot in buffers.slots.values():
        tensor, dim = buffers.tensors[slot.name], slot.batch_dim
        if dim is None:
            continue
        start = slot.rows(live_rows)
        tail = tensor.narrow(dim, start, tensor.shape[dim] - start)
        if slot.dtype.is_floating_point:
            drawn = torch.rand(tail.shape, generator=numbers) * 2 - 1
            tail.copy_((drawn * hostile).to(slot.dtype))
        else:
            tail.fill_(slot.pad if not seed else slot.pad == 0)
