"""GGUF's block types as codes, what these mean, and the numbers that go with them; see ggml's `ggml-common.h`.

Integers stay what they are, and so do scales: where a type has them as integers times a factor, they are kept so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.kernels.linear.quantised_linear import Numbers, QuantisedPanels, joined_panels, quantised_panels

_ROWS_AT_ONCE = 2048  # are put in order together: what that needs beside the result is a few MB
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL and IQ4_XS
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice what e2m1 stands for, so that all are integers


class _Parts(NamedTuple):
    """Blocks [rows, blocks] taken apart.

    Attributes:
        codes: uint8 [rows, blocks, values].
        scales: of the groups of a block, [rows, blocks * groups].
        mins: likewise, or None.
    """

    codes: Tensor
    scales: Numbers
    mins: Numbers | None = None


class _Type(NamedTuple):
    """One type.

    Attributes:
        values: of a block.
        nbytes: of a block.
        bits: of a code.
        table: what codes mean; None for bytes, which mean themselves.
        parts: takes blocks apart, uint8 [rows, blocks, nbytes].
    """

    values: int
    nbytes: int
    bits: int
    table: tuple[int, ...] | None
    parts: Callable[[Tensor], _Parts]


def gguf_panels(stored: Tensor, block_type: str) -> QuantisedPanels:
    """Return rows of blocks as a weight in panels.

    Args:
        stored: uint8 [out_features, bytes of a row], whole blocks.
        block_type: one of GGUF_BLOCKS.
    """
    kind = _TYPES[block_type]
    table = None if kind.table is None else torch.tensor(kind.table, dtype=torch.int8)
    made = []
    for some in stored.split(_ROWS_AT_ONCE):
        parts = kind.parts(some.view(len(some), -1, kind.nbytes))
        made.append(quantised_panels(parts.codes.flatten(1), kind.bits, table, parts.scales, parts.mins))
    return joined_panels(made)


def block_values(block_type: str) -> int:
    """Return how many values a block has."""
    return _TYPES[block_type].values


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Return the number in half precision at a byte of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(stored: Tensor) -> Tensor:
    """Return half-bytes [..., 2 * n] of bytes [..., n], first the low ones."""
    return torch.cat((stored & 15, stored >> 4), dim=-1)


def _bits(stored: Tensor, count: int) -> Tensor:
    """Return the bits of bytes [..., n] by their place, `count` at a time, [..., 8 / count, n]."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8)[:, None]
    return stored[..., None, :] >> shifts & ((1 << count) - 1)


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[..., 2:], Numbers(_halves(blocks, 0)))


def _four_bits(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 2:]), Numbers(_halves(blocks, 0)))


def _q4_1(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 4:]), Numbers(_halves(blocks, 0)), Numbers(_halves(blocks, 2)))


def _five_bits(stored: Tensor) -> Tensor:
    fifth = stored[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _nibbles(stored[..., 4:]) | fifth.flatten(-2) << 4


def _q5_0(blocks: Tensor) -> _Parts:
    return _Parts(_five_bits(blocks[..., 2:]), Numbers(_halves(blocks, 0)))


def _q5_1(blocks: Tensor) -> _Parts:
    return _Parts(_five_bits(blocks[..., 4:]), Numbers(_halves(blocks, 0)), Numbers(_halves(blocks, 2)))


def _mxfp4(blocks: Tensor) -> _Parts:
    exponents = blocks[..., 0].to(torch.int16)  # of twice the scale; bf16 is the upper half of a float
    below = torch.where(exponents == 0, 0x20, 0x40)  # 2^-128 and 2^-127, which have no leading one
    scales = torch.where(exponents < 2, below.to(torch.int16), (exponents - 1) << 7)
    return _Parts(_nibbles(blocks[..., 1:]), Numbers(scales.view(torch.bfloat16)))


def _two_levels(blocks: Tensor, integers: Tensor, factors: Tensor) -> Numbers:
    """Return integers [rows, blocks, groups] and their factors [rows, blocks]."""
    return Numbers(integers.to(torch.int8).reshape(len(blocks), -1), factors.contiguous())


def _q2_k(blocks: Tensor) -> _Parts:
    codes = _bits(blocks[..., 16:80].unflatten(-1, (2, 32)), 2)
    scales = _two_levels(blocks, blocks[..., :16] & 15, _halves(blocks, 80))
    return _Parts(codes.flatten(2), scales, _two_levels(blocks, blocks[..., :16] >> 4, -_halves(blocks, 82)))


def _q3_k(blocks: Tensor) -> _Parts:
    third = _bits(blocks[..., :32], 1).unflatten(-2, (2, 4))
    codes = _bits(blocks[..., 32:96].unflatten(-1, (2, 32)), 2) | third << 2
    high = _bits(blocks[..., 104:108], 2).flatten(-2)
    scales = (_nibbles(blocks[..., 96:104]) | high << 4).to(torch.int8) - 32
    return _Parts(codes.flatten(2), _two_levels(blocks, scales, _halves(blocks, 108)))


def _scales_and_mins(blocks: Tensor) -> tuple[Numbers, Numbers]:
    """Return those of Q4_K and Q5_K: eight of each, in six bits."""
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return _two_levels(blocks, scales, _halves(blocks, 0)), _two_levels(blocks, mins, -_halves(blocks, 2))


def _q4_k(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(2), *_scales_and_mins(blocks))


def _q5_k(blocks: Tensor) -> _Parts:
    fifth = _bits(blocks[..., 16:48], 1).unflatten(-2, (4, 2)).flatten(-2)
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))) | fifth << 4
    return _Parts(codes.flatten(2), *_scales_and_mins(blocks))


def _q6_k(blocks: Tensor) -> _Parts:
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-2)
    codes = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))) | high << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _Parts(codes.flatten(2), _two_levels(blocks, scales, _halves(blocks, 208)))


def _iq4_xs(blocks: Tensor) -> _Parts:
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(-2)
    high = _bits(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    scales = (low | high << 4).to(torch.int8) - 32
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16)))
    return _Parts(codes.flatten(2), _two_levels(blocks, scales, _halves(blocks, 0)))


_TYPES = {
    "Q8_0": _Type(32, 34, 8, None, _q8_0),
    "Q4_0": _Type(32, 18, 4, tuple(range(-8, 8)), _four_bits),
    "Q4_1": _Type(32, 20, 4, tuple(range(16)), _q4_1),
    "Q5_0": _Type(32, 22, 5, tuple(range(-16, 16)), _q5_0),
    "Q5_1": _Type(32, 24, 5, tuple(range(32)), _q5_1),
    "Q2_K": _Type(256, 84, 2, tuple(range(4)), _q2_k),
    "Q3_K": _Type(256, 110, 3, tuple(range(-4, 4)), _q3_k),
    "Q4_K": _Type(256, 144, 4, tuple(range(16)), _q4_k),
    "Q5_K": _Type(256, 176, 5, tuple(range(32)), _q5_k),
    "Q6_K": _Type(256, 210, 6, tuple(range(-32, 32)), _q6_k),
    "IQ4_NL": _Type(32, 18, 4, _NON_LINEAR, _four_bits),
    "IQ4_XS": _Type(256, 136, 4, _NON_LINEAR, _iq4_xs),
    "MXFP4": _Type(32, 17, 4, (*_FP4, *(-value for value in _FP4)), _mxfp4),
}
GGUF_BLOCKS = frozenset(_TYPES)  # that can be put in panels


def parts_of(stored: Tensor, block_type: str) -> tuple[Tensor, Numbers, Numbers | None]:
    """Return the codes, uint8 [out_features, in_features], of rows of blocks, their scales and their least values.

    Args:
        stored: uint8 [out_features, bytes of a row], whole blocks.
        block_type: one of GGUF_BLOCKS.
    """
    kind = _TYPES[block_type]
    parts = kind.parts(stored.view(len(stored), -1, kind.nbytes))
    return parts.codes.flatten(1), parts.scales, parts.mins
