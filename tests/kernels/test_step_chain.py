"""The modelled step of early CUDA C++ kernels keeps its goals: without a GPU it is all that can be said of its time."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from graphdecode.kernels.cuda.nvrtc import unavailable_reason
from step_code.chain import GOAL_OF_64_ROWS_MS, GOALS_MS, WEIGHTS, chain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
]


@pytest.mark.parametrize(("name", "most"), [("llama-3.1-8b", 1.12), ("llama-3.2-1b", 1.40), ("qwen3-0.6b", 2.2)])
def test_a_step_of_one_row_takes_little_more_than_its_floor(name: str, most: float) -> None:
    step = chain(name)
    assert step.floor_us < step.least_us <= step.most_us <= most * step.floor_us
    assert step.most_us <= 1000 * GOALS_MS[name, "bf16"]


@pytest.mark.parametrize(("weights", "most"), [("int8", 0.62), ("int4", 0.42)])
def test_quantized_weights_pay_at_one_row(weights: str, most: float) -> None:
    step, plain = chain("llama-3.1-8b", weights), chain("llama-3.1-8b")
    assert step.most_us <= most * plain.most_us
    assert step.most_us <= 1000 * GOALS_MS["llama-3.1-8b", weights]


def test_a_step_of_64_rows_keeps_near_its_floor_and_quantized_weights_below_bf16() -> None:
    plain = chain("llama-3.1-8b", rows=64)
    assert plain.floor_us < plain.least_us <= plain.most_us <= 1.2 * plain.floor_us
    assert plain.least_us <= 1000 * GOAL_OF_64_ROWS_MS
    for weights in ("int8", "int4"):
        assert chain("llama-3.1-8b", weights, rows=64).most_us <= plain.most_us, weights


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("weights", [weights for weights in WEIGHTS if weights != "bf16"])
def test_quantized_weights_pay_up_to_32_rows(rows: int, weights: str) -> None:
    assert chain("llama-3.1-8b", weights, rows=rows).most_us <= 0.9 * chain("llama-3.1-8b", rows=rows).most_us
