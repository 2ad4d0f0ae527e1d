"""Loops of CUDA graphs over a driver: what is built, what it does, and what happens when the driver refuses."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from cuda_driver.counting import MAX_STEPS, Counting
from cuda_driver.stand_in import Driver
from cuda_driver.torch_device import Device

from graphdecode import GraphManager
from graphdecode.buffers import Batch
from graphdecode.graphs import CaptureError, Loop, cuda_loop
from graphdecode.graphs.cuda_loop import CudaLoops
from graphdecode.graphs.step_graph import LoopControl, StepLoop

CAPACITY = 4
LAUNCHES = [(3, [9, 2, 5], 8), (3, [1, 1, 1], 8), (3, [20, 3, 4], 5), (2, [0, 0], 8), (4, [8, 8, 8, 8], 1), (1, [5], 5)]
WHILE_CALLS = [
    "cuDriverGetVersion",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuGraphConditionalHandleCreate",
    "cuGraphAddNode",
    "cuGraphAddKernelNode",
]
SHARED_CALLS = ["cuGraphCreate", "cuCtxGetCurrent", "cuGraphAddMemsetNode", "cuGraphAddChildGraphNode"]


def manager_of(counting: Counting, ladder: list[int], *, epilogue: bool = True) -> GraphManager:
    loop = counting.loop() if epilogue else Loop(MAX_STEPS)
    return GraphManager(counting.step, counting.buffers, ladder, constants=[counting.weight], loop=loop)


def captured(ladder: list[int], *, epilogue: bool = True) -> tuple[Counting, GraphManager]:
    counting = Counting(CAPACITY)
    graphs = manager_of(counting, ladder, epilogue=epilogue)
    graphs.capture(progress=False)
    return counting, graphs


def kinds_and_reasons(graphs: GraphManager) -> set[tuple[str | None, str | None]]:
    return {(bucket.loop, bucket.loop_reason) for bucket in graphs.report().buckets}


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_while_node_runs_as_many_steps_as_the_slots_say_and_the_epilogue_comes_behind(device, driver, seed):
    counting, graphs = captured([2, CAPACITY])
    assert kinds_and_reasons(graphs) == {("while", None)}
    driver.seed(seed)
    steps = rows = 0
    for live, left, num_steps in LAUNCHES:
        counting.enter([0.1 * row for row in range(live)], left)
        driver.forget_calls()
        graphs.launch(live, num_steps)
        assert driver.calls().count("cuGraphLaunch") == 1
        ran = counting.expect_steps(live, num_steps)
        counting.check(live)
        assert int(counting.buffers.loop_count) == int(counting.buffers.launched_behind) == ran
        steps, rows = steps + ran, rows + live * ran
    report = graphs.report()
    assert sum(bucket.replays for bucket in report.buckets) == steps
    assert sum(bucket.live_rows for bucket in report.buckets) == rows
    graphs.close()


def test_the_condition_is_loaded_once_for_all_buckets_and_unloaded_behind_the_last(device, driver):
    _, graphs = captured([1, 2, CAPACITY])
    assert driver.calls().count("cuModuleLoadData") == 1
    driver.forget_calls()
    graphs.close()
    destroyed = [call for call in driver.calls() if "Destroy" in call or "Unload" in call]
    loops, steps = ["cuGraphExecDestroy", "cuGraphDestroy"] * 3, ["cuGraphExecDestroy", "cuGraphDestroy"] * 6
    assert destroyed == [*loops, "cuModuleUnload", *steps]


def test_what_is_dropped_without_being_closed_is_given_back_the_kernel_last(device: Device, driver: Driver) -> None:
    counting, graphs = captured([CAPACITY])
    made = CudaLoops(LoopControl(counting.loop(), counting.buffers), torch.device("cuda"))
    loops = [made.over(graphs.graphs[CAPACITY]) for _ in range(2)]
    driver.forget_calls()
    del made
    gc.collect()
    assert driver.calls() == [], "loops hold the kernel that they launch"
    loops.clear()
    gc.collect()
    assert driver.calls() == ["cuGraphExecDestroy", "cuGraphDestroy"] * 2 + ["cuModuleUnload"]
    graphs.close()


@pytest.mark.parametrize("call", [*WHILE_CALLS, *SHARED_CALLS])
def test_a_call_that_the_driver_refuses_leads_to_single_launches_with_its_name(device, driver, call):
    driver.fail(call)
    counting, graphs = captured([CAPACITY])
    driver.fail(None)
    assert kinds_and_reasons(graphs) == {("single", f"a WHILE node: {call}: CUDA_ERROR_NOT_SUPPORTED")}
    for live, left, num_steps in LAUNCHES:  # steps behind the last are run too, and are inert
        counting.enter([0.3] * live, left)
        graphs.launch(live, num_steps)
        counting.expect_steps(live, num_steps)
        counting.check(live)
        assert int(counting.buffers.loop_count) == int(counting.buffers.launched_behind) == num_steps
    graphs.close()


@pytest.mark.parametrize(("taken", "kind"), [(100.0, "while"), (101.0, "single")])
def test_a_loop_that_is_not_faster_than_single_launches_is_not_kept(
    device: Device, monkeypatch: pytest.MonkeyPatch, taken: float, kind: str
) -> None:
    ran: list[tuple[str, int]] = []
    counts: list[int] = []
    counting = Counting(CAPACITY)

    def timed(loop: StepLoop, steps: int, _device: torch.device) -> float:
        loop.launch(steps)
        counts.append(int(counting.buffers.loop_count))
        ran.append((loop.kind, steps))
        return (taken if loop.kind == "while" else 100.0) / 1e6

    monkeypatch.setattr(cuda_loop, "seconds_of_step", timed)
    graphs = manager_of(counting, [CAPACITY])
    graphs.capture(progress=False)
    assert ran == [("while", MAX_STEPS), ("single", MAX_STEPS)]
    assert set(counts) == {MAX_STEPS}, "all steps ran, though no row was live"
    slower = "a WHILE node: 101.0 us a step, where single launches take 100.0"
    assert kinds_and_reasons(graphs) == {(kind, None if kind == "while" else slower)}
    counting.enter([0.3] * 3, [9, 2, 5])
    graphs.launch(3, MAX_STEPS)
    ran_steps = counting.expect_steps(3, MAX_STEPS)
    counting.check(3)
    assert int(counting.buffers.loop_count) == (ran_steps if kind == "while" else MAX_STEPS)
    graphs.close()


def test_an_instantiation_that_is_refused_leads_on_and_leaves_nothing(device: Device, driver: Driver) -> None:
    driver.fail("cuGraphInstantiate", behind=2)  # the captured step and epilogue come first
    _, graphs = captured([CAPACITY])
    driver.fail(None)
    assert kinds_and_reasons(graphs) == {("single", "a WHILE node: cuGraphInstantiate: CUDA_ERROR_NOT_SUPPORTED")}
    graphs.close()


def test_a_step_whose_instantiation_is_refused_is_released_while_its_error_lives(device, driver):
    driver.fail("cuGraphInstantiate")
    with pytest.raises(CaptureError, match="CUDA_ERROR_NOT_SUPPORTED") as refused:
        captured([CAPACITY])
    driver.fail(None)
    assert not [line for line in driver.alive() if line.startswith(("graph", "exec"))], refused


def test_a_step_without_operators_is_refused(device: Device, driver: Driver) -> None:
    counting = Counting(CAPACITY)
    graphs = GraphManager(lambda batch: None, counting.buffers, [CAPACITY])
    with pytest.raises(CaptureError, match="it launched nothing"):
        graphs.capture(progress=False)


def test_a_driver_before_while_nodes_launches_steps_one_by_one(device: Device, driver: Driver) -> None:
    driver.set_version(12030)
    _, graphs = captured([CAPACITY])
    assert kinds_and_reasons(graphs) == {("single", "a WHILE node: needs a driver for CUDA 12.4, this one is for 12.3")}
    graphs.close()


def test_a_loop_without_an_epilogue_ends_with_its_steps(device: Device) -> None:
    counting, graphs = captured([CAPACITY], epilogue=False)
    assert kinds_and_reasons(graphs) == {("while", None)}
    counting.enter([0.2, 0.4], [3, 6])
    graphs.launch(2, 8)
    assert counting.expect_steps(2, 8) == 6
    counting.check(2)
    graphs.close()


def test_a_step_with_a_node_that_no_body_may_hold_is_launched_by_itself(device: Device, driver: Driver) -> None:
    called = itertools.count()

    class CallsTheHost(Counting):
        def step(self, batch: Batch) -> None:
            super().step(batch)
            driver.launch_host(torch.cuda.current_stream().cuda_stream, lambda: next(called))

    counting = CallsTheHost(CAPACITY)
    graphs = manager_of(counting, [CAPACITY])
    graphs.capture(progress=False)
    assert kinds_and_reasons(graphs) == {("single", "a WHILE node: its body cannot contain host")}
    counting.enter([0.2] * 4, [8, 8, 8, 8])
    graphs.launch(4, 8)
    counting.expect_steps(4, 8)
    counting.check(4)
    assert next(called) == 3 + 8, "two warm-ups, one run without observation, and a launch"
    graphs.close()


class NoLibrary:
    """The bindings where the driver's library is not found."""

    def __getattr__(self, name: str) -> object:
        def missing(*_arguments: object) -> tuple:
            raise RuntimeError("libcuda was not found")

        missing.__name__ = name
        return missing


@pytest.mark.parametrize(
    ("module", "why"), [(None, "cuda-python is not installed"), (NoLibrary(), "libcuda was not found")]
)
def test_without_driver_steps_are_launched_one_by_one(device, monkeypatch, module, why):
    monkeypatch.setattr(cuda_loop, "driver", module)
    counting, graphs = captured([CAPACITY])
    ((kind, reason),) = kinds_and_reasons(graphs)
    assert kind == "single"
    assert reason is not None
    assert why in reason
    counting.enter([0.2] * 3, [8, 2, 1])
    graphs.launch(3, 4)
    counting.expect_steps(3, 4)
    counting.check(3)
    graphs.close()


def test_a_condition_that_does_not_compile_is_tried_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = itertools.count()

    def refuses(capability: tuple[int, int]) -> bytes:
        assert capability == (9, 0)
        next(tried)
        raise RuntimeError("NVRTC refused to compile the loop's condition: NVRTC_ERROR_INVALID_OPTION")

    monkeypatch.setattr(cuda_loop, "compile_condition", refuses)
    _, graphs = captured([1, 2, CAPACITY])
    assert kinds_and_reasons(graphs) == {
        ("single", "a WHILE node: NVRTC refused to compile the loop's condition: NVRTC_ERROR_INVALID_OPTION")
    }
    assert next(tried) == 1
    graphs.close()


def test_a_launch_that_the_driver_refuses_is_an_error(device: Device, driver: Driver) -> None:
    _, graphs = captured([CAPACITY])
    driver.fail("cuGraphLaunch")
    with pytest.raises(RuntimeError, match="refused to launch a loop: CUDA_ERROR_NOT_SUPPORTED"):
        graphs.launch(3, MAX_STEPS)
    driver.fail(None)
    graphs.close()
