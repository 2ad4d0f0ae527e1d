"""Products of a few rows in CUDA C++ and in Triton: the contest at load, and what it says of both.

python -m gpu_checks.languages DEVICE ROWS WEIGHTS      such as: cuda 1,8 bf16,int8,int4; known figures stay
"""

from __future__ import annotations

import sys
import warnings

import torch

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.figures import Figures
from graphdecode.kernels.cuda.nvrtc import unavailable_reason
from graphdecode.kernels.linear.small_linear import tiled_config
from graphdecode.kernels.linear.weight_tiles import WeightTiles
from graphdecode.linear.small_linear_timing import FUSED_FORMS, GraphClock, TiledOperand, fastest_product, fastest_tiled
from step_code.empty_tiles import empty_tiles

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


def measure(clock: GraphClock, name: str, rows: int, weights: str, figures: Figures) -> None:
    """Hold the contests of a layer."""
    clock.before.clear()
    units, major = clock.units, torch.cuda.get_device_capability()[0]
    for place, (height, width) in SHAPES[name].items():
        key = f"languages {name} {place}, {weights}, {rows} rows"
        if key in figures:
            continue
        fused = FUSED_FORMS[place]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if weights == "bf16":
                weight = torch.randn(height, width, device="cuda").div_(width**0.5).bfloat16()
                winner, times = fastest_product(weight, None, rows, clock, fused)
                nbytes = weight.nbytes
            else:
                operand = TiledOperand(tiles_of(weights, height, width, "cuda"), width, torch.bfloat16)
                early = clock.has_pdl and fused.starts_early(rows)
                layout = operand.tiles.layout
                first = tiled_config(rows, height, width, layout, units, early, fused.is_normed, major)
                winner, times = fastest_tiled(operand, None, rows, clock, fused, first)
                nbytes = operand.nbytes
        best = {True: float("inf"), False: float("inf")}
        for config, seconds in times.items():
            best[config.startswith("skinny")] = min(best[config.startswith("skinny")], seconds)
        figures.add(
            key,
            cuda_us=1e6 * best[True],
            triton_us=1e6 * best[False],
            ratio=best[True] / best[False],
            gb_per_s=nbytes / min(best.values()) / 1e9,
            winner=str(winner),
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
