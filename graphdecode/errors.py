"""The errors of this package, so that a caller can tell them from bugs.

An error that a user can cause derives from `GraphdecodeError`, and from the built-in class that says what sort it is
(`ValueError`, `RuntimeError`). The command line shows these in one line; anything else is a bug, and shows a traceback.
"""

from typing import Any

_MOST_SHOWN = 120  # characters of a value in a message


class GraphdecodeError(Exception):
    """Something that was asked for cannot be done; the message says what, and why."""


class ArgumentError(GraphdecodeError, ValueError):
    """An argument cannot be used; the message names it, its value, and what it must be."""


class ConfigError(ArgumentError):
    """A configuration cannot be used; the message names the file, the key and the line or value."""


class ClosedError(GraphdecodeError, RuntimeError):
    """The object was closed."""


class AnswerError(GraphdecodeError, RuntimeError):
    """An answer that had begun had to be given up; the message says why, and `code` the same to a program, or None."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def cause(error: Exception) -> str:
    """Return what an error of Python's says, for a message that names the file: without its number and the path."""
    if isinstance(error, UnicodeDecodeError):
        return f"no text in UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return str(error)


def shown(value: Any, *, plain: bool = False) -> str:
    """Return a value, whatever it is, for a message: short, on one line; a text without quotes where `plain`."""
    try:
        text = value if plain and isinstance(value, str) and value.isprintable() else repr(value)
    except Exception:  # whatever a stranger's object stumbles over when it is shown
        text = f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_OF_FLASHINFER = {  # part of a name there -> what serves instead
    "prefill": "LLM and Engine compute prompts; graphdecode.attention.cached_attention attends from many queries",
    "mla": "LLM runs models with latent attention",
    "cascade": "merge_state and merge_states put parts of an attention together",
    "attention": "graphdecode.attention.cached_attention attends from many queries",
    "fast_decode_plan": "the wrapper's own plan runs on the device, and can be captured",
    "sampling": "SamplingParams says how LLM and Engine sample",
}


def beyond_flashinfer(name: str) -> str:
    """Return what there is instead of a name of FlashInfer that its surface here has not; nothing of others."""
    found = next((instead for part, instead in _OF_FLASHINFER.items() if part in name.lower()), None)
    if found is None:
        return ""
    return f": of FlashInfer's surface there are decode, append and merge (graphdecode.surfaces.flashinfer); {found}"
