"""Chat formats: how model families write reasoning, content and tool calls, and a parser of their outputs."""

from graphdecode.text.chat_formats.chat_format import BARE_JSON, FORMATS, ChatFormat, format_of
from graphdecode.text.chat_formats.events import CallArguments, CallEnd, CallStart, Content, Reasoning, ReplyEvent
from graphdecode.text.chat_formats.parser import ReplyParser

__all__ = [
    "BARE_JSON",
    "FORMATS",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ChatFormat",
    "Content",
    "Reasoning",
    "ReplyEvent",
    "ReplyParser",
    "format_of",
]
