"""One step in two graphs, with something of the host's between their launches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from graphdecode.graphs.capture import Step
from graphdecode.graphs.step_graph import StepGraph


@dataclass(frozen=True)
class Halves:
    """How a bucket's step runs in two.

    Attributes:
        first: runs all of the step that does not read what the host writes meanwhile.
        second: runs the rest.
        graphs: what was captured: nothing, or the two.
    """

    first: Callable[[], None]
    second: Callable[[], None]
    graphs: tuple[StepGraph, ...] = ()


class HalvedStep:
    """The halves of a step, bucket by bucket.

    Args:
        steps: the two halves, as functions of a batch.
        is_asynchronous: whether a launch comes back before its work is done, as on a GPU.

    Attributes:
        buckets: how each of them runs; one that has not run in halves yet is missing.
    """

    def __init__(self, steps: tuple[Step, Step], *, is_asynchronous: bool) -> None:
        self.steps = steps
        self.buckets: dict[int, Halves] = {}
        self._is_asynchronous = is_asynchronous
        self._beside: ThreadPoolExecutor | None = None

    def run(self, halves: Halves, meanwhile: Callable[[], None]) -> None:
        """Run a step, and `meanwhile` while its first half runs: in another thread, where this one does the work."""
        if self._is_asynchronous:
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

    def close(self) -> None:
        """Forget the buckets, and end the thread."""
        self.buckets.clear()
        if self._beside is not None:
            self._beside.shutdown()
            self._beside = None
