"""`graphdecode buckets`: show a bucket configuration file, or `tune` one to a recorded load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from graphdecode.cli.options import ModelOption
from graphdecode.cli.tune import tune
from graphdecode.config import BucketConfig
from graphdecode.engine.capacity import plan_capacity
from graphdecode.models import ModelConfig, resolve_model_path


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


buckets.command()(tune)
