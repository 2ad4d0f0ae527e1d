"""Chat templates: messages to a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from graphdecode.engine import SamplingParams
from graphdecode.errors import ArgumentError, cause
from graphdecode.text.chat_formats import format_of

_EXPECTED = "a conversation is a list of messages, each a dict with `role` and `content`"
_MARK = "graphdecode-end-of-message"  # in no template
_ARGUMENTS = {  # of `apply_chat_template`, and of a template's rendering
    *("self", "conversation", "messages", "chat_template", "tokenize", "tools"),
    *("add_generation_prompt", "continue_final_message"),
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of an assistant's thought in messages
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
    """A conversation, rendered as a prompt."""

    text: str
    token_ids: list[int]  # tokens of the text; special ones come from the template
    end_of_turn_ids: tuple[int, ...]  # special tokens that end the assistant's messages in this template

    def ending(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that also stop at `end_of_turn_ids`."""
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
    add_special_tokens: bool = False,
) -> RenderedChat:
    """Render a conversation as a prompt; thread-safe.

    Args:
        tokenizer: from transformers, or from `load_tokenizer`.
        messages: one conversation, in OpenAI's format: `role`, and `content` that is a text or a list of parts
            `{"type": "text", "text": ...}`, which are joined by newlines; other keys go to the template. An assistant's
            may be None; its thought (`reasoning_content` or `reasoning`) goes where the template looks for one. Roles
            other than OpenAI's are taken if the template shows their messages.
        chat_template: a Jinja template, or the path of a file; None: the tokenizer's own.
        add_generation_prompt: end with the beginning of an assistant's message.
        continue_final_message: leave the last message open, instead of `add_generation_prompt`.
        tools: JSON schemas, or functions with types and docstrings.
        chat_template_kwargs: further variables of the template.
        add_special_tokens: add the tokenizer's special tokens to those of the template.

    Raises:
        ArgumentError: the messages are malformed, there is no template, or it refuses the conversation.
    """
    if tokenizer is None:
        raise ArgumentError("a chat needs a tokenizer, and this model was loaded without one")
    if add_generation_prompt and continue_final_message:
        raise ArgumentError(
            "continue_final_message=True continues the last message, and add_generation_prompt=True begins another: "
            "set add_generation_prompt=False"
        )
    conversation = [_as_message(message, f"messages[{index}]") for index, message in enumerate(_listed(messages))]
    template = template_of(tokenizer, chat_template, tools)
    conversation = [_with_thought(message, template) for message in conversation]
    variables = dict(chat_template_kwargs or {})
    if reserved := [name for name in variables if name in _ARGUMENTS]:
        raise ArgumentError(f"chat_template_kwargs must not have {reserved[0]!r}, which is an argument by itself")
    arguments = {"chat_template": template, "tokenize": False, "tools": tools}

    def rendered(conversation: list[dict[str, Any]], **options: bool) -> str:
        try:  # raises if a variable has the name of one of these
            return str(tokenizer.apply_chat_template(conversation, **arguments, **options, **variables))
        except Exception as error:  # a template is a program
            raise ArgumentError(f"the chat template refuses this conversation: {error}") from error

    options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    text = rendered(conversation, **options)
    for index, message in enumerate(conversation):
        role = message["role"]
        if role not in _ROLES and role not in template and message["content"].strip() not in text:
            expected = f"one of {', '.join(_ROLES)}, or one that the chat template shows"
            raise ArgumentError(f"messages[{index}].role must be {expected}, got {role!r:.80}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # surrogates
        raise ArgumentError(f"a message is not valid text: {error}") from error
    ends = _end_of_turn(tokenizer, template, rendered)
    return RenderedChat(text, _encoded(tokenizer, text, special=add_special_tokens), ends)


def as_conversations(messages: Any) -> list[list[Message]]:
    """Return one or several conversations as a list; raise ArgumentError if they are neither."""
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


def _as_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ArgumentError(f"{name} must be a dict with `role` and `content`, got {message!r:.80}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ArgumentError(f"{name} must have a `role` such as 'user', got {role!r:.80}")
    calls = message.get("tool_calls")
    is_complete = bool(calls) or role == "assistant"
    if "content" not in message and not is_complete:
        raise ArgumentError(f"{name}.content is missing; a message of the role {role!r} needs it")
    content = _as_text(message.get("content"), f"{name}.content", may_be_absent=is_complete)
    return {**message, "content": content} | ({"tool_calls": [_as_call(call) for call in calls]} if calls else {})


def _as_text(content: Any, name: str, *, may_be_absent: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_absent:
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ArgumentError(f"{name} must be a text or a list of parts, got {content!r:.80}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            shown = f"a part of the type {kind!r}" if kind not in (None, "text") else f"{part!r:.80}"
            raise ArgumentError(f'{name}[{number}] must be {{"type": "text", "text": ...}}, got {shown}')
        texts.append(part["text"])
    return "\n".join(texts)


def _with_thought(message: dict[str, Any], template: str) -> dict[str, Any]:
    """Return a message whose thought, if it has one, is where a template looks for it."""
    given = (message.get(name) for name in _THOUGHTS)
    thought = next((text for text in given if isinstance(text, str) and text), None)
    if thought is None or message["role"] != "assistant":
        return message
    message = {name: value for name, value in message.items() if name not in _THOUGHTS}
    names = [name for name in _THOUGHTS if re.search(rf"\b{name}\b", template)]
    content = message["content"]
    if "[THINK]" in template and "reasoning_content" not in names:  # Mistral's: a part of the content
        text = [{"type": "text", "text": content}] if content else []
        return {**message, "content": [{"type": "thinking", "thinking": thought}, *text]}
    if "<|channel|>" in template and message.get("tool_calls") and content:  # gpt-oss takes one or the other
        thought, message = f"{thought}\n{content}", {**message, "content": ""}
    return {**message, **dict.fromkeys(names, thought)}


def _as_call(call: Any) -> Any:
    """Return a tool call with its arguments as a dict, for templates; OpenAI's are JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call


def read_template(file: Path) -> str:
    """Return the chat template in a file; raise ArgumentError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"chat_template {file}: {cause(error)}") from error


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ArgumentError for an unknown name of a parser."""
    format_of(None, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)


def template_of(tokenizer: Any, template: str | Path | None, tools: Sequence[Tool] | None) -> str:
    """Return a chat template, or the tokenizer's own; raises `ArgumentError` if there is none."""
    if isinstance(template, Path):
        return read_template(template)
    if template is None and not tokenizer.chat_template:
        raise ArgumentError(
            "this model has no chat template: give one as chat_template (a Jinja text, or the path of a file; "
            "--chat-template FILE at the shell), or use generate (/v1/completions), which takes prompts as they are"
        )
    try:
        return str(tokenizer.get_chat_template(template, tools))
    except ValueError as error:  # several by name, and no default
        raise ArgumentError(f"chat_template: {error}") from error


def _encoded(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    # a batch lets other threads run meanwhile, which a single text does not
    (encoding,) = tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=special)
    return list(encoding.ids)


def _end_of_turn(tokenizer: Any, template: str, rendered: Callable[..., str]) -> tuple[int, ...]:
    """Return the special tokens after the assistant's messages in a template, which are not always EOS tokens."""
    chat_format = format_of(template)
    if chat_format is not None and chat_format.channels is not None:  # its first ending is that of a part of a turn
        ids = map(tokenizer.backend_tokenizer.token_to_id, chat_format.channels.endings[1:])
        return tuple(token for token in ids if token is not None)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    try:
        text = rendered(messages, add_generation_prompt=False)
    except ArgumentError:  # it expects other messages
        return ()
    _, mark, suffix = text.rpartition(_MARK)
    first = _encoded(tokenizer, suffix)[:1] if mark else []
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return tuple(token for token in first if token in added and added[token].special)
