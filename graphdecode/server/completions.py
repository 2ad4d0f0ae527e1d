"""`POST /v1/completions`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

from graphdecode.server.cursor import Cursor, Delta
from graphdecode.server.desk import Desk
from graphdecode.server.http_errors import HttpError
from graphdecode.server.protocol import Completion, without_large_parts
from graphdecode.server.reply import Reply
from graphdecode.server.sampling import sampling_params
from graphdecode.server.service import Service, answers_of
from graphdecode.server.structured import Form, form_of
from graphdecode.text.intake import Resolved
from graphdecode.text.outputs import Logprob

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionReply(Reply):
    """Answers one request for completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body_fields: Completion

    def choices_of(self, cursor: Cursor, delta: Delta) -> list[dict[str, Any]]:
        """Return what is new as one choice."""
        start = cursor.text_length - len(delta.text)
        choice = self._choice(cursor, delta.text, delta.token_ids, delta.logprobs, start, is_first=delta.is_first)
        if not (choice["text"] or choice["logprobs"] or delta.finish_reason or self.body_fields.return_token_ids):
            return []
        return [choice | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}]

    def whole_choice(self, cursor: Cursor) -> dict[str, Any]:
        """Return the finished answer."""
        output = cursor.answer.output
        choice = self._choice(cursor, output.text, output.token_ids, output.logprobs, 0, is_first=True)
        return choice | {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}

    def _choice(
        self,
        cursor: Cursor,
        text: str,
        token_ids: list[int],
        entries: list[dict[int, Logprob]] | None,
        offset: int,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        """Return some text and its tokens as a choice; `offset` counts the answer's characters before them."""
        body, prompt = self.body_fields, cursor.order.output
        scored: list[dict[int, Logprob] | None] = [*(entries or ())]
        tokens = token_ids
        if body.echo:
            echoed = self._prompt_of(cursor)
            if is_first:
                text = echoed + text
                scored, tokens = [*(prompt.prompt_logprobs or ()), *scored], prompt.prompt_token_ids + token_ids
            else:
                offset += len(echoed)
        wants_logprobs = body.logprobs is not None and len(scored) == len(tokens)
        choice: dict[str, Any] = {
            "index": cursor.index,
            "text": text,
            "logprobs": self._logprobs(scored, tokens, offset) if wants_logprobs else None,
        }
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt.prompt_logprobs
        if body.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": prompt.prompt_token_ids}
        return choice

    def _logprobs(self, entries: list[dict[int, Logprob] | None], token_ids: list[int], offset: int) -> dict[str, Any]:
        """Return log-probabilities as completions have them; a prompt's first token has none."""
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for scored, token in zip(entries, token_ids, strict=True):
            if scored is None:
                texts.append(str(self.service.tokenizer.decode([token])))
                values.append(None)
                tops.append(None)
                continue
            texts.append(scored[token].decoded_token or "")
            values.append(scored[token].logprob)
            tops.append({entry.decoded_token or "": entry.logprob for entry in scored.values()})
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _prompt_of(self, cursor: Cursor) -> str:
        output = cursor.order.output
        if output.prompt is not None:
            return output.prompt
        return str(self.service.tokenizer.decode(output.prompt_token_ids))


class PreparedCompletion(NamedTuple):
    """What a request for completions comes to.

    Attributes:
        body: without its large parts.
        prompts: in tokens.
        form: of the answers; None: they may have any.
    """

    body: Completion
    prompts: list[Resolved]
    form: Form | None


def prepared_completion(desk: Desk, body: Completion) -> PreparedCompletion:
    """Return what a request comes to.

    Raises:
        HttpError: it cannot be served.
        ArgumentError: a value outside its range.
    """
    if body.suffix:
        raise HttpError(400, "suffix is not supported: text is generated behind a prompt only", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise HttpError(400, "best_of is not supported: ask for n answers and choose", param="best_of")
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    scored = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    params = sampling_params(
        body, desk.sampling_defaults, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scored
    )
    form, special, prompts = form_of(body), body.add_special_tokens is not False, _prompts(body)
    asked = desk.asked(params, len(prompts), priority=body.priority or 0, has_form=form is not None)
    resolved = [desk.resolved(prompt, asked, special=special) for prompt in prompts]
    return PreparedCompletion(without_large_parts(body), resolved, form)


async def complete(service: Service, prepared: PreparedCompletion, caller: str) -> CompletionReply:
    """Return the response to a request.

    Raises:
        HttpError: it cannot be served.
    """
    service.check_room(answers_of(prepared.prompts))  # before a form is read, and anything made for each answer
    grammar = await service.grammar(prepared.form, caller)
    return CompletionReply(service, prepared.body, await service.orders(caller, prepared.prompts, grammar))


def _prompts(body: Completion) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]
