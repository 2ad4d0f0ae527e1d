"""Codes of quantized weights as words of panels, and back.

A panel is 32 output features, a block 32 input features. Layout of codes: int16 `[panels, blocks, 64 * bits]`. The low
bits of all codes of a block come first (8, 4 or 2 per code), then the higher bits (2 or 1). Each of these parts has
rows of 32 words. The lowest bits of a row's words hold two input features of 16 output features, one input feature in
the even words, the next in the odd words; the next bits hold the same for the panel's other half, and then two further
input features.
"""

import torch
from torch import Tensor

from ..native.registration import AnyElement, Written, operator

PANEL = 32
BLOCK = 32  # input features of a block


def whole_panels(by_row: Tensor) -> Tensor:
    """Return rows [out_features, ...] with zeros behind them that fill the last panel."""
    missing = -len(by_row) % PANEL
    return by_row if not missing else torch.cat((by_row, by_row.new_zeros(missing, *by_row.shape[1:])))


def _low_bits(bits: int) -> int:
    return next(low for low in (8, 4, 2) if low <= bits)


@operator(is_compiled=lambda codes: codes.stride(2) == 1)
def pack_codes(out: Written[AnyElement], codes: AnyElement, bits: int) -> None:
    """Write codes as words of panels; output features that fill the last panel are zeros. Only on a CPU.

    Args:
        out: int16 [panels, blocks, 64 * bits].
        codes: uint8 [out_features, blocks, 32], or of 4 bits [out_features, blocks, 16], two per byte.
        bits: bits of a code.
    """
    low = _low_bits(bits)
    if codes.shape[2] < BLOCK:
        codes = torch.cat((codes & 15, codes >> 4), dim=2)
    words = whole_panels(codes.flatten(1)).contiguous().view(torch.int16)
    pairs = words.view(-1, 2, PANEL // 2, codes.shape[1], BLOCK // 2)
    in_order = pairs.permute(0, 3, 4, 1, 2).contiguous().view(torch.uint8).view(*out.shape[:2], BLOCK, PANEL)
    if low == bits:
        out.copy_(_plane(in_order, bits))
        return
    out.copy_(torch.cat((_plane(in_order & ((1 << low) - 1), low), _plane(in_order >> low, bits - low)), dim=2))


def _plane(codes: Tensor, bits: int) -> Tensor:
    """Return the words of a number of bits [panels, blocks, places, 32], lowest bits first."""
    eights = codes.view(torch.int64).view(*codes.shape[:2], -1, 2, 8 // bits, PANEL // 8)  # codes stay in their bytes
    halves = eights[..., 0, :]
    for index in range(1, 8 // bits):
        halves = halves | eights[..., index, :] << (index * bits)
    words = halves.contiguous().view(torch.uint8)
    return (words[..., 1, :].to(torch.int16) << 8 | words[..., 0, :]).flatten(2)


def codes_of(panels: Tensor) -> Tensor:
    """Return the codes [panels * 32, in_features] of a weight's panels, int32."""
    num_panels, blocks, words = panels.shape
    bits = words * 16 // (BLOCK * PANEL)
    low = _low_bits(bits)
    stored = panels.int()
    codes = _unpack_fields(stored[..., : low * 64], low)
    if low < bits:
        codes |= _unpack_fields(stored[..., low * 64 :], bits - low) << low
    by_field = codes.view(num_panels, blocks, BLOCK // 2, 2, PANEL // 2, 2).permute(0, 3, 4, 1, 2, 5)
    return by_field.reshape(num_panels * PANEL, blocks * BLOCK)


def _unpack_fields(words: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 16, bits, dtype=torch.int32)[:, None]
    in_word = words.view(*words.shape[:2], -1, 1, PANEL) >> shifts & ((1 << bits) - 1)
    return in_word.view(*words.shape[:2], BLOCK, PANEL)
