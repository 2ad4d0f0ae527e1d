"""Random lives of graphs over allocators, captures and a driver, in which nothing goes wrong; and faults, all caught.

More lives are lived by `GRAPHDECODE_LIVES=1000 pytest tests/cuda_driver/test_lives.py -k random`.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_driver.life import Life, eventful, lives
from cuda_driver.stand_in import Driver, condition_code
from faults import Fault, dropped
from hypothesis.stateful import run_state_machine_as_test

from graphdecode.buffers import StepBuffers
from graphdecode.graphs import cuda, cuda_loop, step_graph
from graphdecode.graphs.cuda import CudaCapture

LIVES, EVENTS, EVENTFUL_LIVES = 15, 14, 15


@pytest.fixture
def life(bare_driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Life]]:
    condition = condition_code(tmp_path)
    monkeypatch.setattr(cuda_loop, "compile_condition", lambda _capability: condition)
    gc.collect()
    gc.freeze()  # each life ends with a collection, which takes its time where there is much to look at
    yield type("LifeHere", (Life,), {"driver": bare_driver})
    gc.unfreeze()


def test_random_lives_leave_everything_as_it_was(life: type[Life]) -> None:
    run_state_machine_as_test(life, settings=lives(int(os.environ.get("GRAPHDECODE_LIVES", LIVES)), EVENTS))


@pytest.mark.parametrize("seed", range(3))
def test_eventful_lives_leave_everything_as_it_was(life: type[Life], seed: int) -> None:
    eventful(life(), seed)


def driver_call(name: str, change: Callable[..., Any]) -> Fault:
    """Return the fault of calling a function of the driver, by its name, with other arguments."""

    def call(right: Callable[..., Any], function: Callable[..., Any], *arguments: Any) -> Any:
        return right(function, *(change(*arguments) if function.__name__ == name else arguments))

    return Fault(cuda_loop, "_call", call)


def clear_to_one(graph: Any, after: Any, count: int, params: Any, context: Any) -> tuple:
    params.value = 1
    return graph, after, count, params, context


def swap_limit_and_running(graph: Any, after: Any, count: int, params: Any) -> tuple:
    (handle, counted, limit, running, *others), types = params.kernelParams
    params.kernelParams = ((handle, counted, running, limit, *others), types)
    return graph, after, count, params


def forget_that_it_is_spoilt(right: Callable[..., Any], self: CudaCapture, *given: Any, **options: Any) -> None:
    try:
        right(self, *given, **options)
    finally:
        self.is_spoilt = False


@contextmanager
def restore_only_live_rows(_right: Callable[..., Any], buffers: StepBuffers) -> Iterator[None]:
    live = buffers.live_row_count
    yield
    buffers.set_live_rows(live)


CLEAR = (cuda, "_clear_workspaces", dropped)
FAULTS = {
    "cuBLAS workspaces are kept after a capture": Fault(*CLEAR, during=(CudaCapture, "_end")),
    "cuBLAS workspaces are kept before a capture": Fault(*CLEAR, during=(CudaCapture, "clear")),
    "a spoilt capture is used again": Fault(CudaCapture, "_end", forget_that_it_is_spoilt),
    "allocators are not told of a capture that did not end": Fault(CudaCapture, "_give_up", dropped),
    "a graph that the allocator asks is freed": Fault(ctypes.pythonapi, "Py_IncRef", dropped),
    "a capture is on the current stream": Fault(
        torch.cuda, "stream", lambda *_: nullcontext(), during=(CudaCapture, "capture")
    ),
    "a step that fails does not end its capture": Fault(
        CudaCapture, "_end", lambda right, *given, is_failing: is_failing or right(*given, is_failing=False)
    ),
    "slots are not restored": Fault(step_graph, "slots_restored", restore_only_live_rows),
    "a loop's graph is not destroyed": Fault(
        cuda_loop, "_destroy", lambda right, handles, condition: right(handles[1:], condition)
    ),
    "the count starts at one": driver_call("cuGraphAddMemsetNode", clear_to_one),
    "the loop does not wait for its count": driver_call(
        "cuGraphAddNode", lambda graph, _after, edges, _count, params: (graph, [], edges, 0, params)
    ),
    "the condition does not wait for the step": driver_call(
        "cuGraphAddKernelNode", lambda graph, _after, _count, params: (graph, [], 0, params)
    ),
    "the epilogue does not wait for the loop": driver_call(
        "cuGraphAddChildGraphNode", lambda graph, _after, _count, child: (graph, None, 0, child)
    ),
    "the first step is not run": driver_call(
        "cuGraphConditionalHandleCreate", lambda graph, context, _first, flags: (graph, context, 0, flags)
    ),
    "limit and running are swapped": driver_call("cuGraphAddKernelNode", swap_limit_and_running),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(life: type[Life], monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    fault.plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        live_all(life)


def live_all(life: type[Life]) -> None:
    for seed in range(EVENTFUL_LIVES):
        eventful(life(), seed)
