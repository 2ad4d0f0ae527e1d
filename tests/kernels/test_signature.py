"""A signature stands once: schema, the order of arguments, the C struct and the public function follow from it."""

from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

from graphdecode.kernels.native.registration import Float32, Int32, Int64, OneOf, Signature, Written


class Pair(NamedTuple):
    left: Int32
    right: Float32 | None = None


def mix(
    out: Written[Tensor],
    pair: Pair,
    also: Written[Pair] | None,
    x: Tensor | None = None,
    *,
    mode: Annotated[str, OneOf(("plain", "odd"))] = "plain",
    scale: float,
    is_last: bool = False,
) -> None:
    """Do nothing."""


class Other(NamedTuple):
    first: Int64


@pytest.fixture
def signature():
    with pytest.raises(ValueError, match="left"):
        Signature(mix)  # two groups of one kind have fields of the same names
    mix.__annotations__["also"] = Written[Other] | None
    yield Signature(mix)
    mix.__annotations__["also"] = Written[Pair] | None


def test_the_schema_says_what_is_written_and_what_may_be_none(signature):
    assert signature.schema == (
        "mix(Tensor(a!) out, Tensor left, Tensor? right, Tensor(b!)? first, Tensor? x, str mode, float scale, "
        "bool is_last) -> ()"
    )


def test_the_struct_has_the_fields_by_name_and_inputs_are_constant(signature):
    assert signature.c_struct == (
        "typedef struct {\n"
        "    TENSOR(void) out;\n"
        "    union {\n    struct {\n"
        "    TENSOR(const int32_t) left;\n"
        "    TENSOR(const float) right;\n"
        "    };\n    Pair pair;\n    };\n"
        "    union {\n    struct {\n"
        "    TENSOR(int64_t) first;\n"
        "    };\n    Other also;\n    };\n"
        "    TENSOR(const void) x;\n"
        "    int64_t mode;\n"
        "    double scale;\n"
        "    int64_t is_last;\n"
        "} mix_args;\n"
    )
    assert signature.choices == {"MODE_PLAIN": 0, "MODE_ODD": 1}


def test_groups_go_in_whole_and_through_the_dispatcher_one_by_one(signature):
    seen = []
    face = signature.face(lambda *flat: seen.append(flat))
    face("out", Pair(1, 2), None, scale=0.5)
    face("out", pair=Pair(1), also=Other(4), x=3, mode="odd", scale=0.5, is_last=True)
    assert seen == [("out", 1, 2, None, None, "plain", 0.5, False), ("out", 1, None, 4, 3, "odd", 0.5, True)]
    again = []
    flat = signature.flat(lambda out, pair, also, *, mode, is_last: again.append((out, pair, also, mode, is_last)))
    for arguments in seen:
        flat(*arguments)
    assert again == [("out", Pair(1, 2), None, "plain", False), ("out", Pair(1), Other(4), "odd", True)]


def test_a_string_that_is_no_choice_is_refused(signature):
    with pytest.raises(ValueError, match="mode is 'even'; it must be one of plain, odd"):
        signature.face(print)("out", Pair(1), None, mode="even", scale=1.0)


def test_what_c_would_misread_is_not_packed(signature):
    left, right = torch.zeros(2, dtype=torch.int32), torch.zeros(2)
    given = [torch.zeros(2, 3, dtype=torch.bfloat16), left, right, None, None, "odd", 0.5, True]
    packed, element = signature.packed(given)
    assert element == torch.bfloat16
    assert len(packed) == 8 * (5 * 10 + 3)
    for place, wrong in ((1, left.long()), (2, right.double()), (4, right), (0, torch.zeros(1, 1, 1, 1, 1))):
        assert signature.packed([*given[:place], wrong, *given[place + 1 :]]) is None
