"""The modelled step of early CUDA C++ kernels keeps its goals: without a GPU it is all that can be said of its time."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from graphdecode.kernels.cuda.nvrtc import unavailable_reason
from step_code.chain import GOALS_MS, chain

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
