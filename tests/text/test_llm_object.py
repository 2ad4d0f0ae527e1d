"""What a person sees of an LLM in an interpreter: its figures, and that it stays in its process."""

import copy
import pickle
from collections import deque
from collections.abc import Iterator

import pytest

from graphdecode import LLM, AsyncLLM, EngineStats, SamplingParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_batch_size=4, max_sequence_length=64, dtype="float32") as engine:
        yield engine


def test_printed_figures_are_a_summary_of_one_line(llm: LLM) -> None:
    assert str(EngineStats()) == (
        "0 tokens in 0 finished answers; 0 prompt tokens prefilled in 0.00 s; 0 decode steps; buckets none; padding 0%"
    )
    llm.generate(["12+30=", "rev abc="], SamplingParams(temperature=0.0), use_tqdm=False)
    told = str(llm.stats)
    assert "\n" not in told
    assert len(told) < 250
    for part in ("7 tokens in 2 finished answers", "4 decode steps, ", " ms per token p50, ", "buckets 1 x1, 2 x3"):
        assert part in told
    assert "deque" not in repr(llm.stats)


def test_times_of_steps_are_told_in_milliseconds() -> None:
    stats = EngineStats(step_seconds=deque([0.9] * 99 + [2.5]))
    assert "0 decode steps, 900.00 ms per token p50, 916.00 p99;" in str(stats)
    stats.batch_sizes[3], stats.bucket_steps[4] = 2, 2
    assert str(stats).endswith("buckets 4 x2; padding 25%")


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_says_that_it_cannot_be_pickled(llm: LLM, attempt: object) -> None:
    with pytest.raises(TypeError, match="an LLM cannot be pickled: make one in each process"):
        attempt(llm)


def test_what_a_request_takes_and_gives_can_be_pickled(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, logprobs=1)
    (output,) = llm.generate("12+30=", params, use_tqdm=False)
    assert pickle.loads(pickle.dumps(params)) == params
    assert pickle.loads(pickle.dumps(output)) == output


def test_an_async_llm_cannot_be_pickled_either() -> None:
    asynchronous = AsyncLLM("demo", max_batch_size=1, max_sequence_length=32, backend="eager")
    try:
        with pytest.raises(TypeError, match="an LLM cannot be pickled"):
            pickle.dumps(asynchronous)
    finally:
        asynchronous.close()
