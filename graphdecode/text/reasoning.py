"""Where a prompt stands in a model's reasoning: not begun, begun, or closed."""

from __future__ import annotations

from typing import Any

from graphdecode.engine.constraint import ReasoningMarkers
from graphdecode.text.chat_formats import Thinking, format_of
from graphdecode.text.chat_formats.thinking import closes_thought, opens_thought


class PromptReasoning:
    """The markers of reasoning in a model's chat template, as tokens."""

    def __init__(self, tokenizer: Any, thinking: Thinking) -> None:
        self._thinking = thinking
        encode = tokenizer.backend_tokenizer.encode
        self._start_ids, self._end_ids = (
            tuple(encode(marker.strip(), add_special_tokens=False).ids)
            for marker in (thinking.opening, thinking.closing)
        )

    def markers(self, prompt: str, *, begins_message: bool) -> ReasoningMarkers | None:
        """Return the markers for the output of a prompt; None if it does not begin with reasoning.

        `begins_message`: the prompt ends with the beginning of the model's message.
        """
        is_open = opens_thought(self._thinking, prompt, begins_message=begins_message)
        if not is_open and (not begins_message or closes_thought(self._thinking, prompt)):
            return None
        return ReasoningMarkers(self._start_ids, self._end_ids, is_open)


def reasoning_of(tokenizer: Any, reasoning_parser: str | None = None) -> PromptReasoning | None:
    """Return the reasoning of a tokenizer's chat template, or of a parser's name; None if it has none."""
    if tokenizer is None or not isinstance(tokenizer.chat_template, str | None):
        return None
    chat_format = format_of(tokenizer.chat_template, reasoning_parser=reasoning_parser)
    if chat_format is None or chat_format.thinking is None:
        return None
    return PromptReasoning(tokenizer, chat_format.thinking)
