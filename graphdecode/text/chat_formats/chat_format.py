"""How a model family writes thoughts, content and calls of functions, as data.

Markers are as the family's chat template writes them; when outputs are read, their spaces may be others, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Thinking:
    """The markers of a thought, which comes before the answer."""

    opening: str
    closing: str
    is_open: bool = False  # outputs begin within it, unless the prompt closes it


@dataclass(frozen=True)
class JsonArguments:
    """Arguments that are a JSON object."""


@dataclass(frozen=True)
class TaggedArguments:
    """Arguments between markers, each `opening` key `named` value `closing`: texts as they are, else JSON."""

    opening: str
    named: str
    closing: str
    named_json: str = ""  # instead of `named` before a value that is no text; "": the schema says what is one


@dataclass(frozen=True)
class LiteralArguments:
    """Arguments as a programming language writes them, with `assign` between the names and their values."""

    assign: str
    quotes: tuple[str, ...]  # around texts; the first is written
    is_escaped: bool  # texts have escapes
    constants: tuple[str, str, str]  # true, false and null
    bare_keys: bool  # the keys of inner objects have no quotes
    pair: str  # between keys of inner objects and their values
    separator: str  # between members, and between items


ArgumentSyntax = JsonArguments | TaggedArguments | LiteralArguments


@dataclass(frozen=True)
class JsonCall:
    """A call that is a JSON object with a name and arguments."""

    arguments: str = "arguments"  # the key; "arguments" and "parameters" are read


@dataclass(frozen=True)
class NamedCall:
    """A call that is `prefix` name `infix` arguments `suffix`."""

    prefix: str
    infix: str
    suffix: str
    arguments: ArgumentSyntax
    id_marker: str = ""  # may come between the name and `infix`, with the call's id after it
    number_marker: str = ""  # comes between the name and `infix`, with the call's number after it


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written: each between `opening` and `closing`, or as items of a list between them.

    Without an `opening`, a call can only be at the beginning of an answer, or after another call.
    """

    call: JsonCall | NamedCall
    opening: str = ""
    closing: str = ""
    is_list: bool = False  # calls are items of one list
    separator: str = "\n"  # between calls
    section_opening: str = ""  # before the first call
    section_closing: str = ""  # after the last one
    optional_opening: str = ""  # may come before the first call, where there is no `opening`


@dataclass(frozen=True)
class Channels:
    """Messages with headers: each says its channel, and the function that it calls (OpenAI's harmony)."""

    start: str
    channel: str
    constrain: str
    message: str
    endings: tuple[str, ...]
    author: str
    reasoning: str  # the channel of thoughts
    calls: str  # that of calls
    content: str  # that of answers
    recipient: str  # before the name of the function that a message calls


@dataclass(frozen=True)
class ChatFormat:
    """How a model family writes thoughts, content and calls of functions."""

    name: str
    thinking: Thinking | None = None  # None: it writes no thoughts
    calls: CallSyntax | None = None  # None: its chat template knows no functions
    channels: Channels | None = None  # instead of both
    tools_in_system: bool = False  # the template shows tools that a system message has, and no calls
    call_id: str = ""  # what ids look like, with {name} and {index}; "": nine letters and digits

    @property
    def thinks(self) -> bool:
        """Whether outputs may have thoughts."""
        return self.thinking is not None or self.channels is not None

    @property
    def markers(self) -> frozenset[str]:
        """All texts that mark something."""
        return frozenset(filter(None, _texts([self.thinking, self.calls, self.channels])))


def _texts(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple | list):
        for each in part:
            yield from _texts(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _texts(getattr(part, field.name))


@dataclass(frozen=True)
class ChatFormatFamily:
    """A chat format, and how it is known: by its names in vLLM, and by texts in chat templates."""

    chat_format: ChatFormat
    signs: tuple[str, ...] = ()  # all are in the chat template
    absent: tuple[str, ...] = ()  # none is
    tool_call_parsers: tuple[str, ...] = ()  # vLLM's names of parsers
    reasoning_parsers: tuple[str, ...] = ()


Tools = Mapping[str, Mapping[str, Any]]  # functions by name: the schemas of their parameters
