"""Numbers of a schema come out as they are, or the schema is refused with their place."""

import json
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from llguidance import LLMatcher

from graphdecode import LLM, ArgumentError, SamplingParams, StructuredOutputsParams
from graphdecode.models import resolve_model_path
from graphdecode.text.grammar import Grammars
from graphdecode.text.tokenizer import load_tokenizer

EOS = 257


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_tokenizer(resolve_model_path("demo")).backend_tokenizer, 259, [EOS])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", max_batch_size=2, max_sequence_length=64) as made:
        yield made


def takes(grammars: Grammars, schema: Any, text: str) -> bool:
    grammar = grammars.grammar(StructuredOutputsParams(json=schema))
    matcher = LLMatcher(grammars.load(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


BIG = 2**53 + 1


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": BIG}, "const"),
        ({"const": -BIG}, "const"),
        ({"const": -(2**63)}, "const"),  # with which llguidance ends the process
        ({"enum": [1, {"a": [BIG]}]}, r"enum\[1\].a\[0\]"),
        ({"enum": [{"default": 2**53}]}, r"enum\[0\].default"),
        ({"type": "integer", "minimum": BIG}, "minimum"),
        ({"type": "integer", "minimum": 2**63 - 1}, "minimum"),
        ({"type": "integer", "maximum": 2**64}, "maximum"),
        ({"type": "integer", "exclusiveMaximum": 2**53 + 2}, "exclusiveMaximum"),
        ({"type": "number", "exclusiveMinimum": -(2.0**60)}, "exclusiveMinimum"),
        ({"type": "number", "multipleOf": BIG}, "multipleOf"),
        ({"type": "array", "maxItems": BIG}, "maxItems"),
        ({"type": "number", "minimum": 2109.1046251069934}, "minimum"),
        ({"const": 945983068618.0999}, "const"),  # which came out as ...618.1
        ({"properties": {"default": {"const": BIG}}}, "properties.default.const"),
        ({"$defs": {"examples": {"minimum": BIG}}, "$ref": "#/$defs/examples"}, r"\$defs.examples.minimum"),
        ('{"const": 1e400}', "const"),
        ('{"maximum": -1e400}', "maximum"),
    ],
)
def test_a_number_that_would_be_rounded_is_refused_by_its_path(grammars: Grammars, schema: Any, place: str) -> None:
    with pytest.raises(ArgumentError, match=rf"json .*: {place} must be .*9007199254740991"):
        grammars.grammar(StructuredOutputsParams(json=schema))
    written = schema if isinstance(schema, str) else json.dumps(schema)
    lark = f'%llguidance {{}}\nstart: "a" value\nvalue: %json {written}\n'
    with pytest.raises(ArgumentError, match=rf"grammar .*: {place} must be"):
        grammars.grammar(StructuredOutputsParams(grammar=lark))


def test_numbers_that_are_not_enforced_may_be_any(grammars: Grammars) -> None:
    schema = {"type": "integer", "default": BIG, "examples": [2**70], "maximum": 2**63 - 1}
    assert takes(grammars, schema, str(2**63 - 1))
    assert not takes(grammars, schema, str(2**63))
    assert takes(grammars, schema, "-7")


def test_bounds_are_exact_up_to_2_to_the_53(grammars: Grammars) -> None:
    for bound in (2**53 - 1, -(2**53) + 1, 10**15, 0, -1):
        for kind in ("integer", "number"):
            for at in range(bound - 2, bound + 3):
                kept = {"minimum": at >= bound, "maximum": at <= bound}
                kept |= {"exclusiveMinimum": at > bound, "exclusiveMaximum": at < bound}
                for name, expected in kept.items():
                    assert takes(grammars, {"type": kind, name: bound}, str(at)) == expected, (name, bound, at)


def test_values_of_fifteen_digits_come_out_as_they_are(grammars: Grammars) -> None:
    draw = random.Random(3)
    for _ in range(40):
        text = f"{draw.randrange(1, 10)}.{draw.randrange(10**14):014}e{draw.randrange(-6, 12)}"
        exact = format(Decimal(text).normalize(), "f")
        assert takes(grammars, {"const": float(text)}, exact), text
        assert takes(grammars, {"enum": [None, -float(text)]}, f"-{exact}"), text


def test_a_request_with_such_a_schema_is_refused(llm: LLM) -> None:
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(json={"const": -(2**63)}))
    with pytest.raises(ArgumentError, match="const must be"):
        llm.generate("1+1=", wrong, use_tqdm=False)
