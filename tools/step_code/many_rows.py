"""Models products of many rows with quantized weights: over tiles, and dequantized first, beside bf16's.

    python -m step_code.many_rows       prints times over bf16's by rows and weights

Dequantizing reads a weight's bytes and writes two for each value, in at most ten instructions (sm_90's machine code).
Then the product is that of bf16. An H200's constants are measured; no GPU has timed this.
"""

from __future__ import annotations

import torch

from graphdecode.kernels.linear.weight_tiles import WeightTiles
from step_code.empty_tiles import empty_tiles

BANDWIDTH, CUBLAS_PER_S, TILES_PER_S = 4.2e12, 780e12, 104e12  # bytes, operations
INSTRUCTIONS = 10  # of a thread, for a value
ISSUED_PER_S = 132 * 4 * 1.755e9 * 32  # instructions of threads
WEIGHTS = {
    "int8": ("s8", 0, "none", torch.bfloat16),
    "int4 by 128": ("s4", 128, "none", torch.bfloat16),
    "Q4_K": ("u4", 32, "six bits", torch.float16),
    "Q6_K": ("s6", 16, "parts", torch.float16),
    "Q8_0": ("s8", 32, "none", torch.float16),
}
_HEIGHT, _WIDTH = 4096, 4096


def bytes_of_value(tiles: WeightTiles) -> float:
    """Return the bytes of one value of a weight, with its part of the scales."""
    return sum(part.nbytes for part in tiles if isinstance(part, torch.Tensor)) / (_HEIGHT * _WIDTH)


def times_bf16(name: str, rows: int) -> dict[str, float]:
    """Return the modelled time of both products over that of bf16."""
    nbytes = bytes_of_value(empty_tiles(WEIGHTS[name], _HEIGHT, _WIDTH))
    bf16_s = max(2 / BANDWIDTH, 2 * rows / CUBLAS_PER_S)  # of one value, as are the others
    dequantizing_s = max((nbytes + 2) / BANDWIDTH, INSTRUCTIONS / ISSUED_PER_S)
    tiles_s = max(nbytes / BANDWIDTH, 2 * rows / TILES_PER_S)
    return {"tiles": tiles_s / bf16_s, "dequantized": (dequantizing_s + bf16_s) / bf16_s}


def main() -> None:
    """Print the table."""
    for name in WEIGHTS:
        for rows in (64, 128, 256, 512, 2048, 4096, 8192):
            modelled = times_bf16(name, rows)
            print(f"{name}, {rows} rows: " + ", ".join(f"{path} {times:.2f}" for path, times in modelled.items()))


if __name__ == "__main__":
    main()
