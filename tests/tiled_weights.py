"""Random weights in tiles of every kind, and their values in float64."""

import math

import gguf
import numpy as np
import torch

from graphdecode.kernels.linear.code_words import CODES, values_of
from graphdecode.kernels.linear.weight_tiles import tiled
from graphdecode.linear.quantization.gguf import BLOCKS_ON_GPU, GgufBlocks

GROUPED = {  # code, group, kind of the second number, dtype of the scales
    "int8": ("s8", 0, "none", torch.bfloat16),
    "int8 by 128": ("s8", 128, "none", torch.float32),
    "int8 by 32": ("s8", 32, "none", torch.float16),
    "int4": ("s4", 0, "none", torch.float32),
    "int4 by 128": ("s4", 128, "none", torch.bfloat16),
    "int4 by 32": ("s4", 32, "none", torch.float16),
    "int4 by 64 with zeros": ("u4", 64, "zeros", torch.float16),
    "int4 by 128 with zeros": ("u4", 128, "zeros", torch.bfloat16),
    "int4 by 512": ("s4", 512, "none", torch.float32),
    "fp8": ("e4m3", 0, "none", torch.float32),
    "fp8 by 128": ("e4m3", 128, "none", torch.float32),
    "fp4": ("e2m1", 32, "none", torch.uint8),
}
FORMATS = [*GROUPED, *sorted(BLOCKS_ON_GPU)]


def stored_blocks(name, rows, columns):
    """Return random rows of blocks, uint8 [rows, bytes]: small scales, and any bits beside them."""
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    rng = np.random.default_rng([rows, columns])
    stored = rng.integers(0, 256, (rows, -(-columns // values), nbytes), dtype=np.uint8)
    numbers = 2 if name.endswith(("_1", "_K")) and name != "Q6_K" else 1
    if name == "MXFP4":
        stored[..., 0] = rng.integers(110, 122, stored.shape[:2])
        return stored.reshape(rows, -1)
    place = 208 if name == "Q6_K" else 0
    size = 0.02 / (64 if name.endswith("_K") else 1)
    scales = rng.normal(0, size, (*stored.shape[:2], numbers)).astype(np.float16)
    stored[..., place : place + 2 * numbers] = scales.view(np.uint8).reshape(*stored.shape[:2], -1)
    return stored.reshape(rows, -1)


def weight_of(name, rows, columns):
    """Return a random weight in tiles, and its values in float64."""
    if name in BLOCKS_ON_GPU:
        stored = stored_blocks(name, rows, columns)
        weight = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])
        return GgufBlocks(torch.from_numpy(stored), name).tiles(), torch.from_numpy(weight).double()
    code, group, second_kind, dtype = GROUPED[name]
    draw = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(0, 1 << CODES[code].bits, (rows, columns), generator=draw, dtype=torch.uint8)
    if code == "e4m3":
        codes[codes & 127 == 127] = 0  # what is no number
    groups = math.ceil(columns / group) if group else 1
    if dtype == torch.uint8:
        scales = torch.randint(110, 122, (rows, groups), generator=draw, dtype=torch.uint8)
        wide = torch.exp2(scales.double() - 127)
    else:
        scales = (torch.randn(rows, groups, generator=draw) / values_of(code).abs().max() / 4).to(dtype)
        wide = scales.double()
    zeros = None
    if second_kind == "zeros":
        zeros = torch.randint(0, 16, (rows, groups), generator=draw, dtype=torch.uint8)
    spread = group or columns
    values = values_of(code).double()[codes.int()]
    if zeros is not None:
        values -= zeros.double().repeat_interleave(spread, 1)[:, :columns]
    weight = values * wide.repeat_interleave(spread, 1)[:, :columns]
    return tiled(codes, code, scales, group, zeros, second_kind), weight
