"""Loops of CUDA graphs: the captured step as the body of a WHILE node, or many times over in one graph."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch

from graphdecode.errors import GraphdecodeError
from graphdecode.graphs.capture import CudaStepGraph
from graphdecode.graphs.loop import LoopControl, SingleLaunches, StepLoop
from graphdecode.graphs.loop_condition import NAME, compile_condition

try:
    from cuda.bindings import driver
except ImportError:  # without cuda-python steps are launched one by one
    driver = None

WHILE_NODES_SINCE = 12040  # the driver's CUDA version
_BODY_KINDS = {"kernel", "memcpy", "memset", "graph", "empty", "conditional"}
_MAX_UNROLLED_NODES = 100_000  # the driver takes microseconds and kilobytes for each
_COUNT_BYTES = 4


class LoopRefusedError(GraphdecodeError, RuntimeError):
    """This kind of loop cannot be had here; the message says why."""


class CudaLoops:
    """Makes the loops of a manager's buckets; the condition's kernel is compiled once, for the first.

    Args:
        control: the loop's slots.
        device: where they are.
    """

    def __init__(self, control: LoopControl, device: torch.device) -> None:
        self._control = control
        self._device = device
        self._condition: _Condition | str | None = None

    def over(self, step: CudaStepGraph, epilogue: CudaStepGraph | None) -> StepLoop:
        """Return the best loop over a captured step that the driver grants."""
        refusals = []
        for name, make in (("a WHILE node", self._while_node), ("an unrolled graph", self._unrolled)):
            try:
                with torch.cuda.device(self._device):
                    loop = make(step, epilogue)
            except LoopRefusedError as refusal:
                refusals.append(f"{name}: {refusal}")
            else:
                loop.reason = "; ".join(refusals) or None
                return loop
        return self._single_launches(step, epilogue, "; ".join(refusals))

    def close(self) -> None:
        """Release the condition's kernel; all loops are closed."""
        if isinstance(self._condition, _Condition):
            self._condition.close()
        self._condition = None

    def _single_launches(
        self, step: CudaStepGraph, epilogue: CudaStepGraph | None, reason: str | None
    ) -> SingleLaunches:
        return SingleLaunches(self._control, step.replay, epilogue.replay if epilogue else None, reason)

    def _while_node(self, step: CudaStepGraph, epilogue: CudaStepGraph | None) -> WhileLoop:
        _require_driver()
        (version,) = _call(driver.cuDriverGetVersion)
        if version < WHILE_NODES_SINCE:
            raise LoopRefusedError(f"needs a driver for CUDA 12.4, this one is for {_readable(version)}")
        unfit = sorted(set(step.kinds) - _BODY_KINDS)
        if unfit:
            raise LoopRefusedError(f"the step holds nodes that no body may hold: {', '.join(unfit)}")
        if self._condition is None:
            try:
                self._condition = _Condition(self._device)
            except RuntimeError as error:
                self._condition = str(error)
        if isinstance(self._condition, str):
            raise LoopRefusedError(self._condition)
        return WhileLoop(self._control, self._condition, step, epilogue, self._device)

    def _unrolled(self, step: CudaStepGraph, epilogue: CudaStepGraph | None) -> UnrolledLoop:
        _require_driver()
        nodes = self._control.loop.max_steps * step.kinds.total()
        if nodes > _MAX_UNROLLED_NODES:
            raise LoopRefusedError(f"{nodes} nodes are more than {_MAX_UNROLLED_NODES}")
        fewer = self._single_launches(step, epilogue, None)
        return UnrolledLoop(self._control, step, epilogue, self._device, fewer)


class _Condition:
    """The condition's kernel in a device's memory, unloaded by `close`, or when nobody holds it any more."""

    def __init__(self, device: torch.device) -> None:
        code = compile_condition(torch.cuda.get_device_capability(device))
        (module,) = _call(driver.cuModuleLoadData, code)
        self.close = weakref.finalize(self, driver.cuModuleUnload, module)
        (self.function,) = _call(driver.cuModuleGetFunction, module, NAME)


class _OuterGraph:
    """A graph made of others, launched as one; destroyed by `close`, or when nobody holds it any more.

    Args:
        build: adds the nodes to a graph, given its handle.
        device: where it runs.
        condition: the kernel that it launches, which is not unloaded before.
    """

    def __init__(self, build: Callable[[Any], None], device: torch.device, condition: _Condition | None = None) -> None:
        self._device = device
        (graph,) = _call(driver.cuGraphCreate, 0)
        handles: list[Any] = [(driver.cuGraphDestroy, graph)]
        self.close = weakref.finalize(self, _destroy, handles, condition)
        try:
            build(graph)
            (self._exec,) = _call(driver.cuGraphInstantiate, graph, 0)
        except BaseException:
            self.close()
            raise
        handles.insert(0, (driver.cuGraphExecDestroy, self._exec))

    def launch(self) -> None:
        """Launch on the current stream of the graph's device, which need not be the current one."""
        with torch.cuda.device(self._device):
            (error,) = driver.cuGraphLaunch(self._exec, torch.cuda.current_stream(self._device).cuda_stream)
        if int(error) != 0:
            raise RuntimeError(f"the driver refused to launch a loop: {error.name}")


def _destroy(handles: list[tuple[Callable[[Any], Any], Any]], _kept: _Condition | None) -> None:
    for destroy, handle in handles:
        destroy(handle)


class WhileLoop(StepLoop):
    """The step as the body of a WHILE node: as many steps as the slots say, in one launch.

    The count is cleared, the body runs, and behind each step the condition's kernel counts it, adds it and
    the live rows to a tally of all launches, and decides.

    Args:
        control: the slots.
        condition: the kernel.
        step: the captured step.
        epilogue: what runs behind the loop, or None.
        device: where they are.

    Raises:
        LoopRefusedError: the driver refuses.
    """

    kind = "while"

    def __init__(
        self,
        control: LoopControl,
        condition: _Condition,
        step: CudaStepGraph,
        epilogue: CudaStepGraph | None,
        device: torch.device,
    ) -> None:
        self._tally = torch.zeros(2, dtype=torch.int64, device=control.count.device)  # steps, live rows
        tensors = (control.count, control.limit, control.running, control.live_rows, self._tally)
        slots = [tensor.data_ptr() for tensor in tensors]

        def build(graph: Any) -> None:
            (context,) = _call(driver.cuCtxGetCurrent)
            (handle,) = _call(
                driver.cuGraphConditionalHandleCreate, graph, context, 1, driver.CU_GRAPH_COND_ASSIGN_DEFAULT
            )
            cleared = _set_count(graph, control, 0, context)
            loop = driver.CUgraphNodeParams()
            loop.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
            loop.conditional.handle = handle
            loop.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
            loop.conditional.size = 1
            loop.conditional.ctx = context
            (node,) = _call(driver.cuGraphAddNode, graph, [cleared], None, 1, loop)
            body = loop.conditional.phGraph_out[0]
            (ran,) = _call(driver.cuGraphAddChildGraphNode, body, None, 0, step.raw_graph())
            decide = driver.CUDA_KERNEL_NODE_PARAMS()
            decide.func = condition.function
            for size in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"):
                setattr(decide, size, 1)
            decide.kernelParams = ((int(handle), *slots), (ctypes.c_uint64, *[ctypes.c_void_p] * len(slots)))
            _call(driver.cuGraphAddKernelNode, body, [ran], 1, decide)
            if epilogue is not None:
                _call(driver.cuGraphAddChildGraphNode, graph, [node], 1, epilogue.raw_graph())

        self._outer = _OuterGraph(build, device, condition)

    def launch(self, num_steps: int) -> int:
        """Launch the loop; how many steps it runs is in the slot, and how many ran the condition's kernel counts."""
        self._outer.launch()
        return 0

    def counted(self) -> tuple[int, int]:
        """Return steps and live rows of all launches; waits for them."""
        steps, rows = self._tally.tolist()
        return steps, rows

    def close(self) -> None:
        """Release the graph."""
        self._outer.close()


class UnrolledLoop(StepLoop):
    """The step as often as a launch may be asked for, one after the other in one graph; rows that finished are inert.

    Args:
        control: the slots.
        step: the captured step.
        epilogue: what runs behind the steps, or None.
        device: where they are.
        fewer: takes the launches of fewer steps, which this graph does not hold.

    Raises:
        LoopRefusedError: the driver refuses.
    """

    kind = "unrolled"

    def __init__(
        self,
        control: LoopControl,
        step: CudaStepGraph,
        epilogue: CudaStepGraph | None,
        device: torch.device,
        fewer: StepLoop,
    ) -> None:
        self._num_steps = control.loop.max_steps
        self._fewer = fewer

        def build(graph: Any) -> None:
            (context,) = _call(driver.cuCtxGetCurrent)
            last = _set_count(graph, control, self._num_steps, context)
            for _ in range(self._num_steps):
                (last,) = _call(driver.cuGraphAddChildGraphNode, graph, [last], 1, step.raw_graph())
            if epilogue is not None:
                _call(driver.cuGraphAddChildGraphNode, graph, [last], 1, epilogue.raw_graph())

        self._outer = _OuterGraph(build, device)

    def launch(self, num_steps: int) -> int:
        """Launch the graph, or the steps one by one where they are fewer; none is left out."""
        if num_steps == self._num_steps:
            self._outer.launch()
        else:
            self._fewer.launch(num_steps)
        return num_steps

    def close(self) -> None:
        """Release the graph."""
        self._outer.close()


def _set_count(graph: Any, control: LoopControl, value: int, context: Any) -> Any:
    """Add a node that writes the count, before all others, and return it."""
    write = driver.CUDA_MEMSET_NODE_PARAMS()
    write.dst = driver.CUdeviceptr(control.count.data_ptr())
    write.value, write.elementSize = value, _COUNT_BYTES
    write.width = write.height = 1
    (node,) = _call(driver.cuGraphAddMemsetNode, graph, None, 0, write, context)
    return node


def _require_driver() -> None:
    if driver is None:
        raise LoopRefusedError("cuda-python is not installed")


def _readable(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _call(function: Callable[..., tuple], *arguments: Any) -> tuple[Any, ...]:
    try:
        error, *values = function(*arguments)
    except RuntimeError as missing:  # a driver without this function, or none at all
        raise LoopRefusedError(f"{function.__name__}: {missing}") from missing
    if int(error) != 0:
        raise LoopRefusedError(f"{function.__name__}: {error.name}")
    return tuple(values)
