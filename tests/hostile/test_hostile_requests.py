"""One request may ask for anything and be refused; what it may not do is cost others their answers or their time."""

import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from graphdecode import LLM, GraphdecodeError, SamplingParams
from graphdecode.config.sampling_params import MAX_OUTPUTS, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from graphdecode.engine import Request, RequestError
from graphdecode.models import resolve_model_path
from graphdecode.text.detokenizer import Detokenizer
from graphdecode.text.token_texts import TokenTexts

PROMPTS = ["417+385=", "rev oceanic=", "12+30="]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", max_batch_size=4, max_sequence_length=64, page_size=4) as llm:
        yield llm


def answers(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 10**9}, rf"n must be an integer in 1..{MAX_OUTPUTS}, got 1000000000"),
        ({"n": 10**5000}, f"n must be an integer in 1..{MAX_OUTPUTS}, got a value of type int that cannot be shown"),
        ({"stop": [str(number) for number in range(20_000)]}, f"stop must be at most {MAX_STOP_STRINGS} texts"),
        ({"stop": "a" * 10**6}, f"stop must be of at most {MAX_STOP_LENGTH} characters, not 1000000"),
        ({"temperature": 10**400}, "temperature must be a number >= 0"),
        ({"temperature": float("nan")}, "temperature must be a number >= 0 and at most 1e.30, got nan"),
        ({"temperature": Fraction(10**400)}, "temperature must be a number >= 0"),
        ({"min_p": float("inf")}, r"min_p must be a number in \[0, 1\], got inf"),
        ({"logit_bias": {3: 10**400}}, "logit_bias must be a dict"),
        ({"seed": 2**63}, "seed must be None or a 64-bit integer"),
        ({"stop": torch.tensor([1, 2])}, "stop must be text, or a list of texts, got tensor"),
        ({"stop_token_ids": torch.tensor(1)}, "stop_token_ids must be a list of token ids"),
        ({"logit_bias": torch.tensor([1.0, 2.0])}, "logit_bias must be a dict"),
        ({"seed": 1.5}, "seed must be None or a 64-bit integer, got 1.5"),
        (
            {"max_tokens": 10**5000, "min_tokens": 10**5001},
            "min_tokens must be an integer in 0..max_tokens=a value of type",
        ),
        ({"max_tokens": -1}, "max_tokens must be .*, got -1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_one_request_may_ask_for_has_bounds_with_names(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphdecodeError, match=said) as caught:
        SamplingParams(**fields)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 400


def test_stop_texts_cost_time_in_proportion_to_their_number_and_nothing_more_in_a_long_answer() -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model_path("demo") / "tokenizer.json"))

    def seconds_per_token(count: int, length: int, characters: int) -> float:
        stops = tuple("a" * (length - 5) + f"{number:05}" for number in range(count))
        detokenizer = Detokenizer(TokenTexts(tokenizer), stops)
        tokens = tokenizer.encode("a" * characters + "b", add_special_tokens=False).ids
        began = time.thread_time()
        for token in tokens:
            assert detokenizer.push(token) is None
            detokenizer.take()
        took = time.thread_time() - began
        assert detokenizer.text == "a" * characters + "b"
        return took / len(tokens)

    def ratio(more: tuple[int, int, int], less: tuple[int, int, int]) -> float:
        times = [(seconds_per_token(*more), seconds_per_token(*less)) for _ in range(3)]
        return min(first for first, _ in times) / min(second for _, second in times)

    count, length = MAX_STOP_STRINGS, MAX_STOP_LENGTH
    assert ratio((count, length, 2000), (count // 4, length // 4, 2000)) < 8  # each with each: 16
    assert ratio((count, length, 2000), (1, length, 2000)) < count
    assert ratio((count // 4, length, 16_000), (count // 4, length, 1000)) < 3  # all of the text again: 16


@pytest.mark.parametrize("tokens", [[259], [2**40], [-1], [5, 10**30], [1.5], ["a"], [None], [], [[5]]])
def test_impossible_tokens_are_refused_alone(llm: LLM, tokens: list[Any]) -> None:
    alone = answers(llm)
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    first = [next(stream) for stream in streams]
    with pytest.raises(RequestError):
        llm.engine.add(Request(tokens, SamplingParams(repetition_penalty=1.5)))
    rest = ["".join(stream) for stream in streams]
    assert [head + tail for head, tail in zip(first, rest, strict=True)] == alone
    assert answers(llm) == alone


def test_a_text_whose_ids_are_beyond_the_vocabulary_is_refused_and_later_ones_are_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may have more tokens than the model; with a penalty each is counted in memory of the vocabulary."""
    alone = answers(llm)
    encode = llm.input_processor.encode
    monkeypatch.setattr(
        llm.input_processor, "encode", lambda prompt: [5, 300] if prompt == "beyond" else encode(prompt)
    )
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    with pytest.raises(ValueError, match=r"token ids must be in 0\.\.258, got \[300\]"):
        llm.generate([*PROMPTS, "beyond"], [GREEDY, GREEDY, GREEDY, params], use_tqdm=False)
    assert answers(llm) == alone


def test_a_tokenizer_that_fails_at_a_prompt_touches_no_other_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = answers(llm)
    stream = llm.stream(PROMPTS[0], GREEDY)
    begun = next(stream)

    class PanicException(BaseException):
        """What the tokenizers' Rust code raises is no Exception."""

    def fails(*_: Any, **__: Any) -> None:
        raise PanicException("index out of bounds")

    with monkeypatch.context() as patched:
        patched.setattr(type(llm.tokenizer), "__call__", fails)
        with pytest.raises(GraphdecodeError, match=r"the tokenizer cannot encode the prompt '12\+30=': PanicException"):
            llm.generate(["12+30="], GREEDY, use_tqdm=False)
    assert begun + "".join(stream) == alone[0]
    assert answers(llm) == alone


def test_a_set_of_allowed_tokens_is_as_good_as_a_list(llm: LLM) -> None:
    first, second = (
        llm.generate("417+385=", SamplingParams(temperature=0.0, allowed_token_ids=allowed), use_tqdm=False)[0]
        for allowed in ([48, 49, 257], frozenset({48, 49, 257}))
    )
    assert first.outputs[0].token_ids == second.outputs[0].token_ids != []


def test_as_many_answers_as_may_be_asked_for_are_given(llm: LLM) -> None:
    [output] = llm.generate("12+30=", SamplingParams(n=MAX_OUTPUTS, max_tokens=1), use_tqdm=False)
    assert len(output.outputs) == MAX_OUTPUTS
    assert {len(answer.token_ids) for answer in output.outputs} == {1}
