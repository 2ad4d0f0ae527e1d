"""Pictures of one captured step: in Graphviz' DOT language, and as SVG without any other program."""

from __future__ import annotations

from html import escape

from graphdecode.graphs.step_graph import Argument, Node

_ROW, _BOX_HEIGHT, _BOX_WIDTH, _MARGIN = 34, 24, 420, 150
_LANES, _LANE = 14, 9  # arrows that skip boxes run beside them, in so many lanes


# of each node: where what it reads comes from, a node's index or the name of a slot or constant, and a label
Edges = list[dict[tuple[int | str, str], None]]


def to_dot(title: str, nodes: list[Node]) -> str:
    """Return the step as a graph: a box an operation, an arrow from the last that wrote some memory to who reads it.

    Slots and constants that are read before they are written stand as ellipses. Where the arguments are not known (a
    CUDA graph), the boxes are chained in the order of the nodes.
    """
    lines = ["digraph step {", f"  label={_quoted(title)}; rankdir=TB; node [shape=box, fontname=monospace];"]
    sources: set[str] = set()
    for index, (node, edges) in enumerate(zip(nodes, _edges_of(nodes), strict=True)):
        place = f"\\n{node.file.rpartition('/')[2]}:{node.line}" if node.file else ""
        lines.append(f'  n{index} [label={_quoted(node.name)[:-1]}{place}"];')
        for origin, label in edges:
            name = f"n{origin}" if isinstance(origin, int) else _quoted(origin)
            if isinstance(origin, str):
                sources.add(name)
            lines.append(f"  {name} -> n{index} [label={_quoted(label)}];")
    lines += [f"  {source} [shape=ellipse];" for source in sorted(sources)]
    return "\n".join([*lines, "}"])


def to_svg(title: str, nodes: list[Node]) -> str:
    """Return the step as a picture: a box an operation, from top to bottom, arrows on the right for what is passed on.

    The slots and constants that an operation reads stand to the left of its box.
    """
    height = _ROW * (len(nodes) + 2)
    width = 2 * _MARGIN + _BOX_WIDTH + _LANES * _LANE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" '
        'font-size="11">',
        '<defs><marker id="a" markerWidth="7" markerHeight="6" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#456"/></marker></defs>',
        f'<text x="{_MARGIN}" y="18" font-size="13">{escape(title)}</text>',
    ]
    right = _MARGIN + _BOX_WIDTH
    for index, (node, edges) in enumerate(zip(nodes, _edges_of(nodes), strict=True)):
        top = _ROW * (index + 1)
        middle = top + _BOX_HEIGHT // 2
        place = f"  {node.file.rpartition('/')[2]}:{node.line}" if node.file else ""
        lines.append(
            f'<rect x="{_MARGIN}" y="{top}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" fill="#eef3f8" stroke="#456"/>'
            f'<text x="{_MARGIN + 6}" y="{middle + 4}">{escape(_short(node.name + place, 66))}</text>'
        )
        owners = ", ".join(origin for origin, _ in edges if isinstance(origin, str))
        if owners:
            lines.append(
                f'<text x="{_MARGIN - 6}" y="{middle + 4}" text-anchor="end" fill="#765">{escape(_short(owners, 21))}'
                f"<title>{escape(owners)}</title></text>"
            )
        for origin in sorted({origin for origin, _ in edges if isinstance(origin, int)}):
            begin = _ROW * (origin + 1) + _BOX_HEIGHT // 2
            lane = right + 12 + _LANE * (origin % _LANES)
            lines.append(
                f'<path d="M{right},{begin + 4} H{lane} V{middle - 4} H{right}" fill="none" stroke="#456" '
                'stroke-width="0.8" marker-end="url(#a)"/>'
            )
    return "\n".join([*lines, "</svg>"])


def _edges_of(nodes: list[Node]) -> Edges:
    """Return what each node reads, and from whom. Where the arguments are not known, nodes are chained in order."""
    found: Edges = []
    last_writer: dict[object, int] = {}
    knows_arguments = any(argument.tensor is not None for node in nodes for argument in node.arguments)
    for index, node in enumerate(nodes):
        edges: dict[tuple[int | str, str], None] = {}
        for argument in node.arguments:
            memory = argument.storage if argument.storage is not None else argument.address
            origin = last_writer.get(memory, argument.owner)
            if origin is not None and argument.name != "result":
                edges[origin, argument.owner or _shape(argument)] = None
        if index and not knows_arguments:
            edges[index - 1, ""] = None
        found.append(edges)
        for argument in node.arguments:
            if argument.is_written and argument.storage is not None:
                last_writer[argument.storage] = index
    return found


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "\u2026"


def _shape(argument: Argument) -> str:
    return "" if argument.tensor is None else str(list(argument.tensor.shape))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
