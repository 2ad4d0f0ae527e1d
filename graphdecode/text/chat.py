"""Chat templates: messages to a prompt. It needs no engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from graphdecode.engine import SamplingParams
from graphdecode.errors import ArgumentError, cause

_EXPECTED = "a conversation is a list of messages, each a dict with `role` and `content`"
_MARK = "graphdecode-end-of-turn"  # an answer that no template holds itself
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = Mapping[str, Any]
Tool = Mapping[str, Any] | Callable[..., Any]


class ChatOptions(TypedDict, total=False):
    """Options of `render_chat`, which `LLM.chat` and `AsyncLLM.chat` take too."""

    chat_template: str | Path | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Tool] | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as a model is given it."""

    text: str  # what the template made
    token_ids: list[int]  # of the text; the template has put all special tokens in that there are to be
    # tokens that end a turn of the assistant in this template, where it ends with a special one
    end_of_turn_ids: tuple[int, ...]

    def ending(self, params: SamplingParams) -> SamplingParams:
        """Return parameters under which the answer ends with the turn."""
        if params.ignore_eos:
            return params
        stops = tuple(dict.fromkeys([*(params.stop_token_ids or ()), *self.end_of_turn_ids]))
        return params if stops == tuple(params.stop_token_ids or ()) else params.unchecked(stop_token_ids=stops)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    chat_template: str | Path | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Tool] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> RenderedChat:
    """Make a prompt of a conversation; any number of threads may do so with one tokenizer.

    Args:
        tokenizer: of transformers, such as `load_tokenizer` returns.
        messages: of one conversation, in OpenAI's form: `role`, and `content` that is a text or a list of parts
            `{"type": "text", "text": ...}`, which are joined by ends of line; what else there is goes to the template.
        chat_template: in Jinja, or the path of a file that holds one; None: the tokenizer's own.
        add_generation_prompt: end with the beginning of an assistant's turn, so that an answer follows.
        continue_final_message: leave the last message open, so that the answer goes on with it; in place of
            `add_generation_prompt`.
        tools: what the model may call, as JSON schemas or as functions with types and docstrings.
        chat_template_kwargs: further variables of the template.

    Raises:
        ArgumentError: the messages are malformed, there is no template, or it refuses the conversation.
    """
    if tokenizer is None:
        raise ArgumentError("a chat needs a tokenizer, and this model was loaded without one")
    if add_generation_prompt and continue_final_message:
        raise ArgumentError(
            "continue_final_message=True goes on with the last message, and add_generation_prompt=True begins another "
            "one: set add_generation_prompt=False"
        )
    conversation = [_as_message(message, f"messages[{place}]") for place, message in enumerate(_listed(messages))]
    template = _template_of(tokenizer, chat_template, tools)
    for place, message in enumerate(conversation):
        if message["role"] not in _ROLES and message["role"] not in template:  # templates may have roles of their own
            expected = f"one of {', '.join(_ROLES)}, or one that the chat template names"
            raise ArgumentError(f"messages[{place}].role must be {expected}, got {message['role']!r:.80}")
    variables = dict(chat_template_kwargs or {})

    def rendered(conversation: list[dict[str, Any]], **how: bool) -> str:
        try:
            text = tokenizer.apply_chat_template(
                conversation, chat_template=template, tokenize=False, tools=tools, **how, **variables
            )
        except Exception as error:  # a template is a program, and what it divides by came with the messages
            raise ArgumentError(f"the chat template refuses this conversation: {error}") from error
        return str(text)

    text = rendered(
        conversation, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
    )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # halves of surrogate pairs
        raise ArgumentError(f"a message is no valid text: {error}") from error
    return RenderedChat(text, _encoded(tokenizer, text), _end_of_turn(tokenizer, rendered))


def as_conversations(messages: Any) -> list[list[Message]]:
    """Return what was given, one conversation or several, as a list of conversations.

    Raises:
        ArgumentError: what was given is neither.
    """
    items = _listed(messages)
    if isinstance(items[0], Mapping):
        return [items]
    return [_listed(item) for item in items]


def _listed(messages: Any) -> list[Any]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ArgumentError(f"{_EXPECTED}, got {messages!r:.80}")
    items = list(messages)
    if not items:
        raise ArgumentError(f"{_EXPECTED}, got an empty list")
    return items


def _as_message(message: Any, place: str) -> dict[str, Any]:
    """Return one message with its content as a text, as templates expect it."""
    if not isinstance(message, Mapping):
        raise ArgumentError(f"{place} must be a dict with `role` and `content`, got {message!r:.80}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ArgumentError(f"{place} must have a `role` such as 'user', got {role!r:.80}")
    calls = message.get("tool_calls")
    if "content" not in message and not calls:
        raise ArgumentError(f"{place} of the role {role!r} has no `content`")
    content = _as_text(message.get("content"), f"{place}.content", may_be_absent=bool(calls))
    return {**message, "content": content} | ({"tool_calls": [_as_call(call) for call in calls]} if calls else {})


def _as_text(content: Any, place: str, *, may_be_absent: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_absent:
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ArgumentError(f"{place} must be a text or a list of parts, got {content!r:.80}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            shown = f"a part of the type {kind!r}" if kind not in (None, "text") else f"{part!r:.80}"
            raise ArgumentError(f'{place}[{number}] must be {{"type": "text", "text": ...}}, got {shown}')
        texts.append(part["text"])
    return "\n".join(texts)


def _as_call(call: Any) -> Any:
    """Return a call of a tool with its arguments as a dict, which templates expect; OpenAI's form is JSON in a text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call


def read_template(file: Path) -> str:
    """Return the chat template in a file.

    Raises:
        ArgumentError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"chat_template {file}: {cause(error)}") from error


def _template_of(tokenizer: Any, template: str | Path | None, tools: Sequence[Tool] | None) -> str:
    if isinstance(template, Path):
        return read_template(template)
    if template is None and not tokenizer.chat_template:
        raise ArgumentError(
            "this model has no chat template: give one as chat_template (a Jinja text, or the path of a file; "
            "--chat-template FILE at the shell), or use generate (/v1/completions), which takes prompts as they are"
        )
    try:
        return str(tokenizer.get_chat_template(template, tools))
    except ValueError as error:  # several by name, and none of them the default
        raise ArgumentError(f"chat_template: {error}") from error


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def _end_of_turn(tokenizer: Any, rendered: Callable[..., str]) -> tuple[int, ...]:
    """Return the special token that a template writes right behind an answer, which a model writes there, too.

    A checkpoint does not always count it among its end-of-sequence tokens.
    """
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    try:
        text = rendered(turns, add_generation_prompt=False)
    except ArgumentError:  # it wants other turns than these
        return ()
    _, mark, behind = text.rpartition(_MARK)
    first = _encoded(tokenizer, behind)[:1] if mark else []
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return tuple(token for token in first if token in added and added[token].special)
