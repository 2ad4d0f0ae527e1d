"""The commands, and the handling of errors.

Commands import heavy modules in their bodies, so that help, version and a mistyped option need no torch.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from inspect import getdoc
from types import FrameType
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

import graphdecode
from graphdecode.cli.buckets import buckets
from graphdecode.cli.chat import chat
from graphdecode.cli.generate import generate
from graphdecode.cli.models import convert, models, quantize
from graphdecode.cli.options import print_error
from graphdecode.cli.profile import profile
from graphdecode.cli.serve import batch, serve
from graphdecode.cli.step import check, inspect
from graphdecode.config.settings import all_keys
from graphdecode.errors import ArgumentError, GraphdecodeError, cause
from graphdecode.extensions import version_of

_PACKAGES = ("torch", "triton", "cuda-bindings", "numpy", "safetensors", "transformers", "tokenizers")
_SIGNALLED = 128  # plus the signal's number, as in shells
_BROKEN_PIPE = 1  # as Python's own
_INTERRUPTED_SECONDS = 5.0  # an error this soon after Ctrl-C comes of it
_NUMBERS = {int: "an integer", float: "a number"}
_DIGITS = re.compile("[0-9]{1,9}")
_REPORT = (
    "this is a bug in graphdecode: please report it with the command, the lines above and what "
    "`graphdecode --version --debug` prints"
)


def versions() -> str:
    """Return the main versions in one line."""
    return f"graphdecode {graphdecode.__version__}, torch {version_of('torch')}, triton {version_of('triton')}"


def state() -> str:
    """Return the facts for a bug report, one per line."""
    import torch

    from graphdecode.kernels.native import library
    from graphdecode.models import resolve_device, resolve_dtype
    from graphdecode.profiling.environment import describe_environment

    facts: dict[str, object] = {"graphdecode": graphdecode.__version__, "platform": platform.platform()}
    facts |= {name: version_of(name) for name in _PACKAGES}
    try:
        device, resolve = resolve_device("auto"), partial(resolve_dtype, compiles=False)
        facts |= describe_environment(device)
        dtypes = {
            "plain weights in bfloat16": resolve("auto", torch.bfloat16, device),
            "plain weights in float16": resolve("auto", torch.float16, device),
            "quantized integers": resolve("auto", torch.bfloat16, device, integer_quantized=True),
        }
        chosen = ", ".join(f"{str(dtype).removeprefix('torch.')} for {what}" for what, dtype in dtypes.items())
        last = [library.describe(), f"dtype auto: {chosen}"]
    except GraphdecodeError as error:  # an environment variable is wrong
        last = [f"error: {error}"]
    return "\n".join([*(f"{name}: {value}" for name, value in facts.items()), *last])


class _Conversion:
    """Converts the value of a parameter as typer does, whose versions with pydantic take 50 ms to import that.

    None, texts and plain numbers need none of it.
    """

    def __init__(self, of_typer: Callable[[], Any]) -> None:
        self._of_typer = of_typer

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the converted value; see `typer.core`."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        kind, info = param.type_descriptor.annotation, param.type_descriptor.parameter_info
        if kind is str and type(value) is str:
            return value
        if kind is int and (info.min, info.max) == (None, None) and _DIGITS.fullmatch(str(value)):
            return int(value)
        if kind == list[str] and all(type(each) is str for each in value):
            return list(value)
        try:
            return self._of_typer().coerce(value, param=param, ctx=ctx)
        except Exception as error:
            expected = next((said for number, said in _NUMBERS.items() if number in (get_args(kind) or (kind,))), None)
            if expected is None or isinstance(value, list | tuple):
                raise
            least = "" if info.min is None else f" >= {info.min:g}"
            most = "" if info.max is None else f" and at most {info.max:g}"
            raise ArgumentError(f"{param.opts[0]} must be {expected}{least}{most}, got {value!r}") from error


class _Converts:
    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            of_typer = getattr(param, "get_runtime_param", None)  # other versions have none
            if of_typer is not None and not isinstance(of_typer, partial):
                param.get_runtime_param = partial(_Conversion, of_typer)
        return params


class _Command(_Converts, TyperCommand):
    pass


class _Group(_Converts, TyperGroup):
    pass


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables cut the names of options in narrow terminals
    help="A CUDA-graph-first decode runtime: capture once per bucket, replay every token.",
    epilog='Example: graphdecode generate --prompt "417+385=" --prompt "sort zebra="',
)
app.command(epilog='Example: graphdecode generate --json --prompt "999+1="')(generate)
app.command(epilog='Example: graphdecode chat --model smollm2 "Why is the sky blue?"')(chat)
app.command(epilog="Example: graphdecode serve --model smollm2 --port 8000")(serve)
app.command(epilog="Example: graphdecode batch --model demo requests.jsonl answers.jsonl")(batch)
app.add_typer(models, name="models")
app.command(epilog="Example: graphdecode quantize ./SmolLM2-135M ./SmolLM2-135M-int4 --to int4")(quantize)
app.command(epilog="Example: graphdecode convert ./model-Q4_K_M.gguf ./model")(convert)
app.add_typer(buckets, name="buckets")
app.command(epilog="Example: graphdecode profile --model demo --contexts 32,128 --steps 50 --out profile")(profile)
app.command(epilog="Example: graphdecode check mypackage.step:step")(check)
app.command(epilog="Example: graphdecode inspect --model demo --json")(inspect)

for _group in (app, models, buckets):
    for _command in _group.registered_commands:
        _command.cls = _Command
        # typer keeps the line breaks of docstrings after the first paragraph
        _paragraphs = (getdoc(_command.callback) or "").split("\n\n")
        _command.help = "\n\n".join(" ".join(each.split("\n")) for each in _paragraphs)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(state() if "--debug" in sys.argv else versions())
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show a traceback for errors; with --version, device and kernels too. Anywhere in the line."
        ),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Declare the global options; `main` reads `--debug`."""


def _reopen_standard_streams() -> None:
    """Open closed standard streams, so that no file gets their numbers; raise ArgumentError if output is closed."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        number = os.open(os.devnull, os.O_RDWR)  # the lowest free number: the stream's own
        setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))
    if "stdout" in closed:
        raise ArgumentError("standard output is closed")


def _end(number: int, _frame: FrameType | None) -> None:
    """Exit with cleanup, as on Ctrl-C; a second signal exits immediately."""
    signal.signal(number, signal.SIG_DFL)
    sys.exit(_SIGNALLED + number)


class _Interrupts:
    """Raises `KeyboardInterrupt` on Ctrl-C and notes the time, as libraries make other errors of it, or none.

    While torch is imported, its own import of numpy drops the interrupt, and every later one fails.
    """

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self._last = time.monotonic()
        raise KeyboardInterrupt

    def are_recent(self) -> bool:
        return time.monotonic() - self._last < _INTERRUPTED_SECONDS


def _with_flag(message: str) -> str:
    """Replace the setting's name at the beginning of an error by the option, if that was given."""
    name, _, rest = message.partition(" ")
    fields = {name} | {key.field for key in all_keys() if key.name == name}
    command: Any = typer.main.get_command(app)
    words = [argument.partition("=")[0] for argument in sys.argv[1:]]
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    flags = [flag for option in command.params if option.name in fields for flag in option.opts]
    return next((f"{flag} {rest}" for flag in flags if flag in words), message)


def _usage(error: Any) -> str:
    """Return what is wrong with the arguments, and where the right ones are if that says none."""
    message, context = str(error.format_message()), error.ctx
    if context is None or message.endswith("?") or "ossible options" in message:
        return message
    if "unexpected extra argument" in message and any(option.name == "model" for option in context.command.params):
        message += ": a model is given with --model"
    return f"{message.removesuffix('.')}; see {context.command_path} --help"


def main() -> None:
    """Run the command line.

    An error of the user (a wrong option, file or disk) is one line and exit code 2; a traceback with `--debug`. Any
    other error is a bug: a traceback, how to report it, and exit code 1.
    """
    interrupts = _Interrupts()
    handlers: dict[int, Any] = {signal.SIGTERM: _end}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as behind `nohup`
        handlers[signal.SIGINT] = interrupts
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        _reopen_standard_streams()
        arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
        if not arguments:
            with redirect_stdout(sys.stderr):
                app(["--help"], standalone_mode=False)
            sys.exit(2)
        status = app(arguments, standalone_mode=False)  # of `typer.Exit`, or None
        sys.stdout.flush()
        sys.exit(status)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_SIGNALLED + signal.SIGINT)
    except BrokenPipeError:
        # else Python reports it again at its final flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_BROKEN_PIPE)
    except Exception as error:
        if interrupts.are_recent():
            if "--debug" in sys.argv:
                traceback.print_exc()
            sys.exit(_SIGNALLED + signal.SIGINT)
        is_usage = hasattr(error, "format_message")  # typer's error class is private
        if not (is_usage or isinstance(error, (GraphdecodeError, OSError))):
            traceback.print_exc()
            print_error(_REPORT)
            sys.exit(1)
        if "--debug" in sys.argv:
            raise
        message = _usage(error) if is_usage else str(error)
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {cause(error)}"
        if message:  # empty after a command's help
            print_error(_with_flag(" ".join(message.split())))
        sys.exit(2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
