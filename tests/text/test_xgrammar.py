"""Forms that xgrammar reads: the tokens that llguidance allows, and refusals of what it would pass over in silence."""

import importlib.util
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from graphdecode import LLM, ArgumentError, SamplingParams, StructuredOutputsParams
from graphdecode.engine.constraint import Constraint
from graphdecode.text.grammar import Grammars
from graphdecode.text.xgrammar_grammars import XGrammars

needs_xgrammar = pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "demo", max_batch_size=4, max_sequence_length=512, structured_outputs_config={"backend": "xgrammar"}
    ) as made:
        yield made


def wild(seed: int, **form: Any) -> SamplingParams:
    """A form that is asked of a model whose logits are as good as random."""
    return SamplingParams(
        temperature=2.0, seed=seed, max_tokens=300, structured_outputs=StructuredOutputsParams(**form)
    )


def refusal(llm: LLM, **form: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        llm.intake.grammars.grammar(StructuredOutputsParams(**form))
    return str(caught.value)


def of_llguidance(llm: LLM) -> Grammars:
    rules = llm.engine.rules
    return Grammars(llm.tokenizer.backend_tokenizer, rules.vocab_size, rules.eos_token_ids)


def allowed(constraint: Constraint, vocab_size: int, stop_ids: tuple[int, ...]) -> set[int]:
    words = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    constraint.fill(words, stop_ids)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -20, "maximum": 305},
        'é"': {"enum": ["one", 2, None, {"k": [1]}]},
        "id": {"type": "string", "format": "uuid"},
    },
    "required": ["x"],
    "additionalProperties": False,
}
AGREED: list[dict[str, Any]] = [
    {"json": POINT},
    {"json": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, POINT]}, "minItems": 1, "maxItems": 3}},
    {"json": {"type": "array", "prefixItems": [{"type": "null"}, {"const": "a/b"}], "items": False, "minItems": 2}},
    {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}}}},
    {"json": {"type": "string", "pattern": r"^\d{3}-[A-Z](x|yy)?$"}},
    {"regex": r"[ab]{3}(c|dd)*e"},
    {"regex": r'[^"!\n]{2,6}!'},
    {"choice": ["yes", "no", "yesterday", 'ü"\\', "a\nb"]},
    {"grammar": 'root ::= "<" [0-9]+ ">" | "none"'},
    {"grammar": 'start: "<" /[0-9]+/ ">" | "none"'},
]


HALVES = "".join(map(chr, range(0xA0, 0xC0)))  # second bytes of halves of surrogate pairs
# what one library alone allows, and the other: as docs/serving.md has it
DIFFERENT: list[tuple[dict[str, Any], str, str]] = [
    ({"json": {"type": "string"}}, "", "\x7f/" + HALVES),
    ({"json": {"type": "string", "minLength": 1}}, "\\", "\x7f"),
    ({"json": {"type": "integer"}}, "0", ""),
    ({"regex": "[a-c]."}, "", "\n" + HALVES),
]


@needs_xgrammar
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(
    ("form", "theirs_alone", "ours_alone"),
    [*((form, "", "") for form in AGREED), *DIFFERENT],
    ids=lambda given: ascii(given)[:40],
)
def test_the_two_libraries_allow_the_same_tokens_at_every_step_but_for_what_is_documented(
    llm: LLM, form: dict[str, Any], theirs_alone: str, ours_alone: str, spaced: bool
) -> None:
    params = StructuredOutputsParams(**form, disable_any_whitespace=not spaced)
    eos, size = llm.engine.rules.eos_token_ids, llm.engine.rules.vocab_size
    steps, missed, added = 0, set(), set()
    for seed in range(6):
        rng = random.Random(seed)
        both = [reader.constraint(reader.grammar(params)) for reader in (of_llguidance(llm), llm.intake.grammars)]
        for _ in range(60):
            theirs, ours = (allowed(constraint, size, eos) for constraint in both)
            missed |= theirs - ours
            added |= ours - theirs
            token = rng.choice(sorted(ours & theirs))
            done = [constraint.accept(token) for constraint in both]
            assert done[0] == done[1]
            steps += 1
            if done[0]:
                break
    assert missed <= set(theirs_alone.encode("latin-1"))
    assert added <= set(ours_alone.encode("latin-1"))
    assert (missed | added != set()) == (theirs_alone + ours_alone != "")
    assert steps > 6


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose answers are short, of all that xgrammar keeps."""
    low = rng.randint(-999, 999)
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 50)},
        {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice([1, 2.5, 100])},
        {"type": "number", "minimum": -3.25, "exclusiveMaximum": rng.choice([-1, 0.5, 17])},
        {"type": ["integer", "null"], "minimum": 3, "maximum": 70},
        {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)},
        {"type": "string", "pattern": rng.choice(["^[a-c]{2,5}$", "^(x|yy)z?$", r"\d{3}-[A-Z]\w?", "^é+$"])},
        {"type": "string", "format": "uuid"},
        {"enum": rng.sample([1, "one", None, True, 2.5, 't"\\w\n', [1, "a"], {"k": 1}], rng.randint(1, 4))},
        {"enum": ["a", "b"], "type": "string"},
        {"const": rng.choice(["fixed", 0, {"a": [1]}])},
        {"type": rng.sample(["boolean", "null"], rng.randint(1, 2))},
    ]
    if depth:
        inner = random_schema(rng, depth - 1)
        names = rng.sample(["a", "b c", 'd"', "é", "e"], rng.randint(1, 3))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        kinds += 3 * [
            {"type": "array", "items": inner, "minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 3)},
            {"type": "array", "prefixItems": [inner, {"type": "boolean"}], "items": False},
            {"type": "object", "properties": properties, "required": rng.sample(names, rng.randint(0, len(names)))},
            {"anyOf": [inner, {"type": "null"}]},
        ]
    return rng.choice(kinds)


@needs_xgrammar
def test_every_finished_answer_is_valid_whatever_the_schema_and_the_logits(llm: LLM) -> None:
    rng = random.Random(17)
    schemas = [random_schema(rng) for _ in range(80)]
    asked = [wild(index, json=schema, disable_any_whitespace=index % 4 != 0) for index, schema in enumerate(schemas)]
    finished = 0
    for schema, output in zip(schemas, llm.generate(["x"] * len(asked), asked, use_tqdm=False), strict=True):
        assert output.error is None, (schema, output.error)
        if output.outputs[0].finish_reason == "stop":
            finished += 1
            jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
                json.loads(output.outputs[0].text)
            )
    assert finished > 70


@needs_xgrammar
@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"not": {"type": "null"}}}, '^structured_outputs: json cannot be kept: .*"not"'),
        ({"json": {"type": "array", "uniqueItems": True}}, '"uniqueItems"'),
        ({"json": {"type": "array", "contains": {"const": 1}}}, '"contains"'),
        ({"json": {"if": {}, "then": {}}}, '"if", "then"'),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, '"oneOf"'),
        ({"json": {"allOf": [{"type": "integer"}]}}, '"allOf"'),
        ({"json": {"type": "object", "minProperties": 2}}, '"minProperties"'),
        ({"json": {"type": "object", "patternProperties": {"a": {}}}}, '"patternProperties"'),
        ({"json": {"type": "object", "required": ["x"]}}, '"required"'),
        (
            {"json": {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}}},
            '"additionalProperties" beside "properties"',
        ),
        ({"json": {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.5}}}}, '"multipleOf"'),
        ({"json": {"minimum": 3}}, 'without type, .*"minimum"'),
        (
            {"json": {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer"}}}},
            '"minimum" beside "\\$ref"',
        ),
        ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json": {"$ref": "#"}}, "nothing has this form"),
        ({"json": {"enum": ["a", 1], "type": "string"}}, '"type" beside "enum"'),
        ({"json": {"type": "string", "format": "date"}}, "\"format\" 'date'"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, '"pattern"'),
        ({"json": {"type": "string", "pattern": "^(.|\n){2}$"}}, '"pattern" of characters that JSON escapes'),
        ({"json": {"type": "string", "pattern": "a", "minLength": 2}}, '"minLength"'),
        ({"json": {"type": "frob"}}, '"type"'),
        ({"json": {"const": "\ud800"}}, "json cannot be"),
        ({"json": {"type": "null"}, "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"regex": "a(?=b)"}, "regex cannot be kept: .*Lookahead"),
        ({"regex": "a^b"}, r"\^ and \$ at the ends"),
        ({"regex": "("}, "parenthesis"),
        ({"regex": "\ud800"}, "regex cannot be"),
        ({"grammar": "start: word"}, "grammar cannot be kept: .*'word'"),
        ({"grammar": "no grammar"}, "grammar cannot be kept"),
    ],
)
def test_what_xgrammar_would_pass_over_is_refused_with_its_keyword(
    llm: LLM, form: dict[str, Any], message: str
) -> None:
    assert re.search(message, refusal(llm, **form)), refusal(llm, **form)


@needs_xgrammar
def test_a_grammar_with_llguidances_header_is_left_to_it(llm: LLM) -> None:
    grammar = '%llguidance {}\nstart: %json {"type": "boolean", "x-guidance": {"whitespace_flexible": false}}'
    (output,) = llm.generate(["x"], [wild(1, grammar=grammar)], use_tqdm=False)
    assert output.outputs[0].text in ("true", "false")


@needs_xgrammar
def test_a_stop_token_may_come_where_the_answer_may_end_and_nowhere_else(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=180,
        stop_token_ids=[258],  # no end-of-sequence token
        logit_bias={258: 1e6},
        structured_outputs=StructuredOutputsParams(regex="(ab){1,90}"),
    )
    (output,) = llm.generate(["x"], [params], use_tqdm=False)
    assert output.outputs[0].token_ids == [97, 98, 258]


def test_a_backend_that_is_not_installed_is_named_with_what_to_install(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "graphdecode.text.xgrammar_grammars.find_spec", lambda name: None if name == "xgrammar" else find(name)
    )
    reader = XGrammars(llm.tokenizer.backend_tokenizer, llm.engine.rules.vocab_size, llm.engine.rules.eos_token_ids)
    with pytest.raises(ArgumentError, match=r"xgrammar, which is missing: pip install 'graphdecode\[xgrammar\]'"):
        reader.grammar(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize("given", ["xgrammar", {"backend": "xgrammar", "enable_in_reasoning": True}])
def test_vllms_config_of_forms_may_name_a_backend_and_nothing_else(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"structured_outputs_config must be \{'backend': \.\.\.\}"):
        LLM("demo", structured_outputs_config=given)
