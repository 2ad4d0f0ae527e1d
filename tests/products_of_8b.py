"""Products of a layer of Llama 8B in every format, without memory, for the machine code of GPUs that are not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphdecode.kernels.cuda.nvrtc import unavailable_reason
from graphdecode.kernels.linear.weight_tiles import WeightTiles
from step_code.empty_tiles import empty_tiles

needs_nvrtc = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120")
TILES = {
    "int8": ("s8", 0, "none", torch.float32),
    "int4": ("u4", 128, "zeros", BFLOAT16),
    "Q8_0": ("s8", 32, "none", FLOAT16),
    "Q4_0": ("s4", 32, "none", FLOAT16),
    "Q4_1": ("u4", 32, "least", FLOAT16),
    "Q5_1": ("u5", 32, "least", FLOAT16),
    "Q4_K": ("u4", 32, "six bits", FLOAT16),
    "Q5_K": ("u5", 32, "six bits", FLOAT16),
    "Q6_K": ("s6", 16, "parts", FLOAT16),
    "fp8": ("e4m3", 128, "none", torch.float32),
    "MXFP4": ("e2m1", 32, "none", torch.uint8),
}
# weight rows and columns, whether a norm is before it, and the epilogue: of a layer of Llama 8B
PRODUCTS = {
    "qkv": (6144, 4096, True, "store"),
    "o": (4096, 4096, False, "add"),
    "gate_up": (28672, 4096, True, "silu"),
    "down": (4096, 14336, False, "add"),
}


def operands(kind: str, product: str, rows: int) -> tuple[Tensor, Tensor, Tensor | WeightTiles, dict[str, Any]]:
    """Result, activations and weight without memory, and what is fused with the product."""
    height, width, is_normed, epilogue = PRODUCTS[product]
    if kind == "plain":
        weight: Tensor | WeightTiles = torch.empty(height, width, dtype=BFLOAT16, device="meta")
    else:
        weight = empty_tiles(TILES[kind], height, width)
    x = torch.empty(rows, width, dtype=BFLOAT16, device="meta")
    out = torch.empty(rows, height // 2 if epilogue == "silu" else height, dtype=BFLOAT16, device="meta")
    return out, x, weight, {"is_normed": is_normed, "epilogue": epilogue}
