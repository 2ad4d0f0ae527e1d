"""A chat session: its messages, and which of them fit the model's context."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from graphdecode.engine import SamplingParams
from graphdecode.errors import ArgumentError
from graphdecode.text.chat import RenderedChat, render_chat
from graphdecode.text.llm import LLM
from graphdecode.text.outputs import RequestOutput

_LEAST_ROOM = 8  # a conversation that leaves less than an eighth of all tokens to the answer has outgrown its room


class Conversation:
    """Messages of a user and a model.

    Every turn gives the model all that was said before, which the prefix cache makes cheap. What outgrows the room that
    the model has loses its oldest turns, down to half of the room, so that this does not happen at every turn.

    Args:
        llm: what answers.
        system: how the model is to behave; None leaves that to its template.
        sampling_params: of each answer; None: what `LLM.chat` takes then.
        chat_template: see `render_chat`.

    Attributes:
        messages: all that was said, oldest first, without what `system` holds.
        num_forgotten: how many of them, the oldest, the model is no longer given.
        last: the output of the latest turn, with its metrics.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat_template: str | Path | None = None,
    ) -> None:
        self.llm = llm
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.num_forgotten = 0
        self.last: RequestOutput | None = None
        self._params = sampling_params or llm.default_chat_params()
        self._template = chat_template

    def say(self, text: str) -> Generator[str, None, None]:
        """Say something, and yield the answer piece by piece.

        An answer that is left early, by `close()` on the iterator or by Ctrl-C, stays in the conversation as far as it
        came; where nothing came, what was said is forgotten, too.

        Raises:
            ArgumentError: the message alone is longer than there is room, or the template refuses it.
        """
        self.messages.append({"role": "user", "content": text})
        answer, complete = "", False
        try:
            chat = self._fitting()
            params = chat.ending(self._params)
            with self.llm.stream({"prompt_token_ids": chat.token_ids}, params) as stream:
                self.last = stream.request
                for piece in stream:
                    answer += piece
                    yield piece
            complete = True
        finally:
            if answer or complete:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def reset(self) -> None:
        """Forget all that was said."""
        self.messages.clear()
        self.num_forgotten = 0

    def all_messages(self) -> list[dict[str, str]]:
        """Return all that was said, and first the system's message where there is one."""
        return self._with_system(0)

    def _with_system(self, start: int) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.messages[start:]

    def _rendered(self, start: int) -> RenderedChat:
        return render_chat(self.llm.tokenizer, self._with_system(start), chat_template=self._template)

    def _fitting(self) -> RenderedChat:
        """Return the prompt of the next answer, without as many of the oldest turns as have no place."""
        limit = self.llm.capacity.token_limit
        start = self.num_forgotten
        chat = self._rendered(start)
        if len(chat.token_ids) > limit - limit // _LEAST_ROOM:
            while len(chat.token_ids) > limit // 2 and (later := self._next_turn(start)) is not None:
                start = later
                chat = self._rendered(start)
        if len(chat.token_ids) >= limit:
            raise ArgumentError(
                f"the message takes {len(chat.token_ids)} tokens, and there is room for {limit}, the answer included: "
                "shorten it, or set a larger max_sequence_length (--max-sequence-length)"
            )
        self.num_forgotten = start
        return chat

    def _next_turn(self, start: int) -> int | None:
        """Return where the turn after the one at `start` begins; None: that is the last one."""
        users = (place for place in range(start + 1, len(self.messages)) if self.messages[place]["role"] == "user")
        return next(users, None)
