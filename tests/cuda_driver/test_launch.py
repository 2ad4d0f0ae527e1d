"""Launches of CUDA C++ kernels: grid, shared memory, cluster, early start, and the stream."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver as cuda
from cuda_driver.calls import ask, int32_at
from cuda_driver.stand_in import Driver, device_code

from graphdecode.kernels.cuda.launch import Kernel

SOURCE = 'extern "C" __global__ void add(int *at, int by, int *none) { at[0] += none == 0 ? by : 0; }'


@pytest.fixture
def kernel(driver: Driver, tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(device_code(SOURCE, {"add": [8, 4, 8]}, tmp_path), "add")
    yield kernel
    kernel.unload()


@pytest.fixture
def stream(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The current stream, as torch tells it."""
    stream = ask(cuda.cuStreamCreate, 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=int(stream)))
    yield stream
    ask(cuda.cuStreamDestroy, stream)


def test_a_launch_runs_in_the_current_stream(kernel: Kernel, stream: object) -> None:
    memory = ask(cuda.cuMemAlloc, 64)
    ask(cuda.cuMemsetD32Async, memory, 5, 1, stream)
    at = SimpleNamespace(data_ptr=lambda: int(memory))
    kernel.launch((5, 2), 128, (at, 7, None), starts_early=True)  # type: ignore[arg-type]
    ask(cuda.cuStreamSynchronize, stream)
    assert int32_at(memory) == 12
    ask(cuda.cuMemFree, memory)


def test_captured_launches_follow_each_other_and_start_early_where_they_say_so(kernel: Kernel, stream: object) -> None:
    ask(cuda.cuStreamBeginCapture, stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    for early in (False, True, False, True):
        kernel.launch((6,), 128, (None, 1, None), shared_bytes=100 << 10, starts_early=early, cluster=2)
    graph = ask(cuda.cuStreamEndCapture, stream)
    nodes, count = ask(cuda.cuGraphGetNodes, graph, 4)
    assert count == 4
    sizes = [ask(cuda.cuGraphKernelNodeGetParams, node) for node in nodes]
    assert {(each.gridDimX, each.gridDimY, each.blockDimX, each.sharedMemBytes) for each in sizes} == {
        (6, 1, 128, 100 << 10)
    }
    begins, ends, edges, _ = ask(cuda.cuGraphGetEdges, graph, 3)
    order = [int(node) for node in nodes]
    assert [(order.index(int(begin)), order.index(int(end))) for begin, end in zip(begins, ends, strict=True)] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]
    assert [edge.type for edge in edges] == [1, 0, 1]  # programmatic
    ask(cuda.cuGraphDestroy, graph)


def test_a_new_thread_loads_and_launches_in_the_devices_context(
    kernel: Kernel, stream: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    memory = ask(cuda.cuMemAlloc, 64)
    ask(cuda.cuMemsetD32Async, memory, 5, 1, stream)
    at = SimpleNamespace(data_ptr=lambda: int(memory))
    with ThreadPoolExecutor(1) as threads:
        threads.submit(kernel.launch, (1,), 32, (at, 7, None)).result()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(Kernel, device_code(SOURCE, {"add": [8, 4, 8]}, tmp_path), "add").result().unload()
    ask(cuda.cuStreamSynchronize, stream)
    assert int32_at(memory) == 12
    ask(cuda.cuMemFree, memory)


def test_a_grid_without_blocks_launches_nothing(kernel: Kernel, stream: object) -> None:
    memory = ask(cuda.cuMemAlloc, 64)
    ask(cuda.cuMemsetD32Async, memory, 5, 1, stream)
    at = SimpleNamespace(data_ptr=lambda: int(memory))
    for grid in ((0,), (4, 0)):
        kernel.launch(grid, 32, (at, 7, None))  # type: ignore[arg-type]
    ask(cuda.cuStreamSynchronize, stream)
    assert int32_at(memory) == 5
    ask(cuda.cuMemFree, memory)


def test_a_refused_launch_names_the_call(kernel: Kernel, stream: object) -> None:
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx"):
        kernel.launch((3,), 128, (None, 1, None), cluster=2)
    with pytest.raises(RuntimeError, match="cuFuncSetAttribute"):
        kernel.launch((2,), 128, (None, 1, None), shared_bytes=1 << 20)
