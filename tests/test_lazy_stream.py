"""The stand-in for a device's streams: it is as late as a device may be, and no later."""

from collections.abc import Iterator

import pytest
import torch
from lazy_device import installed
from lazy_stream import DEVICE, GARBAGE, LazyStreams, Mark

SEEDS = range(20)


@pytest.fixture(params=SEEDS[:3])
def streams(request: pytest.FixtureRequest) -> Iterator[LazyStreams]:
    with installed(request.param) as made:
        yield made


def on_device(value: int) -> torch.Tensor:
    return torch.full((4,), value, device=DEVICE)


def pinned(value: int) -> torch.Tensor:
    return torch.full((4,), value, pin_memory=True)


def outcomes(seen: list[int]) -> set[int]:
    assert len(seen) == len(SEEDS)
    return set(seen)


def test_what_a_copy_brings_to_the_host_may_be_there_before_its_event_and_is_there_behind_it() -> None:
    early = []
    for seed in SEEDS:
        with installed(seed):
            source, target, done = on_device(7), pinned(1), torch.cuda.Event()
            target.copy_(source, non_blocking=True)
            early.append(target.tolist()[0])
            done.record()
            done.synchronize()
            assert target.tolist() == [7] * 4
    assert outcomes(early) == {1, 7}


@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_that_is_written_again_before_its_copy_has_run_arrives_as_it_is_then(waits: bool) -> None:
    arrived = []
    for seed in SEEDS:
        with installed(seed):
            source, target, copied = pinned(7), on_device(1), torch.cuda.Event()
            target.copy_(source, non_blocking=True)
            copied.record()
            if waits:
                copied.synchronize()
            source.numpy()[:] = 8
            arrived.append(target.tolist()[0])
    assert outcomes(arrived) == ({7} if waits else {7, 8})


def test_pageable_memory_is_read_before_the_host_goes_on(streams: LazyStreams) -> None:
    source, target = torch.full((4,), 7), on_device(1)
    target.copy_(source)
    source.fill_(8)
    assert target.tolist() == [7] * 4


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_is_freed_belongs_to_others_where_another_stream_still_reads_it(waits: bool) -> None:
    read = []
    for seed in SEEDS:
        with installed(seed):
            outer, side = torch.cuda.current_stream(), torch.cuda.Stream()
            target, freed = on_device(1), on_device(7)
            side.wait_stream(outer)
            with torch.cuda.stream(side):
                target.copy_(freed)
            if waits:
                outer.wait_stream(side)
            del freed
            torch.cuda.synchronize()
            read.append(target.tolist()[0])
    garbage = int.from_bytes(bytes([GARBAGE] * 8), "little")
    assert outcomes(read) == ({7} if waits else {7, garbage})


@pytest.mark.parametrize("waits", [False, True])
def test_two_streams_run_in_the_order_of_their_waits_and_else_in_any(waits: bool) -> None:
    last = []
    for seed in SEEDS:
        with installed(seed):
            target, side = on_device(1), torch.cuda.Stream()
            target.fill_(2)
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                target.fill_(3)
            torch.cuda.synchronize()
            last.append(target.tolist()[0])
    assert outcomes(last) == ({3} if waits else {2, 3})


def test_a_graph_holds_what_was_queued_and_reads_memory_as_it_is_when_it_runs(streams: LazyStreams) -> None:
    source, target, graph = on_device(1), on_device(0), torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin()
    target.copy_(source)
    graph.capture_end()
    assert target.tolist() == [0] * 4
    source.fill_(5)
    graph.replay()
    assert target.tolist() == [5] * 4
    graph.reset()


def test_a_graph_that_is_under_way_is_not_reset() -> None:
    with installed(2) as streams:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.replay()
        with pytest.raises(RuntimeError, match="under way"):
            graph.reset()
        streams.synchronize()
        graph.reset()


def test_what_would_run_at_once_is_refused(streams: LazyStreams) -> None:
    tensor = on_device(1)
    for mistake in (tensor.numpy, tensor.sum, lambda: torch.add(tensor, 1), lambda: tensor.add_(1)):
        with pytest.raises(TypeError, match="on the device"):
            mistake()
    assert tensor[1:].view(3, 1).tolist() == [[1]] * 3
    assert tensor.device == DEVICE
    assert not tensor.is_pinned()
    assert pinned(1).is_pinned()


def test_the_host_cannot_wait_inside_a_capture(streams: LazyStreams) -> None:
    tensor, graph = on_device(1), torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin()
    for wait in (tensor.tolist, torch.cuda.synchronize):
        with pytest.raises(AssertionError, match="only being captured"):
            wait()
    graph.capture_end()


def test_a_host_that_would_wait_forever_is_an_error(streams: LazyStreams) -> None:
    event = torch.cuda.Event()
    event.synchronize()  # never recorded: nothing to wait for
    with pytest.raises(RuntimeError, match="never queued"):
        streams.run_until(Mark())
