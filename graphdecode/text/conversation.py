"""A chat session that keeps its messages within the model's context."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

from graphdecode.engine import SamplingParams
from graphdecode.errors import ArgumentError
from graphdecode.text.arguments import LoRARequest
from graphdecode.text.chat import RenderedChat, render_chat, template_of
from graphdecode.text.chat_formats import ChatFormat, Content, Reasoning, ReplyParser, format_of
from graphdecode.text.chat_formats.thinking import opens_thought
from graphdecode.text.llm import LLM
from graphdecode.text.outputs import RequestOutput

_LEAST_ROOM = 8  # at least an eighth of all tokens is for the output


class Conversation:
    """Messages of a user and a model.

    Each prompt has all messages before it, which the prefix cache makes cheap. If they outgrow the context, the oldest
    are dropped down to half of it, so that this does not happen at each message.

    Args:
        system: the system message; None: as the template has it.
        sampling_params, chat_template, lora_request: as for `LLM.chat`.

    Attributes:
        messages: all messages without `system`, oldest first.
        num_forgotten: the number of the oldest messages that the prompt leaves out.
        last: the latest output.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat_template: str | Path | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self.llm = llm
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.num_forgotten = 0
        self.last: RequestOutput | None = None
        self._params = sampling_params or llm.default_chat_params()
        self._template = chat_template
        self._lora_request = lora_request

    def say(self, text: str) -> Generator[Reasoning | Content, None, None]:
        """Send a message, and yield the output piece by piece: reasoning and content, in the model's order.

        After `close()` on the iterator, or Ctrl-C, the conversation keeps the output so far; if there is none, the
        message is dropped, too. Raises `ArgumentError` if the message alone is too long, or the template refuses it.
        """
        self.messages.append({"role": "user", "content": text})
        reasoning, content, complete = "", "", False
        try:
            chat = self._fitting()
            params, chat_format = chat.ending(self._params), self._chat_format()
            if self.llm.input_processor.special_tokens(chat_format.markers):
                params = params.unchecked(skip_special_tokens=False)
            thinking = chat_format.thinking
            in_reasoning = thinking is not None and opens_thought(thinking, chat.text, begins_message=True)
            parser = ReplyParser(chat_format, tools={}, in_reasoning=in_reasoning)
            prompt, lora_request = {"prompt_token_ids": chat.token_ids}, self._lora_request
            with self.llm.stream(prompt, params, lora_request=lora_request) as stream:
                self.last = stream.request
                for piece, final in chain(zip(stream, repeat(False)), [("", True)]):
                    for event in parser.feed(piece, final=final):
                        if isinstance(event, Reasoning):
                            reasoning += event.text
                            yield event
                        elif isinstance(event, Content):
                            content += event.text
                            yield event
            complete = True
        finally:
            if reasoning or content or complete:
                thought = {"reasoning_content": reasoning} if reasoning else {}
                self.messages.append({"role": "assistant", "content": content, **thought})
            else:
                self.messages.pop()

    def reset(self) -> None:
        """Drop all messages."""
        self.messages.clear()
        self.num_forgotten = 0

    def all_messages(self, start: int = 0) -> list[dict[str, str]]:
        """Return all messages from the one at `start` on, with the system message if there is one."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.messages[start:]

    def _chat_format(self) -> ChatFormat:
        """Return how the model marks its thoughts."""
        chat_format = format_of(template_of(self.llm.tokenizer, self._template, None))
        return ChatFormat("content") if chat_format is None else replace(chat_format, calls=None)

    def _rendered(self, start: int) -> RenderedChat:
        return render_chat(self.llm.tokenizer, self.all_messages(start), chat_template=self._template)

    def _fitting(self) -> RenderedChat:
        limit = self.llm.capacity.token_limit
        start = self.num_forgotten
        chat = self._rendered(start)
        if len(chat.token_ids) > limit - limit // _LEAST_ROOM:
            users = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
            while len(chat.token_ids) > limit // 2 and start < users[-1]:
                start = next(index for index in users if index > start)
                chat = self._rendered(start)
        if len(chat.token_ids) >= limit:
            raise ArgumentError(
                f"the message takes {len(chat.token_ids)} tokens, and there is room for {limit}, including the output: "
                "shorten it, or set a larger max_sequence_length (--max-sequence-length)"
            )
        self.num_forgotten = start
        return chat
