"""Loops of CUDA graphs: the captured step as the body of a WHILE node."""

from __future__ import annotations

import copy
import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphdecode.errors import GraphdecodeError
from graphdecode.graphs.cuda import CudaStepGraph
from graphdecode.graphs.step_graph import LoopControl, StepLoop
from graphdecode.kernels.cuda import nvrtc

try:
    from cuda.bindings import driver
except ImportError:  # without cuda-python steps are launched one by one
    driver = None

WHILE_NODES_SINCE = 12040  # the driver's CUDA version
_BODY_KINDS = {"kernel", "memcpy", "memset", "graph", "empty", "conditional"}
_COUNT_BYTES = 4
_TIMED_LAUNCHES = 3
CONDITION = b"graphdecode_loop_goes_on"


class LoopRefusedError(GraphdecodeError, RuntimeError):
    """This kind of loop is not available; the message says why."""


def compile_condition(capability: tuple[int, int]) -> bytes:
    """Return the condition kernel's cubin for a compute capability, such as (9, 0); a RuntimeError without NVRTC."""
    return nvrtc.compiled("loop_condition.cu", {}, nvrtc.architecture(capability))


def seconds_of_step(loop: StepLoop, steps: int, device: torch.device) -> float:
    """Return the time of a step in the fastest of some launches of `steps` steps; waits for them."""
    seconds = []
    for _ in range(_TIMED_LAUNCHES):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        loop.launch(steps)
        torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - began) / steps)
    return min(seconds)


class CudaLoops:
    """Makes the loops of a backend; the condition kernel is compiled once."""

    def __init__(self, control: LoopControl, device: torch.device) -> None:
        self._control = control
        self._device = device
        self._condition: _Condition | RuntimeError | None = None

    def over(self, *graphs: CudaStepGraph) -> StepLoop:
        """Return the loop over a captured step, and its epilogue if it has one.

        A WHILE node is timed against single launches, and used if it is not slower. Several ranks would have to agree:
        they use what the driver supports.
        """
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        try:
            if driver is None:
                raise LoopRefusedError("cuda-python is not installed")
            with torch.cuda.device(self._device):
                if is_alone:
                    self.must_be_faster(graphs)
                return self._while_node(graphs, self._control)
        except LoopRefusedError as refusal:
            loop = StepLoop(self._control, *(graph.replay for graph in graphs))
            loop.reason = f"a WHILE node: {refusal}"
            return loop

    def close(self) -> None:
        """Release the condition kernel, after all loops are closed."""
        if isinstance(self._condition, _Condition):
            self._condition.close()
        self._condition = None

    def must_be_faster(self, graphs: Sequence[CudaStepGraph]) -> None:
        """Raise a LoopRefusedError if a WHILE node is slower than single launches; no row is live."""
        control = copy.copy(self._control)
        control.running = torch.ones_like(control.running)  # run all steps, though no row is live
        steps, limit = control.loop.max_steps, control.limit.clone()
        loop = self._while_node(graphs, control)
        try:
            control.limit.fill_(steps)
            looped = seconds_of_step(loop, steps, self._device)
            single = seconds_of_step(StepLoop(control, *(graph.replay for graph in graphs)), steps, self._device)
        finally:
            loop.close()
            control.limit.copy_(limit)
        if looped > single:
            raise LoopRefusedError(f"{1e6 * looped:.1f} us a step, where single launches take {1e6 * single:.1f}")

    def _while_node(self, graphs: Sequence[CudaStepGraph], control: LoopControl) -> GraphLoop:
        (version,) = _call(driver.cuDriverGetVersion)
        if version < WHILE_NODES_SINCE:
            readable = f"{version // 1000}.{version % 1000 // 10}"
            raise LoopRefusedError(f"needs a driver for CUDA 12.4, this one is for {readable}")
        unfit = sorted(set(graphs[0].kinds) - _BODY_KINDS)
        if unfit:
            raise LoopRefusedError(f"its body cannot contain {', '.join(unfit)}")
        if self._condition is None:
            try:
                self._condition = _Condition(self._device)
            except RuntimeError as error:
                self._condition = error.with_traceback(None)  # its frames would keep the step's graph
        if isinstance(self._condition, RuntimeError):
            raise LoopRefusedError(str(self._condition))
        return GraphLoop(control, graphs, self._device, self._condition)


class _Condition:
    """The condition kernel, loaded on a device; unloaded by `close` or its finalizer."""

    def __init__(self, device: torch.device) -> None:
        code = compile_condition(torch.cuda.get_device_capability(device))
        (module,) = _call(driver.cuModuleLoadData, code)
        self.close = weakref.finalize(self, driver.cuModuleUnload, module)
        (self.function,) = _call(driver.cuModuleGetFunction, module, CONDITION)


class GraphLoop(StepLoop):
    """All steps of a launch in one graph; destroyed by `close` or its finalizer.

    The step is the body of a WHILE node. The count is cleared; after each step the condition kernel counts it, adds it
    and the live rows to a tally of all launches, and decides whether to go on.

    Raises:
        LoopRefusedError: the driver refuses.
    """

    kind = "while"

    def __init__(
        self, control: LoopControl, graphs: Sequence[CudaStepGraph], device: torch.device, condition: _Condition
    ) -> None:
        super().__init__(control, *(graph.replay for graph in graphs))
        self._device = device
        self._tally = torch.zeros(2, dtype=torch.int64, device=control.count.device)  # steps, live rows
        (graph,) = _call(driver.cuGraphCreate, 0)
        handles: list[Any] = [(driver.cuGraphDestroy, graph)]
        self._release = weakref.finalize(self, _destroy, handles, condition)
        try:
            (context,) = _call(driver.cuCtxGetCurrent)
            step, *epilogue = (each.raw_graph() for each in graphs)
            last = self._add_while(graph, context, step, condition)
            for each in epilogue:
                (last,) = _call(driver.cuGraphAddChildGraphNode, graph, [last], 1, each)
            (self._exec,) = _call(driver.cuGraphInstantiate, graph, 0)
        except BaseException:
            self._release()
            raise
        handles.insert(0, (driver.cuGraphExecDestroy, self._exec))

    def _add_while(self, graph: Any, context: Any, step: int, condition: _Condition) -> Any:
        control = self._control
        tensors = (control.count, control.limit, control.running, control.live_rows, self._tally)
        slots = [tensor.data_ptr() for tensor in tensors]
        (handle,) = _call(driver.cuGraphConditionalHandleCreate, graph, context, 1, driver.CU_GRAPH_COND_ASSIGN_DEFAULT)
        clear = driver.CUDA_MEMSET_NODE_PARAMS()
        clear.dst = driver.CUdeviceptr(control.count.data_ptr())
        clear.elementSize = _COUNT_BYTES
        clear.width = clear.height = 1
        (cleared,) = _call(driver.cuGraphAddMemsetNode, graph, None, 0, clear, context)
        loop = driver.CUgraphNodeParams()
        loop.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        loop.conditional.handle = handle
        loop.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        loop.conditional.size = 1
        loop.conditional.ctx = context
        (node,) = _call(driver.cuGraphAddNode, graph, [cleared], None, 1, loop)
        body = loop.conditional.phGraph_out[0]
        (ran,) = _call(driver.cuGraphAddChildGraphNode, body, None, 0, step)
        decide = driver.CUDA_KERNEL_NODE_PARAMS()
        decide.func = condition.function
        for size in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"):
            setattr(decide, size, 1)
        decide.kernelParams = ((int(handle), *slots), (ctypes.c_uint64, *[ctypes.c_void_p] * len(slots)))
        _call(driver.cuGraphAddKernelNode, body, [ran], 1, decide)
        return node

    def launch(self, num_steps: int) -> int:
        """Launch on the current stream of the graph's device, which need not be the current device."""
        with torch.cuda.device(self._device):
            (error,) = driver.cuGraphLaunch(self._exec, torch.cuda.current_stream(self._device).cuda_stream)
        if int(error) != 0:
            raise LoopRefusedError(f"the driver refused to launch a loop: {error.name}")
        return 0

    def counted(self) -> tuple[int, int]:
        """Return steps and live rows of all launches of a WHILE node; waits for the device."""
        steps, rows = self._tally.tolist()
        return steps, rows

    def close(self) -> None:
        """Release the graph."""
        self._release()


def _destroy(handles: list[tuple[Callable[[Any], Any], Any]], _condition: _Condition | None) -> None:
    for destroy, handle in handles:
        destroy(handle)


def _call(function: Callable[..., tuple], *arguments: Any) -> tuple[Any, ...]:
    try:
        result = function(*arguments)
    except RuntimeError as missing:  # no driver, or one without this function
        raise LoopRefusedError(f"{function.__name__}: {missing}") from missing
    return _checked(result, function.__name__)


def _checked(result: tuple[Any, ...], call: str) -> tuple[Any, ...]:
    error, *values = result
    if int(error) != 0:
        raise LoopRefusedError(f"{call}: {error.name}")
    return tuple(values)
