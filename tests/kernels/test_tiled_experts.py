"""Products of experts with weights of few bits on a GPU, against float64 of what others make of the same bytes."""

import pytest
import torch
from test_experts import ALPHA, LIMIT, product, random, routed
from test_tiled_linear import on, weight_of

from graphdecode.kernels.linear.small_linear import SmallLinearConfig
from graphdecode.kernels.linear.weight_tiles import joined_tiles
from graphdecode.kernels.moe.expert_linear import Routed, tiled_expert_linear, tiled_expert_linear_triton

pytest.importorskip("triton")
EXPERTS, SLOTS, NOBODYS = 4, 2, 2
KINDS = ["fp4", "MXFP4", "int4 by 128", "int4 by 64 with zeros", "int8", "fp8 by 128", "Q4_0", "Q8_0", "Q4_K", "Q6_K"]
CASES = [(name, *case) for name in KINDS for case in (("none", 8), ("swiglu_clamped", 16))]
CASES += [("Q4_0", "swiglu_clamped", 32), ("Q4_K", "swiglu_clamped", 8), ("int8", "none", 64)]


def experts_of(name, width, depth):
    """Return the tiles of all experts and their values in float64; of the one where nobody goes they are no numbers."""
    made = [weight_of(name, width + expert, depth) for expert in range(EXPERTS)]  # seeded by their sizes
    rows = [(tiles._replace(words=tiles.words[:, :width]), weight[:width]) for tiles, weight in made]
    parts = [
        tiles._replace(
            high=None if tiles.high is None else tiles.high[:, :width],
            scales=tiles.scales[:, :width] if tiles.scales.shape[1] > 1 else tiles.scales,
            seconds=None if tiles.seconds is None else tiles.seconds[:, :width],
        )
        for tiles, _ in rows
    ]
    return joined_tiles(parts), torch.stack([weight for _, weight in rows])


@pytest.mark.parametrize(("name", "gate", "block_m"), CASES)
def test_an_experts_product_is_that_of_its_values(name, gate, block_m, device):
    halves, width, depth, rows = 1 + (gate != "none"), 20, 300, 7
    config = SmallLinearConfig("dot", 32, 0, 1, num_warps=2, num_stages=2, pdl=False, block_m=block_m)
    tiles, weight = experts_of(name, width * halves, depth)
    depth = weight.shape[2]  # whole blocks
    bias = random(EXPERTS, width * halves, seed=3)
    x = random(rows, depth + 3, seed=4)[:, 1:-2]
    logits = random(rows, EXPERTS, seed=5)
    logits[:, NOBODYS] = -9.0
    ids, _, order, offsets = routed("torch", logits, SLOTS, rows - 1)
    outs = [torch.full((rows * SLOTS, width), torch.nan, device=device) for _ in range(2)]
    moved = on(device, tiles)
    pairs = Routed(order.to(device), offsets.to(device), SLOTS, gate, ALPHA, LIMIT)
    for version, out in zip((tiled_expert_linear_triton, tiled_expert_linear), outs, strict=True):
        version(out, x.to(device), moved, bias.to(device), pairs, config)
    chosen = ids.view(-1).tolist()
    assert NOBODYS not in chosen
    for out in outs:
        for pair, expert in enumerate(chosen):
            if expert < 0:
                assert out[pair].isnan().all()
                continue
            expected = product(x[pair // SLOTS], weight[expert], bias[expert], gate)
            torch.testing.assert_close(out[pair].double().cpu(), expected, rtol=1e-4, atol=1e-4)
