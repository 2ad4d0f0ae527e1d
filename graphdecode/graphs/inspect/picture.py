"""Pictures of one captured step, in Graphviz' language and as SVG."""

from __future__ import annotations

import shutil
import subprocess

from graphdecode.errors import GraphdecodeError
from graphdecode.graphs.step_graph import Node

# for each node, the sources that it reads (a node's index, or the name of a slot or constant), with a label
Edges = list[dict[tuple[int | str, str], None]]


def to_dot(title: str, nodes: list[Node]) -> str:
    """Return the step as a graph: operations are boxes, arrows go from the last writer of memory to its readers.

    Slots and constants that are read before they are written are ellipses; nodes of a CUDA graph are chained in order.
    """
    lines = ["digraph step {", f"  label={_quoted(title)}; rankdir=TB; node [shape=box, fontname=monospace];"]
    sources: set[str] = set()
    for index, (node, edges) in enumerate(zip(nodes, _edges_of(nodes), strict=True)):
        location = f"\\n{node.file.rpartition('/')[2]}:{node.line}" if node.file else ""
        lines.append(f'  n{index} [label={_quoted(node.name)[:-1]}{location}"];')
        for origin, label in edges:
            name = f"n{origin}" if isinstance(origin, int) else _quoted(origin)
            if isinstance(origin, str):
                sources.add(name)
            lines.append(f"  {name} -> n{index} [label={_quoted(label)}];")
    lines += [f"  {source} [shape=ellipse];" for source in sorted(sources)]
    return "\n".join([*lines, "}"])


class PictureError(GraphdecodeError, RuntimeError):
    """A picture that cannot be drawn here."""


def to_svg(dot: str) -> str:
    """Return Graphviz' drawing of a graph; a PictureError if it fails or is not installed."""
    program = shutil.which("dot")
    if program is None:
        raise PictureError("a picture needs Graphviz' program dot, which is not installed; --dot prints what it draws")
    done = subprocess.run([program, "-Tsvg"], input=dot, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PictureError(f"Graphviz refuses: {done.stderr.strip()}")
    return done.stdout


def _edges_of(nodes: list[Node]) -> Edges:
    """Return the edges of each node; if the arguments are not known, nodes are chained in order."""
    all_edges: Edges = []
    last_writer: dict[object, int] = {}
    has_arguments = any(argument.shape is not None for node in nodes for argument in node.arguments)
    for index, node in enumerate(nodes):
        edges: dict[tuple[int | str, str], None] = {}
        for argument in node.arguments:
            memory = argument.storage if argument.storage is not None else argument.address
            origin = last_writer.get(memory, argument.owner)
            if origin is not None and argument.name != "result":
                shape = "" if argument.shape is None else str(list(argument.shape))
                edges[origin, argument.owner or shape] = None
        if index and not has_arguments:
            edges[index - 1, ""] = None
        all_edges.append(edges)
        for argument in node.arguments:
            if argument.is_written and argument.storage is not None:
                last_writer[argument.storage] = index
    return all_edges


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
