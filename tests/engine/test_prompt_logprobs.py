"""`prompt_logprobs`: what the model thinks of the prompt itself, the same however it is cut, shared or recomputed."""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_kernels import compiled_or_gpu
from transformers import AutoModelForCausalLM

from graphdecode import LLM, AsyncLLM, SamplingParams
from graphdecode.models import resolve_model_path

MakeLLM = Callable[..., LLM]
SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=5)
SCORES_ALONE = SamplingParams(max_tokens=0, prompt_logprobs=3)


@pytest.fixture(scope="module")
def log_softmax() -> Callable[[list[int]], torch.Tensor]:
    """The demo model's log-probabilities at each place of a prompt, by transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float64).eval()

    def of(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return of


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", max_batch_size=4, max_sequence_length=256) as engine:
        yield engine


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97, 123) for _ in range(length)]


def floats(output: Any) -> list[dict[int, tuple[float, int]]]:
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    return [{t: (e.logprob, e.rank) for t, e in place.items()} for place in output.prompt_logprobs[1:]]


def assert_agree(found: list[dict[int, tuple[float, int]]], tokens: list[int], expected: torch.Tensor) -> None:
    """The token and the five likeliest are there, with their log-probabilities, ranks and order."""
    for place, entries in enumerate(found):
        row, token = expected[place], tokens[place + 1]
        assert token in entries
        top = [other for other, (_, rank) in entries.items() if rank <= 5]
        torch.testing.assert_close(row[top], row.topk(5).values, rtol=0, atol=1e-4)
        for other, (value, rank) in entries.items():
            assert value == pytest.approx(row[other].item(), abs=1e-4)
            assert (row > row[other] + 1e-4).sum() < rank <= 1 + (row > row[other] - 1e-4).sum()


@pytest.mark.parametrize("length", [2, 17, 140, 250])
def test_prompt_logprobs_are_transformers_log_softmax(llm, log_softmax, length):
    tokens = random_prompt(length, seed=length)
    (output,) = llm.generate([tokens], SCORED, use_tqdm=False)
    assert_agree(floats(output), tokens, log_softmax(tokens))
    assert len(output.outputs[0].token_ids) == 4


def test_the_top_token_has_the_same_logprob_alone_and_in_the_list(llm: LLM) -> None:
    answer = llm.generate("sort zebra=", SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)[0].outputs[0]
    tokens = llm.tokenizer("sort zebra=").input_ids + answer.token_ids
    with_top, alone = (
        floats(llm.generate([tokens], SamplingParams(max_tokens=0, prompt_logprobs=wanted), use_tqdm=False)[0])
        for wanted in (1, 0)
    )
    for place in range(len(tokens) - 1 - len(answer.token_ids), len(tokens) - 1):
        token = tokens[place + 1]
        assert with_top[place] == alone[place] == {token: (alone[place][token][0], 1)}


def test_a_cached_prefix_is_scored_and_then_shared(llm: LLM) -> None:
    tokens = random_prompt(100, seed=3)
    first, again = (llm.generate([tokens], SCORED, use_tqdm=False)[0] for _ in range(2))
    assert floats(first) == floats(again)
    assert again.metrics.num_cached_tokens == 0
    (other,) = llm.generate([tokens], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert other.metrics.num_cached_tokens == 96
    assert other.prompt_logprobs is None
    assert other.outputs[0].token_ids == first.outputs[0].token_ids


def test_one_of_several_outputs_scores_the_prompt_and_the_others_share_its_pages(llm: LLM) -> None:
    tokens = random_prompt(100, seed=4)
    before = llm.stats.prefilled_tokens
    params = SamplingParams(n=3, temperature=1.0, max_tokens=3, prompt_logprobs=2)
    (output,) = llm.generate([tokens], params, use_tqdm=False)
    assert len(floats(output)) == 99
    assert llm.stats.prefilled_tokens - before == 99 + 2 * 3  # six full pages are found, three tokens are not in them


def test_without_tokens_to_generate_a_prompt_may_fill_the_capacity(llm: LLM) -> None:
    before = dict(llm.stats.batch_sizes)
    full, one = llm.generate([random_prompt(256, seed=5), [97]], SCORES_ALONE, use_tqdm=False)
    assert [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in (full, one)] == [
        ([], "", "length")
    ] * 2
    assert len(floats(full)) == 255
    assert one.prompt_logprobs == [None]
    assert dict(llm.stats.batch_sizes) == before, "no step was run"
    assert llm.cache.pool.used == 0
    with pytest.warns(RuntimeWarning, match="1 of 1"):
        (refused,) = llm.generate([random_prompt(257, seed=5)], SCORES_ALONE, use_tqdm=False)
    assert "with none to generate, at most 256 fit" in refused.error


@pytest.mark.parametrize("params", [{}, {"prompt_logprobs": 1, "n": 2}], ids=str)
def test_max_tokens_0_needs_prompt_logprobs_and_one_output(params: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_tokens .*prompt_logprobs and n=1"):
        SamplingParams(max_tokens=0, **params)


def test_a_stream_has_prompt_logprobs_before_its_first_token(llm: LLM) -> None:
    with llm.stream("rev oceanic=", SCORED) as stream:
        assert stream.request.prompt_logprobs is None
        next(stream)
        assert len(stream.request.prompt_logprobs) == len("rev oceanic=")


def test_every_async_output_has_prompt_logprobs() -> None:
    async def run() -> list[int]:
        async with AsyncLLM("demo", max_batch_size=2, max_sequence_length=64) as llm:
            return [len(output.prompt_logprobs) async for output in llm.generate("rev oceanic=", SCORED)]

    assert set(asyncio.run(run())) == {len("rev oceanic=")}


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (
            random_prompt(rng.randint(1, 90), seed=index % 5),
            SamplingParams(
                temperature=rng.choice([0.0, 0.9]),
                seed=index,
                max_tokens=rng.randint(6, 30),
                prompt_logprobs=rng.choice([None, 0, 1, 20]),
                ignore_eos=True,
            ),
        )
        for index in range(14)
    ]


@compiled_or_gpu
def test_law_9_prompt_logprobs_have_the_same_bits_in_any_batch_and_chunk() -> None:
    def answers(llm: LLM, given: list[tuple[list[int], SamplingParams]]) -> list[Any]:
        outputs = llm.generate([prompt for prompt, _ in given], [params for _, params in given], use_tqdm=False)
        return [(o.outputs[0].token_ids, None if o.prompt_logprobs is None else floats(o)) for o in outputs]

    given = requests(seed=11)
    with LLM("demo", max_batch_size=1, max_sequence_length=128, batch_invariant=True) as llm:
        expected = [answers(llm, [request])[0] for request in given]
    tight = {"max_batch_size": 6, "page_size": 4, "total_num_pages": 50}
    for settings in ({"max_batch_size": 8, "max_prefill_tokens": 13}, tight, tight | {"steps_per_launch": 4}):
        with LLM("demo", max_sequence_length=128, batch_invariant=True, **settings) as llm:
            assert answers(llm, given) == expected
            assert answers(llm, given[::-1]) == expected[::-1]
            assert bool(llm.num_preemptions) == ("total_num_pages" in settings)
            assert llm.cache.pool.used == 0


def test_a_prompt_with_nan_logprobs_fails_alone() -> None:
    with LLM("demo", dtype="float32", max_batch_size=2, max_sequence_length=64) as llm:
        llm.model.stem.embedding[97] = torch.nan  # type: ignore[attr-defined]
        broken, whole = llm.generate([[98, 97, 99], [98, 100, 99]], SCORES_ALONE, use_tqdm=False)
    assert broken.outputs[0].finish_reason == "error"
    assert "NaN" in broken.error
    assert whole.error is None
    assert len(floats(whole)) == 2
