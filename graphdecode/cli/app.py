"""The commands, and how an error leaves the program."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from graphdecode.cli.buckets import buckets
from graphdecode.cli.generate import generate
from graphdecode.cli.options import print_error
from graphdecode.cli.profile import profile
from graphdecode.cli.step import check, inspect

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A CUDA-graph-first decode runtime: capture once per bucket, replay every token.",
)
app.command()(generate)
app.add_typer(buckets, name="buckets")
app.command()(profile)
app.command()(check)
app.command()(inspect)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        versions = [f"{name} {metadata.version(name)}" for name in ("graphdecode", "torch", "triton")]
        typer.echo(", ".join(versions))
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback for errors; anywhere in the line.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Take the options for the help; `main` looks for `--debug`."""


def main() -> None:
    """Run the command line; an error is one line and exit code 2, with `--debug` a traceback."""
    try:
        arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
        sys.exit(app(arguments, standalone_mode=False))  # what `typer.Exit` says, or None
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message:  # a command that shows its help says nothing more
            print_error(" ".join(message.split()))
        sys.exit(2)
