"""Runs of a step that leave no trace in the caller's slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphdecode.buffers import StepBuffers


@contextmanager
def slots_restored(buffers: StepBuffers) -> Iterator[None]:
    """Give the slots, and how many rows are live, back as they were. Adopted tensors are not saved."""
    saved = {name: buffers.tensors[name].clone() for name in buffers.slots}
    live = buffers.live_row_count
    try:
        yield
    finally:
        buffers.set_live_rows(live)
        for name, values in saved.items():
            tensor = buffers.tensors[name]
            if tensor.shape == values.shape:
                tensor.copy_(values)


@contextmanager
def no_row_live(buffers: StepBuffers) -> Iterator[None]:
    """Make every row padding for a while, so that a step touches nothing but the slots, which are given back."""
    with slots_restored(buffers):
        buffers.pad(0)
        buffers.set_live_rows(0)
        yield
