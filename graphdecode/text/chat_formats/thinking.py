"""The markers of thoughts that are known, and how they are known."""

from __future__ import annotations

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
    ThinkingFamily(Thinking("<think>\n", "\n</think>\n\n", is_open=True), (), ("deepseek_r1",)),
]
