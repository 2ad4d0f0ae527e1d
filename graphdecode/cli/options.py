"""Shared by commands: options made from settings, messages on standard error, tables, input."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from graphdecode.config import BucketConfig, EngineConfig
from graphdecode.config.key import Option
from graphdecode.errors import ArgumentError, cause
from graphdecode.extensions import load_modules

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Row = TypeVar("Row")
_Decorator = Callable[[Callable[..., None]], Callable[..., None]]
ModelOption = Annotated[
    str, typer.Option(help="What `graphdecode models` lists, a checkpoint folder, or a repository id.")
]
ModelsOption = Annotated[
    list[str],
    typer.Option(
        metavar="MODEL",
        help="What `graphdecode models` lists, a checkpoint folder, a folder of such, or a repository id. Several are "
        "loaded when requests name them.",
    ),
]
ConfigOption = Annotated[Path | None, typer.Option(help="A configuration file (TOML); options override it.")]
TokenizerOption = Annotated[
    str | None, typer.Option(help="A folder, file or repository to take the tokenizer from; left out: the model's.")
]

_REPEATED = {list[str]: "TEXT", list[int]: "ID"}  # metavars of options that may be repeated
_LEAST_WIDTH = 118  # columns of tables if standard output is not a terminal
_LEAST_FOLDED = 16  # least columns of a column of texts; longer words are folded
MODEL_OPTIONS = (  # settings of the commands that run a model
    "device",
    "dtype",
    "quantize",
    "kv_cache_dtype",
    "speculation",
    "max_adapters",
    "max_adapter_rank",
    "adapt_experts",
    "tensor_parallel_size",
    "model_impl",
    "trust_remote_code",
    "batch_invariant",
)


def wide_console() -> Console:
    """Return a console on standard output, wide enough for tables in a file unless COLUMNS says otherwise."""
    from rich.console import Console

    console = Console()
    has_width = console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return console if has_width else Console(width=max(console.width, _LEAST_WIDTH))


@functools.cache
def stderr_console() -> Console:
    """Return the console on standard error."""
    from rich.console import Console

    return Console(stderr=True)


def print_table(console: Console, table: Table) -> None:
    """Print a table; if its columns do not fit the console, one line per cell with the column's head."""
    at_least = 0
    for column in table.columns:
        longest = max(len(word) for text in (column.header, *column.cells) for word in str(text).split())
        at_least += 2 + (min(longest, _LEAST_FOLDED) if column.justify == "left" else longest)
    if at_least <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title)
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        console.print("")
        for column, cell in zip(table.columns, cells, strict=True):
            console.print(f"{column.header}: {cell}", highlight=False, markup=False)


def table_of(
    rows: Iterable[Row],
    columns: Mapping[str, Callable[[Row], str]],
    left: Iterable[str] = (),
    *,
    title: str | None = None,
    is_open: bool = False,
) -> Table:
    """Return a table with one line per row; `columns` are functions that return the cell of a row, by head.

    Columns with a head in `left` are left-aligned, and the first of them is not wrapped. `is_open`: no lines but the
    one below the heads.
    """
    from rich import box
    from rich.table import Table

    table, left = Table(title=title, box=box.SIMPLE if is_open else box.HEAVY_HEAD), tuple(left)
    for head in columns:
        justify: Any = "left" if head in left else "right"
        table.add_column(head, justify=justify, no_wrap=head in left[:1], overflow="fold")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


@functools.cache
def options_of(*configs: type) -> dict[str, Any]:
    """Return typer's options for the fields of dataclasses, by name."""
    options_by_name: dict[str, Any] = {}
    for config in configs:
        hints = get_type_hints(config, localns={"Sequence": list})
        options = [each for each in dataclasses.fields(config) if each.metadata.get("option") is not None]
        options_by_name |= {each.name: _annotated(each, hints[each.name]) for each in options}
    return options_by_name


def _annotated(field: dataclasses.Field[Any], hint: Any) -> Any:
    option: Option = field.metadata["option"]
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not NoneType]
    kind = next((kind for kind in kinds if get_origin(kind) is list), kinds[0])
    if get_origin(kind) is Mapping:  # given as texts
        kind = list[str]
    flags = option.flags
    if kind is bool and not flags:
        name = f"--{field.name.replace('_', '-')}"
        flags = (f"{name}/--no-{name[2:]}" if field.default else name,)
    metavar = option.metavar or (_REPEATED.get(kind) if get_origin(kind) is list else None)
    shown_default = option.default or False
    return Annotated[kind | None, typer.Option(*flags, metavar=metavar, help=option.help, show_default=shown_default)]


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """Hold Ctrl-C back while modules are imported: some drop it in C, as torch does while it imports numpy."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def with_options(name: str, configs: tuple[type, ...], *fields: str) -> _Decorator:
    """Give a command the options of some fields of dataclasses; those that are given are passed as one dict, `name`."""
    options = {field: options_of(*configs)[field] for field in fields}

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**arguments: Any) -> None:
            values = {key: arguments.pop(key, None) for key in options}
            command(**arguments, **{name: {key: value for key, value in values.items() if value not in (None, [])}})

        signature = inspect.signature(command, eval_str=True)
        parameters = [parameter for key, parameter in signature.parameters.items() if key != name]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters += [inspect.Parameter(key, kind, default=None, annotation=options[key]) for key in options]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return with_options


def with_settings(*fields: str) -> _Decorator:
    """Give a command the options of some settings, and `load_modules`, as `overrides`."""
    return with_options("overrides", (BucketConfig, EngineConfig), *fields, "load_modules")


def settings_of(config: Path | None, **options: Any) -> EngineConfig:
    """Return the settings of a file (None: defaults) with options, and load their modules; raises `ArgumentError`."""
    settings = EngineConfig.of(config, **options)
    load_modules(settings.load_modules)
    return settings


def stdin_text() -> str:
    """Return the text of standard input; raises `ArgumentError` if it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"stdin: {cause(error)}") from error


def print_error(message: str) -> None:
    """Print an error as one line on standard error."""
    # names from files may hold control characters, or surrogates
    safe = "".join(character if character.isprintable() else repr(character)[1:-1] for character in message)
    print_message(f"error: {safe}", style="red", is_prose=False)


def print_message(message: str, style: str | None = None, *, is_prose: bool = True) -> None:
    """Print a message on standard error; in a terminal, prose is wrapped at words."""
    console = stderr_console()
    is_exact = not (is_prose and console.is_terminal)
    console.print(message, style=style, highlight=False, soft_wrap=is_exact, markup=False)
