"""The errors of this package.

Errors that users can cause derive from `GraphdecodeError`, and from the built-in class of their kind (`ValueError`,
`RuntimeError`). The command line shows them in one line; any other error is a bug, and shows a traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

_MOST_SHOWN = 120  # characters of a value in a message


class GraphdecodeError(Exception):
    """Base of errors that users can cause; the message says what cannot be done, and why."""


class ArgumentError(GraphdecodeError, ValueError):
    """An argument cannot be used; the message names it, its value, and what it must be."""


class ConfigError(ArgumentError):
    """A configuration cannot be used; the message names the file, the key and the line or value."""


class UnsupportedModelError(GraphdecodeError, ValueError):
    """A model that is not supported; the message lists what is."""


class CheckpointError(GraphdecodeError, ValueError):
    """A checkpoint does not match its configuration; the message names every tensor."""


class ClosedError(GraphdecodeError, RuntimeError):
    """The object was closed."""


class EngineStateError(GraphdecodeError, RuntimeError):
    """The call is not possible now: requests run, the engine sleeps, or memory is missing; nothing was changed."""


class NotSupportedError(GraphdecodeError, NotImplementedError):
    """The call is not possible on this device or system."""


class AnswerError(GraphdecodeError, RuntimeError):
    """An output failed after it had begun; `code` is the reason, for programs."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def cause(error: Exception) -> str:
    """Return the text of a built-in error without number and path, for a message that names the file."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return str(error)


def resembling(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known name that a wrong one resembles, for a message; else nothing."""
    lower = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), lower, 1)
    return f"; did you mean {lower[close[0]]!r}?" if close else ""


def shown(value: Any, *, plain: bool = False) -> str:
    """Return a value for a message: short, on one line; `plain`: texts without quotes."""
    try:
        text = value if plain and isinstance(value, str) and value.isprintable() else repr(value)
    except Exception:  # an object's `__repr__` may raise anything
        text = f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_OF_FLASHINFER = {  # part of a name -> what to use instead
    "prefill": "LLM and Engine compute prompts; graphdecode.attention.cached_attention attends from many queries",
    "mla": "graphdecode.mla has latent attention over all keys of a row",
    "attention": "graphdecode.attention.cached_attention attends from many queries",
    "sampling": "graphdecode.sampling draws from probabilities and logits",
}


def flashinfer_hint(name: str) -> str:
    """Return the hint for a name of FlashInfer that its surface here lacks; "" for other names."""
    alternative = next((instead for part, instead in _OF_FLASHINFER.items() if part in name.lower()), None)
    if alternative is None:
        return ""
    return f": FlashInfer's decode, append and merge are supported (graphdecode.surfaces.flashinfer); {alternative}"
