"""Chat formats: how model families write tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatFormat:
    """How a model family writes tool calls."""

    name: str
    opening: str  # text before a call or a list of calls; "": an output that begins with `{` is a call
    closing: str  # text after it; "": it ends with its JSON
    marker: str  # text by which a chat template of this format is known
    is_special: bool = False  # whether `opening` is a special token
    arguments: str = "arguments"  # the key of a call's arguments


FORMATS = (
    ChatFormat("hermes", "<tool_call>", "</tool_call>", "<tool_call>"),
    ChatFormat("mistral", "[TOOL_CALLS]", "", "[TOOL_CALLS]", is_special=True),
    ChatFormat("granite", "<|tool_call|>", "", "<|tool_call|>", is_special=True),
    ChatFormat("llama", "", "", "<|python_tag|>", arguments="parameters"),
)
BARE_JSON = ChatFormat("json", "", "", "")


def format_of(chat_template: str | None) -> ChatFormat | None:
    """Return the format that a chat template uses; None: it has no tools."""
    return next((each for each in FORMATS if chat_template and each.marker in chat_template), None)
