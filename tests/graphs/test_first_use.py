"""Capture at first use: what runs meanwhile, what is captured when, and what a bucket that cannot be captured does."""

import warnings

import pytest
import torch

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch


@pytest.fixture
def buffers(device: str) -> StepBuffers:
    slots = [Slot("x", ("batch", 4), torch.float32), Slot("steps", (1,), torch.int32)]
    return StepBuffers(slots, max_batch_size=8, device=device)


def step(batch: Batch) -> None:
    batch.x.add_((torch.arange(batch.size, device=batch.x.device) < batch.live_rows)[:, None])
    batch.steps.add_(1)


def lazy(buffers: StepBuffers, run=step) -> GraphManager:
    graphs = GraphManager(run, buffers, [2, 4, 8], capture_when="first-use")
    graphs.capture(progress=False)
    return graphs


def states(graphs: GraphManager) -> dict[int, str]:
    return {bucket.bucket: bucket.state for bucket in graphs.report().buckets}


def test_nothing_is_captured_before_it_is_used(buffers: StepBuffers) -> None:
    graphs = lazy(buffers)
    assert states(graphs) == {2: "waiting", 4: "waiting", 8: "waiting"}
    assert graphs.replay(3) == 4
    assert states(graphs) == {2: "waiting", 4: "captured", 8: "waiting"}


def test_a_first_step_runs_padded_in_the_next_captured_bucket(buffers: StepBuffers) -> None:
    graphs = lazy(buffers)
    graphs.replay(8)
    assert graphs.replay(2) == 8
    assert graphs.replay(2) == 2
    replays = {bucket.bucket: bucket.replays for bucket in graphs.report().buckets}
    assert replays == {2: 1, 4: 0, 8: 1}


def test_every_step_runs_exactly_once(buffers: StepBuffers) -> None:
    graphs = lazy(buffers)
    for batch_size in (5, 1, 1, 3, 8, 2, 4):
        graphs.replay(batch_size)
    assert buffers.steps.item() == 7
    assert buffers.x[0].tolist() == [7.0] * 4, "row 0 is live in every step"


def test_a_bucket_that_cannot_be_captured_stays_eager_and_is_reported_once(buffers: StepBuffers) -> None:
    def reads_in_small_buckets(batch: Batch) -> None:
        if batch.size == 2:
            batch.x.add_(float(batch.steps.sum()) * 0.0)
        step(batch)

    graphs = lazy(buffers, reads_in_small_buckets)
    with pytest.warns(RuntimeWarning, match="bucket 2 .*test_first_use.py:.*host-read"):
        assert graphs.replay(1) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert graphs.replay(1) == 2
        assert graphs.replay(8) == 8
    assert buffers.steps.item() == 5
    assert states(graphs) == {2: "eager", 4: "waiting", 8: "captured"}
    (failed,) = (bucket for bucket in graphs.report().buckets if bucket.error)
    assert failed.bucket == 2
    assert "host-read" in str(graphs.report())


def test_frozen_graphs_capture_nothing_more_but_every_batch_size_runs(buffers: StepBuffers) -> None:
    graphs = lazy(buffers)
    graphs.replay(8)
    graphs.freeze()
    assert graphs.replay(3) == 8
    assert states(graphs) == {2: "waiting", 4: "waiting", 8: "captured"}


def test_a_capture_time_that_does_not_exist_is_refused(buffers: StepBuffers) -> None:
    with pytest.raises(ValueError, match="capture_when .*'later'"):
        GraphManager(step, buffers, [8], capture_when="later")


def test_idle_captures_go_from_the_largest_shape(buffers: StepBuffers) -> None:
    graphs = GraphManager(step, buffers, [2, 4, 8], capture_when="idle")
    assert not graphs.capture_waiting(), "nothing is ready for it before capture()"
    graphs.capture(progress=False)
    graphs.replay(3)
    assert states(graphs) == {2: "waiting", 4: "waiting", 8: "waiting"}, "a first output does not wait for a capture"
    assert graphs.capture_waiting()
    assert states(graphs) == {2: "waiting", 4: "captured", 8: "waiting"}, "what was asked for comes first"
    assert graphs.capture_waiting()
    assert states(graphs) == {2: "waiting", 4: "captured", 8: "captured"}
    assert graphs.capture_waiting()
    assert not graphs.capture_waiting()
    assert set(states(graphs).values()) == {"captured"}
    assert buffers.steps.item() == 1, "no step of these was anybody's"


def test_idle_captures_a_shape_after_its_second_step(buffers: StepBuffers) -> None:
    graphs = GraphManager(step, buffers, [2, 4, 8], capture_when="idle")
    graphs.capture(progress=False)
    for count, state in ((1, "waiting"), (2, "captured")):
        graphs.replay(3)
        assert (states(graphs)[4], buffers.steps.item()) == (state, count)


def test_nothing_is_captured_when_busy_or_frozen(buffers: StepBuffers) -> None:
    assert not lazy(buffers).capture_waiting()
    graphs = GraphManager(step, buffers, [2, 4, 8], capture_when="idle")
    graphs.capture(progress=False)
    graphs.replay(3)
    graphs.freeze()
    assert not graphs.capture_waiting()
