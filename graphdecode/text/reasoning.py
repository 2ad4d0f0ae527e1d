"""Where a prompt stands in a model's reasoning: not begun, begun, or closed."""

from __future__ import annotations

from typing import Any

from graphdecode.engine.constraint import ReasoningMarkers

_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class PromptReasoning:
    """The markers of reasoning in a model's chat template, as texts and as tokens."""

    def __init__(self, tokenizer: Any, start: str, end: str) -> None:
        self._start, self._end = start, end
        encode = tokenizer.backend_tokenizer.encode
        self._start_ids, self._end_ids = (
            tuple(encode(marker, add_special_tokens=False).ids) for marker in (start, end)
        )

    def markers(self, prompt: str, *, begins_message: bool) -> ReasoningMarkers | None:
        """Return the markers for the output of a prompt; None if it does not begin with reasoning.

        `begins_message`: the prompt ends with the beginning of the model's message.
        """
        is_open = prompt.rfind(self._start) > prompt.rfind(self._end)
        if not is_open and (not begins_message or prompt.rstrip().endswith(self._end)):
            return None
        return ReasoningMarkers(self._start_ids, self._end_ids, is_open)


def reasoning_of(tokenizer: Any) -> PromptReasoning | None:
    """Return the reasoning of a tokenizer's chat template; None if it has none."""
    template = None if tokenizer is None else tokenizer.chat_template
    if not isinstance(template, str):
        return None
    return next((PromptReasoning(tokenizer, *markers) for markers in _MARKERS if markers[1] in template), None)
