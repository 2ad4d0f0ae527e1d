"""Starts a subject of `tools/bench` or `tools/check`, before anything of graphdecode is imported."""

from __future__ import annotations

import ast
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

try:
    import typer
except ModuleNotFoundError:
    sys.exit(
        "error: graphdecode is not installed in this Python: tools/test makes .venv; . .venv/bin/activate enters it"
    )

# subjects whose Triton kernels are compiled or interpreted, which has to be set before graphdecode is imported
COMPILED, INTERPRETED = ("bench kernels",), ("check quantized-products",)


def run(room: str) -> None:
    """Run the subject that the command line names with its options, or list the subjects."""
    command, paths = Path(sys.argv[0]).name, sorted((Path(__file__).parent / room).glob("[!_]*.py"))
    subjects = {path.stem.replace("_", "-"): path for path in paths}
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in subjects:
        print(f"usage: tools/{command} SUBJECT [OPTIONS]; tools/{command} SUBJECT --help shows the options\n")
        for subject, path in subjects.items():
            print(f"  {subject:18} {(ast.get_docstring(ast.parse(path.read_text())) or '').splitlines()[0]}")
        sys.exit(0 if name in ("", "--help") else 2)
    if f"{command} {name}" in COMPILED:
        os.environ.pop("TRITON_INTERPRET", None)
        import_module("triton")
    elif f"{command} {name}" in INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
    module = import_module(f"{room}.{subjects[name].stem}")
    sys.argv[:2] = [f"tools/{command} {name}"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with cleanup
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(help="\b\n" + (module.__doc__ or "").replace("\n\n", "\n\n\b\n"))(module.main)
    from graphdecode.cli.options import print_error
    from graphdecode.errors import GraphdecodeError

    try:
        app()
    except GraphdecodeError as error:
        print_error(str(error))
        sys.exit(2)
