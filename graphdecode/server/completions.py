"""`POST /v1/completions`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from graphdecode.server.cursor import Cursor, Delta
from graphdecode.server.http_errors import HttpError
from graphdecode.server.protocol import Completion
from graphdecode.server.reply import Reply
from graphdecode.server.sampling import sampling_params
from graphdecode.server.service import Service
from graphdecode.text.outputs import Logprob

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionReply(Reply):
    """Answers one request for completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body_fields: Completion

    def choices_of(self, cursor: Cursor, delta: Delta) -> list[dict[str, Any]]:
        """Return what is new as one choice."""
        text = delta.text
        logprobs = None
        if delta.logprobs is not None:
            logprobs = completion_logprobs(delta.logprobs, delta.token_ids, cursor.text_length - len(delta.text))
        if self.body_fields.echo and delta.is_first:
            text = self._prompt_of(cursor) + text
        if not (text or logprobs or delta.finish_reason or self.body_fields.return_token_ids):
            return []
        return [self._choice(cursor, text, logprobs, delta.token_ids, delta.finish_reason, delta.stop_reason)]

    def whole_choice(self, cursor: Cursor) -> dict[str, Any]:
        """Return the finished answer."""
        output, body = cursor.answer.output, self.body_fields
        text, logprobs = output.text, None
        if output.logprobs is not None:
            logprobs = completion_logprobs(output.logprobs, output.token_ids, 0)
        if body.echo:
            text = self._prompt_of(cursor) + text
        return self._choice(cursor, text, logprobs, output.token_ids, output.finish_reason, output.stop_reason)

    def _choice(
        self,
        cursor: Cursor,
        text: str,
        logprobs: dict[str, Any] | None,
        token_ids: list[int],
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": cursor.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if self.body_fields.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": cursor.order.output.prompt_token_ids}
        return choice

    def _prompt_of(self, cursor: Cursor) -> str:
        output = cursor.order.output
        if output.prompt is not None:
            return output.prompt
        return str(self.service.tokenizer.decode(output.prompt_token_ids))


def completion_logprobs(logprobs: list[dict[int, Logprob]], token_ids: list[int], offset: int) -> dict[str, Any]:
    """Return log-probabilities as completions have them.

    Args:
        logprobs: at each token.
        token_ids: the tokens.
        offset: characters of the text before the first of them.
    """
    taken = [entries[token] for entries, token in zip(logprobs, token_ids, strict=True)]
    texts = [entry.decoded_token or "" for entry in taken]
    return {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in taken],
        "top_logprobs": [{e.decoded_token or "": e.logprob for e in entries.values()} for entries in logprobs],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
    }


async def complete(service: Service, body: Completion) -> CompletionReply:
    """Return the response to a request.

    Raises:
        HttpError: it cannot be served.
        ArgumentError: a value outside its range.
    """
    if body.suffix:
        raise HttpError(400, "suffix is not supported: text is generated behind a prompt only", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise HttpError(400, "best_of is not supported: ask for n answers and choose", param="best_of")
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(body, service.sampling_defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    special = body.add_special_tokens is not False
    return CompletionReply(service, body, await service.orders(_prompts(body), params, special=special))


def _prompts(body: Completion) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]
