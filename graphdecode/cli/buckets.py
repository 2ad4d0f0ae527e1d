"""`graphdecode buckets`: show a bucket configuration file, or tune one to a recorded load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from graphdecode.buckets import BucketLadder
from graphdecode.cli.options import ConfigOption, ModelOption
from graphdecode.config import BucketConfig
from graphdecode.engine.capacity import plan_capacity
from graphdecode.models import ModelConfig, resolve_model_path
from graphdecode.profiling.ladder_trial import LadderTrial, try_ladders
from graphdecode.profiling.tuner import (
    StepCost,
    best_ladders,
    expected_step_ms,
    padding_share,
    read_batch_sizes,
)


class _FileByDefault(typer.core.TyperGroup):
    """A command group whose first word may be a file instead of a command: it is shown then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


buckets = typer.Typer(cls=_FileByDefault, no_args_is_help=True, help="Show a bucket configuration file, or tune one.")


@buckets.command()
def show(
    file: Annotated[Path, typer.Argument(help="A bucket configuration file (TOML).")],
    model: ModelOption = "demo",
) -> None:
    """Print the ladder, which batch sizes go where, the worst padding, and the memory plan for a model."""
    config = BucketConfig.load(file)
    console = Console()
    console.print(_bucket_table(config))
    batch_size, share = config.ladder.worst_padding()
    console.print(f"worst padding: batch size {batch_size} wastes {100 * share:.0f}% of its bucket's rows")
    console.print(_memory_table(config, model))


def _bucket_table(config: BucketConfig) -> Table:
    table = Table("bucket", "batch sizes", "worst padding", title=f"{len(config.ladder)} buckets")
    below = 0
    for bucket in config.ladder:
        first = below + 1
        sizes = str(bucket) if first == bucket else f"{first}-{bucket}"
        table.add_row(str(bucket), sizes, f"{100 * (bucket - first) / bucket:.0f}%")
        below = bucket
    return table


def _memory_table(config: BucketConfig, model: str) -> Table:
    path = resolve_model_path(model)
    settings = ModelConfig.load(path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    capacity = plan_capacity(config, settings, settings.dtype, device)
    weights = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    cache = capacity.page_bytes * (capacity.total_num_pages + 1)
    rows = capacity.pages_per_row * config.max_batch_size
    table = Table("what", "MiB", "of what", title=f"memory for {model} in {settings.dtype} on {device.type}")
    table.add_row("weights", f"{weights / 2**20:.1f}", "the checkpoint's files")
    table.add_row(
        "key-value cache",
        f"{cache / 2**20:.1f}",
        f"{capacity.total_num_pages} pages of {config.page_size} tokens, {capacity.page_bytes / 2**10:.1f} KiB each, "
        f"{100 * min(capacity.total_num_pages / rows, 1.0):.0f}% of {config.max_batch_size} rows at full length",
    )
    return table


@buckets.command()
def tune(
    record: Annotated[Path, typer.Option(help="Batch sizes that `generate --record-batches` wrote.")],
    out: Annotated[Path, typer.Option(help="Where the tuned configuration goes.")],
    profile: Annotated[Path | None, typer.Option(help="A profile.json; without one, a linear cost model.")] = None,
    config: ConfigOption = None,
    max_graphs: Annotated[int, typer.Option(help="Graphs that the ladder may have.")] = 16,
    measure: Annotated[
        bool, typer.Option("--measure", help="Replay the load through every ladder of the table, in turn.")
    ] = False,
    model: ModelOption = "demo",
    context: Annotated[int, typer.Option(help="Tokens of each row, with --measure.")] = 64,
) -> None:
    """Find the ladder of least expected step time for a recorded load, and write a configuration with it.

    The table shows today's ladder beside the best of each number of graphs, and what each further graph gains. With
    --measure the ladders are tried out on a model: measured step time, time of capture, memory of the graphs.
    """
    counts = read_batch_sizes(record)
    base = BucketConfig.load(config) if config else BucketConfig()
    base = base.with_limits(max_batch_size=max(base.max_batch_size, *counts), max_graphs=max_graphs)
    top = base.max_batch_size
    cost = StepCost.from_profile(profile, top) if profile else StepCost.linear(top)
    ladders = best_ladders(counts, cost, top, max_graphs)
    rows = {"today": base.ladder} | {f"best of {k}": ladder for k, ladder in enumerate(ladders, 1)}
    trials = try_ladders(rows, counts, model=model, context=context) if measure else {}
    console = Console()
    console.print(_ladder_table(rows, counts, cost, trials, f"{record}, {cost.source}"))
    if trials:
        today, tuned = trials["today"].step_ms, trials[f"best of {len(ladders)}"].step_ms
        console.print(f"measured on {model}: {today:.4f} ms a step today, {tuned:.4f} tuned, {today / tuned:.3f}x")
    out.write_text(base.with_limits(batch_sizes=list(ladders[-1])).to_toml(), encoding="utf-8")
    console.print(f"wrote {out}")


def _ladder_table(
    ladders: dict[str, BucketLadder],
    counts: Mapping[int, int],
    cost: StepCost,
    trials: dict[str, LadderTrial],
    title: str,
) -> Table:
    table = Table("ladder", "graphs", "expected ms", "gain", "padding", title=title)
    if trials:
        for column in ("measured ms", "capture ms", "graphs MiB"):
            table.add_column(column)
    table.add_column("sizes")
    before: float | None = None
    for name, ladder in ladders.items():
        expected, padding = expected_step_ms(ladder, counts, cost), padding_share(ladder, counts)
        gain = "" if before is None or name == "today" else f"{before - expected:.4f}"
        before = None if name == "today" else expected
        figures = [name, str(len(ladder)), f"{expected:.4f}", gain, f"{100 * padding:.1f}%"]
        if trials:
            trial = trials[name]
            figures += [f"{trial.step_ms:.4f}", f"{trial.capture_ms:.0f}", f"{trial.pool_bytes / 2**20:.2f}"]
        table.add_row(*figures, " ".join(str(size) for size in ladder))
    return table
