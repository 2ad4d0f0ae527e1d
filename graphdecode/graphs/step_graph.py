"""The contract of a captured step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from graphdecode.graphs.owners import Owners


@dataclass(frozen=True)
class Argument:
    """One tensor of an operator, or one address among the arguments of a kernel.

    Attributes:
        name: of the operator's argument, "result" for what it returns; for a kernel, its number and the byte in it.
        address: where the tensor's storage began at capture, or the address itself.
        owner: the slot or constant that it belongs to; None for an operator's intermediates, and for an address that
            nobody owns.
        tensor: of an operator, an alias of the tensor, which goes on pointing at the memory of the capture.
        storage: what identifies the tensor's storage; None for opaque tensors.
        is_written: whether the operation writes there.
        is_certain: whether it surely is an address: of a kernel's struct a word may be padding, and hold anything.
    """

    name: str
    address: int | None
    owner: str | None
    tensor: Tensor | None = None
    storage: int | None = None
    is_written: bool = False
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


class StepGraph(Protocol):
    """One bucket's step, captured: replayed any number of times, closed once.

    Attributes:
        kinds: kind of node or operator -> count.
        nodes: the operations in order.
        pool_bytes: memory of the step's intermediates.
        driver_bytes: device memory that the driver took to make the graph fit to launch.
        moved_bytes: what one replay reads and writes at most; 0 where it is not known.
        capture_ms: time that it took to capture the graph and make it fit to launch, without warm-up.
        instantiate_ms: time of it that the driver took.
    """

    kinds: Counter[str]
    nodes: list[Node]
    pool_bytes: int
    driver_bytes: int
    moved_bytes: int
    capture_ms: float
    instantiate_ms: float

    def replay(self) -> None:
        """Run the step again over the same memory."""

    def problem_finder(self, owners: Owners) -> Callable[[Argument], str | None]:
        """Return a function that says what has become of an argument's memory since capture; None if nothing."""

    def close(self) -> None:
        """Release graph and memory."""
