"""Loops of CUDA graphs, over a stand-in for the driver: what is built of which nodes, and what happens when it refuses.

The stand-in runs the graphs that were built for it, so that it can be seen what they would do.
"""

import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphdecode import Slot, StepBuffers
from graphdecode.graphs import Loop, cuda_loop, loop_condition
from graphdecode.graphs.cuda_loop import CudaLoops
from graphdecode.graphs.loop import LoopControl

real = pytest.importorskip("cuda.bindings.driver")

MAX_STEPS = 8


class Code(IntEnum):
    """What the driver answers."""

    SUCCESS = 0
    REFUSED = 801


class Node:
    """A node of a graph: what it does, and what has to be done before."""

    def __init__(self, does: Callable[[], None], after: list["Node"]) -> None:
        self.does = does
        self.after = after


class FakeGraph:
    """Nodes in the order in which they were added; runs them, and checks that nothing comes before what it awaits."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, does: Callable[[], None], after: list[Node] | None) -> Node:
        self.nodes.append(Node(does, after or []))
        return self.nodes[-1]

    def run(self) -> None:
        done: list[Node] = []
        for node in self.nodes:
            assert all(earlier in done for earlier in node.after)
            assert len(node.after) == bool(done), "one node after the other, all in one chain"
            node.does()
            done.append(node)


class FakeDriver:
    """The driver's calls that loops are built with; their order is kept, and any of them can be made to fail."""

    def __init__(self, memory: dict[int, torch.Tensor]) -> None:
        self.calls: list[str] = []
        self.failing: str | None = None
        self.version = 13000
        self.memory = memory
        self.captured: dict[int, Callable[[], None]] = {}
        self.alive: set[Any] = set()
        self.condition: bool = True
        self.is_on_device = False
        for name in ("CUgraphNodeType", "CUgraphConditionalNodeType", "CUDA_KERNEL_NODE_PARAMS"):
            setattr(self, name, getattr(real, name))
        self.CUDA_MEMSET_NODE_PARAMS, self.CUdeviceptr = real.CUDA_MEMSET_NODE_PARAMS, real.CUdeviceptr
        self.CU_GRAPH_COND_ASSIGN_DEFAULT = real.CU_GRAPH_COND_ASSIGN_DEFAULT

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def called(*arguments: Any) -> tuple:
            self.calls.append(name)
            if name == self.failing:
                return (Code.REFUSED, *([None] * name.startswith(("cuGraphAdd", "cuGraphCond"))))
            result = found(*arguments)
            return (Code.SUCCESS,) if result is None else (Code.SUCCESS, result)

        called.__name__ = name
        return called

    def make(self, thing: Any) -> Any:
        self.alive.add(thing)
        return thing

    def CUgraphNodeParams(self) -> SimpleNamespace:
        return SimpleNamespace(type=None, conditional=SimpleNamespace())

    def cuDriverGetVersion(self) -> int:
        return self.version

    def cuCtxGetCurrent(self) -> str:
        return "context"

    def cuModuleLoadData(self, code: bytes) -> str:
        assert code == b"cubin"
        return self.make("module")

    def cuModuleGetFunction(self, module: str, name: bytes) -> Any:
        assert (module, name) == ("module", loop_condition.NAME)
        return real.CUfunction(77)

    def cuModuleUnload(self, module: str) -> None:
        self.alive.remove(module)

    def cuGraphCreate(self, flags: int) -> FakeGraph:
        assert flags == 0
        return self.make(FakeGraph())

    def cuGraphConditionalHandleCreate(self, graph: FakeGraph, context: str, default: int, flags: int) -> int:
        assert (context, default, flags) == ("context", 1, 1)
        return 4711

    def cuGraphAddMemsetNode(self, graph: FakeGraph, after: Any, count: int, params: Any, context: str) -> Node:
        assert (after, count, context) == (None, 0, "context")
        assert (params.elementSize, params.width, params.height) == (4, 1, 1)
        target, value = self.memory[int(params.dst)], params.value
        return graph.add(lambda: target.fill_(value), None)

    def cuGraphAddNode(self, graph: FakeGraph, after: list[Node], edges: None, count: int, params: Any) -> Node:
        assert (edges, count) == (None, len(after))
        assert params.type == real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        loop = params.conditional
        assert loop.type == real.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        assert (loop.handle, loop.size, loop.ctx) == (4711, 1, "context")
        body = FakeGraph()
        loop.phGraph_out = [body]

        def run() -> None:
            self.condition = True
            while self.condition:
                body.run()

        return graph.add(run, after)

    def cuGraphAddChildGraphNode(self, graph: FakeGraph, after: list[Node] | None, count: int, child: int) -> Node:
        assert count == len(after or [])
        return graph.add(self.captured[child], after)

    def cuGraphAddKernelNode(self, graph: FakeGraph, after: list[Node], count: int, params: Any) -> Node:
        assert count == len(after)
        assert int(params.func) == 77
        sizes = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ")
        assert [getattr(params, size) for size in sizes] == [1] * 6
        pointers = (ctypes.c_void_p * 6).from_address(int(params.kernelParams))
        handle, *slots, tally_at = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers]
        assert handle == 4711
        count_slot, limit, running, live_rows = (self.memory[address] for address in slots)
        tally = (ctypes.c_int64 * 2).from_address(tally_at)

        def decide() -> None:  # what the kernel's source says
            count_slot.add_(1)
            tally[0] += 1
            tally[1] += int(live_rows)
            self.condition = bool(count_slot < limit) and bool(running > 0)

        return graph.add(decide, after)

    def cuGraphInstantiate(self, graph: FakeGraph, flags: int) -> "SimpleNamespace":
        assert flags == 0
        return self.make(Exec(graph))

    def cuGraphLaunch(self, graph_exec: Any, stream: int) -> None:
        assert stream == 5
        assert self.is_on_device, "another device may be the current one"
        graph_exec.graph.run()

    def cuGraphExecDestroy(self, graph_exec: Any) -> None:
        self.alive.remove(graph_exec)

    def cuGraphDestroy(self, graph: FakeGraph) -> None:
        self.alive.remove(graph)


class Exec:
    """A graph that is fit to launch."""

    def __init__(self, graph: FakeGraph) -> None:
        self.graph = graph


class Captured:
    """What the loops need of a captured graph; the driver knows by the handle what it does."""

    def __init__(self, driver: FakeDriver, does: Callable[[], None], *kinds: str) -> None:
        self.kinds = Counter(kinds or ("kernel",))
        self.replay = does
        self._handle = len(driver.captured) + 1
        driver.captured[self._handle] = does

    def raw_graph(self) -> int:
        return self._handle


class World:
    """The slots, a step that ends after `left` steps, and the driver."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        names = ("running", "loop_limit", "loop_count")
        self.buffers = StepBuffers([Slot(name, (1,), torch.int32) for name in names], max_batch_size=1, device="cpu")
        self.control = LoopControl(Loop(MAX_STEPS), self.buffers)
        self.driver = FakeDriver({tensor.data_ptr(): tensor for tensor in self.buffers.tensors.values()})
        self.left = 0
        self.ran: list[str] = []
        patch.setattr(cuda_loop, "driver", self.driver)
        patch.setattr(cuda_loop, "compile_condition", lambda capability: b"cubin")
        patch.setattr(torch.cuda, "device", self._on_device)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
        self.step = Captured(self.driver, self._step)
        self.epilogue = Captured(self.driver, self._epilogue)
        self.loops = CudaLoops(self.control, torch.device("cuda"))

    @contextmanager
    def _on_device(self, device: torch.device) -> Iterator[None]:
        assert device == torch.device("cuda")
        self.driver.is_on_device = True
        yield
        self.driver.is_on_device = False

    def _step(self) -> None:
        self.left -= 1
        self.buffers.running.fill_(max(self.left, 0))
        self.ran.append("step")

    def _epilogue(self) -> None:
        self.ran.append(f"epilogue behind {int(self.buffers.loop_count)}")

    def launch(self, loop: Any, left: int, num_steps: int) -> list[str]:
        self.left = left
        self.ran.clear()
        self.control.ask_for(num_steps)
        loop.launch(num_steps)
        return self.ran


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


WHILE_CALLS = [
    "cuDriverGetVersion",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuGraphCreate",
    "cuCtxGetCurrent",
    "cuGraphConditionalHandleCreate",
    "cuGraphAddMemsetNode",
    "cuGraphAddNode",
    "cuGraphAddChildGraphNode",
    "cuGraphAddKernelNode",
    "cuGraphAddChildGraphNode",
    "cuGraphInstantiate",
]


def test_a_while_node_holds_the_step_and_the_condition_and_the_epilogue_comes_behind(world: World) -> None:
    loop = world.loops.over(world.step, world.epilogue)
    assert (loop.kind, loop.reason) == ("while", None)
    assert world.driver.calls == WHILE_CALLS
    world.driver.calls.clear()
    for left, num_steps, ran in [(100, 8, 8), (3, 8, 3), (100, 5, 5), (5, 5, 5), (0, 8, 1), (100, 1, 1)]:
        assert world.launch(loop, left, num_steps) == ["step"] * ran + [f"epilogue behind {ran}"]
        assert int(world.buffers.loop_count) == ran
    assert world.driver.calls == ["cuGraphLaunch"] * 6


def test_the_condition_is_compiled_once_for_all_buckets_and_freed_with_the_last(world: World) -> None:
    loops = [world.loops.over(world.step, world.epilogue) for _ in range(3)]
    assert world.driver.calls.count("cuModuleLoadData") == 1
    for loop in loops:
        loop.close()
    assert world.driver.alive == {"module"}
    world.loops.close()
    assert not world.driver.alive


def test_the_device_counts_the_steps_that_ran_over_all_launches_and_their_live_rows(world: World) -> None:
    loop = world.loops.over(world.step, world.epilogue)
    assert loop.counted() == (0, 0)
    steps = rows = 0
    for live, left, num_steps, ran in [(1, 100, 8, 8), (0, 3, 8, 3), (1, 100, 5, 5), (1, 0, 8, 1)]:
        world.buffers.set_live_rows(live)
        assert world.launch(loop, left, num_steps).count("step") == ran
        steps, rows = steps + ran, rows + live * ran
        assert loop.counted() == (steps, rows)
    world.driver.version = 12030
    unrolled = world.loops.over(world.step, None)
    world.launch(unrolled, 3, 8)
    assert unrolled.counted() == (0, 0)
    assert unrolled.launch(8) == 8, "none is left out, and the host knows"


def test_what_is_dropped_without_being_closed_is_given_back_the_kernel_last(world: World) -> None:
    loops = [world.loops.over(world.step, world.epilogue) for _ in range(2)]
    world.driver.calls.clear()
    world.loops = None  # type: ignore[assignment]
    gc.collect()
    assert world.driver.calls == [], "loops hold the kernel that they launch"
    loops.clear()
    gc.collect()
    assert world.driver.calls == ["cuGraphExecDestroy", "cuGraphDestroy"] * 2 + ["cuModuleUnload"]
    assert not world.driver.alive


def test_a_loop_without_an_epilogue_ends_with_its_steps(world: World) -> None:
    loop = world.loops.over(world.step, None)
    assert world.launch(loop, 3, 8) == ["step"] * 3
    world.driver.version = 12030
    unrolled = world.loops.over(world.step, None)
    assert world.launch(unrolled, 100, 8) == ["step"] * 8
    assert world.launch(unrolled, 100, 2) == ["step"] * 2


@pytest.mark.parametrize("call", sorted(set(WHILE_CALLS)))
def test_each_call_that_the_driver_refuses_leads_to_the_next_best_loop_with_its_name(world: World, call: str) -> None:
    world.driver.failing = call
    loop = world.loops.over(world.step, world.epilogue)
    shared = {"cuGraphCreate", "cuCtxGetCurrent", "cuGraphAddMemsetNode", "cuGraphAddChildGraphNode"}
    shared |= {"cuGraphInstantiate"}
    if call in shared:
        assert loop.kind == "single"
        assert loop.reason == f"a WHILE node: {call}: REFUSED; an unrolled graph: {call}: REFUSED"
    else:
        assert loop.kind == "unrolled"
        assert loop.reason == f"a WHILE node: {call}: REFUSED"
    world.driver.failing = None
    # without an early end the steps behind the last are run too, and are inert
    assert world.launch(loop, 3, 8) == ["step"] * 8 + ["epilogue behind 8"]
    assert world.launch(loop, 3, 5) == ["step"] * 5 + ["epilogue behind 5"]
    loop.close()
    world.loops.close()
    assert not world.driver.alive, "whatever was begun is given back"


def test_an_unrolled_graph_is_one_launch_of_all_steps(world: World) -> None:
    world.driver.version = 12030
    loop = world.loops.over(world.step, world.epilogue)
    assert loop.kind == "unrolled"
    assert loop.reason == "a WHILE node: needs a driver for CUDA 12.4, this one is for 12.3"
    world.driver.calls.clear()
    assert world.launch(loop, 100, 8) == ["step"] * 8 + ["epilogue behind 8"]
    assert world.driver.calls == ["cuGraphLaunch"]
    world.driver.calls.clear()
    assert world.launch(loop, 100, 7) == ["step"] * 7 + ["epilogue behind 7"]
    assert world.driver.calls == []


@pytest.mark.parametrize("kind", ["host", "memalloc", "eventrecord", "waitevent"])
def test_a_step_with_a_node_that_no_body_may_hold_is_unrolled(world: World, kind: str) -> None:
    step = Captured(world.driver, world._step, "kernel", kind)
    loop = world.loops.over(step, world.epilogue)
    assert loop.kind == "unrolled"
    assert loop.reason == f"a WHILE node: the step holds nodes that no body may hold: {kind}"


def test_a_graph_too_large_is_not_unrolled(world: World) -> None:
    world.driver.version = 12030
    step = Captured(world.driver, world._step, *["kernel"] * 20_000)
    loop = world.loops.over(step, world.epilogue)
    assert loop.kind == "single"
    assert loop.reason is not None
    assert loop.reason.endswith("an unrolled graph: 160000 nodes are more than 100000")


def test_without_cuda_python_steps_are_launched_one_by_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_loop, "driver", None)
    loop = world.loops.over(world.step, world.epilogue)
    missing = "cuda-python is not installed"
    assert (loop.kind, loop.reason) == ("single", f"a WHILE node: {missing}; an unrolled graph: {missing}")
    assert world.launch(loop, 3, 4) == ["step"] * 4 + ["epilogue behind 4"]


def test_without_the_drivers_library_steps_are_launched_one_by_one(world: World) -> None:
    def missing() -> int:
        raise RuntimeError("libcuda was not found")

    world.driver.cuDriverGetVersion = missing  # type: ignore[method-assign]
    world.driver.cuGraphCreate = lambda flags: missing()  # type: ignore[method-assign, assignment, return-value]
    loop = world.loops.over(world.step, world.epilogue)
    assert loop.kind == "single"
    assert loop.reason is not None
    assert loop.reason.count("libcuda was not found") == 2


def test_a_condition_that_does_not_compile_is_tried_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuses(capability: tuple[int, int]) -> bytes:
        tried.append(capability)
        raise RuntimeError("NVRTC refused to compile the loop's condition: NVRTC_ERROR_INVALID_OPTION")

    monkeypatch.setattr(cuda_loop, "compile_condition", refuses)
    loops = [world.loops.over(world.step, world.epilogue) for _ in range(3)]
    assert {loop.kind for loop in loops} == {"unrolled"}
    assert {loop.reason for loop in loops} == {
        "a WHILE node: NVRTC refused to compile the loop's condition: NVRTC_ERROR_INVALID_OPTION"
    }
    assert tried == [(9, 0)]


@pytest.mark.parametrize("version", [12030, 13000])
def test_a_launch_that_the_driver_refuses_is_an_error(world: World, version: int) -> None:
    world.driver.version = version
    loop = world.loops.over(world.step, world.epilogue)
    world.driver.failing = "cuGraphLaunch"
    with pytest.raises(RuntimeError, match="refused to launch a loop: REFUSED"):
        world.launch(loop, 3, 8)
