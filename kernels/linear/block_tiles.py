"""From GGUF's blocks to tiles for a GPU: no value is changed, and scales of two levels stay what they are.

What a block holds is ggml's: see its `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .weight_tiles import SUPER, WeightTiles, six_bit_words, tiled

_BLOCK = 32


def _halves(stored: Tensor) -> Tensor:
    """Return pairs of bytes [..., 2 n] as numbers in half precision [..., n]."""
    return stored.contiguous().view(torch.float16)


def _nibbles(stored: Tensor) -> Tensor:
    """Return the lower halves of bytes [..., n], and then the upper ones, [..., 2 n]."""
    return torch.cat((stored & 15, stored >> 4), dim=-1)


def _bits(stored: Tensor) -> Tensor:
    """Return the bits of bytes [..., n], from the lowest on, [..., 8 n]."""
    return (stored[..., None] >> torch.arange(8, dtype=torch.uint8, device=stored.device) & 1).flatten(-2)


def _fifth(stored: Tensor) -> Tensor:
    """Return integers of five bits: the fifth bits of all stand first, in four bytes."""
    return _nibbles(stored[..., 4:]) | _bits(stored[..., :4]) << 4


def _simple(code: str, integers: Callable[[Tensor], Tensor], has_min: bool = False) -> Callable[[Tensor], WeightTiles]:
    """Return what puts blocks of 32 in tiles: a scale, perhaps a least value, and integers behind them."""

    def put(blocks: Tensor) -> WeightTiles:
        behind = 4 if has_min else 2
        codes = integers(blocks[..., behind:]).flatten(1)
        scales = _halves(blocks[..., :2]).flatten(1)
        if not has_min:
            return tiled(codes, code, scales, _BLOCK)
        return tiled(codes, code, scales, _BLOCK, _halves(blocks[..., 2:4]).flatten(1), "least")

    return put


def _chunks(stored: Tensor) -> Tensor:
    """Return integers of four bits in bytes [..., 128]: the lower halves of 32 are 32 columns, the upper the next."""
    return _nibbles(stored.unflatten(-1, (4, _BLOCK))).flatten(-2)


def _six_bits(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the mins of eight groups that twelve bytes hold, each [..., 8]."""
    first, second, third = stored.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    return scales, torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)


def _two_levels(code: str, integers: Callable[[Tensor], Tensor]) -> Callable[[Tensor], WeightTiles]:
    """Return what puts blocks of 256 in tiles: two halves, scales and mins of six bits, and integers."""

    def put(blocks: Tensor) -> WeightTiles:
        codes, seconds = integers(blocks[..., 16:]).flatten(1), six_bit_words(*_six_bits(blocks[..., 4:16]))
        return tiled(codes, code, _halves(blocks[..., :4]).flatten(1), _BLOCK, seconds, "six bits")

    return put


def _fifth_of_chunks(stored: Tensor) -> Tensor:
    """Return integers of five bits in bytes [..., 160]: bit i of the first 32 bytes is the fifth of the i-th 32."""
    fifth = stored[..., None, :_BLOCK] >> torch.arange(8, dtype=torch.uint8, device=stored.device)[:, None] & 1
    return _chunks(stored[..., _BLOCK:]) | fifth.flatten(-2) << 4


def _six_bit_blocks(blocks: Tensor) -> WeightTiles:
    """Put blocks in tiles whose integers have six bits, and a scale of eight for each sixteen."""
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    upper = high >> torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None] & 3  # [..., 2, 4, 32]
    codes = _nibbles(low) | upper.flatten(-2) << 4
    parts = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return tiled(codes.flatten(1), "s6", _halves(blocks[..., 208:]).flatten(1), 16, parts, "parts")


_BLOCKS: dict[str, tuple[int, int, Callable[[Tensor], WeightTiles]]] = {  # values and bytes of a block
    "Q8_0": (_BLOCK, 34, _simple("s8", lambda stored: stored)),
    "Q4_0": (_BLOCK, 18, _simple("s4", _nibbles)),
    "Q4_1": (_BLOCK, 20, _simple("u4", _nibbles, has_min=True)),
    "Q5_0": (_BLOCK, 22, _simple("s5", _fifth)),
    "Q5_1": (_BLOCK, 24, _simple("u5", _fifth, has_min=True)),
    "Q4_K": (SUPER, 144, _two_levels("u4", _chunks)),
    "Q5_K": (SUPER, 176, _two_levels("u5", _fifth_of_chunks)),
    "Q6_K": (SUPER, 210, _six_bit_blocks),
}
TILED_BLOCKS = frozenset(_BLOCKS)  # that can be put in tiles


def tiles_of_blocks(stored: Tensor, block_type: str) -> WeightTiles:
    """Return a weight in tiles.

    Args:
        stored: uint8 [rows, bytes of a row], whole blocks as GGUF has them.
        block_type: one of TILED_BLOCKS.
    """
    _, nbytes, put = _BLOCKS[block_type]
    return put(stored.unflatten(1, (-1, nbytes)))
