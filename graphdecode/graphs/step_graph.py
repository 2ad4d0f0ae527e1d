"""The contract of a captured step, and what a step is run within."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphdecode.buffers import Batch, StepBuffers

if TYPE_CHECKING:
    from graphdecode.graphs.inspect.owners import Owners

Step = Callable[[Batch], None]


def run(step: Callable[[Batch], Any], batch: Batch) -> Any:
    """Run a step as it is, and return what it does."""
    with torch.no_grad():
        return step(batch)


@contextmanager
def slots_restored(buffers: StepBuffers) -> Iterator[None]:
    """Give the slots, and how many rows are live, back as they were. Adopted tensors are not saved."""
    saved = {name: buffers.tensors[name].clone() for name in buffers.slots}
    live = buffers.live_row_count
    try:
        yield
    finally:
        buffers.set_live_rows(live)
        for name, values in saved.items():
            tensor = buffers.tensors[name]
            if tensor.shape == values.shape:
                tensor.copy_(values)


@contextmanager
def no_row_live(buffers: StepBuffers) -> Iterator[None]:
    """Make every row padding for a while, so that a step touches nothing but the slots, which are given back."""
    with slots_restored(buffers):
        buffers.pad(0)
        buffers.set_live_rows(0)
        yield


@dataclass(frozen=True)
class Argument:
    """One tensor of an operator, or one address among the arguments of a kernel."""

    name: str  # of the operator's argument, "result" for what it returns; for a kernel, its number and the byte in it
    address: int | None  # where the tensor's storage began at capture, or the address itself
    # the slot or constant that it belongs to; None for an operator's intermediates, and for an address that nobody owns
    owner: str | None
    # of an operator, an alias of the tensor, which goes on pointing at the memory of the capture
    tensor: Tensor | None = None
    storage: int | None = None  # what identifies the tensor's storage; None for opaque tensors
    is_written: bool = False  # whether the operation writes there
    # whether it surely is an address: of a kernel's struct a word may be padding, and hold anything
    is_certain: bool = True


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    Attributes:
        name: of the operator or kernel.
        kind: of the node ("kernel", "memcpy", ...); a recorded operator is a kind of its own.
        file: of the step's line that it comes from, where that is known.
        line: its number.
        arguments: its tensors, where they are known.
    """

    name: str
    kind: str
    file: str | None = None
    line: int | None = None
    arguments: tuple[Argument, ...] = ()


class StepGraph(ABC):
    """One bucket's step, captured: replayed any number of times, closed once.

    Attributes:
        nodes: the operations in order.
        pool_bytes: memory of intermediates that this capture added to the pool, where others left too little.
        driver_bytes: device memory that the driver took to make the graph fit to launch; 0 where there is none.
        moved_bytes: what one replay reads and writes at most; 0 where it is not known. What is read in part (the live
            pages of a cache, the gathered rows of a table) is counted whole.
        capture_ms: time that it took to capture the graph and make it fit to launch, without warm-up.
        instantiate_ms: time of it that the driver took; 0 where there is none.
    """

    nodes: list[Node]
    pool_bytes: int
    moved_bytes: int
    capture_ms: float
    driver_bytes: int = 0
    instantiate_ms: float = 0.0

    @property
    def kinds(self) -> Counter[str]:
        """Kind of node or operator -> count."""
        return Counter(node.kind for node in self.nodes)

    @abstractmethod
    def replay(self) -> None:
        """Run the step again over the same memory."""

    @abstractmethod
    def problem_finder(self, owners: Owners) -> Callable[[Argument], str | None]:
        """Return a function that says what has become of an argument's memory since capture; None if nothing."""

    @abstractmethod
    def close(self) -> None:
        """Release graph and memory."""
