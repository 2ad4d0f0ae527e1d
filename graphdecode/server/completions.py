"""`POST /v1/completions`: its body to prompts, and its outputs to a response."""

from __future__ import annotations

from typing import Any

from graphdecode.server import protocol
from graphdecode.server.choices import ChoicesReply
from graphdecode.server.http import HttpError
from graphdecode.server.logprobs import completion_logprobs, offsets_in_prompt
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import Completion
from graphdecode.server.reply import Cursor, Delta, Prepared
from graphdecode.server.structured_outputs import structured_output_of
from graphdecode.text.arguments import as_prompt
from graphdecode.text.outputs import Logprob
from graphdecode.text.token_texts import text_of_tokens

_DEFAULT_MAX_TOKENS = 16  # OpenAI's; null is as many as fit, as vLLM's


class CompletionReply(ChoicesReply):
    """The response to a request for completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    body_fields: Completion

    def choice(self, cursor: Cursor, delta: Delta, *, whole: bool = False) -> dict[str, Any] | None:
        """See `ChoicesReply.choice`."""
        body, prompt = self.body_fields, cursor.parent.output
        text, tokens = delta.text, delta.token_ids
        scored: list[dict[int, Logprob] | None] = [*(delta.logprobs or ())]
        offsets: list[int] = []
        if body.echo and delta.is_first:
            echoed, is_text = prompt.prompt, prompt.prompt is not None
            if echoed is None:
                echoed = text_of_tokens(self._texts, prompt.prompt_token_ids)
            offsets = offsets_in_prompt(self._texts, echoed, prompt.prompt_token_ids, is_text=is_text)
            text, tokens = echoed + text, prompt.prompt_token_ids + tokens
            scored, cursor.offset = [*(prompt.prompt_logprobs or ()), *scored], len(echoed)
        logprobs = None
        if body.logprobs is not None and len(scored) == len(tokens):
            offsets += self._offsets(cursor, delta)
            as_ids = bool(body.return_tokens_as_token_ids)
            logprobs = completion_logprobs(self._texts, tokens, scored, offsets, as_ids=as_ids)
        if not (whole or text or logprobs or delta.finish_reason or body.return_token_ids):
            return None
        choice = {"index": cursor.index, "text": text, "logprobs": logprobs}
        if whole:
            choice["prompt_logprobs"] = None if body.prompt_logprobs is None else prompt.prompt_logprobs
        if whole or body.return_token_ids:
            choice["token_ids"] = delta.token_ids if body.return_token_ids else None
        if whole or (body.return_token_ids and delta.is_first):
            choice["prompt_token_ids"] = prompt.prompt_token_ids if body.return_token_ids else None
        return choice | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}

    def _offsets(self, cursor: Cursor, delta: Delta) -> list[int]:
        """Return where the text of each new token begins, however much of it is held back."""
        skipped = () if self.body_fields.skip_special_tokens is False else self._texts.special
        offsets = []
        for token, entries in zip(delta.token_ids, delta.logprobs or (), strict=True):
            offsets.append(cursor.offset)
            cursor.offset += 0 if token in skipped else len(entries[token].decoded_token or "")
        return offsets


def prepared_completion(preprocessor: Preprocessor, body: Completion) -> Prepared:
    """Validate and tokenize a request; see `Endpoint.prepare`."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise HttpError(400, "best_of is not supported: request n outputs and choose", param="best_of")
    max_tokens = body.max_tokens if "max_tokens" in body.model_fields_set else _DEFAULT_MAX_TOKENS
    scored = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    if body.echo and max_tokens == 0 and scored is None:
        scored = 0  # nothing is generated only of a prompt that is scored
    params = preprocessor.sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scored)
    structured, special, prompts = structured_output_of(body), body.add_special_tokens is not False, _prompts(body)
    shared = preprocessor.tokenized_params(params, len(prompts), body, is_structured=structured is not None)
    processor, tokenized = preprocessor.input_processor, []
    for prompt in map(as_prompt, prompts):
        ids = processor.encode(prompt, special=special)
        tokenized.append(preprocessor.tokenized_prompt(prompt, ids, shared, body))
    return Prepared(protocol.without_large_parts(body), tokenized, structured)


def _prompts(body: Completion) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]
