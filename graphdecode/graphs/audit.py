"""Matches every pointer of a captured graph against those who own memory now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphdecode.graphs.owners import MemoryMap, Owners, storage_address
from graphdecode.graphs.recorded import RecordedStepGraph
from graphdecode.graphs.step_graph import Argument


class StalePointerError(RuntimeError):
    """A graph would read or write memory whose owner has left it."""


@dataclass(frozen=True)
class StalePointer:
    """An address in a graph that nobody owns any more.

    Attributes:
        bucket: rows of the graph.
        node: the operator or kernel.
        argument: its argument.
        address: where the graph points.
        owner: whose memory it was at capture.
        problem: what has become of it.
        file: of the step's line.
        line: its number.
    """

    bucket: int
    node: str
    argument: str
    address: int | None
    owner: str | None
    problem: str
    file: str | None
    line: int | None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file else ""
        address = "" if self.address is None else f" ({self.address:#x})"
        return f"{where}bucket {self.bucket}: {self.node}, argument {self.argument}{address}: {self.problem}"


def stale_pointers(bucket: int, graph: RecordedStepGraph, owners: Owners) -> Iterator[StalePointer]:
    """Yield each argument of a recorded graph that points at memory which nobody owns now.

    An owner may have reallocated its storage in place (`resize_`), or taken another one (`set_`, `.data = ...`, a
    parameter that was replaced in its module).
    """
    owned = (owners.slots(), owners.constants_now())
    pool = graph.pool_storages
    for node in graph.nodes:
        for argument in node.arguments:
            problem = _problem(argument, owned, pool)
            if problem is not None:
                yield StalePointer(
                    bucket, node.name, argument.name, argument.address, argument.owner, problem, node.file, node.line
                )


def _problem(argument: Argument, owned: tuple[MemoryMap, MemoryMap], pool: set[int | None]) -> str | None:
    if argument.storage is None or (argument.owner is None and argument.storage not in pool):
        return None  # opaque, or a number that the step's code wrote
    owner = argument.owner or "an intermediate"
    if storage_address(argument.tensor) != argument.address:
        return f"the memory of {owner} was reallocated after capture"
    if argument.owner is not None and not any(memory.name_of(argument.tensor) for memory in owned):
        return f"{owner} has other memory now than at capture"
    return None
