"""Steps of a launch that did not run: their places hold no tokens, and the next launch begins behind them."""

import pytest
import torch

from graphdecode.kernels.model.advance import skip_steps, skip_steps_triton
from graphdecode.kernels.native.registration import versions

skip_steps_torch = versions("skip_steps").torch

LENGTH, ROWS = 7, 5


def int32(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


@pytest.fixture(params=["torch", "triton"])
def skip(request, device):
    """Skip by one of the two versions, in place."""

    def run(step_index, ring, limit, count, entries):
        per_step = [] if entries is None else [int32(entries)]
        if request.param == "torch":
            skip_steps_torch(step_index, ring, int32(limit), int32(count), *per_step)
            return
        there = [tensor.to(device) for tensor in (step_index, ring, int32(limit), int32(count), *per_step)]
        skip_steps_triton(*there)
        step_index.copy_(there[0])
        ring.copy_(there[1])

    return run


@pytest.mark.parametrize(("limit", "count"), [(3, 1), (7, 1), (5, 5), (1, 1), (6, 2), (0, 3)])
@pytest.mark.parametrize("step", [0, 4, 2**40 + 3])
@pytest.mark.parametrize("entries", [None, 3])
def test_skipped_places_hold_no_tokens_and_all_others_what_they_held(skip, entries, step, limit, count):
    ring = torch.arange(LENGTH * ROWS).view(LENGTH, ROWS)
    expected, index = ring.clone(), torch.tensor([step])
    skipped = max(limit - count, 0) * (entries or 1)
    for later in range(skipped):
        expected[(step + later) % LENGTH] = -1
    skip(index, ring, limit, count, entries)
    assert index.tolist() == [step + skipped]
    assert torch.equal(ring, expected)


def test_the_operator_passes_opcheck(device):
    tensors = [torch.tensor([4]), torch.zeros(LENGTH, ROWS, dtype=torch.int64), int32(3), int32(1)]
    arguments = tuple(tensor.to(device) for tensor in tensors)
    torch.library.opcheck(torch.ops.graphdecode.skip_steps.default, (*arguments, None))
    skip_steps(*arguments)
    assert arguments[0].tolist() == [6]
