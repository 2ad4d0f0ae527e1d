"""`graphdecode buckets`: show a bucket configuration, or `tune` one to a recorded load."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphdecode.buckets import query_widths
from graphdecode.cli.options import ConfigOption, print_table, settings_of, table_of, wide_console, with_settings
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from graphdecode.config import BucketConfig, EngineConfig
    from graphdecode.models import ModelConfig
    from graphdecode.models.transformers_backend import AdoptedConfig
    from graphdecode.profiling.ladder_trial import Trial
    from graphdecode.profiling.tuner import LadderFigures, QueryCost

_FEW_STEPS = 1000


@with_settings("device", "dtype")
def tune(
    overrides: dict[str, Any],
    record: Annotated[Path, typer.Option(help="Batch sizes that `generate --record-batches` wrote.")],
    out: Annotated[Path, typer.Option(help="Where the tuned configuration goes (TOML).")],
    profile: Annotated[Path | None, typer.Option(help="A profile.json; without one, a linear cost model.")] = None,
    config: ConfigOption = None,
    max_graphs: Annotated[int | None, typer.Option(help="Graphs of the ladder at most; none: as many as now.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Replay the load through every ladder of the table, interleaved.")
    ] = False,
    model: Annotated[str, typer.Option(help="To measure: a folder, a repository id, demo, shape:NAME.")] = "demo",
    context: Annotated[int, typer.Option(help="To measure: tokens of each row.")] = 64,
    rounds: Annotated[int, typer.Option(help="To measure: rounds of each ladder.")] = 7,
    report: Annotated[Path | None, typer.Option(help="Write all figures to this file, as JSON.")] = None,
) -> None:
    """Find the ladder of least expected step time for a recorded load, and write a configuration with it.

    The table compares today's ladder (of --config, or the default) with the best ladder for each number of graphs:
    expected step, padding, what each further graph saves, and with --profile the cost of captures. The profile of a
    speculating engine adds the costs of steps by rows and queries. With --measure the ladders are replayed on a model:
    step time, capture time and memory of the graphs.
    """
    for option, path in (("--out", out), ("--report", report)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ArgumentError(f"{option} must be a file in a folder that exists, got {path}")
    settings = settings_of(config)
    measuring = settings_of(config, **overrides)
    from graphdecode.profiling import tuner
    from graphdecode.profiling.comparison import read_profile
    from graphdecode.profiling.ladder_trial import try_ladders

    counts = tuner.read_batch_sizes(record)
    top, today = settings.buckets.max_batch_size, settings.buckets.ladder
    if max(counts) > top:
        raise ArgumentError(
            f"{record} has batches of up to {max(counts)} rows, and max_batch_size is {top} in "
            f"{config or 'the default configuration'}: give the one that the load was recorded with as --config"
        )
    max_graphs = len(today) if max_graphs is None else max_graphs
    settings = settings.with_settings(max_graphs=max_graphs)
    measured = read_profile(profile) if profile else None
    cost = tuner.StepCost.linear(top) if measured is None else tuner.StepCost.from_profile(measured, top)
    graph_cost = None if measured is None else tuner.GraphCost.from_profile(measured, top)
    figures = tuner.compare_ladders(counts, today, cost, max_graphs, graph_cost)
    console = wide_console()
    print_table(console, _ladder_table(f"{counts.total()} steps of {record}; cost: {cost.source}", figures))
    wide = [] if measured is None else tuner.query_costs(measured)
    if wide:
        print_table(console, _query_table(wide))
    if counts.total() < _FEW_STEPS:
        few = f"{record} has only {counts.total()} steps: the ladder may not fit any other load"
        console.print(f"{few}; record some minutes of real requests", style="yellow", soft_wrap=True)
    tuned = settings.with_settings(batch_sizes=figures[-1].sizes)
    out.write_text(tuned.to_toml(), encoding="utf-8")
    console.print(f"wrote {out}", soft_wrap=True)
    trial: Trial | None = None
    if measure:
        ladders = {row.name: row.ladder for row in figures}
        trial = try_ladders(
            ladders, counts, model=model, device=measuring.device, dtype=measuring.dtype, context=context, rounds=rounds
        )
        _print_trial(console, trial, figures)
    if report is not None:
        from graphdecode.models import resolve_device
        from graphdecode.profiling.environment import describe_environment

        document = {
            "schema": tuner.SCHEMA_VERSION,
            "environment": describe_environment(resolve_device(measuring.device)),
            "cost": cost.source,
            "max_batch_size": top,
            "max_graphs": max_graphs,
            "batch_sizes": {str(size): counts[size] for size in sorted(counts)},
            "ladders": [asdict(row) for row in figures],
            "query_costs": [asdict(cost) for cost in wide],
            "trial": None if trial is None else asdict(trial),
        }
        report.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {report}", soft_wrap=True)


def _ladder_table(title: str, figures: list[LadderFigures]) -> Table:
    columns: dict[str, Callable[[LadderFigures], str]] = {
        "ladder": lambda row: row.name,
        "graphs": lambda row: str(len(row.sizes)),
        "expected ms": lambda row: f"{row.expected_ms:.4f}",
        "last graph saves": lambda row: (
            "" if row.gain_ms is None else f"{row.gain_ms:.4f} ({row.gain_ms / (row.gain_ms + row.expected_ms):.1%})"
        ),
        "padding": lambda row: f"{100 * row.padding_share:.1f}%",
        "capture ms": lambda row: "?" if row.capture_ms is None else f"{row.capture_ms:.0f}",
        "graphs MiB": lambda row: "?" if row.pool_bytes is None else f"{row.pool_bytes / 2**20:.2f}",
        "batch sizes": lambda row: " ".join(map(str, row.sizes)),
    }
    return table_of(figures, columns, left=["ladder", "batch sizes"], title=title, is_open=True)


def _query_table(costs: list[QueryCost]) -> Table:
    cells = {(cost.bucket, cost.queries): f"{cost.step_ms:.4f} ({cost.break_even:.2f})" for cost in costs}

    def cell(width: int, bucket: int) -> str:
        return cells.get((bucket, width), "")

    columns: dict[str, Callable[[int], str]] = {"rows": str}
    for width in sorted({cost.queries for cost in costs}):
        columns[f"{width} queries" if width > 1 else "1 query"] = partial(cell, width)
    title = "step ms by rows and queries (tokens a row and step that break even)"
    return table_of(sorted({cost.bucket for cost in costs}), columns, title=title, is_open=True)


def _print_trial(console: Console, trial: Trial, figures: list[LadderFigures]) -> None:
    from graphdecode.profiling.tuner import TODAY

    ladders, ratios = trial.ladders, {row.name: trial.ratio(row.name, TODAY) for row in figures}
    columns: dict[str, Callable[[LadderFigures], str]] = {
        "ladder": lambda row: row.name,
        "graphs": lambda row: str(len(row.sizes)),
        "step ms": lambda row: f"{ladders[row.name].step_ms:.4f}",
        "of today": lambda row: f"{ratios[row.name].median:.3f}",
        "quietest round": lambda row: f"{ratios[row.name].quiet:.3f}",
        "noise": lambda row: f"{100 * ratios[row.name].noise:.1f}%",
        "expected of today": lambda row: f"{row.expected_ms / figures[0].expected_ms:.3f}",
        "capture ms": lambda row: f"{ladders[row.name].capture_ms:.0f}",
        "graphs MiB": lambda row: f"{ladders[row.name].pool_bytes / 2**20:.2f}",
    }
    title = (
        f"measured: {trial.model} {trial.dtype}, context {trial.context}, "
        f"{trial.rounds} alternating rounds of {trial.steps} steps"
    )
    print_table(console, table_of(figures, columns, left=["ladder"], title=title, is_open=True))
    tuned = figures[-1].name
    console.print(
        f"{tuned}: {ladders[tuned].step_ms:.4f} ms a step, {ladders[TODAY].step_ms:.4f} today, "
        f"{ratios[tuned].median:.3f} of it (the median of the ratios of rounds): "
        f"{ratios[tuned].verdict}",
        highlight=False,
        soft_wrap=True,
    )


class _FileByDefault(typer.core.TyperGroup):
    """A command group whose default command is `show`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["show", *args]
        return super().parse_args(ctx, args)


buckets = typer.Typer(
    cls=_FileByDefault,
    no_args_is_help=True,
    help="Print the buckets of a configuration file, or the default ones: which batch sizes each serves, how much of "
    "it may be padding, and the memory that a model's weights and cache take; or tune them to a recorded load.",
    epilog="Example: graphdecode buckets my-buckets.toml --model smollm2",
)


@buckets.command(epilog="Example: graphdecode buckets my-buckets.toml --model shape:llama-3.1-8b")
@with_settings("device", "dtype", "kv_cache_dtype", "quantize", "model_impl")
def show(
    overrides: dict[str, Any],
    file: Annotated[Path | None, typer.Argument(help="A configuration file (TOML); none: the defaults.")] = None,
    model: Annotated[str, typer.Option(help="A folder, a repository id, demo, or shape:llama-3.1-8b.")] = "demo",
) -> None:
    """Print the ladder, which batch sizes go where, the worst padding, and the memory plan for a model."""
    config = settings_of(file, **overrides)
    from graphdecode.models import describe_model, resolve_device, resolve_dtype

    described = describe_model(model, model_impl=config.model_impl, trust_remote_code=config.trust_remote_code)
    device = resolve_device(config.device)
    chosen = resolve_dtype(
        config.dtype, described.dtype, device, integer_quantized=described.integer_quantized, compiles=False
    )
    console = wide_console()
    console.print(_bucket_table(config.buckets))
    batch_size, share = config.buckets.ladder.worst_padding()
    worst = f"worst padding: batch size {batch_size} wastes {100 * share:.0f}% of its bucket's rows"
    console.print(worst if share else "no padding: every batch size has a bucket", highlight=False)
    if config.speculation != "off":
        widths = ", ".join(map(str, query_widths(config.num_tokens)))
        console.print(
            f"{config.speculation} drafts: each bucket also with {widths} queries a row, a graph each", highlight=False
        )
    print_table(console, _memory_table(config, model, described, chosen, device))


def _bucket_table(config: BucketConfig) -> Table:
    from rich.table import Table

    table = Table("bucket", "batch sizes", "worst padding", title=f"{len(config.ladder)} buckets")
    first = 1
    for bucket in config.ladder:
        sizes = str(bucket) if first == bucket else f"{first}-{bucket}"
        table.add_row(str(bucket), sizes, f"{100 * (bucket - first) / bucket:.0f}%")
        first = bucket + 1
    return table


def _memory_table(
    engine: EngineConfig, model: str, settings: ModelConfig | AdoptedConfig, dtype: torch.dtype, device: torch.device
) -> Table:
    from graphdecode.engine.capacity import (
        checkpoint_bytes_of,
        draft_state_bytes_of,
        draft_states_of,
        paired_adapter_bytes_of,
        plan_capacity,
        rounding_bytes_of,
        state_bytes_of,
    )
    from graphdecode.memory import free_bytes
    from graphdecode.models import adapter_bytes, num_parameters, weight_bytes

    config = engine.buckets
    free, weights = free_bytes(device), weight_bytes(model, settings, dtype, device, quantize=engine.quantize)
    parameters = num_parameters(settings)
    keeps = ", most of them quantized as stored" if weights < parameters * dtype.itemsize else ""
    adapters = adapter_bytes(
        settings, engine.max_adapters, engine.max_adapter_rank, dtype, adapt_experts=engine.adapt_experts
    )
    capacity = plan_capacity(engine, settings, dtype, device, available_bytes=max(free - weights - adapters, 0))
    pages, per_row, rolling = capacity.total_num_pages, capacity.pages_per_row, capacity.rolling
    cache = capacity.page_bytes * (pages + 1)
    states, checkpoints = state_bytes_of(config, settings), checkpoint_bytes_of(engine, settings)
    drafted = draft_state_bytes_of(engine, settings)
    pairs = paired_adapter_bytes_of(engine, settings, dtype, device)
    remaining = free - weights - adapters - capacity.cache_bytes - states - checkpoints - drafted - pairs
    remaining -= rounding_bytes_of(engine, device)
    name = str(dtype).removeprefix("torch.")
    of_states = f"of {config.max_batch_size} rows, and one for padding" + "; prefixes are not shared" * (
        not checkpoints
    )
    of_checkpoints = f"of {engine.state_checkpoints} prefixes, at most one for {engine.state_checkpoint_tokens} tokens"
    limit = f"; pages may take {config.memory_fraction:.0%} of it" if config.total_num_pages == "auto" else ""
    layers, ring = (0, 0) if rolling is None else (sum(rolling.layers), rolling.pages)
    slots = f"{engine.max_adapters} slots of rank {engine.max_adapter_rank}"
    lines = (
        ("free now", free, f"on {device.type}"),
        ("weights", weights, f"{parameters / 1e6:.1f} million parameters in {name}{keeps}"),
        ("adapters", adapters, slots),
        ("left for pages", free - weights - adapters, f"what the weights leave{limit}"),
        (
            "key-value cache",
            cache,
            f"{pages} pages of {config.page_size} tokens, and one for padding, {capacity.page_bytes / 2**10:.1f} KiB "
            f"each: {pages / per_row:.1f} of {config.max_batch_size} rows at {capacity.max_sequence_length} tokens",
        ),
        ("of windows", capacity.rolling_bytes, f"{ring} pages a row for {layers} layers with a window"),
        ("recurrent states", states, of_states),
        ("checkpoints", checkpoints, of_checkpoints),
        ("states of drafts", drafted, f"{draft_states_of(engine)} queries of all rows"),
        ("experts' adapters", pairs, "what they add in a pass"),
        (
            "left" if remaining >= 0 else "missing",
            abs(remaining),
            "for graphs and buffers" if remaining >= 0 else "it does not fit",
        ),
    )
    columns: dict[str, Callable[[tuple[str, int, str]], str]] = {
        "what": lambda line: line[0],
        "MiB": lambda line: f"{line[1] / 2**20:.1f}",
        "of what": lambda line: line[2],
    }
    shown = [line for line in lines if line[1] or line is lines[-1]]
    return table_of(shown, columns, left=["what", "of what"], title=f"memory for {model} in {name} on {device.type}")


buckets.command(
    epilog="Example: graphdecode buckets tune --record batches.json --profile profile/profile.json --max-graphs 8 "
    "--out tuned.toml"
)(tune)
