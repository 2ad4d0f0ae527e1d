"""A recorded step's intermediates share memory when they are not needed at the same time, and never otherwise."""

import random

import pytest
import torch
from step_buffers import make_buffers

from graphdecode import GraphManager
from graphdecode.buffers import Batch

ROW_BYTES = 4 * 8 * 4  # of the four rows of eight floats


def layers(batch: Batch) -> None:
    """Run many layers, each of which needs what the one before it made."""
    hidden = batch.x
    for layer in range(50):
        hidden = torch.tanh(hidden) + layer
    batch.y.copy_(hidden)


def test_the_memory_of_many_layers_is_that_of_one() -> None:
    buffers = make_buffers()
    graphs = GraphManager(layers, buffers, [4])
    graphs.capture(progress=False)
    assert graphs.report().buckets[0].nodes["aten.tanh.default"] == 50
    assert graphs.report().buckets[0].pool_bytes <= 3 * ROW_BYTES
    expected = make_buffers()
    for held in (buffers, expected):
        held.x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
    graphs.replay(4)
    layers(expected.narrow(4))
    assert torch.equal(buffers.y, expected.y)


@pytest.mark.parametrize("seed", range(20))
def test_no_intermediate_is_overwritten_before_its_last_use(seed: int) -> None:
    """Random steps hold some of what they make, and views of it, and drop it at any time; sizes differ."""

    def step(batch: Batch) -> None:
        draw, held = random.Random(seed), [batch.x]
        for _ in range(60):
            first, second = (held[draw.randrange(len(held))] for _ in range(2))
            width = draw.choice((2, 4, 8))
            made = torch.empty(4, width).copy_(first[:, :1] - second[:, -1:])
            made.add_(first[:, :1].repeat(1, width)).mul_(0.5)
            held.append(draw.choice((made, made[:, 1:], made.flip(1), made.t().contiguous().t())))
            while len(held) > draw.randint(2, 6):
                del held[draw.randrange(len(held))]
        for made in held:
            batch.y.add_(made[:, :1])

    buffers, expected = make_buffers(), make_buffers()
    graphs = GraphManager(step, buffers, [4])
    graphs.capture(progress=False)
    for run in range(2):
        given = torch.randn(4, 8, generator=torch.Generator().manual_seed(run))
        for held in (buffers, expected):
            held.x.copy_(given)
            held.y.zero_()
        graphs.replay(4)
        step(expected.narrow(4))
        assert torch.equal(buffers.y, expected.y), f"seed {seed}, run {run}"
