"""`CudaStepGraph`: one bucket's step as a CUDA graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch


class CudaCapture:
    """What all buckets of a manager share: one stream to capture on and one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = torch.cuda.graph_pool_handle()


class CudaStepGraph:
    """A captured step; replay is one launch.

    Args:
        step: the step over one bucket's views; warmed up already.
        shared: stream and pool.

    Attributes:
        nodes: kind of node -> count; the driver knows, see `graphs.inspect`.
        pool_bytes: memory that this capture added to the pool.
    """

    def __init__(self, step: Callable[[], None], shared: CudaCapture) -> None:
        self.nodes: Counter[str] = Counter()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(shared.device)
        before = torch.cuda.memory_reserved(shared.device)
        current = torch.cuda.current_stream(shared.device)
        try:
            with (
                torch.no_grad(),
                torch.cuda.graph(
                    self._graph, pool=shared.pool, stream=shared.stream, capture_error_mode="thread_local"
                ),
            ):
                step()
        except BaseException:
            # a capture that fails while it ends leaves its own stream current
            torch.cuda.set_stream(current)
            raise
        torch.cuda.synchronize(shared.device)
        self.pool_bytes = max(torch.cuda.memory_reserved(shared.device) - before, 0)

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Release the graph."""
        self._graph.reset()
