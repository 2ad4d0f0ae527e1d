"""Prompts do not stall answers: chunks between steps are as large as the time between two tokens allows."""

import random
from collections.abc import Callable

import pytest

from graphdecode import LLM, SamplingParams
from graphdecode.engine.pace import ChunkBudget
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.scheduler import Sequence


def test_chunks_follow_the_target_whatever_a_token_costs() -> None:
    draw = random.Random(3)
    for _ in range(50):
        step, token, target = draw.uniform(0.1, 5), draw.uniform(0.001, 0.5), draw.uniform(1, 50)
        budget = ChunkBudget(2048, target)
        budget.saw(0, step)
        for _ in range(30):
            tokens = budget.tokens(others_wait=True)
            took = step + tokens * token
            budget.saw(tokens, took)
        assert took <= max(target * 1.01, step + 8 * token)
        assert took > target - token - 1e-6 or tokens in (8, 2048) or step > target
        assert budget.tokens(others_wait=False) == 2048


def test_without_a_target_chunks_are_as_large_as_they_may_be() -> None:
    budget = ChunkBudget(512, 0.0)
    budget.saw(0, 1.0)
    budget.saw(512, 9.0)
    assert budget.tokens(others_wait=True) == 512


Chosen = list[tuple[Sequence, PromptChunk]]


def watched(choose: Callable[[int], Chosen], sizes: list[int]) -> Callable[[int], Chosen]:
    """Note how many tokens of prompts are chosen."""

    def chosen(budget: int) -> Chosen:
        chunks = choose(budget)
        sizes.extend([sum(len(chunk.token_ids) for _, chunk in chunks)] if chunks else [])
        return chunks

    return chosen


@pytest.mark.parametrize("target_itl_ms", [0.0, 0.3, 3.0])
def test_the_target_makes_chunks_smaller_and_changes_no_token(
    target_itl_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = list(range(1, 200))
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=60, ignore_eos=True)
    options = {"max_batch_size": 3, "max_sequence_length": 256, "prefix_cache": False, "batch_invariant": True}
    with LLM("demo", device="cpu", **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(["12+30=", long, long[::-1]], params)]
    with LLM("demo", device="cpu", target_itl_ms=target_itl_ms, **options) as llm:
        sizes = []  # of all chunks of a round
        monkeypatch.setattr(llm.engine.scheduler, "next_chunks", watched(llm.engine.scheduler.next_chunks, sizes))
        first = llm.stream("12+30=", params)
        next(first)
        others = [llm.stream(prompt, params) for prompt in (long, long[::-1])]
        for stream in (first, *others):
            list(stream)
        assert [stream.request.outputs[0].token_ids for stream in (first, *others)] == expected
    prompts = sizes[1:]  # behind that of the row that decodes
    assert sum(prompts) == 2 * (len(long) - 1)
    assert prompts[0] == (32 if target_itl_ms else sum(prompts))
