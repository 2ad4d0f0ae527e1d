"""A signature stands once: schema, the order of arguments, the C struct and the public function follow from it."""

import cProfile
import inspect
import pstats
import traceback
from pathlib import Path
from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode import BucketConfig
from graphdecode.buckets import StepShape
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.runner import LaunchPlan
from graphdecode.engine.steps import RowInputs, RowSampling, SequenceMemory
from graphdecode.kernels.linear.add_adapters import AdapterTokens, add_adapters
from graphdecode.kernels.native import library
from graphdecode.kernels.native.registration import Float32, Int32, Int64, OneOf, Signature, Written
from graphdecode.kernels.norm import rms_norm as rms_norm_file
from graphdecode.kernels.norm.rms_norm import rms_norm
from graphdecode.models import load_model


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


def test_records_go_in_whole_and_through_the_dispatcher_one_by_one(signature):
    seen = []
    caller = signature.caller(lambda *flat: seen.append(flat))
    caller("out", Pair(1, 2), None, scale=0.5)
    caller("out", pair=Pair(1), also=Other(4), x=3, mode="odd", scale=0.5, is_last=True)
    assert seen == [("out", 1, 2, None, None, "plain", 0.5, False), ("out", 1, None, 4, 3, "odd", 0.5, True)]
    for bad in (
        lambda: caller("out", Pair(1)),
        lambda: caller("out", Pair(1), None, size=1, scale=1.0),
        lambda: caller("out", Pair(1), None, pair=Pair(1), scale=1.0),
        lambda: caller("out", Pair(1), None, None, "odd", scale=1.0),
    ):
        with pytest.raises(TypeError, match=r"mix\(\)"):
            bad()
    assert len(seen) == 2
    again = []
    flat = signature.flat(lambda out, pair, also, *, mode, is_last: again.append((out, pair, also, mode, is_last)))
    for arguments in seen:
        flat(*arguments)
    assert again == [("out", Pair(1, 2), None, "plain", False), ("out", Pair(1), Other(4), "odd", True)]


def test_a_string_that_is_no_choice_is_refused(signature):
    with pytest.raises(ValueError, match="mode is 'even'; it must be one of plain, odd"):
        signature.caller(print)("out", Pair(1), None, mode="even", scale=1.0)


def test_what_c_would_misread_is_not_packed(signature):
    left, right = torch.zeros(2, dtype=torch.int32), torch.zeros(2)
    given = [torch.zeros(2, 3, dtype=torch.bfloat16), left, right, None, None, "odd", 0.5, True]
    packed, element = signature.packed(given)
    assert element == torch.bfloat16
    assert len(packed) == 8 * (5 * 10 + 3)
    for place, wrong in ((1, left.long()), (2, right.double()), (4, right), (0, torch.zeros(1, 1, 1, 1, 1))):
        assert signature.packed([*given[:place], wrong, *given[place + 1 :]]) is None


def frames_of(call, *arguments):
    with pytest.raises(Exception, match=r".") as caught:
        call(*arguments)
    return [(Path(frame.filename).name, frame.name) for frame in traceback.extract_tb(caught.tb)]


def test_a_traceback_names_the_operator_and_its_file():
    out, weight = torch.zeros(2, 4), torch.ones(3)
    assert ("rms_norm.py", "rms_norm") in frames_of(rms_norm, out, out, "no tensor", 1e-6)
    with library.switched_off():
        fault = frames_of(rms_norm, out, out, weight, 1e-6)
        tokens = AdapterTokens(*[torch.zeros(2, 1, dtype=torch.int32)] * 4)
        other = frames_of(add_adapters, out, out, *[weight] * 4, tokens)
    assert fault.count(("rms_norm.py", "rms_norm")) >= 2  # who called it, and its body
    assert other.count(("add_adapters.py", "add_adapters")) >= 2


def test_an_operator_is_found_where_it_is_defined():
    lines, first = inspect.getsourcelines(rms_norm)
    assert rms_norm.__code__.co_firstlineno == first
    assert rms_norm.__code__.co_filename == rms_norm_file.__file__
    assert any(line.startswith("def rms_norm(") for line in lines)
    assert [*inspect.signature(rms_norm).parameters] == ["out", "x", "weight", "eps"]


class Dispatched(TorchDispatchMode):
    """The project's operators that were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "graphdecode":
            self.names.add(func._schema.name.removeprefix("graphdecode::"))
        return func(*args, **(kwargs or {}))


@library.switched_off()  # nothing is compiled
def test_a_profile_of_a_step_lists_operators_by_name():
    config = BucketConfig(max_batch_size=1, max_sequence_length=64, backend="eager")
    runner = make_runner(load_model("demo", device="cpu"), config)
    runner.graphs.capture(progress=False, kinds=["steps"])
    runner.stage([RowInputs([97, 98], 2, SequenceMemory((0,)), RowSampling())])
    with Dispatched() as dispatched:
        runner.launch(LaunchPlan(StepShape(1)))
    with cProfile.Profile() as profile:
        runner.launch(LaunchPlan(StepShape(1)))
    runner.close()
    listed = {name.lstrip("_") for _, _, name in pstats.Stats(profile).stats}
    assert len(dispatched.names) > 5
    assert dispatched.names <= listed
