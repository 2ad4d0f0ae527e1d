"""`graphdecode buckets`: show a bucket configuration file, or `tune` one to a recorded load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from graphdecode.buckets import query_widths
from graphdecode.cli.options import (
    overriding,
    settings_of,
    wide_console,
)
from graphdecode.cli.tune import tune

if TYPE_CHECKING:
    import torch

    from graphdecode.config import BucketConfig, EngineConfig
    from graphdecode.models import ModelConfig
    from graphdecode.models.transformers_backend import AdoptedConfig


class _FileByDefault(typer.core.TyperGroup):
    """A command group whose first word may be a file or an option instead of a command: `show` is meant then."""

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
@overriding("device", "dtype", "kv_cache_dtype", "model_impl")
def show(
    overrides: dict[str, Any],
    file: Annotated[Path | None, typer.Argument(help="A configuration file (TOML); none: the defaults.")] = None,
    model: Annotated[str, typer.Option(help="A folder, a repository id, demo, or shape:llama-3.1-8b.")] = "demo",
) -> None:
    """Print the ladder, which batch sizes go where, the worst padding, and the memory plan for a model."""
    config = settings_of(file, **overrides)
    from graphdecode.models import describe_model, resolve_device, resolve_dtype

    described = describe_model(model, model_impl=config.model_impl, trust_remote_code=config.trust_remote_code)
    place = resolve_device(config.device)
    chosen = resolve_dtype(config.dtype, described.dtype, place, few_bits=described.few_bits)
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
    console.print(_memory_table(config, model, described, chosen, place))


def _bucket_table(config: BucketConfig) -> Table:
    table = Table("bucket", "batch sizes", "worst padding", title=f"{len(config.ladder)} buckets")
    below = 0
    for bucket in config.ladder:
        first = below + 1
        sizes = str(bucket) if first == bucket else f"{first}-{bucket}"
        table.add_row(str(bucket), sizes, f"{100 * (bucket - first) / bucket:.0f}%")
        below = bucket
    return table


def _memory_table(
    engine: EngineConfig, model: str, settings: ModelConfig | AdoptedConfig, dtype: torch.dtype, device: torch.device
) -> Table:
    from graphdecode.engine.capacity import captured_widths, plan_capacity, resolve_cache_dtype
    from graphdecode.memory import free_bytes
    from graphdecode.models import weight_bytes

    config, cache_dtype = engine.buckets, resolve_cache_dtype(engine.kv_cache_dtype, dtype)
    free, weights = free_bytes(device), weight_bytes(settings, dtype)
    widths = captured_widths(engine)
    capacity = plan_capacity(config, settings, cache_dtype, device, max(free - weights, 0), widths)
    pages, per_row = capacity.total_num_pages, capacity.pages_per_row
    cache = capacity.page_bytes * (pages + 1)
    left = free - weights - cache
    name = str(dtype).removeprefix("torch.")
    limit = f"; pages may take {config.memory_fraction:.0%} of it" if config.total_num_pages == "auto" else ""
    table = Table(title=f"memory for {model} in {name} on {device.type}")
    table.add_column("what")
    table.add_column("MiB", justify="right")
    table.add_column("of what")
    lines = (
        ("free now", free, f"on {device.type}"),
        ("weights", weights, f"{weights // dtype.itemsize / 1e6:.1f} million parameters in {name}"),
        ("left for pages", free - weights, f"what the weights leave{limit}"),
        (
            "key-value cache",
            cache,
            f"{pages} pages of {config.page_size} tokens, and one for padding, {capacity.page_bytes / 2**10:.1f} KiB "
            f"each: {pages / per_row:.1f} of {config.max_batch_size} rows at {capacity.max_sequence_length} tokens",
        ),
        ("left" if left >= 0 else "missing", abs(left), "for graphs and buffers" if left >= 0 else "it does not fit"),
    )
    for what, size, of_what in lines:
        table.add_row(what, f"{size / 2**20:.1f}", of_what)
    return table


buckets.command(
    epilog="Example: graphdecode buckets tune --record batches.json --profile profile/profile.json --max-graphs 8 "
    "--out tuned.toml"
)(tune)
