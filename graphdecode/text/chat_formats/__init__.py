"""Chat formats: how model families write reasoning, content and tool calls, and a parser of their outputs."""

from graphdecode.text.chat_formats.chat_format import ChatFormat, ChatFormatFamily, Thinking, Tools
from graphdecode.text.chat_formats.events import CallArguments, CallEnd, CallStart, Content, Reasoning, ReplyEvent
from graphdecode.text.chat_formats.families import FAMILIES
from graphdecode.text.chat_formats.families.llama import BARE_JSON
from graphdecode.text.chat_formats.parser import ReplyParser
from graphdecode.text.chat_formats.registry import format_of, register_chat_format, with_bare_calls

__all__ = [
    "BARE_JSON",
    "FAMILIES",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ChatFormat",
    "ChatFormatFamily",
    "Content",
    "Reasoning",
    "ReplyEvent",
    "ReplyParser",
    "Thinking",
    "Tools",
    "format_of",
    "register_chat_format",
    "with_bare_calls",
]
