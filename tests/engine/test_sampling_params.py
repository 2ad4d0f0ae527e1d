"""SamplingParams refuse what cannot be, by name, value and range."""

from typing import Any

import pytest

from graphdecode.config.sampling_params import SamplingParams
from graphdecode.engine.steps import RowSampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("seed", 2**63),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("inf")),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", 1.5),
        ("truncate_prompt_tokens", 0),
        ("n", 1025),
        ("logprobs", True),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("inf")}),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.5]),
        ("allowed_token_ids", 5),
        ("bad_words", "abc"),
        ("bad_words", ["a", " "]),
        ("bad_words", [1]),
        ("stop", ""),
        ("stop", ["a", ""]),
    ],
)
def test_a_value_outside_its_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*got "):
        SamplingParams(**{field: value})


def test_borders_are_allowed() -> None:
    SamplingParams(
        temperature=0, top_k=-1, top_p=1, min_p=1, seed=-(2**63), logprobs=20, max_tokens=1, min_tokens=1, stop=["a"]
    )


def test_penalties_are_noticed() -> None:
    def of(params: SamplingParams) -> RowSampling:
        return RowSampling.of(params, seed=0, stop_ids=(), prompt_length=1, max_length=8, vocab_size=64)

    assert not of(SamplingParams()).uses_penalties
    assert of(SamplingParams(repetition_penalty=1.1)).uses_penalties
    assert of(SamplingParams(presence_penalty=-1)).uses_penalties
    assert of(SamplingParams(frequency_penalty=0.1)).uses_penalties
