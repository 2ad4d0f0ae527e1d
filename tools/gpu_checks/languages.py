"""Products in CUDA C++, in Triton and by cuBLAS: the contests at load, of products and layers, and what they say.

python -m gpu_checks.languages DEVICE ROWS WEIGHTS      such as: cuda 1,8 bf16,int8,int4; known figures stay
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import torch

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.figures import Figures
from graphdecode.kernels.cuda.nvrtc import unavailable_reason
from graphdecode.kernels.linear.small_linear import MOST_ROWS, tiled_config
from graphdecode.kernels.linear.weight_tiles import WeightTiles
from graphdecode.linear.layer_timing import LayerRace, fastest_layer
from graphdecode.linear.linear_choice import SCRATCH_VALUES
from graphdecode.linear.small_linear_timing import (
    FUSED_FORMS,
    GraphClock,
    LayerProduct,
    TiledOperand,
    fastest_product,
    fastest_tiled,
)
from step_code.empty_tiles import empty_tiles

LANGUAGES = {"skinny": "cuda_us", "plain": "cublas_us", "dequantized": "cublas_us"}  # the others are Triton's
# weight rows and columns, in the order of a layer
SHAPES = {
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "1B": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
    "0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
}
TILES = {
    "int8": ("s8", 0, "none", torch.bfloat16),
    "int4": ("s4", 128, "none", torch.bfloat16),
    "Q4_K": ("u4", 32, "six bits", torch.float16),
    "fp8": ("e4m3", 128, "none", torch.float32),
}


def tiles_of(weights: str, height: int, width: int, device: str) -> WeightTiles:
    """Return a random weight in tiles."""
    tiles = empty_tiles(TILES[weights], height, width, device)
    tiles.words.random_(-32768, 32767)
    if tiles.code == "e4m3":
        tiles.words.bitwise_and_(0x6F6F)  # without what is no number
    tiles.scales.fill_(1e-3)
    if tiles.seconds is not None:
        tiles.seconds.random_(0, 1 << 20)
    return tiles


def contest(clock: GraphClock, place: str, shape: tuple[int, int], rows: int, weights: str) -> dict[str, Any]:
    """Hold the contest of one product; return the best time of each language, and the winner."""
    (height, width), fused = shape, FUSED_FORMS[place]
    operand: torch.Tensor | TiledOperand
    if weights == "bf16":
        operand = torch.randn(height, width, device="cuda").div_(width**0.5).bfloat16()
        winner, times = fastest_product(operand, None, rows, clock, fused)
    else:
        operand = TiledOperand(tiles_of(weights, height, width, "cuda"), width, torch.bfloat16)
        if rows > MOST_ROWS:
            scratch = torch.empty(min(height * width, SCRATCH_VALUES), dtype=torch.bfloat16, device="cuda")
            operand = operand._replace(scratch=scratch)
        early, layout = clock.has_pdl and fused.starts_early(rows), operand.tiles.layout
        major = torch.cuda.get_device_capability()[0]
        first = tiled_config(rows, height, width, layout, clock.units, early, fused.is_normed, major)
        winner, times = fastest_tiled(operand, None, rows, clock, fused, first)
    best: dict[str, float] = {}
    for name, seconds in times.items():
        language = LANGUAGES.get(name.partition(" ")[0], "triton_us")
        best[language] = min(best.get(language, math.inf), 1e6 * seconds)
    return {**best, "gb_per_s": operand.nbytes / min(best.values()) / 1e3, "winner": str(winner)}


def measure(clock: GraphClock, name: str, rows: int, weights: str, figures: Figures) -> None:
    """Hold the contests of a layer's products, and of the layer."""
    keys = {place: f"languages {name} {place}, {weights}, {rows} rows" for place in SHAPES[name]}
    whole = f"languages {name} layer, {weights}, {rows} rows"
    if whole in figures or (weights == "bf16" and rows > MOST_ROWS):
        return
    clock.before.clear()
    products: list[LayerProduct] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for place, shape in SHAPES[name].items():
            figures.add(keys[place], **contest(clock, place, shape, rows, weights))
            products.append(clock.last[rows])
        alone_s = LayerRace(products, clock).seconds([product.config for product in products])
        configs, layer_s = fastest_layer(products, clock)
    figures.add(
        whole,
        layer_us=1e6 * layer_s,
        alone_us=1e6 * alone_s,  # with the winners of each product by itself
        chosen=[str(config) for config in configs],
        warnings=[str(warning.message) for warning in said],
    )


def main() -> int:
    """Measure the arguments' rows and weights."""
    device, *given = sys.argv[1:]
    if device == "cpu" or unavailable_reason() is not None:
        print(f"no contest between languages here: {unavailable_reason() or 'no CUDA device'}")
        return 0
    rows, weights = (text.split(",") for text in given)
    clock, figures = GraphClock(torch.device("cuda", torch.cuda.current_device())), Figures()
    for each in weights:
        for count in rows:
            for name in SHAPES:
                measure(clock, name, int(count), each, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
