"""Matches every pointer of a captured graph against those who own memory now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphdecode.errors import GraphdecodeError
from graphdecode.graphs.inspect.owners import Owners
from graphdecode.graphs.step_graph import StepGraph


class StalePointerError(GraphdecodeError, RuntimeError):
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
        is_certain: whether it surely is an address, and had an owner; a strict manager refuses no other.
    """

    bucket: int
    node: str
    argument: str
    address: int | None
    owner: str | None
    problem: str
    file: str | None
    line: int | None
    is_certain: bool = True

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file else ""
        address = "" if self.address is None else f" ({self.address:#x})"
        return f"{where}bucket {self.bucket}: {self.node}, argument {self.argument}{address}: {self.problem}"


def stale_pointers(bucket: int, graph: StepGraph, owners: Owners) -> Iterator[StalePointer]:
    """Yield each argument of a graph that points at memory which has another owner than at capture, or none.

    An owner may have reallocated its storage in place (`resize_`), or taken another one (`set_`, `.data = ...`, a
    parameter that was replaced in its module); memory that was never declared may have been freed, or have had no owner
    even at capture.
    """
    problem_of = graph.problem_finder(owners)
    for node in graph.nodes:
        for argument in node.arguments:
            problem = problem_of(argument)
            if problem is not None:
                what = (argument.name, argument.address, argument.owner, problem, node.file, node.line)
                yield StalePointer(bucket, node.name, *what, argument.is_certain)
