"""Random lives of graphs over allocators, captures and a driver, in which nothing goes wrong; and faults, all found.

More lives are lived by `GRAPHDECODE_LIVES=1000 pytest tests/cuda_driver/test_lives.py -k random`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_driver.life import Life, eventful, lives
from cuda_driver.stand_in import Driver, condition_code
from hypothesis.stateful import run_state_machine_as_test
from planted import Fault

from graphdecode.graphs import cuda_loop, step_graph
from graphdecode.graphs.backend import Backend
from graphdecode.graphs.cuda import CudaCapture
from graphdecode.graphs.cuda_loop import GraphLoop

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


# What each one breaks: see the line. The first four are how it once was.
FAULTS = [
    # workspaces of cuBLAS
    Fault(CudaCapture, "_end", "_clear_workspaces()", "pass"),
    Fault(CudaCapture, "clear", "_clear_workspaces()", "pass"),
    # a capture that the driver refuses to end
    Fault(Backend, "_graph", "or self._captures[-1].is_spoilt", ""),
    Fault(CudaCapture, "_end", "self._give_up(graph)", "pass"),
    Fault(CudaCapture, "_end", "self.is_spoilt = True", "pass"),
    Fault(CudaCapture, "_give_up", "ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))", "pass"),
    # the capturer
    Fault(CudaCapture, "capture", "torch.cuda.stream(self.stream), ", ""),
    Fault(CudaCapture, "capture", "self._end(graph, is_failing=True)", "pass"),
    Fault(step_graph, "slots_restored", "tensor.copy_(values)", "pass"),
    # the loops, call by call
    Fault(cuda_loop, "_destroy", "for destroy, handle in handles:", "for destroy, handle in handles[1:]:"),
    Fault(
        GraphLoop, "_add_while", "clear.elementSize = _COUNT_BYTES", "clear.elementSize, clear.value = _COUNT_BYTES, 1"
    ),
    Fault(GraphLoop, "_add_while", "graph, [cleared], None, 1, loop", "graph, [], None, 0, loop"),
    Fault(GraphLoop, "_add_while", "body, [ran], 1, decide", "body, [], 0, decide"),
    Fault(GraphLoop, "_add_while", "return node", "return cleared"),
    Fault(GraphLoop, "_add_while", "context, 1, driver.CU_GRAPH", "context, 0, driver.CU_GRAPH"),
    Fault(GraphLoop, "_add_while", "control.limit, control.running", "control.running, control.limit"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(life: type[Life], monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    fault.plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        live_all(life)


def live_all(life: type[Life]) -> None:
    for seed in range(EVENTFUL_LIVES):
        eventful(life(), seed)
