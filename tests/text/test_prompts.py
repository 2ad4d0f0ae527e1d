"""What may be given as prompts and as parameters, and what is refused before anything runs."""

import numpy as np
import pytest
import torch

from graphdecode import LLM, SamplingParams
from graphdecode.text.input_processor import as_prompt, as_prompts

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
    assert as_prompts(prompts) == [[5, 6, 7]]


def test_texts_come_alone_in_a_list_or_in_a_dict():
    assert as_prompts("abc") == as_prompts(["abc"]) == as_prompts({"prompt": "abc"}) == ["abc"]
    assert as_prompts(["abc", {"prompt": "de"}, [3]]) == ["abc", "de", [3]]
    assert as_prompts([]) == []
    assert as_prompts([[]]) == [[]]


@pytest.mark.parametrize(
    "wrong",
    [None, 5, 1.5, b"abc", {}, {"text": "abc"}, {"prompt": None}, [None], [5, "a"], [True], [[1.5]], [["a"]], [b"a"]]
    + [torch.tensor([0.5]), torch.tensor([[[1]]]), pytest.param(object(), id="object")],
    ids=repr,
)
def test_what_is_no_prompt_is_refused_with_what_was_expected(wrong, llm):
    with pytest.raises(ValueError, match="a prompt is a text, a list of token ids, or a dict"):
        llm.generate(wrong, GREEDY)
    assert not llm.engine.has_work


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
    with pytest.raises(ValueError, match="no valid text"):
        llm.generate(["fine", "half a pair: \ud83d"], GREEDY)


def test_an_empty_prompt_and_foreign_ids_are_named(llm):
    (refused,) = llm.generate([[]], GREEDY)
    assert "empty" in refused.error
    with pytest.raises(ValueError, match=r"0\.\.\d+, got \[99999\]"):
        llm.stream([5, 99999], GREEDY)


@pytest.mark.parametrize("wrong", [[5, 99999], [1, -1], [2**70]], ids=str)
def test_an_id_outside_the_vocabulary_refuses_its_own_prompt_and_no_other(wrong, llm):
    refused, answered = llm.generate([wrong, "12+30="], GREEDY)
    foreign = [token for token in wrong if not 0 <= token < llm.engine.vocab_size]
    assert refused.error == f"token ids must be in 0..{llm.engine.vocab_size - 1}, got {foreign}"
    assert refused.outputs[0].finish_reason == "refused"
    assert refused.prompt_token_ids == wrong
    assert answered.outputs[0].text == "42"


@pytest.mark.parametrize("wrong", [5, "greedy", {"temperature": 0.0}, [None], [GREEDY, GREEDY]], ids=repr)
def test_wrong_parameters_are_refused(wrong, llm):
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate("abc", wrong)


def test_a_stream_takes_no_list_of_parameters(llm):
    with pytest.raises(ValueError, match="one SamplingParams, got a list"):
        llm.stream("abc", [GREEDY])


@pytest.mark.parametrize("wrong", [None, 5, b"demo", ["demo"]], ids=repr)
def test_a_model_is_named_by_text_or_path(wrong):
    with pytest.raises(ValueError, match="model must be a checkpoint folder"):
        LLM(wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", [5]),
        ("stop", b"a"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [1.5]),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: "a"}),
        ("seed", "x"),
        ("seed", True),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("top_k", 1.5),
        ("logprobs", "a"),
        ("n", None),
        ("ignore_eos", "no"),
        ("skip_special_tokens", 3),
    ],
)
def test_parameters_of_a_wrong_type_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        SamplingParams(**{name: value})


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), stop_token_ids=(np.int32(4),))
    assert params.max_tokens == 3
