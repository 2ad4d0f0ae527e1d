"""CUDA graphs: captured on one stream, into one pool."""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from graphdecode.buffers import StepSlots
from graphdecode.graphs.errors import CaptureError, definition_of
from graphdecode.graphs.inspect import nodes as cuda_nodes
from graphdecode.graphs.inspect.observer import LastOperator
from graphdecode.graphs.inspect.owners import Owners
from graphdecode.graphs.step_graph import Argument, Step, StepGraph


class CudaCapture:
    """The capture stream and memory pool that all graphs of a backend share.

    cuBLAS keeps a workspace for every stream. All are freed right before and right after a capture, so that a graph's
    workspaces are in its pool. A graph that other code captured keeps its workspace only if that was allocated during
    its capture. `is_spoilt`: the driver refused to end a capture, so that no other can begin in its pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.is_spoilt = False
        self._failed: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make the capture stream the current one, ordered with the work before and after."""
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outer.wait_stream(self.stream)

    def clear(self) -> None:
        """Free the allocator's free memory, and cuBLAS workspaces outside of the pool.

        Another thread may be about to launch a product with its workspace: that stays mapped, to be had again.
        """
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        _clear_workspaces()

    def capture(self, step: Step, batch: StepSlots) -> torch.cuda.CUDAGraph:
        """Run a step on the stream, and return its graph; the process can continue after a CaptureError."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        observer = LastOperator()
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream), torch.no_grad(), observer:
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    step(batch)
                except BaseException:
                    self._end(graph, is_failing=True)
                    raise
                self._end(graph, is_failing=False)
        except BaseException as error:
            self._failed.append(graph)
            if isinstance(error, Exception):
                raise CaptureError.of(error, observer.name) from error
            raise
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph, *, is_failing: bool) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self.is_spoilt = True
            self._give_up(graph)
            self._release_generator()
            if not is_failing:
                raise
        finally:
            _clear_workspaces()

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Clean up after the driver refused to end a capture.

        Up to version 2.13, torch then does not notify its allocators. The one for device memory is notified here. The
        one for pinned memory cannot be: it keeps asking this graph about streams, and refuses the pool.
        """
        index = torch.cuda.current_device()
        functions = [getattr(torch._C, name, None) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool")]
        try:
            for function in filter(None, functions):
                function(index, self.pool)
        except RuntimeError:
            return  # a newer torch did it
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))  # never free the graph that the allocator asks

    def _release_generator(self) -> None:
        """Capture nothing: the end of a capture tells torch's generator, which is left in that of the failed one."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with suppress(RuntimeError), warnings.catch_warnings():  # the first error is the one to tell
            warnings.simplefilter("ignore")  # the graph is empty
            graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            graph.capture_end()

    def close(self) -> None:
        """Release the graphs whose capture failed."""
        for graph in self._failed:
            graph.reset()
        self._failed.clear()


def _clear_workspaces() -> None:
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


class CudaStepGraph(StepGraph):
    """A step captured after warm-up; replay is one launch.

    Raises:
        CaptureError: the step or its capture failed; the process can go on.
    """

    def __init__(self, step: Step, batch: StepSlots, shared: CudaCapture, owners: Owners) -> None:
        self._pool = shared.pool
        shared.clear()
        reserved = torch.cuda.memory_reserved(shared.device)
        began = time.perf_counter()
        self._graph = shared.capture(step, batch)
        free, captured = torch.cuda.mem_get_info(shared.device)[0], time.perf_counter()
        try:
            self._graph.instantiate()
        except RuntimeError as error:
            self._graph.reset()  # the error's traceback would keep the graph and its pool
            raise CaptureError.of(error) from error
        ended = time.perf_counter()
        self.capture_ms, self.instantiate_ms = 1000 * (ended - began), 1000 * (ended - captured)
        self.driver_bytes = max(free - torch.cuda.mem_get_info(shared.device)[0], 0)
        torch.cuda.synchronize(shared.device)
        self.pool_bytes = max(torch.cuda.memory_reserved(shared.device) - reserved, 0)
        memory = cuda_nodes.AddressMap.now(owners, self._pool)
        self.nodes = cuda_nodes.nodes_of(self.raw_graph(), memory)
        if not self.nodes and cuda_nodes.driver is not None:
            self._graph.reset()
            raise CaptureError("unseen-work", "the step", "it launched nothing", definition_of(step))
        self.moved_bytes = memory.bytes_touched(self.nodes)

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    def raw_graph(self) -> int:
        """Return the `cudaGraph_t`, to add to another graph."""
        return self._graph.raw_cuda_graph()

    def problem_finder(self, owners: Owners) -> Callable[[Argument], str | None]:
        """Return a function that describes how the owner of an address has changed since capture, or returns None."""
        return cuda_nodes.AddressMap.now(owners, self._pool).problem_of

    def close(self) -> None:
        """Release the graph."""
        self._graph.reset()
        self.nodes = []
