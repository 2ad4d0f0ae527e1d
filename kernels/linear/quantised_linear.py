"""Linear layers with a weight in blocks of few bits, as GGUF has it: never undone in memory.

A block is 32 input features of one output feature: integers of four or eight bits, a scale and perhaps a least value,
in half precision. A panel is 32 output features. Layouts: `panels`, int16 `[panels, blocks, words]`, where a word of 16
bits holds two bytes or four half-bytes, from the lowest on; one word after another makes rows of 32, and the integers
at one place of a row are two input features of 16 output features, the next place's those of the panel's other half;
scales and least values, float16 `[panels, blocks, 32]`. Four bits without a least value stand for what they are less 8.
Five bits are kept in bytes, half again as many as the file has.

Activations are not quantised, and weights are not rounded: a block's products are summed up as integers times
activations, in float32, and scaled. A row's result depends neither on other rows nor on the number of threads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..native.registration import operator
from ..native.signature import AnyElement, Written

PANEL = 32
BLOCK = 32  # input features that share a scale
_HALF_BYTE_ZERO = 8
_PANELS_AT_ONCE = 64  # are put in order together: what that needs beside the result is a few MB


class _Layout(NamedTuple):
    """Where a block of GGUF has what; see ggml's `ggml-common.h`."""

    nbytes: int
    bits: int  # of an integer in panels
    has_min: bool
    has_fifth_bits: bool = False


_LAYOUTS = {"Q8_0": _Layout(34, 8, False), "Q4_0": _Layout(18, 4, False), "Q4_1": _Layout(20, 4, True)}
_LAYOUTS |= {"Q5_0": _Layout(22, 8, False, True), "Q5_1": _Layout(24, 8, True, True)}
BLOCK_TYPES = frozenset(_LAYOUTS)  # that can be put in panels


class QuantisedPanels(NamedTuple):
    """A weight in panels of blocks; see above."""

    panels: Tensor
    scales: Tensor
    mins: Tensor | None


def quantised_panels(blocks: Tensor, block_type: str) -> QuantisedPanels:
    """Return a weight in panels; output features that are missing to a whole panel are zeros.

    Args:
        blocks: uint8 [out_features, bytes of a row], whole blocks as GGUF has them.
        block_type: one of BLOCK_TYPES.
    """
    layout = _LAYOUTS[block_type]
    num_panels, num_blocks = -(-len(blocks) // PANEL), blocks.shape[1] // layout.nbytes
    words = torch.empty(num_panels, num_blocks, BLOCK * PANEL * layout.bits // 16, dtype=torch.int16)
    scales, mins = torch.zeros(2, num_panels, num_blocks, PANEL, dtype=torch.float16)
    for first in range(0, num_panels, _PANELS_AT_ONCE):
        some = blocks[first * PANEL : (first + _PANELS_AT_ONCE) * PANEL]
        here = slice(first, first + -(-len(some) // PANEL))
        padded = torch.zeros(len(words[here]) * PANEL, num_blocks, layout.nbytes, dtype=torch.uint8)
        padded[: len(some)] = some.view(len(some), num_blocks, layout.nbytes)
        scales[here] = _halves(padded, 0)
        if layout.has_min:
            mins[here] = _halves(padded, 1)
        words[here] = _words(_stored_integers(padded[..., 4 if layout.has_min else 2 :], layout), layout.bits)
    return QuantisedPanels(words, scales.clone(), mins.clone() if layout.has_min else None)


def _halves(blocks: Tensor, place: int) -> Tensor:
    """Return the number in half precision at a place of each block, [panels, blocks, 32]."""
    numbers = blocks[..., 2 * place : 2 * place + 2].contiguous().view(torch.float16)
    return numbers.view(-1, PANEL, blocks.shape[1]).transpose(1, 2)


def _stored_integers(stored: Tensor, layout: _Layout) -> Tensor:
    """Return the integers of blocks [..., bytes behind the scales] as bytes [..., 32]."""
    if not layout.has_fifth_bits:
        return stored if layout.bits == 8 else torch.cat((stored & 15, stored >> 4), dim=-1)
    fifth = (stored[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    low = torch.cat((stored[..., 4:] & 15, stored[..., 4:] >> 4), dim=-1)
    integers = low | fifth.flatten(-2) << 4
    return integers if layout.has_min else integers - 16


def _words(integers: Tensor, bits: int) -> Tensor:
    """Return the integers of blocks, bytes [out_features, blocks, 32], as words [panels, blocks, words]."""
    by_place = integers.reshape(-1, 2, PANEL // 2, integers.shape[1], BLOCK // 2, 2).permute(0, 3, 4, 1, 2, 5)
    in_word = by_place.reshape(len(by_place), integers.shape[1], -1, 16 // bits, PANEL).int()
    shifts = torch.arange(0, 16, bits, dtype=torch.int32)[:, None]
    return (in_word << shifts).sum(-2, dtype=torch.int32).to(torch.int16).flatten(2)


def _integers(panels: Tensor, has_min: bool) -> Tensor:
    """Return the integers [panels * 32, blocks, 32] of panels."""
    num_panels, num_blocks, words = panels.shape
    bits = words * 16 // (BLOCK * PANEL)
    rows = panels.int().view(num_panels, num_blocks, -1, 1, PANEL)
    found = (rows >> torch.arange(0, 16, bits, dtype=torch.int32)[:, None]) & ((1 << bits) - 1)
    by_place = found.view(num_panels, num_blocks, BLOCK // 2, 2, PANEL // 2, 2).permute(0, 3, 4, 1, 2, 5)
    integers = by_place.reshape(num_panels * PANEL, num_blocks, BLOCK)
    if bits == 8:
        return (integers ^ 128) - 128
    return integers if has_min else integers - _HALF_BYTE_ZERO


def _is_served(
    out: Tensor, x: Tensor, panels: Tensor, scales: Tensor, mins: Tensor | None, bias: Tensor | None
) -> bool:
    return x.stride(1) == 1 and panels.dtype == torch.int16 and scales.dtype == torch.float16


@operator(is_compiled=_is_served, constants={"QUANTISED_BLOCK": BLOCK})
def quantised_linear(
    out: Written[Tensor],
    x: Tensor,
    panels: AnyElement,
    scales: AnyElement,
    mins: AnyElement | None = None,
    bias: Tensor | None = None,
) -> None:
    """Write `x @ weight.T + bias` into `out`, the weight in panels of blocks. CPU alone.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], float32 or bfloat16, rows may be strided; any number of rows.
        panels: as `quantised_panels` returned it, as are scales and mins.
        scales: float16 [panels, blocks, 32].
        mins: likewise, or None.
        bias: [out_features] or None.
    """
    weight = _integers(panels, mins is not None) * scales.transpose(1, 2).flatten(0, 1).float()[..., None]
    if mins is not None:
        weight += mins.transpose(1, 2).flatten(0, 1).float()[..., None]
    product = x.float() @ weight.flatten(1)[: out.shape[1]].T
    out.copy_(product if bias is None else product + bias.float())
