"""What several commands share: options, the console for messages, and how a list of numbers is read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from graphdecode.config import EngineConfig
from graphdecode.errors import ArgumentError, cause
from graphdecode.extensions import load_modules

STDERR = Console(stderr=True)
ModelOption = Annotated[
    str,
    typer.Option(help="What `graphdecode models` lists, a checkpoint folder, or a repository id."),
]
ConfigOption = Annotated[Path | None, typer.Option(help="A configuration file (TOML); options override it.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda; left out: the configuration's.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="auto, float32, bfloat16 or float16; left out: the configuration's.")
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(help="Weights in few bits: int8, int4, fp8, q8_0 or q4_k; none expands those of a checkpoint."),
]
KvCacheDtypeOption = Annotated[
    str | None, typer.Option(help="auto, or int8 or fp8: keys and values in 8 bits; left out: the configuration's.")
]
SpeculateOption = Annotated[
    str | None, typer.Option(help="ngram: guess tokens ahead from what stood before; the answers stay the same.")
]
TensorParallelOption = Annotated[
    int | None, typer.Option("--tensor-parallel", help="Processes, one a GPU, that share the model's weights.")
]
MaxSequenceLengthOption = Annotated[
    int | None, typer.Option(help="Tokens of a prompt and its answer at most; left out: the configuration's.")
]
ModelImplOption = Annotated[
    str | None, typer.Option(help="auto, native or transformers: who runs the model; left out: the configuration's.")
]
TrustRemoteCodeOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run a checkpoint's own Python code where transformers needs it."),
]
TokenizerOption = Annotated[
    str | None, typer.Option(help="A folder, file or repository to take the tokenizer from; left out: the model's.")
]

LoadModuleOption = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="A file of Python that registers a family, form, source or step; repeatable."),
]

_LEAST_WIDTH = 118  # of tables where standard output is no terminal


def wide_console() -> Console:
    """Return a console on standard output that gives wide tables their width in a file, where COLUMNS says no other."""
    console = Console()
    is_as_it_is = console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return console if is_as_it_is else Console(width=max(console.width, _LEAST_WIDTH))


def settings_of(config: Path | None, **options: Any) -> EngineConfig:
    """Return what a configuration file, or the defaults, and the options that were given mean; load what they name.

    Args:
        config: the file, or None.
        options: fields of `EngineConfig`; None means that the option was left out.

    Raises:
        ArgumentError: the file or an option cannot be used.
    """
    settings = EngineConfig.of(config, **{name: value for name, value in options.items() if value is not None})
    load_modules(settings.load_modules)
    return settings


def tokenizer_for(model: Path, other: str | None, settings: EngineConfig) -> Any:
    """Return the tokenizer of a model, or the one that is asked for instead.

    Args:
        model: its folder or file.
        other: as `resolve_model_path` takes it, or None.
        settings: say whether a tokenizer's own code may run.

    Raises:
        ModelSourceError: there is none that can be read.
    """
    from graphdecode.models import resolve_model_path
    from graphdecode.text import load_tokenizer

    path = model if other is None else resolve_model_path(other)
    return load_tokenizer(path, trust_remote_code=settings.trust_remote_code)


def check_new_file(option: str, path: Path) -> None:
    """Refuse a file that could not be written, before anything is measured.

    Raises:
        ArgumentError: it is a folder, or in no folder.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentError(f"{option} must be a file in a folder that exists, got {path}")


def numbers(option: str, text: str) -> list[int]:
    """Read whole numbers that are separated by commas.

    Args:
        option: its name, for the message.
        text: what was given.

    Raises:
        ArgumentError: there is none, or something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(
            f"{option} must be whole numbers separated by commas, such as 1,8,64; got {text!r}"
        ) from None


def stdin_text() -> str:
    """Return all that standard input holds.

    Raises:
        ArgumentError: it is no text.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"stdin: {cause(error)}") from error


def print_error(message: str) -> None:
    """Print an error as one line on standard error."""
    # a name out of a stranger's file may hold what moves a terminal's cursor, or cannot be encoded
    safe = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in message)
    STDERR.print(f"error: {safe}", style="red", highlight=False, soft_wrap=True, markup=False)
