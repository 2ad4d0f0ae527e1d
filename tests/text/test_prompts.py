"""What may be given as prompts and as parameters, and what is refused before anything runs."""

import copy
import pickle
import re
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from graphdecode import LLM, ArgumentError, AsyncLLM, EngineStats, SamplingParams, StructuredOutputsParams
from graphdecode.models import resolve_model_path
from graphdecode.text.arguments import as_prompt, as_prompts
from graphdecode.text.detokenizer import Detokenizer
from graphdecode.text.token_texts import TokenTexts

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def llm():
    with LLM("demo") as engine:
        yield engine


@pytest.mark.parametrize(
    "prompts",
    [
        [[5, 6, 7]],
        [5, 6, 7],
        (5, 6, 7),
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        torch.tensor([[5, 6, 7]]),
        [np.int64(5), 6, 7],
        [torch.tensor([5, 6, 7], dtype=torch.int32)],
        {"prompt_token_ids": [5, 6, 7]},
        [{"prompt_token_ids": (5, 6, 7), "prompt": "of the same"}],
        iter([[5, 6, 7]]),
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_token_ids_come_in_many_forms(prompts):
    assert as_prompts(prompts) == [([5, 6, 7], None)]


def test_texts_come_alone_in_a_list_or_in_a_dict():
    assert as_prompts("abc") == as_prompts(["abc"]) == as_prompts({"prompt": "abc"}) == [("abc", None)]
    assert [each.prompt for each in as_prompts(["abc", {"prompt": "de"}, [3]])] == ["abc", "de", [3]]
    assert as_prompts([]) == []
    assert as_prompts([[]]) == [([], None)]
    assert as_prompts({"prompt": "a", "cache_salt": None}) == [("a", None)]


@pytest.mark.parametrize(
    "wrong",
    [None, 5, 1.5, b"abc", {}, {"text": "abc"}, {"prompt": None}, [None], [5, "a"], [True], [[1.5]], [["a"]], [b"a"]]
    + [[1.5], torch.tensor([0.5]), torch.tensor([[[1]]]), pytest.param(object(), id="object")],
    ids=repr,
)
def test_what_is_no_prompt_is_refused_with_what_was_expected(wrong, llm):
    with pytest.raises(ValueError, match="a prompt is"):
        llm.generate(wrong, GREEDY)
    assert not llm.engine.has_work
    assert llm.cache.pool.used == llm.stats.batch_sizes[0] == 0


@pytest.mark.parametrize("wrong", [["a", "b"], None, [["a"]], {"a": 1}], ids=repr)
def test_a_stream_has_one_prompt(wrong, llm):
    with pytest.raises(ValueError, match="a prompt is"):
        llm.stream(wrong)
    with pytest.raises(ValueError, match="a prompt is"):
        as_prompt(wrong)


def test_a_dict_is_answered_as_its_text(llm):
    (plain,), (given,) = llm.generate("12+30=", GREEDY), llm.generate({"prompt": "12+30="}, GREEDY)
    assert given.outputs[0].text == plain.outputs[0].text
    assert given.prompt == "12+30="
    assert "".join(llm.stream({"prompt": "12+30="}, GREEDY)) == plain.outputs[0].text


def test_text_that_cannot_be_encoded_is_refused(llm):
    with pytest.raises(ValueError, match="not valid text"):
        llm.generate(["fine", "half a pair: \ud83d"], GREEDY)


@pytest.mark.parametrize("wrong", [[5, 99999], [1, -1], [2**70]], ids=str)
def test_an_id_outside_the_vocabulary_raises_before_any_prompt_runs(wrong, llm):
    foreign = [token for token in wrong if not 0 <= token < llm.engine.vocab_size]
    named = re.escape(f"token ids must be in 0..{llm.engine.vocab_size - 1}, got {foreign}")
    with pytest.raises(ArgumentError, match=named):
        llm.generate(["12+30=", wrong], GREEDY)
    with pytest.raises(ValueError, match=named):
        llm.stream(wrong, GREEDY)
    assert llm.num_waiting == 0
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], {}, "empty"),
        ("1+1=", {"logprobs": 100}, "max_logprobs=20.* got 100"),
        ("1+1=", {"prompt_logprobs": 100}, "prompt_logprobs.*max_logprobs=20.* got 100"),
        ("1+1=", {"logit_bias": {10**6: 1.0}}, r"logit_bias names \[1000000\]"),
        ("1+1=", {"stop_token_ids": [10**6]}, r"stop_token_ids names \[1000000\]"),
        ("1+1=", {"structured_outputs": StructuredOutputsParams(regex="(")}, "regex|unclosed"),
    ],
    ids=str,
)
def test_what_can_never_be_right_raises_before_any_prompt_runs(prompt, params, named, llm):
    with pytest.raises(ArgumentError, match=named):
        llm.generate(["2+2=", prompt], SamplingParams(temperature=0.0, **params))
    assert not llm.engine.has_work


def test_a_prompt_that_is_too_long_is_an_output_with_an_error_and_one_warning(llm):
    most = llm.engine.runner.capacity.token_limit
    with pytest.warns(RuntimeWarning, match=f"2 of 3 .*{most}") as warned:
        refused, answered, _ = llm.generate([[65] * most, "12+30=", [65] * (most + 1)], GREEDY)
    assert len(warned) == 1
    assert f"the prompt has {most} tokens" in refused.error
    assert refused.outputs[0].finish_reason == "refused"
    assert refused.prompt_token_ids == [65] * most
    assert answered.outputs[0].text == "42"


@pytest.mark.parametrize("wrong", [5, "greedy", {"temperature": 0.0}, [None], [GREEDY, GREEDY]], ids=repr)
def test_wrong_parameters_are_refused_and_leave_no_prompt_behind(wrong, llm):
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate("abc", wrong)
    with pytest.raises(ValueError, match="must be SamplingParams.*{'top_k': 3}"):
        llm.generate("abc", {"top_k": 3})
    with pytest.raises(ValueError, match="must be SamplingParams"):
        llm.generate(["12+30=", "1+1="], [GREEDY, None])
    assert llm.num_waiting == 0


def test_a_stream_takes_no_list_of_parameters(llm):
    with pytest.raises(ValueError, match="SamplingParams.* list"):
        llm.stream("abc", [GREEDY])


@pytest.mark.parametrize("wrong", [None, 5, b"demo", ["demo"]], ids=repr)
def test_a_model_is_named_by_text_or_path(wrong):
    with pytest.raises(ValueError, match="model must be"):
        LLM(wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name, values in {
            "n": (0, 1025, None),
            "temperature": (-0.1, float("nan"), "hot"),
            "top_k": (-2, 1.5),
            "top_p": (0.0, 1.1),
            "min_p": (-0.1,),
            "seed": (2**63, "x", True),
            "repetition_penalty": (0,),
            "presence_penalty": (2.1,),
            "frequency_penalty": (float("inf"),),
            "max_tokens": (0, 1.5, True),
            "min_tokens": (-1, 17),
            "logprobs": (-2, True, "a"),
            "prompt_logprobs": (-2, 1.5),
            "truncate_prompt_tokens": (0, -2, 1.5, True),
            "logit_bias": ({-1: 1.0}, {1: float("inf")}, [1], {"a": 1.0}, {1: "a"}),
            "stop_token_ids": ([-1], 5, "5", [1.5]),
            "allowed_token_ids": ([], [1.5], 5),
            "bad_words": ("abc", ["a", " "], [1]),
            "stop": ("", ["a", ""], 5, [5], b"a"),
            "ignore_eos": ("no",),
            "skip_special_tokens": (3,),
        }.items()
        for value in values
    ],
)
def test_a_value_of_a_wrong_type_or_outside_its_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*got "):
        SamplingParams(**{name: value})


def test_borders_and_numbers_of_numpy_are_allowed():
    SamplingParams(
        temperature=0, top_k=-1, top_p=1, min_p=1, seed=-(2**63), logprobs=20, max_tokens=1, min_tokens=1, stop=["a"]
    )
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), stop_token_ids=(np.int32(4),))
    assert params.max_tokens == 3


LONGER = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def small_llm() -> Iterator[LLM]:
    with LLM("demo", max_batch_size=4, max_sequence_length=64, dtype="float32") as engine:
        yield engine


def kept(small_llm: LLM, prompt: str | list[int], max_tokens: int | None, truncate: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, truncate_prompt_tokens=truncate)
    (output,) = small_llm.generate([prompt], params, use_tqdm=False)
    assert output.error is None
    return output.prompt_token_ids


def test_the_last_tokens_of_a_longer_prompt_are_kept(small_llm: LLM) -> None:
    ids = small_llm.tokenizer("xyz rev oceanic=").input_ids
    assert kept(small_llm, "xyz rev oceanic=", 8, 12) == kept(small_llm, ids, 8, 12) == ids[-12:]
    assert kept(small_llm, ids, 8, 99) == ids
    params = replace(LONGER, truncate_prompt_tokens=12)
    assert small_llm.generate("xyz rev oceanic=", params)[0].outputs[0].text == "cinaeco"


@pytest.mark.parametrize(("max_tokens", "length"), [(8, 56), (1, 63), (None, 63), (64, 63), (1000, 63)])
def test_minus_one_truncates_to_leave_room_for_the_output(small_llm: LLM, max_tokens: int | None, length: int) -> None:
    long = [97 + i % 26 for i in range(100)]
    assert kept(small_llm, long, max_tokens, -1) == long[-length:]


def test_what_a_tokenizer_puts_in_front_of_a_text_stays(small_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(small_llm.tokenizer), "bos_token_id", property(lambda _: ord("x")), raising=False)
    ids = small_llm.tokenizer("xyz rev oceanic=").input_ids
    assert kept(small_llm, "xyz rev oceanic=", 8, 12) == [ord("x"), *ids[-11:]]
    assert kept(small_llm, ids, 8, 12) == ids[-12:], "token ids are the caller's own"


def test_each_of_n_answers_is_the_one_of_the_next_seed(small_llm: LLM) -> None:
    params = SamplingParams(temperature=5.0, max_tokens=12, ignore_eos=True, seed=2**63 - 2)
    outputs = small_llm.generate("rev abc=", replace(params, n=4), use_tqdm=False)[0].outputs
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    for output, seed in zip(outputs, [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1], strict=True):
        (alone,) = small_llm.generate("rev abc=", replace(params, seed=seed), use_tqdm=False)
        assert alone.outputs[0].token_ids == output.token_ids
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_n_answers_compute_their_prompt_once_and_hold_its_pages_once() -> None:
    with LLM("demo", max_batch_size=8, max_sequence_length=256, max_prefill_tokens=32, page_size=16) as small_llm:
        params = SamplingParams(n=8, temperature=1.0, max_tokens=2, ignore_eos=True)
        prompt = [97 + i % 26 for i in range(130)]
        (output,) = small_llm.generate([prompt], params, use_tqdm=False)
        assert small_llm.stats.prefilled_tokens == 129 + 7 * 1, (
            "eight pages of the prompt are found by all but the first"
        )
        assert output.metrics.num_cached_tokens == 128


def test_prefixes_are_shared_below_one_salt_alone() -> None:
    with LLM("demo", max_batch_size=8, max_sequence_length=256, page_size=16) as salting:
        tokens = [97 + i % 26 for i in range(130)]

        def cached(*salts: str | None) -> list[int]:
            prompts = [{"prompt_token_ids": tokens, "cache_salt": salt} for salt in salts]
            outputs = salting.generate(prompts, GREEDY, use_tqdm=False)
            assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
            return [output.metrics.num_cached_tokens for output in outputs]

        assert cached("a", "b", None, "a") == [0, 0, 0, 128]  # in one batch
        assert cached("a", None, "b", "c", "a/b") == [128, 128, 128, 0, 0]
        with salting.stream({"prompt_token_ids": tokens, "cache_salt": "d"}, GREEDY) as stream:
            list(stream)
        assert stream.request.metrics.num_cached_tokens == 0
    for wrong in ("", 5, "a" * 129):
        with pytest.raises(ArgumentError, match="^cache_salt must be"):
            as_prompts({"prompt": "a", "cache_salt": wrong})


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
    detokenizer = Detokenizer(TokenTexts(spacing_tokenizer), skip_special_tokens=skip, spaced=spaced)
    text = ""
    for token in [1, 3, 4, 3, 2, 4]:
        detokenizer.push(token)
        text += detokenizer.take()
    detokenizer.finish()
    assert text + detokenizer.take(final=True) == expected


def test_special_tokens_are_in_the_text_without_skip_special_tokens(small_llm: LLM) -> None:
    end = small_llm.tokenizer.decode([257])
    shown = replace(LONGER, skip_special_tokens=False, include_stop_str_in_output=True)
    assert small_llm.generate("12+30=", shown)[0].outputs[0].text == "42" + end
    assert small_llm.generate("12+30=", LONGER)[0].outputs[0].text == "42"


def test_without_a_tokenizer_token_ids_are_answered_with_token_ids(small_llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(resolve_model_path("demo"), folder, ignore=shutil.ignore_patterns("tokenizer*"))
    ids = small_llm.get_tokenizer()("12+30=").input_ids
    assert small_llm.get_tokenizer().decode(ids) == "12+30="
    expected = small_llm.generate([ids], replace(LONGER, logprobs=1))[0].outputs[0]
    with LLM(folder, max_batch_size=2, max_sequence_length=64, dtype="float32", skip_tokenizer_init=True) as bare:
        assert bare.tokenizer is bare.get_tokenizer() is None
        answer = bare.generate([ids], replace(LONGER, logprobs=1))[0].outputs[0]
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("", expected.token_ids, "stop")
        assert [{t: e.logprob for t, e in place.items()} for place in answer.logprobs] == [
            {t: e.logprob for t, e in place.items()} for place in expected.logprobs
        ]
        assert list(bare.stream(ids, LONGER)) == []
        for prompt in ("12+30=", [ids, "12+30="], {"prompt": "12+30="}):
            with pytest.raises(ArgumentError, match="skip_tokenizer_init"):
                bare.generate(prompt, LONGER)
        with pytest.raises(ArgumentError, match="stop and bad_words"):
            bare.generate([ids], replace(LONGER, stop="a"))
        assert bare.cache.pool.used == 0


def test_printed_figures_are_a_summary_of_one_line() -> None:
    with LLM("demo", max_batch_size=4, max_sequence_length=64, dtype="float32") as llm:
        llm.generate(["12+30=", "rev abc="], SamplingParams(temperature=0.0), use_tqdm=False)
    assert "\n" not in str(EngineStats()) + str(llm.stats)
    assert "7 tokens in 2 " in str(llm.stats)
    assert "4 decode steps, " in str(llm.stats)
    assert "buckets 1 x1, 2 x3" in str(llm.stats)
    assert "deque" not in repr(llm.stats)


def test_stats_show_step_times_in_milliseconds() -> None:
    stats = EngineStats(decode_seconds=deque([0.9] * 99 + [2.5]))
    assert "0 decode steps, 900.00 ms per token p50, 916.00 p99;" in str(stats)
    stats.batch_sizes[3], stats.bucket_steps[4] = 2, 2
    assert str(stats).endswith("buckets 4 x2; padding 25%")


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_cannot_be_pickled(small_llm: LLM, attempt: object) -> None:
    with pytest.raises(TypeError, match="LLM"):
        attempt(small_llm)


def test_parameters_and_outputs_can_be_pickled(small_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, logprobs=1)
    (output,) = small_llm.generate("12+30=", params, use_tqdm=False)
    assert pickle.loads(pickle.dumps(params)) == params
    assert pickle.loads(pickle.dumps(output)) == output


def test_an_async_llm_cannot_be_pickled_either() -> None:
    asynchronous = AsyncLLM("demo", max_batch_size=1, max_sequence_length=32, backend="eager")
    try:
        with pytest.raises(TypeError, match="LLM"):
            pickle.dumps(asynchronous)
    finally:
        asynchronous.close()
