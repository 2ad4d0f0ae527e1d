"""Weights in tiles for a GPU, from what they come in: plain, in GGUF's blocks, in groups; values stay as stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphdecode.kernels.linear.int8_linear import quantise_int8
from graphdecode.kernels.linear.weight_tiles import WeightTiles, can_tile, joined_tiles, six_bit_words, tiled
from graphdecode.linear.gguf_blocks import parts_of
from graphdecode.linear.groups import Groups, unpacked

_ROWS_AT_ONCE = 4096  # are put in order together: what that needs beside the result is tens of MB
_PART_OF_ROW = 128  # columns that share a scale where all do, and a zero
_CODES = {
    "Q8_0": "s8",
    "Q4_0": "s4",
    "Q4_1": "u4",
    "Q5_0": "s5",
    "Q5_1": "u5",
    "Q4_K": "u4",
    "Q5_K": "u5",
    "Q6_K": "s6",
    "MXFP4": "e2m1",
}
TILED_BLOCKS = frozenset(_CODES)  # GGUF's types that can be put in tiles


def int8_tiles(weight: Tensor, maxima: Callable[[Tensor], Tensor] | None = None) -> WeightTiles:
    """Return a plain weight rounded to int8 with a scale for each row; see `quantise_int8`."""
    codes, scales = quantise_int8(weight, maxima)
    return tiled(codes.view(torch.uint8), "s8", scales[:, None], 0)


def tiles_of_blocks(stored: Tensor, block_type: str) -> WeightTiles:
    """Return rows of GGUF's blocks in tiles.

    Args:
        stored: uint8 [rows, bytes of a row], whole blocks, on the CPU.
        block_type: one of TILED_BLOCKS.
    """
    return joined_tiles([_some_tiles(some, block_type) for some in stored.split(_ROWS_AT_ONCE)])


def _some_tiles(stored: Tensor, block_type: str) -> WeightTiles:
    codes, scales, mins = parts_of(stored, block_type)
    code, group = _CODES[block_type], codes.shape[1] // scales.values.shape[1]
    if code == "e2m1":  # its table has twice the values, and so its scales are halves of what they are here
        exponents = (scales.values * 2).view(torch.int16) >> 7
        return tiled(codes, code, exponents.to(torch.uint8), group)
    if scales.factors is None:
        return tiled(codes, code, scales.values, group, *(() if mins is None else (mins.values, "least")))
    if mins is None:
        return tiled(codes, code, scales.factors, group, scales.values, "parts")
    assert mins.factors is not None
    both = torch.stack((scales.factors, -mins.factors), dim=-1).flatten(1)
    integers = [each.view(torch.uint8).unflatten(1, (-1, 8)) for each in (scales.values, mins.values)]
    return tiled(codes, code, both, group, six_bit_words(*integers), "six bits")


def tiles_of_groups(groups: Groups) -> WeightTiles | None:
    """Return a weight in groups in tiles; None where its codes or its groups are none that tiles can have."""
    group = 0 if groups.group_size >= groups.shape[1] else groups.group_size
    if groups.code == "nf4" or not can_tile(group):
        return None
    return joined_tiles([_tiles_of_some(some, group) for some in groups.by_row().split(_ROWS_AT_ONCE)])


def _tiles_of_some(groups: Groups, group: int) -> WeightTiles:
    codes = unpacked(groups.codes) if groups.bits == 4 else groups.codes.view(torch.uint8)
    scales, zeros = groups.scales, groups.zeros
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if groups.code != "integer":
        return tiled(codes, groups.code, scales, group)
    if zeros is None:
        return tiled(codes, "s4", scales, group) if groups.bits == 4 else tiled(codes ^ 128, "s8", scales, group)
    if not group:  # zeros are by group
        group, parts = _PART_OF_ROW, -(-groups.shape[1] // _PART_OF_ROW)
        scales, zeros = scales.expand(-1, parts), zeros.expand(-1, parts)
    if groups.bits == 4:
        return tiled(codes, "u4", scales, group, zeros, "zeros")
    wide = scales.float()  # so that what stands for the zero is not rounded to 16 bits
    return tiled(codes ^ 128, "s8", wide, group, wide * (128 - zeros.float()), "least")
