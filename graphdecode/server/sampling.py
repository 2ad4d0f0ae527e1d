"""From the fields of a request to `SamplingParams`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from graphdecode.engine import SamplingParams
from graphdecode.errors import ArgumentError
from graphdecode.server.protocol import OTHERWISE, Generation

_ASKED = {field.name for field in fields(SamplingParams) if field.init} - {*OTHERWISE}


def sampling_params(
    body: Generation, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, **others: Any
) -> SamplingParams:
    """Return how a request wants to be answered.

    Args:
        body: of the request; fields that it leaves out, or sets to null, keep their defaults.
        defaults: the checkpoint's.
        max_tokens: None is as many as fit.
        logprobs: of how many tokens; None: none.
        others: fields that follow from what else the request asks for.

    Raises:
        ArgumentError: a value outside its range.
    """
    asked = {name: value for name in _ASKED - set(others) if (value := getattr(body, name)) is not None}
    return replace(defaults, **asked, logit_bias=_logit_bias(body), max_tokens=max_tokens, logprobs=logprobs, **others)


def _logit_bias(body: Generation) -> dict[int, float] | None:
    """Return the biases by token id, which JSON writes as text."""
    if body.logit_bias is None:
        return None
    try:
        return {int(token): value for token, value in body.logit_bias.items()}
    except ValueError:
        raise ArgumentError(f"logit_bias must name token ids, got {list(body.logit_bias)[:5]}") from None
