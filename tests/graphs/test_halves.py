"""A step in two graphs: what the host writes between them is read by the second, and all else is as in one."""

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from graphdecode import Slot, StepBuffers
from graphdecode.buckets import ShapeLadder, StepShape
from graphdecode.buffers import Batch
from graphdecode.graphs import GraphTable


@pytest.fixture
def buffers(device: str) -> StepBuffers:
    slots = [
        Slot("x", ("batch", 4), torch.float32),
        Slot("between", ("batch", 4), torch.float32),
        Slot("mask", ("batch", 4), torch.int32, staged="masks"),
        Slot("y", ("batch", 4), torch.float32),
        Slot("steps", (1,), torch.int32),
    ]
    return StepBuffers(slots, max_batch_size=8, device=device)


def compute(batch: Batch) -> None:
    batch.between.copy_(torch.sin(batch.x) * 3.0 + 1.0)


def choose(batch: Batch) -> None:
    batch.y.copy_(batch.between * batch.mask)
    batch.x.add_(batch.y)
    batch.steps.add_(1)


def whole(batch: Batch) -> None:
    compute(batch)
    choose(batch)


PARTS: dict[str, Callable[[Batch], None]] = {"whole": whole, "logits": compute, "choose": choose}


def made(
    buffers: StepBuffers,
    rows: Sequence[int] = (2, 4, 8),
    parts: Mapping[str, Callable[[Batch], None]] = PARTS,
    backend: str = "auto",
) -> GraphTable:
    shapes = [StepShape(bucket, part=part) for bucket in rows for part in parts]
    graphs = GraphTable(lambda shape, batch: parts[shape.part](batch), buffers, ShapeLadder(shapes, 8), backend=backend)
    graphs.capture(progress=False)
    return graphs


def masked(buffers: StepBuffers, rows: int, value: int) -> None:
    buffers.staging("masks")["mask"][:rows] = value
    buffers.upload_rows("mask", range(rows))


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_law_5_the_halves_give_the_bits_of_the_whole(buffers: StepBuffers, backend: str) -> None:
    graphs = made(buffers, backend=backend)
    found = []
    for in_halves in (False, True):
        buffers.upload("masks", 0)
        for name in ("x", "y", "steps"):
            buffers.tensors[name].fill_(0.25 if name == "x" else 0)
        for step, rows in enumerate([3, 3, 8, 1, 3, 2, 3]):
            if in_halves:
                ran = graphs.run(
                    StepShape(rows, part="logits"), meanwhile=lambda rows=rows, step=step: masked(buffers, rows, step)
                )
                assert ran is not None
                assert ran.rows >= rows
            else:
                masked(buffers, rows, step)
                graphs.run(StepShape(rows))
        found.append((buffers.x.clone(), buffers.y.clone(), buffers.steps.clone()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][2].item() == 7
    assert {bucket.bucket: bucket.replays for bucket in graphs.report().buckets} == {2: 4, 4: 8, 8: 2}


def test_a_whole_step_does_not_wait_for_host_work(buffers: StepBuffers) -> None:
    graphs = made(buffers)
    before = {name: tensor.clone() for name, tensor in buffers.tensors.items()}
    with pytest.raises(RuntimeError, match="halves"):
        graphs.run(StepShape(3), meanwhile=lambda: None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in buffers.tensors.items())


def test_halves_are_captured_once_and_only_if_used(buffers: StepBuffers) -> None:
    graphs = made(buffers)
    before = {bucket.bucket: bucket.capture_ms for bucket in graphs.report().buckets}
    for _ in range(3):
        graphs.run(StepShape(3, part="logits"), meanwhile=lambda: None)
    after = {bucket.bucket: bucket.capture_ms for bucket in graphs.report().buckets}
    assert [bucket for bucket in before if after[bucket] > before[bucket]] == [4]
    for _ in range(3):
        graphs.run(StepShape(3, part="logits"), meanwhile=lambda: None)
    assert {bucket.bucket: bucket.capture_ms for bucket in graphs.report().buckets} == after


def test_frozen_graphs_are_not_captured_in_halves_and_run_all_the_same(buffers: StepBuffers) -> None:
    graphs = made(buffers)
    graphs.freeze()
    buffers.x.fill_(1.0)
    graphs.run(StepShape(2, part="logits"), meanwhile=lambda: masked(buffers, 2, 1))
    assert torch.equal(buffers.y[:2], torch.sin(torch.ones_like(buffers.x[:2])) * 3.0 + 1.0)


def test_halves_that_cannot_be_captured_stay_eager(buffers: StepBuffers) -> None:
    def reads(batch: Batch) -> None:
        batch.x.add_(float(batch.steps.sum()) * 0.0)
        choose(batch)

    graphs = made(buffers, [8], PARTS | {"choose": reads})
    with pytest.warns(RuntimeWarning, match="halves of bucket 8 .*host-read"):
        graphs.run(StepShape(8, part="logits"), meanwhile=lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs.run(StepShape(8, part="logits"), meanwhile=lambda: None)
    assert buffers.steps.item() == 2


def test_host_work_runs_beside_the_first_half(buffers: StepBuffers) -> None:
    order: list[str] = []
    on_the_way, begun = threading.Event(), threading.Event()

    def first(batch: Batch) -> None:
        begun.set()
        if on_the_way.is_set():
            assert written.wait(60), "the host comes while this runs"
        compute(batch)
        order.append("first")

    written = threading.Event()
    graphs = made(buffers, [8], PARTS | {"logits": first}, backend="eager")
    on_the_way.set()
    begun.clear()

    def meanwhile() -> None:
        if buffers.device.type == "cpu":
            assert begun.wait(60)
        order.append("host")
        written.set()

    if buffers.device.type != "cpu":
        written.set()
    graphs.run(StepShape(8, part="logits"), meanwhile=meanwhile)
    assert sorted(order) == ["first", "host"]


def test_an_error_of_host_work_is_raised_and_the_next_step_runs(buffers: StepBuffers) -> None:
    graphs = made(buffers)
    graphs.run(StepShape(2, part="logits"), meanwhile=lambda: None)
    with pytest.raises(ZeroDivisionError):
        graphs.run(StepShape(2, part="logits"), meanwhile=lambda: 1 // 0)
    graphs.run(StepShape(2, part="logits"), meanwhile=lambda: None)
    assert buffers.steps.item() == 2


def test_halves_of_a_table_without_halves_are_refused(buffers: StepBuffers) -> None:
    graphs = made(buffers, [8], {"whole": whole})
    with pytest.raises(ValueError, match="part 'logits'"):
        graphs.run(StepShape(1, part="logits"), meanwhile=lambda: None)
