"""What an output consists of, in the order in which it comes: reasoning, content and calls of functions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the thought before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins."""

    index: int  # of the call in its output
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which are JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends; one that was cut, too."""

    index: int


ReplyEvent = Reasoning | Content | CallStart | CallArguments | CallEnd
