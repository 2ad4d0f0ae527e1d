"""Sizes that no memory holds are refused by name and bytes, before anything is allocated."""

import tracemalloc
from typing import Any

import pytest
import torch

from graphdecode import LLM, GraphdecodeError
from graphdecode.engine import capacity, loading

GIB = 2**30


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"total_num_pages": 2**31 - 1}, r"total_num_pages=2147483647 takes \d+ bytes for keys and values"),
        (
            {"max_batch_size": 65536, "config": {"loop": {"steps_per_launch": 4096}}},
            r"steps_per_launch=4096 takes \d{11,} bytes for tokens of 65536 rows",
        ),
        (
            {"max_batch_size": 4096, "config": {"capacity": {"max_logit_biases": 2**20}}},
            rf"max_logit_biases={2**20} takes {2**20 * 8 * 4096} bytes for biases of 4096 rows",
        ),
        (
            {"max_batch_size": 8192, "config": {"capacity": {"max_bad_words": 65536}}},
            rf"max_bad_words=65536 takes {65536 * 16 * 4 * 8192} bytes for forbidden words of 8192 rows",
        ),
        ({"max_prefill_tokens": 2**31 - 1}, r"max_prefill_tokens=2147483647 takes \d+ bytes for tokens of prompts"),
    ],
)
def test_what_no_memory_holds_is_refused_by_key_and_bytes(
    settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "total_bytes", lambda device: 16 * GIB)
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were loaded first"))
    tracemalloc.start()
    try:
        with pytest.raises(GraphdecodeError, match=rf"{said}; all sizes together take \d+, and cpu has {16 * GIB}"):
            LLM("demo", device="cpu", **settings)
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()


def test_what_is_there_is_what_the_process_may_use() -> None:
    assert 2**28 < capacity.total_bytes(torch.device("cpu")) < 2**63


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0)])
def test_the_cpu_may_be_numbered(device: Any) -> None:
    with LLM("demo", device=device, max_batch_size=2) as llm:
        assert llm.device == torch.device("cpu")
        assert llm.generate("12+30=", use_tqdm=False)[0].error is None


def test_there_is_no_second_cpu() -> None:
    with pytest.raises(GraphdecodeError, match="device is cpu:1, but there is one CPU"):
        LLM("demo", device="cpu:1")
