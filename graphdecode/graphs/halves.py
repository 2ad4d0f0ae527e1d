"""One step in two graphs, with something of the host's between their launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from graphdecode.buffers import StepBuffers
from graphdecode.graphs.capture import Step, no_row_live
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.generation import Generation, Halves
from graphdecode.graphs.step_graph import StepGraph


class HalvedStep:
    """The halves of a step, bucket by bucket.

    Args:
        steps: the two halves, as functions of a batch.
        buffers: of the step. On a GPU a launch comes back before its work is done; on a CPU it is the work.

    Attributes:
        buckets: how each of them runs; one that has not run in halves yet is missing.
    """

    def __init__(self, steps: tuple[Step, Step], buffers: StepBuffers) -> None:
        self.steps = steps
        self.buckets: dict[int, Halves] = {}
        self._buffers = buffers
        self._beside: ThreadPoolExecutor | None = None

    def run(self, bucket: int, generation: Generation, meanwhile: Callable[[], None]) -> None:
        """Run a step, and `meanwhile` while its first half runs: in another thread, where this one does the work."""
        if bucket not in self.buckets:
            self.buckets[bucket] = generation.eager_halves(bucket, self.steps)
        halves = self.buckets[bucket]
        if self._buffers.device.type == "cuda":
            halves.first()
            meanwhile()
        else:
            if self._beside is None:
                self._beside = ThreadPoolExecutor(1, thread_name_prefix="graphdecode-beside")
            done = self._beside.submit(meanwhile)
            try:
                halves.first()
            finally:
                done.result()
        halves.second()

    def capture(self, bucket: int, generation: Generation) -> tuple[StepGraph, ...]:
        """Let a bucket run as graphs from now on, and return them; none where they cannot be captured."""
        try:
            with no_row_live(self._buffers):
                halves = generation.capture_halves(bucket, self.steps)
        except CaptureError as error:
            warnings.warn(f"the halves of bucket {bucket} stay eager: {error}", RuntimeWarning, stacklevel=4)
            return ()
        self.buckets[bucket] = halves
        return halves.graphs

    @property
    def graphs(self) -> list[tuple[int, StepGraph]]:
        """Every graph, with its bucket."""
        return [(bucket, graph) for bucket, halves in self.buckets.items() for graph in halves.graphs]

    def close(self) -> None:
        """Forget the buckets, and end the thread."""
        self.buckets.clear()
        if self._beside is not None:
            self._beside.shutdown()
            self._beside = None
