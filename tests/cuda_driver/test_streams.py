"""The stand-in's streams, events and captures: the order that the driver promises, and none beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from cuda_driver.calls import Code, ask
from cuda_driver.stand_in import Driver


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5])
def test_streams_run_in_order_and_events_order_them(driver: Driver, seed: int) -> None:
    driver.seed(seed)
    told: list[int] = []
    kernel = cuda.CUfunction(driver.kernel("told", lambda words: told.append(words[0]), 1))
    streams = [ask(cuda.cuStreamCreate, 1) for _ in range(2)]
    event = ask(cuda.cuEventCreate, 0)

    def launch(stream: int, number: int) -> None:
        ask(cuda.cuLaunchKernel, kernel, 1, 1, 1, 1, 1, 1, 0, streams[stream], ((number,), (ctypes.c_uint64,)), 0)

    launch(0, 1)
    launch(0, 2)
    ask(cuda.cuEventRecord, event, streams[0])
    launch(1, 10)
    ask(cuda.cuStreamWaitEvent, streams[1], event, 0)
    launch(1, 3)
    ask(cuda.cuStreamSynchronize, streams[1])
    assert told.index(1) < told.index(2) < told.index(3)
    assert told.index(10) < told.index(3)
    ask(cuda.cuCtxSynchronize)
    for stream in streams:
        ask(cuda.cuStreamDestroy, stream)
    ask(cuda.cuEventDestroy, event)


class TestCapture:
    """What a stream is told while it captures becomes a graph."""

    def begin(self, driver: Driver, mode: str = "THREAD_LOCAL") -> tuple[Any, Callable[..., None]]:
        kernel = cuda.CUfunction(driver.kernel("nothing", lambda words: None, 0))
        stream = ask(cuda.cuStreamCreate, 1)
        ask(cuda.cuStreamBeginCapture, stream, getattr(cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}"))

        def launch(where: Any = stream) -> None:
            ask(cuda.cuLaunchKernel, kernel, 1, 1, 1, 1, 1, 1, 0, where, 0, 0)

        return stream, launch

    def test_a_branch_that_comes_back_is_a_part_of_the_graph(self, driver: Driver) -> None:
        stream, launch = self.begin(driver)
        other, events = ask(cuda.cuStreamCreate, 1), [ask(cuda.cuEventCreate, 0) for _ in range(2)]
        launch()
        ask(cuda.cuEventRecord, events[0], stream)
        ask(cuda.cuStreamWaitEvent, other, events[0], 0)
        launch(other)
        launch()
        ask(cuda.cuEventRecord, events[1], other)
        ask(cuda.cuStreamWaitEvent, stream, events[1], 0)
        launch()
        graph = ask(cuda.cuStreamEndCapture, stream)
        assert ask(cuda.cuGraphGetNodes, graph, 0)[1] == 4
        assert ask(cuda.cuGraphGetEdges, graph, 0)[3] == 4
        ask(cuda.cuGraphDestroy, graph)
        for handle in (stream, other):
            ask(cuda.cuStreamDestroy, handle)
        for event in events:
            ask(cuda.cuEventDestroy, event)

    def test_a_branch_that_does_not_come_back_ends_it_without_a_graph(self, bare_driver: Driver) -> None:
        stream, launch = self.begin(bare_driver)
        other, event = ask(cuda.cuStreamCreate, 1), ask(cuda.cuEventCreate, 0)
        launch()
        ask(cuda.cuEventRecord, event, stream)
        ask(cuda.cuStreamWaitEvent, other, event, 0)
        launch(other)
        ask(cuda.cuStreamEndCapture, stream, wants=Code.CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
        launch()  # and nothing captures any more
        ask(cuda.cuCtxSynchronize)

    @pytest.mark.parametrize("waits", ["cuCtxSynchronize", "cuStreamSynchronize", "cuMemAlloc"])
    def test_what_no_capture_allows_spoils_it(self, bare_driver: Driver, waits: str) -> None:
        stream, launch = self.begin(bare_driver)
        launch()
        arguments = {"cuCtxSynchronize": (), "cuStreamSynchronize": (stream,), "cuMemAlloc": (64,)}[waits]
        ask(getattr(cuda, waits), *arguments, wants=Code.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        ask(cuda.cuStreamEndCapture, stream, wants=Code.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        assert bare_driver.alive() == ["stream 2"]

    def test_a_thread_may_allocate_beside_it_where_it_says_so(self, driver: Driver) -> None:
        stream, _launch = self.begin(driver)
        before = ask(cuda.cuThreadExchangeStreamCaptureMode, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        memory = ask(cuda.cuMemAlloc, 64)
        ask(cuda.cuThreadExchangeStreamCaptureMode, before)
        graph = ask(cuda.cuStreamEndCapture, stream)
        ask(cuda.cuGraphDestroy, graph)
        ask(cuda.cuMemFree, memory)
        ask(cuda.cuStreamDestroy, stream)
