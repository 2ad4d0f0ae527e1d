"""`graphdecode convert`: a GGUF file as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphdecode.cli.options import STDERR


def convert(
    model: Annotated[str, typer.Argument(help="A .gguf file, a repository id that has one, or smollm2.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; auto is bfloat16 for blocks, else the file's own.")
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint that is there.")] = False,
) -> None:
    """Write a GGUF model as safetensors, with config.json, tokenizer and chat template, as transformers reads them.

    Weights in blocks are expanded: what they lost when they were rounded stays lost.
    """
    from graphdecode.text.converted_copy import converted_copy

    made = converted_copy(model, folder, dtype=dtype, overwrite=overwrite, progress=True)
    size = sum(file.stat().st_size for file in made.iterdir() if file.is_file())
    STDERR.print(f"{size / 2**20:.1f} MiB", highlight=False)
    typer.echo(made)
