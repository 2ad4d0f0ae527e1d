"""What is done to a prompt and to its answers: cut prompts, answers side by side, special tokens, no tokenizer."""

import copy
import pickle
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from graphdecode import LLM, ArgumentError, AsyncLLM, EngineStats, SamplingParams
from graphdecode.models import resolve_model_path
from graphdecode.text.detokenizer import Detokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_batch_size=4, max_sequence_length=64, dtype="float32") as engine:
        yield engine


def kept(llm: LLM, prompt: str | list[int], max_tokens: int | None, truncate: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, truncate_prompt_tokens=truncate)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.error is None
    return output.prompt_token_ids


def test_the_last_tokens_of_a_longer_prompt_are_kept(llm: LLM) -> None:
    ids = llm.tokenizer("xyz rev oceanic=").input_ids
    assert kept(llm, "xyz rev oceanic=", 8, 12) == kept(llm, ids, 8, 12) == ids[-12:]
    assert kept(llm, ids, 8, 99) == ids
    params = replace(GREEDY, truncate_prompt_tokens=12)
    assert llm.generate("xyz rev oceanic=", params)[0].outputs[0].text == "cinaeco"


@pytest.mark.parametrize(("max_tokens", "length"), [(8, 56), (1, 63), (None, 63), (64, 63), (1000, 63)])
def test_minus_one_keeps_what_leaves_room_for_the_answer(llm: LLM, max_tokens: int | None, length: int) -> None:
    long = [97 + i % 26 for i in range(100)]
    assert kept(llm, long, max_tokens, -1) == long[-length:]


def test_what_a_tokenizer_puts_in_front_of_a_text_stays(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llm.tokenizer), "bos_token_id", property(lambda _: ord("x")), raising=False)
    ids = llm.tokenizer("xyz rev oceanic=").input_ids
    assert kept(llm, "xyz rev oceanic=", 8, 12) == [ord("x"), *ids[-11:]]
    assert kept(llm, ids, 8, 12) == ids[-12:], "token ids are the caller's own"


@pytest.mark.parametrize("value", [0, -2, 1.5, True])
def test_what_cannot_be_kept_is_named(value: object) -> None:
    with pytest.raises(ArgumentError, match="truncate_prompt_tokens must be None, -1 or an integer >= 1"):
        SamplingParams(truncate_prompt_tokens=value)  # type: ignore[arg-type]


def test_each_of_n_answers_is_the_one_of_the_next_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=5.0, max_tokens=12, ignore_eos=True, seed=2**63 - 2)
    outputs = llm.generate("rev abc=", replace(params, n=4), use_tqdm=False)[0].outputs
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    for output, seed in zip(outputs, [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1], strict=True):
        (alone,) = llm.generate("rev abc=", replace(params, seed=seed), use_tqdm=False)
        assert alone.outputs[0].token_ids == output.token_ids
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_n_answers_compute_their_prompt_once_and_hold_its_pages_once() -> None:
    with LLM("demo", max_batch_size=8, max_sequence_length=256, max_prefill_tokens=32, page_size=16) as llm:
        params = SamplingParams(n=8, temperature=1.0, max_tokens=2, ignore_eos=True)
        prompt = [97 + i % 26 for i in range(130)]
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert llm.stats.prefilled_tokens == 129 + 7 * 1, "eight pages of the prompt are found by all but the first"
        assert output.metrics.num_cached_tokens == 128


def test_more_answers_than_there_may_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"n must be an integer in 1\.\.1024, got 1025"):
        SamplingParams(n=1025)


@pytest.fixture(scope="module")
def spacing_tokenizer() -> Tokenizer:
    """Words with spaces between them, as WordPiece writes them, and two special tokens."""
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<e>", special=True)])
    return tokenizer


@pytest.mark.parametrize(
    ("skip", "spaced", "expected"),
    [(False, True, "a <s> <e> <s> b <e>"), (False, False, "a <s><e><s> b <e>"), (True, False, "a b")],
)
def test_special_tokens_that_follow_one_another_stand_side_by_side_where_that_is_wanted(
    spacing_tokenizer: Tokenizer, skip: bool, spaced: bool, expected: str
) -> None:
    detokenizer = Detokenizer(spacing_tokenizer, skip_special_tokens=skip, spaced=spaced)
    text = ""
    for token in [1, 3, 4, 3, 2, 4]:
        detokenizer.push(token)
        text += detokenizer.take()
    detokenizer.finish()
    assert text + detokenizer.take(final=True) == expected


def test_special_tokens_are_shown_where_that_is_asked_for(llm: LLM) -> None:
    end = llm.tokenizer.decode([257])
    shown = replace(GREEDY, skip_special_tokens=False, include_stop_str_in_output=True)
    assert llm.generate("12+30=", shown)[0].outputs[0].text == "42" + end
    assert llm.generate("12+30=", GREEDY)[0].outputs[0].text == "42"


def test_without_a_tokenizer_token_ids_are_answered_with_token_ids(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(resolve_model_path("demo"), folder, ignore=shutil.ignore_patterns("tokenizer*"))
    ids = llm.tokenizer("12+30=").input_ids
    expected = llm.generate([ids], replace(GREEDY, logprobs=1))[0].outputs[0]
    with LLM(folder, max_batch_size=2, max_sequence_length=64, dtype="float32", skip_tokenizer_init=True) as bare:
        assert bare.tokenizer is None
        answer = bare.generate([ids], replace(GREEDY, logprobs=1))[0].outputs[0]
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("", expected.token_ids, "stop")
        assert [{t: e.logprob for t, e in place.items()} for place in answer.logprobs] == [
            {t: e.logprob for t, e in place.items()} for place in expected.logprobs
        ]
        assert list(bare.stream(ids, GREEDY)) == []
        for prompt in ("12+30=", [ids, "12+30="], {"prompt": "12+30="}):
            with pytest.raises(ArgumentError, match=r"no tokenizer \(skip_tokenizer_init\): give token ids"):
                bare.generate(prompt, GREEDY)
        with pytest.raises(ArgumentError, match="stop and bad_words must be None"):
            bare.generate([ids], replace(GREEDY, stop="a"))
        assert bare.cache.pool.used == 0


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
