"""What is launched for twelve models that many people run can be launched: grids, integers, addresses, alignment."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from known_models import KNOWN_MODELS

from graphdecode.kernels.linear.small_linear import candidates, small_linear_triton
from graphdecode.models import shapes
from step_code.launches import RecordedStep, launches_of, recorded_step, spread
from step_code.rules import grid_faults

LARGEST_INT32 = 2**31 - 1
IN_64_BITS = {
    "k_cache",
    "v_cache",
    "cache.k_cache",
    "cache.v_cache",
}  # arguments whose rows the kernels find in 64 bits, and which need it
PROCESSORS = (78, 132, 148, 188)  # of an A10 up to the largest


@pytest.fixture(params=KNOWN_MODELS)
def model(request, monkeypatch) -> str:
    monkeypatch.setitem(shapes.SHAPES, request.param, KNOWN_MODELS[request.param])
    return f"shape:{request.param}"


def step_of(model: str, rows: int) -> RecordedStep:
    """Of a server for 256 rows of 128k tokens."""
    return recorded_step(model, rows, max_batch_size=256, max_sequence_length=131072)


@pytest.mark.parametrize("rows", [1, 256])
def test_every_launch_of_a_step_can_be(model, rows):
    for launch in step_of(model, rows).launches:
        assert not list(grid_faults(launch))
        for name, value in spread(launch.arguments).items():
            where = f"{name} of {launch.name}"
            if isinstance(value, int):
                assert abs(value) <= LARGEST_INT32, where
            if isinstance(value, torch.Tensor):
                field = name.rpartition(".")[2]
                elements = value.untyped_storage().nbytes() // value.element_size()
                assert elements <= LARGEST_INT32 or field in IN_64_BITS, f"{where} has {elements} elements"
                assert value.storage_offset() * value.element_size() % 16 == 0, f"{where}: not read 16 bytes at a time"


def test_every_product_that_may_be_chosen_has_a_grid_that_can_be(model):
    shapes_of_weights = {
        (linear.out_features, linear.in_features)
        for block in step_of(model, 1).model.blocks
        for linear in block.linears.values()
    }
    assert shapes_of_weights
    for out_features, in_features in shapes_of_weights:
        weight = torch.empty(out_features, in_features, dtype=torch.bfloat16, device="meta")
        for rows in (1, 4, 64):
            x, out = (torch.empty(rows, size, dtype=torch.bfloat16, device="meta") for size in weight.shape[::-1])
            for config in {each for units in PROCESSORS for each in candidates(*weight.shape, 2, rows, units)}:
                call = partial(small_linear_triton, out, x, weight, None, None, None, None, 0.0, "store", 1.0, config)
                launches = launches_of(call)
                assert launches
                for launch in launches:
                    assert not list(grid_faults(launch)), config
