"""`graphdecode quantize`: a model written anew with weights in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphdecode.cli.options import STDERR


def quantize(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or repository id, of plain weights, or GGUF.")],
    out: Annotated[Path, typer.Argument(help="The folder to make, or the .gguf file.")],
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
    """Write a model with weights in few bits: whole, with its tokenizer, for this program and for others.

    It is there at once or not at all: nothing is left of a copy that failed or was interrupted.
    """
    from graphdecode.text.quantised_copy import quantised_copy

    made = quantised_copy(
        model, out, to, group_size=group_size, file_format=file_format, overwrite=overwrite, progress=True
    )
    files = [made] if made.is_file() else [file for file in made.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    STDERR.print(f"{size / 2**20:.1f} MiB, {to}", highlight=False)
    typer.echo(made)
