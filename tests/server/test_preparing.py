"""What it takes to make a request ready: as much as it holds, and not once more for each of its prompts."""

import json
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
from preprocessors import RULES, demo_preprocessor, demo_tokenizer

from graphdecode import SamplingParams
from graphdecode.config import ServerConfig
from graphdecode.engine.request import ContextLengthError
from graphdecode.errors import AnswerError, ArgumentError, GraphdecodeError
from graphdecode.server.endpoints import GENERATING
from graphdecode.server.http import HttpError, as_http_error
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.text.input_processor import InputProcessor

COMPLETIONS = GENERATING["/v1/completions"]


class Counting:
    """A tokenizer that counts the texts that it is asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts = 0

    def __call__(self, text: Any, **options: Any) -> Any:
        self.texts += len(text) if isinstance(text, list) else 1
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture(scope="module")
def preprocessor() -> Preprocessor:
    return demo_preprocessor(Counting(demo_tokenizer()))


def prepared(preprocessor: Preprocessor, *, in_child: bool = True, **fields: Any) -> Any:
    return COMPLETIONS.prepared(preprocessor, json.dumps({"prompt": "1+1="} | fields).encode(), in_child=in_child)


def texts_of(preprocessor: Preprocessor, **fields: Any) -> int:
    before = preprocessor.tokenizer.texts
    assert prepared(preprocessor, **fields) is not None
    return int(preprocessor.tokenizer.texts - before)


def test_words_are_spelled_once_for_all_prompts_of_a_request(preprocessor: Preprocessor) -> None:
    words = [f"w{number}" for number in range(50)]
    assert texts_of(preprocessor, prompt=["a"] * 200, bad_words=words) == 200 + 2 * len(words)


def test_too_many_words_are_refused_before_one_of_them_is_spelled(preprocessor: Preprocessor) -> None:
    before = preprocessor.tokenizer.texts
    with pytest.raises(HttpError, match="bad_words.*max_bad_words=128.*4500") as refused:
        prepared(preprocessor, bad_words=[f"w{number}" for number in range(4500)])
    assert (refused.value.status, refused.value.param, preprocessor.tokenizer.texts) == (400, "bad_words", before)


def test_parameters_are_checked_once_for_all_prompts_and_answers(preprocessor, monkeypatch):
    checked = []
    check = SamplingParams.__post_init__
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda self: (checked.append(1), check(self))[1])
    (completion, *_) = prepared(
        preprocessor, prompt=["a"] * 100, n=3, seed=7, prompt_logprobs=1, allowed_token_ids=[48, 49]
    )
    assert len(checked) <= 3
    assert len({id(prompt.params) for prompt in pickle.loads(pickle.dumps(completion)).prompts}) == 1
    orders = [preprocessor.input_processor.parent_request(prompt, None, start_tag=2.5) for prompt in completion.prompts]
    assert len(checked) <= 3
    requests = [request for request, _ in orders[1].children]
    assert [request.sampling_params.seed for request in requests] == [7, 8, 9]
    assert [request.sampling_params.prompt_logprobs for request in requests] == [1, None, None]
    assert {(request.start_tag, request.sampling_params.n) for request in requests} == {(2.5, 1)}
    assert completion.prompts[0].params.sampling.seed == 7


@pytest.mark.parametrize(("prompts", "answers"), [(301, 1), (100, 4), (3, 101)])
def test_more_answers_than_can_ever_be_open_are_refused_for_good(preprocessor, prompts, answers):
    with pytest.raises(HttpError, match="300") as refused:
        prepared(preprocessor, prompt=["a"] * prompts, n=answers)
    assert (refused.value.status, refused.value.headers) == (400, {})


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] * 100},
        {"bad_words": ["a"] * 100},
        {"stop": ["a"] * 100},
        {"allowed_token_ids": [1] * 5000},
        {"logit_bias": dict.fromkeys(map(str, range(5000)), 1)},
    ],
)
def test_a_small_body_of_many_parts_is_prepared_in_a_child(preprocessor: Preprocessor, fields: dict[str, Any]) -> None:
    before = preprocessor.tokenizer.texts
    assert prepared(preprocessor, in_child=False, **fields) is None
    assert preprocessor.tokenizer.texts == before


def test_a_body_of_few_parts_is_prepared_at_once(preprocessor: Preprocessor) -> None:
    assert prepared(preprocessor, in_child=False, prompt=[50] * 200, stop=["a"], bad_words=["b"]) is not None
    assert prepared(preprocessor, in_child=False, prompt=["a"] * 60) is not None


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (AnswerError("gone", "restarting"), 503, "restarting"),
        (AnswerError("is restarting", None), 500, None),  # it is the code that counts, and not the words
        (AnswerError("beyond", "form_too_complex"), 400, "form_too_complex"),
        (AnswerError("unreadable", "refused"), 400, "refused"),
        (ContextLengthError("the prompt has 9 tokens"), 400, "context_length_exceeded"),
        (ArgumentError("n must be 1"), 400, None),
    ],
)
def test_the_kind_of_an_error_decides_the_status(error: GraphdecodeError, status: int, code: str | None) -> None:
    told = as_http_error(error, frozenset({"n"}))
    assert (told.status, told.code, "Retry-After" in told.headers) == (status, code, status == 503)


def test_names_of_fields_that_are_ignored_are_cut_and_escaped_for_the_log(preprocessor: Preprocessor) -> None:
    hostile = {"a\nERROR: b": 1, "\x1b[31m": 1, "\u202e": 1, "'\"": 1, "x" * 5000: 1}
    more = {f"name {number}": 1 for number in range(20)}
    _, names, _ = prepared(preprocessor, **hostile, **more)
    assert names[:5] == ("a\\nERROR: b", "\\x1b[31m", "\\u202e", "\\'\"", "x" * 40)
    assert len(names) == 10
    assert all(name.isascii() and name.isprintable() for name in names)


@pytest.mark.parametrize(
    ("path", "field"), [("completions", "max_tokens"), ("chat/completions", "max_completion_tokens")]
)
def test_an_output_that_cannot_fit_is_refused_in_vllms_words_and_null_is_what_fits(preprocessor, path, field):
    def prepared_with(asked: int | None) -> Any:
        asks = {"prompt": "1+1="} if field == "max_tokens" else {"messages": [{"role": "user", "content": "1+1="}]}
        more = {"chat_template": "{{ messages[0].content }}", "max_tokens": None} if field != "max_tokens" else {}
        (ready, *_) = GENERATING[f"/v1/{path}"].prepared(
            templated, json.dumps(asks | more | {field: asked}).encode(), in_child=True
        )
        return ready.prompts[0].params.sampling.max_tokens

    templated = replace(preprocessor, config=ServerConfig(trust_request_chat_template=True))
    assert (prepared_with(252), prepared_with(None)) == (252, None)
    with pytest.raises(HttpError) as refused:
        prepared_with(253)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, field, "context_length_exceeded")
    words = (
        f"{field} is too large: 253. This model's maximum context length is 256 tokens and your request has 4 input "
    )
    assert str(refused.value).startswith(f"{words}tokens (253 > 256 - 4). ")


@pytest.mark.parametrize("fields", [{"max_tokens": 300}, {"prompt": [50] * 256}])
def test_a_request_that_is_too_long_is_told_the_option_and_the_models_own_limit(preprocessor, fields):
    with pytest.raises(HttpError, match="--max-sequence-length N .*512"):
        prepared(preprocessor, **fields)
    rules = replace(RULES, model_max_length=256)
    longest = replace(preprocessor, engine=preprocessor.engine._replace(rules=rules))
    with pytest.raises(HttpError, match="own limit is 256") as refused:
        prepared(longest, **fields)
    assert "--max-sequence-length" not in str(refused.value)


def test_the_longest_of_several_prompts_counts_as_it_is_truncated_and_16_tokens_are_the_default(preprocessor):
    def prepared(**more: Any) -> Any:
        body = json.dumps({"prompt": ["1+1=", "12345+1="], **more}).encode()
        return GENERATING["/v1/completions"].prepared(preprocessor, body, in_child=True)[0].prompts

    assert [each.params.sampling.max_tokens for each in prepared()] == [16, 16]
    assert [len(each.token_ids) for each in prepared(max_tokens=252, truncate_prompt_tokens=4)] == [4, 4]
    with pytest.raises(HttpError, match=r"252 > 256 - \d"):
        prepared(max_tokens=252)


def test_words_and_tokens_that_are_named_again_count_once() -> None:
    input_processor = InputProcessor(RULES, 0, demo_tokenizer())
    rng = random.Random(1)
    words = ["".join(rng.choices("ab 1=", k=rng.randrange(1, 6))) + "x" for _ in range(40)]
    alone = [
        input_processor.tokenized_params(SamplingParams(bad_words=[word])).bad_words for word in dict.fromkeys(words)
    ]
    assert input_processor.tokenized_params(SamplingParams(bad_words=words)).bad_words == [
        spelling for each in alone for spelling in each
    ]
    many = input_processor.tokenized_params(
        SamplingParams(allowed_token_ids=[50, 49] * 5000, stop_token_ids=[49] * 5000)
    ).per_output
    assert (many.allowed_token_ids, many.stop_token_ids) == ((50, 49), (49,))  # what each answer takes along


def test_a_bad_word_that_the_tokenizer_refuses_is_an_argument_error() -> None:
    input_processor = InputProcessor(RULES, 0, demo_tokenizer())
    with pytest.raises(ArgumentError, match="bad_words"):
        input_processor.tokenized_params(SamplingParams(bad_words=["\ud800"]))
