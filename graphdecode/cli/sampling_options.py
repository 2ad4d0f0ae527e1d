"""Options of the shell that say how answers are sampled; None where they were left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphdecode.cli.options import field_options, taking
from graphdecode.config.sampling_params import SamplingParams
from graphdecode.errors import ArgumentError

_OPTIONS = field_options(SamplingParams)
ALL = tuple(_OPTIONS)
OF_A_CHAT = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
)


def sampling(*fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of some fields of `SamplingParams`; those that were given come as `sampling`.

    Args:
        fields: by their names.
    """
    return taking("sampling", {name: _OPTIONS[name] for name in fields}, _with_biases)


def _with_biases(given: dict[str, Any]) -> dict[str, Any]:
    """Return fields of `SamplingParams`, of which the biases come as they were typed.

    Raises:
        ArgumentError: a bias is none.
    """
    return given | ({"logit_bias": dict(map(_bias, given["logit_bias"]))} if "logit_bias" in given else {})


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ArgumentError(f"--logit-bias must be a token id and a number, such as 42=-5, got {text!r}") from None
