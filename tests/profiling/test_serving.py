"""An open-loop load is played as it was written, and counted right."""

import json
from pathlib import Path

import pytest

from graphdecode import LLM, BucketConfig
from graphdecode.profiling.serving import Arrival, poisson_arrivals, read_trace, serve


def test_poisson_arrivals_keep_rate_and_ranges() -> None:
    arrivals = poisson_arrivals(50.0, 4000, (3, 9), (1, 5), seed=1)
    assert arrivals == poisson_arrivals(50.0, 4000, (3, 9), (1, 5), seed=1)
    assert len(arrivals) / arrivals[-1].at == pytest.approx(50.0, rel=0.06)
    assert {a.prompt_tokens for a in arrivals} == set(range(3, 10))
    assert {a.answer_tokens for a in arrivals} == set(range(1, 6))


@pytest.mark.parametrize(("rate", "count", "prompts"), [(0, 1, (1, 2)), (1, 0, (1, 2)), (1, 1, (0, 2)), (1, 1, (3, 2))])
def test_impossible_loads_are_refused(rate: float, count: int, prompts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        poisson_arrivals(rate, count, prompts, (1, 1))


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = [{"at": 0.2, "prompt_tokens": 3, "answer_tokens": 4}, {"at": 0.1, "prompt_tokens": 5, "answer_tokens": 6}]
    path.write_text("\n".join(json.dumps(record) for record in records))
    assert read_trace(path) == [Arrival(0.1, 5, 6), Arrival(0.2, 3, 4)]
    path.write_text('{"at": 1}')
    with pytest.raises(ValueError, match="is no trace"):
        read_trace(path)


def test_every_request_is_served_and_every_token_counted() -> None:
    arrivals = [Arrival(0.001 * i, 4 + i, 3 + i % 5) for i in range(12)]
    with LLM("demo", config=BucketConfig(max_batch_size=4, max_sequence_length=64)) as llm:
        result = serve(llm, arrivals, progress=False)
        assert llm.cache.pool.used == 0
    assert result["requests"] == 12
    tokens = sum(arrival.answer_tokens for arrival in arrivals)
    assert sum(int(size) * steps for size, steps in result["batch_sizes"].items()) == tokens
    assert 0 < result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"]
    assert result["longest_queue"] >= 1
