"""Pads are right whoever ran before: how far the rows behind the live ones hold pads is the buffers' to know."""

import random

import pytest
import torch

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch

CAPACITY = 8
SLOTS = [
    Slot("x", ("batch",), torch.float32),
    Slot("staged", ("batch",), torch.float32, staged="rows"),
    Slot("sum", (1,), torch.float32),
]


def total(batch: Batch) -> None:
    batch.sum.copy_(batch.x.sum())


def count_up(batch: Batch) -> None:
    """Write into every row, live or not."""
    batch.x.add_(1.0)


@pytest.fixture
def buffers(device: str) -> StepBuffers:
    return StepBuffers(SLOTS, max_batch_size=CAPACITY, device=device)


def managers(buffers: StepBuffers, *steps: object, ladder: tuple[int, ...] = (CAPACITY,)) -> list[GraphManager]:
    made = [GraphManager(step, buffers, ladder) for step in steps]  # type: ignore[arg-type]
    for graphs in made:
        graphs.capture(progress=False)
    return made


def test_an_upload_between_two_managers_leaves_no_stale_pads(buffers: StepBuffers) -> None:
    """Eight rows of ones, then three: the sum is 3, though the first manager has run with three rows before."""
    first, second = managers(buffers, total, total)
    buffers.x[:3] = 1.0
    first.replay(3)
    buffers.upload("rows", CAPACITY)
    buffers.x.fill_(1.0)
    second.replay(CAPACITY)
    buffers.upload("rows", 3)
    first.replay(3)
    assert buffers.sum.item() == 3.0


def test_padding_written_by_another_manager_is_reset(buffers: StepBuffers) -> None:
    summing, counting = managers(buffers, total, count_up)
    for turn in range(1, 4):
        counting.replay(3)
        summing.replay(3)
        assert buffers.sum.item() == 3.0 * turn


def test_a_larger_bucket_is_padded_to_its_end(buffers: StepBuffers) -> None:
    small, large = managers(buffers, total, ladder=(4,))[0], managers(buffers, total)[0]
    buffers.upload("rows", CAPACITY)
    buffers.x.fill_(1.0)
    buffers.upload("rows", 3)
    small.replay(3)
    assert buffers.sum.item() == 3.0
    large.replay(3)
    assert buffers.sum.item() == 3.0


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_managers_uploads_and_rows_sums_the_live_rows_alone(buffers: StepBuffers, seed: int) -> None:
    chosen = random.Random(seed)
    made = managers(buffers, total, total, count_up, ladder=(2, 4, CAPACITY))
    rows = 1
    for _ in range(60):
        if chosen.random() < 0.5:
            rows = chosen.randint(1, CAPACITY)
            if chosen.random() < 0.6:
                buffers.upload("rows", rows)
            else:
                buffers.set_live_rows(rows)
            if chosen.random() < 0.5:
                buffers.x[:rows] = 1.0
        graphs = chosen.choice(made)
        expected = buffers.x[:rows].sum().item()
        graphs.replay(rows)
        if graphs is not made[2]:
            assert buffers.sum.item() == expected, (seed, rows)


def test_consecutive_steps_fill_no_padding(buffers: StepBuffers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 8: with the same manager and as many rows."""
    (graphs,) = managers(buffers, total, ladder=(4, CAPACITY))
    graphs.replay(3)
    monkeypatch.setattr(StepBuffers, "pad", lambda *_: pytest.fail("padded again"))
    graphs.replay(3)
    buffers.upload("rows", 3)
    graphs.replay(3)
