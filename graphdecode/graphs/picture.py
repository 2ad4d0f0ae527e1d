"""A picture of one captured step, in Graphviz' DOT language."""

from __future__ import annotations

from graphdecode.graphs.step_graph import Argument, Node


def to_dot(title: str, nodes: list[Node]) -> str:
    """Return the step as a graph: a box an operation, an arrow from the last that wrote some memory to who reads it.

    Slots and constants that are read before they are written stand as ellipses. Where the arguments are not known (a
    CUDA graph), the boxes are chained in the order of the nodes.
    """
    lines = ["digraph step {", f"  label={_quoted(title)}; rankdir=TB; node [shape=box, fontname=monospace];"]
    last_writer: dict[object, str] = {}
    sources: set[str] = set()
    knows_arguments = any(argument.tensor is not None for node in nodes for argument in node.arguments)
    for index, node in enumerate(nodes):
        place = f"\\n{node.file.rpartition('/')[2]}:{node.line}" if node.file else ""
        lines.append(f'  n{index} [label={_quoted(node.name)[:-1]}{place}"];')
        edges: dict[tuple[str, str], None] = {}
        for argument in node.arguments:
            memory = argument.storage if argument.storage is not None else argument.address
            origin = last_writer.get(memory)
            if origin is None and argument.owner is not None:
                origin = _quoted(argument.owner)
                sources.add(origin)
            if origin is not None and argument.name != "result":
                edges[origin, argument.owner or _shape(argument)] = None
        if index and not knows_arguments:
            edges[f"n{index - 1}", ""] = None
        lines += [f"  {origin} -> n{index} [label={_quoted(label)}];" for origin, label in edges]
        for argument in node.arguments:
            if argument.is_written and argument.storage is not None:
                last_writer[argument.storage] = f"n{index}"
    lines += [f"  {source} [shape=ellipse];" for source in sorted(sources)]
    return "\n".join([*lines, "}"])


def _shape(argument: Argument) -> str:
    return "" if argument.tensor is None else str(list(argument.tensor.shape))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
