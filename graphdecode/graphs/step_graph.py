"""The contract of a captured step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Argument:
    """One tensor of a node.

    Attributes:
        name: of the operator's argument; "result" for what it returns.
        tensor: an alias of the tensor, which goes on pointing at the memory of the capture.
        storage: what identifies its storage; None for opaque tensors.
        address: where the storage began at capture.
        owner: the slot or constant that it belongs to; None for the step's own intermediates.
        is_written: whether the node writes into it.
    """

    name: str
    tensor: Tensor
    storage: int | None
    address: int | None
    owner: str | None
    is_written: bool


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    Attributes:
        name: of the operator or kernel.
        file: of the step's line that it comes from, where that is known.
        line: its number.
        arguments: its tensors, where they are known.
    """

    name: str
    file: str | None = None
    line: int | None = None
    arguments: tuple[Argument, ...] = ()


class StepGraph(Protocol):
    """One bucket's step, captured: replayed any number of times, closed once.

    Attributes:
        kinds: kind of node or operator -> count.
        nodes: the operations in order.
        pool_bytes: memory of the step's intermediates.
        moved_bytes: what one replay reads and writes at most; 0 where it is not known.
        instantiate_ms: time that the driver took to make the graph fit to launch.
    """

    kinds: Counter[str]
    nodes: list[Node]
    pool_bytes: int
    moved_bytes: int
    instantiate_ms: float

    def replay(self) -> None:
        """Run the step again over the same memory."""

    def close(self) -> None:
        """Release graph and memory."""
