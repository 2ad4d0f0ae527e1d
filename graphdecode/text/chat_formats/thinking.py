"""The markers of thoughts that are known, and how they are known."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from graphdecode.text.chat_formats.chat_format import Thinking


class ThinkingFamily(NamedTuple):
    """Markers of thoughts, texts in the chat templates of models that write them, and their parsers' names in vLLM."""

    thinking: Thinking
    signs: tuple[str, ...]
    reasoning_parsers: tuple[str, ...] = ()


_TAGS = Thinking("<think>\n", "\n</think>\n\n")
THINKING = [
    ThinkingFamily(Thinking("<|channel>thought\n", "\n<channel|>"), ("<|channel>thought",), ("gemma4",)),
    ThinkingFamily(Thinking("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]"), ("mistral",)),
    ThinkingFamily(Thinking("<seed:think>", "</seed:think>"), ("<seed:think>",), ("seed_oss",)),
    ThinkingFamily(
        Thinking("Here is my thought process:", "Here is my response:"), ("Here is my thought process:",), ("granite",)
    ),
    ThinkingFamily(
        _TAGS,
        ("</think>",),
        ("qwen3", "glm45", "glm47", "granite_thinking_parser", "nemotron_v3", "deepseek_v3", "kimi_k2"),
    ),
    ThinkingFamily(_TAGS, ("<think>",)),
    ThinkingFamily(replace(_TAGS, is_open=True), (), ("deepseek_r1",)),
]


def closes_thought(thinking: Thinking, prompt: str) -> bool:
    """Return whether a prompt ends with a thought that is closed."""
    return prompt.rstrip().endswith(thinking.closing.strip())


def opens_thought(thinking: Thinking, prompt: str, *, begins_message: bool) -> bool:
    """Return whether an output goes on with a thought that its prompt, or the model by itself, has opened.

    `begins_message`: the prompt ends with the beginning of the model's message, and not within one.
    """
    opening, closing = thinking.opening.strip(), thinking.closing.strip()
    if begins_message:
        return prompt.rstrip().endswith(opening) or (thinking.is_open and not closes_thought(thinking, prompt))
    return prompt.rfind(opening) > prompt.rfind(closing)
