"""`graphdecode check` and `graphdecode inspect`: a step and its graphs."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from graphdecode.buckets import BucketLadder
from graphdecode.cli.options import ConfigOption, settings_of, with_settings
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from graphdecode.buffers import Batch, StepBuffers
    from graphdecode.engine.runner import Runner
    from graphdecode.graphs import GraphReport, GraphTable

_REPLAYS = 3  # per bucket, for the report
_BESIDE = {"prompts": "prompts, by tokens", "mixed": "mixed steps, by rows + tokens of prompts"}


class _UserStep(NamedTuple):
    step: Callable[[Batch], None]
    buffers: StepBuffers
    constants: Any
    between_steps: Callable[[], None] | None
    batch_sizes: Any


def _load(target: str) -> _UserStep:
    module_name, colon, function = target.partition(":")
    sys.path.insert(0, ".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if "importlib" in last.filename else f" at {last.filename}:{last.lineno}"
        if module_name.endswith(".py"):
            meant = ".".join(Path(os.path.relpath(module_name)).with_suffix("").parts)
            where = f" (a module is meant, such as {meant}{colon}{function}, not a file)"
        raise ArgumentError(f"{module_name} cannot be imported{where}: {type(error).__name__}: {error}") from error
    from graphdecode.buffers import StepBuffers  # imports torch, as the module has by now

    names = (function or "step", "buffers", "between_steps", "batch_sizes")
    step, buffers, between_steps, batch_sizes = (getattr(module, name, None) for name in names)
    if not callable(step) or not isinstance(buffers, StepBuffers):
        raise ArgumentError(f"{target}: the module must have that function, and a StepBuffers named buffers")
    if between_steps is not None and not callable(between_steps):
        raise ArgumentError(f"{module_name}.between_steps must be a function, got {between_steps!r}")
    return _UserStep(step, buffers, getattr(module, "constants", ()), between_steps, batch_sizes)


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE[:FUNCTION]", help="The step, such as mypackage.steps:decode; without a function: step."
        ),
    ],
) -> None:
    """Report what a graph would get wrong in a step; exit code 1 if there is anything.

    The module has the step's StepBuffers as `buffers`; optionally `constants`, which the step only reads; and
    optionally `between_steps`, a function without arguments that the host calls between two steps.
    """
    step, buffers, constants, between_steps, _ = _load(target)
    from rich.console import Console
    from rich.table import Table

    from graphdecode.graphs import check as find_hazards

    findings = find_hazards(step, buffers, constants=constants, between_steps=between_steps)
    console = Console()
    if not findings:
        console.print(f"{target} can be captured", highlight=False)
        return
    table = Table("hazard", "operator", "where")
    for finding in findings:
        where = f"{Path(finding.file).name}:{finding.line}" if finding.file else ""
        table.add_row(finding.kind, finding.operator, where)
    console.print(table)
    for finding in findings:
        console.print(str(finding), highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(findings)} finding{'' if len(findings) == 1 else 's'} in {target}", highlight=False)
    raise typer.Exit(1)


@with_settings("device", "dtype", "quantize", "model_impl", "speculation")
def inspect(
    overrides: dict[str, Any],
    target: Annotated[
        str | None, typer.Argument(metavar="[MODULE[:FUNCTION]]", help="A step of your own; none: that of a model.")
    ] = None,
    model: Annotated[str, typer.Option(help="A checkpoint folder, a repository id, demo, or shape:NAME.")] = "demo",
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    queries: Annotated[int, typer.Option(help="Queries per row of the step to draw.")] = 1,
    dot: Annotated[int | None, typer.Option(metavar="BUCKET", help="Print one bucket's step for Graphviz.")] = None,
    svg: Annotated[
        int | None, typer.Option(metavar="BUCKET", help="Print one bucket's step as a picture; Graphviz draws it.")
    ] = None,
) -> None:
    """Capture a step, replay each bucket, and show what is in the graphs.

    A module of your own has its StepBuffers as `buffers`, and optionally `constants`, which the step only reads, and
    `batch_sizes`, the buckets.
    """
    if sum((as_json, dot is not None, svg is not None)) > 1:
        raise ArgumentError("give only one of --json, --dot and --svg")
    settings = settings_of(config, **overrides)
    own = None if target is None else _load(target)
    from graphdecode.engine.loading import load_runner
    from graphdecode.graphs import GraphManager

    runner, drawn = None, svg if dot is None else dot
    if own is not None:
        step, buffers, constants, _, sizes = own
        rows = buffers.max_batch_size
        ladder = BucketLadder.auto(rows) if sizes is None else BucketLadder(sizes, rows)
        _check_drawn(drawn, ladder)
        graphs: GraphTable = GraphManager(step, buffers, ladder, constants=constants)
    else:
        _check_drawn(drawn, settings.buckets.ladder)
        runner = load_runner(model, settings, progress=True)
        graphs = runner.graphs
    try:
        graphs.capture(kinds=["steps"])
        for shape in graphs.ladder.of("steps"):
            for _ in range(_REPLAYS):
                graphs.run(shape)
        if dot is not None:
            typer.echo(graphs.dot(dot, queries))
        elif svg is not None:
            typer.echo(graphs.svg(svg, queries))
        else:
            _show(graphs, runner, as_json)
    finally:
        graphs.close() if runner is None else runner.close()


def _check_drawn(bucket: int | None, ladder: BucketLadder) -> None:
    """Refuse an unknown bucket before anything is loaded or captured."""
    if bucket is not None and bucket not in ladder.sizes:
        raise ArgumentError(f"bucket must be one of {list(ladder.sizes)}, got {bucket}")


def _show(graphs: GraphTable, runner: Runner | None, as_json: bool) -> None:
    beside: dict[str, GraphReport] = {}
    if runner is not None:
        runner.graphs.capture(kinds=list(_BESIDE))
        beside = {name: report for name, report in runner.reports().items() if name in _BESIDE}
    if as_json:
        others = {name: report.as_dict() for name, report in beside.items()}
        typer.echo(json.dumps(graphs.report().as_dict() | others, indent=1))
        return
    typer.echo(str(graphs.report()))
    for name, report in beside.items():
        typer.echo(f"\n{_BESIDE[name]}: {report}")
