"""Which chat format a model has: by its chat template, or by the names that vLLM gives its parsers."""

from __future__ import annotations

from dataclasses import replace as replaced
from functools import lru_cache

from graphdecode.errors import ArgumentError, shown
from graphdecode.extensions import EntryPoints
from graphdecode.text.chat_formats.chat_format import ChatFormat, ChatFormatFamily, Thinking
from graphdecode.text.chat_formats.families import FAMILIES
from graphdecode.text.chat_formats.families.llama import BARE_JSON
from graphdecode.text.chat_formats.thinking import THINKING

_MAX_TEMPLATES = 64  # whose formats are remembered


def register_chat_format(family: ChatFormatFamily, *, replace: bool = False) -> None:
    """Register a family's chat format; it is tried before those that are known.

    Raises:
        ArgumentError: its name is taken and `replace` is False, or it is not a `ChatFormatFamily`.
    """
    if not isinstance(family, ChatFormatFamily):
        raise ArgumentError(f"a chat format must come as a ChatFormatFamily, got {shown(family)}")
    name = family.chat_format.name
    taken = [each for each in FAMILIES if each.chat_format.name == name]
    if taken and not replace:
        raise ArgumentError(f"the chat format {shown(name, plain=True)} is registered already; replace=True takes it")
    _by_template.cache_clear()
    FAMILIES[:] = [family, *(each for each in FAMILIES if each.chat_format.name != name)]


_OUTSIDE = EntryPoints("graphdecode.tool_parsers", lambda _, family: register_chat_format(family), FAMILIES)


def _families() -> list[ChatFormatFamily]:
    if not _OUTSIDE.is_loaded:
        _OUTSIDE.find()
    return FAMILIES


def tool_call_parsers() -> list[str]:
    """Return the names of all parsers of tool calls."""
    return sorted({name for each in _families() for name in (*each.tool_call_parsers, each.chat_format.name)})


def reasoning_parsers() -> list[str]:
    """Return the names of all parsers of thoughts."""
    names = {name for each in THINKING for name in each.reasoning_parsers}
    return sorted(names | {name for each in _families() for name in each.reasoning_parsers})


def format_of(
    chat_template: str | None, *, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> ChatFormat | None:
    """Return the format that a chat template uses, or that parsers' names say; None: it has no marks of any.

    Raises ArgumentError for an unknown name.
    """
    template = chat_template or ""
    found = _by_template(template) if tool_call_parser is None else _by_name(tool_call_parser)
    if reasoning_parser is None:
        thinking = _thinking_by_template(template)
    else:
        by_name = [each for each in _families() if reasoning_parser in each.reasoning_parsers]
        if by_name and tool_call_parser is None:
            return by_name[0].chat_format
        thinking = None if by_name else _thinking_by_name(reasoning_parser)
    if found is not None and found.channels is not None:
        return found
    if found is None:
        return None if thinking is None else ChatFormat("thinking", thinking=thinking)
    return found if thinking is None else replaced(found, thinking=thinking)


def with_bare_calls(chat_format: ChatFormat | None) -> ChatFormat:
    """Return a format in which functions can be called: by bare JSON, if it has no form of calls."""
    if chat_format is None:
        return BARE_JSON
    if chat_format.calls is None and chat_format.channels is None:
        return replaced(chat_format, calls=BARE_JSON.calls)
    return chat_format


@lru_cache(_MAX_TEMPLATES)
def _by_template(template: str) -> ChatFormat | None:
    for each in _families():
        is_told = bool(each.signs) and all(sign in template for sign in each.signs)
        if is_told and not any(sign in template for sign in each.absent):
            return each.chat_format
    return None


def _by_name(name: str) -> ChatFormat:
    for each in _families():
        if name in each.tool_call_parsers or name == each.chat_format.name:
            return each.chat_format
    raise ArgumentError(f"tool_call_parser must be one of {', '.join(tool_call_parsers())}, got {shown(name)}")


@lru_cache(_MAX_TEMPLATES)
def _thinking_by_template(template: str) -> Thinking | None:
    return next(
        (each.thinking for each in THINKING if each.signs and all(sign in template for sign in each.signs)), None
    )


def _thinking_by_name(name: str) -> Thinking:
    for each in THINKING:
        if name in each.reasoning_parsers:
            return each.thinking
    raise ArgumentError(f"reasoning_parser must be one of {', '.join(reasoning_parsers())}, got {shown(name)}")
