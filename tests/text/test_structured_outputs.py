"""Answers of a form: whatever the logits say, and whoever sits beside them."""

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from demo_copies import demo_copy
from llguidance import LLMatcher, LLTokenizer

from graphdecode import LLM, ArgumentError, Request, RequestError, SamplingParams, StructuredOutputsParams
from graphdecode.text import RequestOutput

LAUNCHES = {"one step": {}, "five steps": {"steps_per_launch": 5}}


@pytest.fixture(scope="module", params=LAUNCHES)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("demo", max_batch_size=8, max_sequence_length=512, **LAUNCHES[request.param]) as made:
        yield made


def answers(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([f"{index}+1=" for index in range(len(params))], params, use_tqdm=False)


def wild(seed: int, max_tokens: int = 400, **form: Any) -> SamplingParams:
    """A form that is asked of a model whose logits are as good as random."""
    return SamplingParams(
        temperature=2.0, seed=seed, max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**form)
    )


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose answers are short, of everything that can be kept."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "integer", "minimum": (low := rng.randint(-999, 999)), "maximum": low + rng.randint(0, 5000)},
        lambda: {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice([1, 2.5, 100])},
        lambda: {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": rng.choice([2, 3, 7])},
        lambda: {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-c]{2,5}$", "^(x|yy)z?$", r"^\d{3}-[A-Z]\w?$"])},
        lambda: {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])},
        lambda: {"enum": rng.sample([1, "one", None, True, 2.5, 't"\\w\n', [1, "a"], {"k": 1}], rng.randint(1, 4))},
        lambda: {"const": rng.choice(["fixed", 0, {"a": [1]}])},
        lambda: {"type": rng.sample(["boolean", "null"], rng.randint(1, 2))},
    ]
    if depth:
        kinds += 3 * [
            lambda: {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": rng.randint(0, 2),
                "maxItems": 3,
            },
            lambda: {"type": "array", "prefixItems": [random_schema(rng, depth - 1) for _ in range(2)], "items": False},
            lambda: random_object(rng, depth),
            lambda: {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]},
        ]
    return rng.choice(kinds)()


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b c", 'd"', "é", "e"], rng.randint(0, 3))
    properties = {name: random_schema(rng, depth - 1) for name in names}
    required = rng.sample(names, rng.randint(0, len(names)))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def test_every_finished_answer_is_valid_whatever_the_schema_and_the_logits(llm: LLM) -> None:
    rng = random.Random(11)
    schemas = [random_object(rng, 2) | {"$defs": {"n": {"type": "integer"}}} for _ in range(120)]
    for schema in schemas[::3]:
        schema["properties"]["ref"] = {"$ref": "#/$defs/n"}
    asked = [wild(index, json=schema, disable_any_whitespace=index % 2 == 0) for index, schema in enumerate(schemas)]
    finished = 0
    for schema, output in zip(schemas, answers(llm, asked), strict=True):
        answer = output.outputs[0]
        assert output.error is None, (schema, output.error)
        if answer.finish_reason == "stop":
            finished += 1
            jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
                json.loads(answer.text)
            )
        else:
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", 400)
    assert finished > 100


def matchers_of(llm: LLM, texts: list[str], max_tokens: int) -> dict[int, LLMatcher]:
    """Hand in a request for each grammar; the library's matcher of each, in the order of their rows."""
    eos = list(llm.engine.rules.eos_token_ids)
    vocabulary = LLTokenizer(llm.tokenizer.backend_tokenizer.to_str(), n_vocab=259, eos_token=eos)
    made = {}
    for row, text in enumerate(texts):
        params = SamplingParams(temperature=3.0, max_tokens=max_tokens, seed=5 + row)
        made[llm.engine.add(Request([97 + row], params, grammar=text))] = LLMatcher(vocabulary, text)
    return made


def test_the_mask_of_every_step_is_the_librarys_where_the_host_fills_it(llm: LLM) -> None:
    forms: list[dict[str, Any]] = [
        {"json": {"type": "array", "items": {"enum": [1, "ab"]}, "maxItems": 4}},
        {"grammar": 'start: "<" /[a-f]{3,9}/ ">"'},
    ]
    texts = [llm.input_processor.grammars.grammar(StructuredOutputsParams(**form)) for form in forms]
    matchers, steps = matchers_of(llm, texts, 40), 0
    rows = list(matchers)
    while llm.engine.has_work:
        events = llm.engine.step()
        masks = dict(zip(rows, llm.engine.runner.buffers.token_mask.numpy(), strict=False))
        for event in events:
            (token,) = event.token_ids
            matcher = matchers[event.request_id]
            assert masks[event.request_id].tobytes() == matcher.compute_bitmask()
            assert matcher.consume_token(token)
            steps += 1
            if event.finish_reason is not None:
                rows.remove(event.request_id)
    assert steps > 8


def test_a_request_that_enters_while_masks_are_filled_leaves_them_as_they_are(llm: LLM) -> None:
    """`Engine.add` fills the first mask of an answer in its caller's thread, which no step waits for."""
    grammars = llm.input_processor.grammars
    texts = [
        grammars.grammar(StructuredOutputsParams(json={"type": kind})) for kind in ("integer", "string", "boolean")
    ]
    first, second, entering = map(grammars.constraint, texts)
    masks = type(first).fill_all([first, second], [(), ()])
    before = [mask.copy() for mask in masks if isinstance(mask, np.ndarray)]
    own = np.empty_like(before[0])
    entering.fill(own, ())
    assert len(before) == 2
    assert not any(np.array_equal(own, mask) for mask in before)
    assert all(np.array_equal(mask, kept) for mask, kept in zip(masks, before, strict=True))


def test_the_mask_of_every_step_is_the_librarys_where_the_device_follows_an_automaton(llm: LLM) -> None:
    choices = ["yes", "no", "yesterday", "nothing", 'ü"']
    forms: list[dict[str, Any]] = [
        {"choice": choices},
        {"regex": "[ab]{3}(c|dd)*e"},
        {"regex": r"\d{1,3}(, \w)?"},
        {"regex": '[^"!]{2,6}!'},
        {"regex": "[xyz]{30,50}"},
        {"choice": choices},
    ]
    texts = [llm.input_processor.grammars.grammar(StructuredOutputsParams(**form)) for form in forms]
    matchers, compared = matchers_of(llm, texts, 60), 0
    rows, of_choices = list(matchers), next(iter(matchers))
    said = b""
    while llm.engine.has_work:
        events = llm.engine.step()
        assert llm.engine.runner.step.guided_rows == frozenset(range(len(rows)))
        masks = dict(zip(rows, llm.engine.runner.buffers.token_mask.numpy(), strict=False))
        for event in events:
            matcher = matchers[event.request_id]
            assert matcher.consume_tokens(event.token_ids)
            if event.request_id == of_choices:
                said += bytes(token for token in event.token_ids if token < 256)
            if event.finish_reason is not None:
                rows.remove(event.request_id)
                continue
            assert masks[event.request_id].tobytes() == matcher.compute_bitmask()
            compared += 1
            if event.request_id == of_choices:
                bits = np.unpackbits(masks[of_choices].view(np.uint8), bitorder="little")
                eos = list(llm.engine.rules.eos_token_ids)
                assert set(np.flatnonzero(bits)) == continuations(choices, said, eos)
    assert compared > (40 if llm.config.steps_per_launch == 1 else 7)
    assert said.decode() in choices


def continuations(choices: list[str], said: bytes, eos: list[int]) -> set[int]:
    """The bytes that may follow, from the definition."""
    spelled = [choice.encode() for choice in choices]
    following = {word[len(said)] for word in spelled if word.startswith(said) and len(word) > len(said)}
    return following | (set(eos) if said in spelled else set())


def test_law_9_a_form_changes_nothing_beside_it_and_nothing_beside_it_changes_an_answer_of_a_form(llm: LLM) -> None:
    free = [SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True, logprobs=1) for seed in range(4)]
    held = [
        wild(1, 60, json_object=True),
        wild(2, 60, regex="(a|b){5,40}"),
        wild(3, 60, choice=["left", "right"]),
        wild(4, 60, json={"type": "array", "items": {"type": "integer"}, "minItems": 3}),
    ]
    prompts = ["417+385=", "rev oceanic=", "sort zebra=", "x"]

    def texts(which: list[int], params: list[SamplingParams]) -> list[Any]:
        return [
            (output.outputs[0].token_ids, output.outputs[0].logprobs, output.outputs[0].finish_reason)
            for output in llm.generate([prompts[index % 4] for index in which], params, use_tqdm=False)
        ]

    alone = [texts([index], [params])[0] for index, params in enumerate(free + held)]
    mixed = [0, 4, 1, 5, 2, 6, 3, 7]
    together = texts(mixed, [(free + held)[index] for index in mixed])
    assert together == [alone[index] for index in mixed]


def test_law_9_masks_that_are_filled_beside_the_step_give_the_same_answers(llm, monkeypatch):
    forms: list[dict[str, Any]] = [
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 5}},
        {"json_object": True},
        {"grammar": 'start: /[a-f]{3,40}/ "."'},
    ]
    asked = [wild(seed, 60, **form) for seed, form in enumerate(forms)]
    asked.append(SamplingParams(temperature=1.0, seed=3, max_tokens=50, ignore_eos=True, logprobs=2))
    found = []
    for worth in (1e9, -1.0):
        monkeypatch.setattr(llm.engine.loop.masks, "thread_seconds", worth)
        found.append([output.outputs[0] for output in answers(llm, asked)])
    assert found[0] == found[1]
    assert [answer.finish_reason for answer in found[0][3:]] == ["length"]


def test_a_preempted_structured_output_resumes() -> None:
    asked = [wild(seed, 60, json={"type": "array", "items": {"type": "integer"}, "minItems": 9}) for seed in range(6)]
    with LLM("demo", max_batch_size=6, max_sequence_length=80, page_size=4) as llm:
        expected = [output.outputs[0] for output in answers(llm, asked)]
    with LLM("demo", max_batch_size=6, max_sequence_length=80, page_size=4, total_num_pages=40) as llm:
        assert [output.outputs[0] for output in answers(llm, asked)] == expected
        assert llm.num_preemptions


def test_a_structured_output_ends_when_complete_or_with_length(llm: LLM) -> None:
    (output,) = answers(llm, [wild(1, 3, choice=["yes"])])
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("yes", "stop")
    assert len(output.outputs[0].token_ids) == 3
    (output,) = answers(llm, [wild(1, 2, choice=["yes"])])
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ye", "length")
    (output,) = answers(llm, [SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="ab?"))])
    assert output.outputs[0].text in ("a", "ab")
    assert output.outputs[0].finish_reason == "stop"


def test_a_stop_token_may_come_where_the_answer_may_end_and_nowhere_else(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="(ab){1,90}")
    params = SamplingParams(
        temperature=0.0,
        max_tokens=180,
        stop_token_ids=[258],  # as the token that ends a turn of a chat, which is no end-of-sequence token
        logit_bias={258: 1e6},
        structured_outputs=form,
    )
    (output,) = answers(llm, [params])
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab", 258)
    assert output.outputs[0].token_ids == [97, 98, 258]


def test_the_most_choices_are_followed_to_their_end(llm: LLM) -> None:
    choices = [f"option {index}" for index in range(10_000)]
    outputs = answers(llm, [wild(seed, choice=choices) for seed in range(2)])
    assert all(output.outputs[0].text in choices for output in outputs)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_structured_outputs_of_each_kind(llm: LLM) -> None:
    matched = re.compile(r"\d{2}-[a-z]{1,4}")
    one = {"type": "object", "properties": {"b": {"enum": [1]}}, "required": ["b"]}
    both = {**one, "properties": {"b": {"enum": [1]}, "a": {"enum": [2]}}, "required": ["b", "a"]}
    both["additionalProperties"] = False
    forms: list[tuple[dict[str, Any], Callable[[str], object]]] = [
        ({"regex": r"\d{2}-[a-z]{1,4}"}, matched.fullmatch),
        ({"choice": ["a\nb", "ä"]}, lambda text: text in ("a\nb", "ä")),
        ({"grammar": 'root ::= "<" [0-9] ">"'}, re.compile("<[0-9]>").fullmatch),
        ({"grammar": 'start: "<" /[0-9]/ ">"'}, re.compile("<[0-9]>").fullmatch),
        ({"json": json.dumps(both), "disable_any_whitespace": True}, lambda text: text == '{"b":1,"a":2}'),
        (
            {"json": one, "disable_additional_properties": True, "whitespace_pattern": " "},
            re.compile('{ ?"b" ?: ?1 ?}').fullmatch,
        ),
    ]
    for output, (form, is_right) in zip(answers(llm, [wild(3, **form) for form, _ in forms]), forms, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        assert is_right(output.outputs[0].text), (form, output.outputs[0].text)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "object", "not": {}}}, '^structured_outputs: json .*"not"'),
        ({"json": {"type": "array", "uniqueItems": True}}, '"uniqueItems"'),
        ({"json": {"x-guidance": {"lenient": True}, "if": {}, "then": {}}}, '"if", "then"'),
        ({"json": {"$ref": "https://example.com/schema"}}, "json .*example.com"),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"regex": "a(?=b)"}, "regex "),
        ({"regex": "("}, "regex "),
        ({"grammar": "start: word"}, 'grammar .*"word"'),
        ({"grammar": "no grammar"}, "grammar "),
        ({"json": {"const": "\ud800"}}, "json "),
        ({"regex": "\ud800"}, "regex "),
        ({"json": {"required": {"type": "x" * 83 + "\u00e9" * 40}}}, "json "),
        ({"json": {"description": "x" * 2**20}}, "json .*1048576"),
    ],
)
def test_an_unenforceable_keyword_is_refused_before_any_prompt_runs(llm, form, message):
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    with pytest.raises(ArgumentError, match=message):
        llm.generate(["417+385=", "x"], [plain, wild(1, **form)], use_tqdm=False)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "^structured_outputs .*got None"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json": "no json"}, "json must be .*got 'no json'"),
        ({"choice": []}, "choice must be"),
        ({"choice": "yes"}, "choice must be"),
        ({"regex": ""}, "regex must be"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"json_object": 7}, "json_object must be"),
    ],
)
def test_invalid_structured_outputs_params_are_refused(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        StructuredOutputsParams(**form)


def test_the_engine_refuses_unresolved_structured_outputs_and_two_masks(llm: LLM) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        llm.engine.add(Request([97], wild(1, regex="a")))
    with pytest.raises(RequestError, match="allowed_token_ids"):
        llm.engine.add(Request([97], SamplingParams(allowed_token_ids=[97]), grammar="start: /a/"))
    with pytest.raises(RequestError, match="the grammar cannot be read"):
        llm.engine.add(Request([97], grammar="start: b"))
    with pytest.raises(ArgumentError, match="structured_outputs must be"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_unconstrained_rows_upload_no_mask(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, staged = llm.engine.runner, []
    stage = runner.step.stage_masks
    monkeypatch.setattr(runner.step, "stage_masks", lambda masks: (staged.append(list(masks)), stage(masks)))
    answers(llm, [SamplingParams(max_tokens=9, ignore_eos=True)] * 3)
    assert not staged
    free = SamplingParams(max_tokens=9, ignore_eos=True)
    answers(llm, [wild(1, 9, regex="[ab]{9}"), free])
    assert not staged, "the device follows an automaton"
    answers(llm, [wild(1, 9, grammar="start: /[ab]{9}/"), free])
    assert len(staged) >= 7
    assert all(rows == [0] for rows in staged), "the mask of the row that has one, and of no other"


@pytest.mark.parametrize("beside", [{}, {"ignore_eos": True}, {"stop_token_ids": [120, 121]}], ids=str)
def test_structured_outputs_take_precedence_over_min_tokens(llm: LLM, beside: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    forms: list[tuple[dict[str, Any], str]] = [
        ({"choice": ["left", "right"]}, "left|right"),
        ({"regex": "a{2,3}"}, "aaa"),
        ({"regex": "b*"}, "b{20,}"),
        ({"grammar": 'start: "c" start | "c"'}, "c{20,}"),
        ({"json": schema, "disable_any_whitespace": True}, re.escape('{"a":"b"}')),
    ]
    sampled = {"temperature": 1.0, "max_tokens": 60, "min_tokens": 20, **beside}
    params = [
        SamplingParams(**sampled, seed=seed, structured_outputs=StructuredOutputsParams(**form))
        for seed, (form, _) in enumerate(forms)
    ]
    for output, (form, expected) in zip(answers(llm, params), forms, strict=True):
        assert output.error is None, form
        assert re.fullmatch(expected, output.outputs[0].text), form


def test_bad_words_that_forbid_all_allowed_tokens_are_an_error(llm: LLM) -> None:
    params = SamplingParams(bad_words=["x"], structured_outputs=StructuredOutputsParams(choice=["x"]))
    (output,) = answers(llm, [params])
    assert output.error is not None
    assert "its grammar cannot be followed further: bad_words forbid all" in output.error


def test_the_end_of_a_structured_output_is_not_in_its_text(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="[0-9]{4,26}")
    params = SamplingParams(
        temperature=0.0, max_tokens=40, structured_outputs=form, ignore_eos=True, skip_special_tokens=False
    )
    [output] = llm.generate("12+30=", params, use_tqdm=False)
    assert output.outputs[0].token_ids[-1] == 257
    assert re.fullmatch("[0-9]{4,26}", output.outputs[0].text)


@pytest.mark.parametrize("form", [{"regex": "[abcxyz]{2,19}"}, {"json": {"type": "integer"}}])
def test_without_eos_a_structured_output_ends_where_nothing_can_follow(tmp_path: Any, form: dict[str, Any]) -> None:
    ends = {"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}
    folder = demo_copy(tmp_path / "model", **ends, tokenizer_config={"eos_token": None})
    with LLM(folder, max_batch_size=2, max_sequence_length=128, device="cpu") as endless:
        assert endless.engine.rules.eos_token_ids == ()
        asked = [wild(seed, 30, **form) for seed in range(6)]
        for output in endless.generate(["12+"] * 6, asked, use_tqdm=False):
            (answer,) = output.outputs
            assert output.error is None
            assert answer.text.isprintable(), answer
            assert not set(answer.token_ids) & {0, 256, 257, 258}
            assert len(answer.token_ids) == (19 if "regex" in form else 30) or answer.finish_reason == "stop"
