"""`CudaStepGraph`: one bucket's step as a CUDA graph."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphdecode.buffers import Batch
from graphdecode.graphs.cuda_memory import AddressMap
from graphdecode.graphs.cuda_nodes import is_mapped, nodes_of
from graphdecode.graphs.dispatch import TorchDispatchMode
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.owners import Owners
from graphdecode.graphs.step_graph import Argument, Node


class CudaCapture:
    """What the buckets of a manager share: one stream to capture on and one memory pool.

    A pool is good for one generation of graphs: when the last one is gone the allocator takes it apart.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make the capture's stream the current one for a while, in order with what comes before and after."""
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outer.wait_stream(self.stream)


class _LastOperator(TorchDispatchMode):
    """Remembers which operator was the last, for the error of a capture that fails."""

    name: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


class CudaStepGraph:
    """A captured step; replay is one launch.

    Args:
        step: what is captured; warmed up already.
        batch: the views that it is given.
        shared: stream and pool.
        owners: what it may touch.

    Attributes:
        kinds: kind of node -> count.
        nodes: the graph's nodes.
        pool_bytes: memory that this capture added to the pool.
        driver_bytes: device memory that the instantiation took.
        moved_bytes: for each kernel the sizes of the slots, caches and weights among its arguments; intermediates are
            not counted, and what a kernel reads in part (the live pages of a cache) is counted whole.
        instantiate_ms: time that the driver took to make the graph fit to launch.

    Raises:
        CaptureError: the step or its capture failed; stream and allocator are as they were.
    """

    def __init__(self, step: Callable[[Batch], None], batch: Batch, shared: CudaCapture, owners: Owners) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize(shared.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(shared.device)
        observer = _LastOperator()
        try:
            with torch.cuda.device(shared.device), torch.cuda.stream(shared.stream), torch.no_grad(), observer:
                self._capture(step, batch, shared)
            free = torch.cuda.mem_get_info(shared.device)[0]
            began = time.perf_counter()
            self._graph.instantiate()
            self.instantiate_ms = 1000 * (time.perf_counter() - began)
            self.driver_bytes = max(free - torch.cuda.mem_get_info(shared.device)[0], 0)
        except Exception as error:
            self._graph.reset()
            raise CaptureError.of(error, observer.name) from error
        torch.cuda.synchronize(shared.device)
        self.pool_bytes = max(torch.cuda.memory_reserved(shared.device) - before, 0)
        self._pool = shared.pool
        self.kinds: Counter[str] = Counter()
        self.nodes: list[Node] = []
        self.moved_bytes = 0
        try:
            addresses = self._addresses(owners)
            self.nodes = nodes_of(self._graph.raw_cuda_graph(), addresses.owner_at, addresses.is_ownerless)
            self.moved_bytes = addresses.bytes_touched(self.nodes)
            self.kinds.update(node.kind for node in self.nodes)
        except RuntimeError as error:  # a graph that cannot be described can be launched all the same
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)

    def _addresses(self, owners: Owners) -> AddressMap:
        return AddressMap(owners, self._pool, torch.cuda.memory_snapshot(), is_mapped)

    def _capture(self, step: Callable[[Batch], None], batch: Batch, shared: CudaCapture) -> None:
        self._graph.capture_begin(pool=shared.pool, capture_error_mode="thread_local")
        try:
            step(batch)
        except BaseException:
            self._end(shared, is_failing=True)
            raise
        self._end(shared, is_failing=False)

    def _end(self, shared: CudaCapture, *, is_failing: bool) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:
            # the driver refused what was captured, and torch left before it told the allocator: without this, the
            # allocator would go on believing that a capture is under way, and keep the pool for ever
            index = torch.cuda.current_device()
            for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                tell = getattr(torch._C, name, None)
                if tell is not None:
                    tell(index, shared.pool)
            if not is_failing:
                raise

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    def raw_graph(self) -> int:
        """Return the `cudaGraph_t`, for graphs that this one is to be a part of."""
        return self._graph.raw_cuda_graph()

    def problem_finder(self, owners: Owners) -> Callable[[Argument], str | None]:
        """Return a function that says what has become of the memory at an address since capture; None if nothing."""
        now = self._addresses(owners)

        def problem_of(argument: Argument) -> str | None:
            if argument.owner is None:
                return "nobody owned the memory there at capture"
            owner = None if argument.address is None else now.owner_at(argument.address)
            if owner == argument.owner:
                return None
            return f"{argument.owner} was there at capture, {owner or 'nothing'} is there now"

        return problem_of

    def close(self) -> None:
        """Release the graph."""
        self._graph.reset()
        self.nodes = []
