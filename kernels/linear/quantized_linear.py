"""Linear layers with a quantized weight in panels, which is never dequantized in memory.

A weight is codes of 2 to 6 or of 8 bits: a table says which integer a code means, or it is a float8. A group of
neighbouring input features has a scale for each output feature, and perhaps a least value: weight = scale * meaning +
least value. Both may be int8 times a factor, which serves some neighbouring groups. These are the blocks of GGUF, and
integers and float8 with any of the usual groups.

A panel is 32 output features, a block 32 input features. Layout of codes: int16 `[panels, blocks, 64 * bits]`. The low
bits of all codes of a block stand first (8, 4 or 2 of a code), then the bits above them (2 or 1). Within these a row
of 32 words has the codes of two input features and 16 output features in the lowest bits of its words: those of one
input feature in the even words, of the next one in the odd; then the same of the panel's other half in the next bits,
then two further input features. Numbers: `[panels, groups, 32]`.

Weights are not rounded. Rows of bf16 and fp16 are multiplied as integers (AVX2 and up; with AMX, bf16 alone by tiles),
with 15 bits and a sign of an activation beside the largest of its group, and one or two rows with 23 (AVX-512's VNNI
and VBMI). Else a group's integers times activations of bf16 are summed up in float32 and scaled, and with float32
whole weights are multiplied. A row's result depends neither on other rows nor on the number of threads, but for this
choice by their number.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from ..native.registration import AnyElement, OneOf, Wide, Written, operator

PANEL = 32
BLOCK = 32  # input features whose codes stand together
LEAST_GROUP = 16
_SCALE_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class QuantizedPanels(NamedTuple):
    """A weight in panels; see above.

    Attributes:
        panels: int16 [panels, blocks, words], the codes.
        scales: [panels, groups, 32], of scale_dtype; int8 where there are factors.
        table: int8 [2 ** bits], what codes mean; None for codes of 8 bits, which mean themselves.
        mins: likewise, or None.
        factors: [panels, groups of factors, 32], of scale_dtype, or None.
        min_factors: likewise, of the least values.
        scale_dtype: "float16", "bfloat16" or "float32".
        code: "e4m3" for codes of 8 bits that are float8, else "integer".
    """

    panels: AnyElement
    scales: AnyElement
    table: AnyElement | None
    mins: AnyElement | None
    factors: AnyElement | None
    min_factors: AnyElement | None
    scale_dtype: Annotated[str, OneOf(("float16", "bfloat16", "float32"))]
    code: Annotated[str, OneOf(("integer", "e4m3"))] = "integer"


class Numbers(NamedTuple):
    """Scales or least values by output feature.

    Attributes:
        values: [out_features, groups]; int8 where there are factors, else float16, bfloat16 or float32.
        factors: [out_features, groups of factors], float16, bfloat16 or float32.
    """

    values: Tensor
    factors: Tensor | None = None


def quantized_panels(
    codes: Tensor, bits: int, table: Tensor | None, scales: Numbers, mins: Numbers | None = None
) -> QuantizedPanels:
    """Return a weight in panels; output features that are missing to a whole panel are zeros.

    Args:
        codes: uint8 or float8_e4m3fn [out_features, in_features], in_features a multiple of 32; or of 4 bits uint8
            [out_features, in_features / 32, 16], those of 16 features in the lower halves, of the next in the upper.
        bits: of a code: 2, 3, 4, 5, 6 or 8.
        table: int8 [2 ** bits], what codes mean; None for 8 bits, which are signed.
        scales: of groups of input features, equal in size: a multiple of 16, or all.
        mins: of the same groups; of the scales' dtype.
    """
    least = (None, None) if mins is None else mins
    return QuantizedPanels(
        _packed(codes.view(torch.uint8), bits),
        _rows_by_panel(scales.values),
        table,
        _rows_by_panel(least[0]),
        _rows_by_panel(scales.factors),
        _rows_by_panel(least[1]),
        _SCALE_DTYPES[(scales.values if scales.factors is None else scales.factors).dtype],
        "e4m3" if codes.dtype == torch.float8_e4m3fn else "integer",
    )


def by_panel(weight: QuantizedPanels) -> dict[str, Tensor]:
    """Return what a weight has for each panel, by name."""
    names = ("panels", "scales", "mins", "factors", "min_factors")
    return {name: held for name in names if (held := getattr(weight, name)) is not None}


def joined_panels(parts: Sequence[QuantizedPanels], *, interleaved: bool = False) -> QuantizedPanels:
    """Return parts of one kind as one weight: all but the last have whole panels.

    Interleaved, the parts have equally many panels, and the first of each part come before the second ones.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    joined: dict[str, Any] = {}
    for name in by_panel(first):
        held = [getattr(part, name) for part in parts]
        joined[name] = torch.stack(held, 1).flatten(0, 1) if interleaved else torch.cat(held)
    return first._replace(**joined)


def _padded(by_row: Tensor) -> Tensor:
    missing = -len(by_row) % PANEL
    return by_row if not missing else torch.cat((by_row, by_row.new_zeros(missing, *by_row.shape[1:])))


def _rows_by_panel(numbers: Tensor | None) -> Any:
    """Return numbers [out_features, groups], if any, as [panels, groups, 32]."""
    return None if numbers is None else _padded(numbers).view(-1, PANEL, numbers.shape[1]).transpose(1, 2).contiguous()


def _low_bits(bits: int) -> int:
    return next(low for low in (8, 4, 2) if low <= bits)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes as words [panels, blocks, words]; see `quantized_panels`."""
    by_block = codes if codes.dim() == 3 else codes.unflatten(1, (-1, BLOCK))
    rows, blocks = by_block.shape[:2]
    words = torch.empty(-(-rows // PANEL), blocks, BLOCK * PANEL * bits // 16, dtype=torch.int16)
    pack_codes(words, by_block, bits)
    return words


@operator(is_compiled=lambda codes: codes.stride(2) == 1)
def pack_codes(out: Written[AnyElement], codes: AnyElement, bits: int) -> None:
    """Write codes as the words of panels; output features that are missing to a whole panel are zeros. CPU alone.

    Args:
        out: int16 [panels, blocks, 64 * bits].
        codes: uint8 [out_features, blocks, 32], or of 4 bits [out_features, blocks, 16], two in a byte.
        bits: of a code.
    """
    low = _low_bits(bits)
    if codes.shape[2] < BLOCK:
        codes = torch.cat((codes & 15, codes >> 4), dim=2)
    pairs = _padded(codes.flatten(1)).contiguous().view(torch.int16).view(-1, 2, PANEL // 2, codes.shape[1], BLOCK // 2)
    in_order = pairs.permute(0, 3, 4, 1, 2).contiguous().view(torch.uint8).view(*out.shape[:2], BLOCK, PANEL)
    if low == bits:
        out.copy_(_plane(in_order, bits))
        return
    out.copy_(torch.cat((_plane(in_order & ((1 << low) - 1), low), _plane(in_order >> low, bits - low)), dim=2))


def _plane(codes: Tensor, bits: int) -> Tensor:
    """Return codes of so many bits [panels, blocks, places, 32], each bits' next place above the one before."""
    eights = codes.view(torch.int64).view(*codes.shape[:2], -1, 2, 8 // bits, PANEL // 8)  # no code leaves its byte
    halves = eights[..., 0, :]
    for place in range(1, 8 // bits):
        halves = halves | eights[..., place, :] << (place * bits)
    words = halves.contiguous().view(torch.uint8)
    return (words[..., 1, :].to(torch.int16) << 8 | words[..., 0, :]).flatten(2)


def codes_of(panels: Tensor) -> Tensor:
    """Return the codes [panels * 32, in_features] of a weight's panels, int32."""
    num_panels, blocks, words = panels.shape
    bits = words * 16 // (BLOCK * PANEL)
    low = _low_bits(bits)
    stored = panels.int()
    codes = _places(stored[..., : low * 64], low)
    if low < bits:
        codes |= _places(stored[..., low * 64 :], bits - low) << low
    by_place = codes.view(num_panels, blocks, BLOCK // 2, 2, PANEL // 2, 2).permute(0, 3, 4, 1, 2, 5)
    return by_place.reshape(num_panels * PANEL, blocks * BLOCK)


def _places(words: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 16, bits, dtype=torch.int32)[:, None]
    in_word = words.view(*words.shape[:2], -1, 1, PANEL) >> shifts & ((1 << bits) - 1)
    return in_word.view(*words.shape[:2], BLOCK, PANEL)


def dequantized_panels(weight: QuantizedPanels) -> Tensor:
    """Return what a weight in panels stands for, float32 [panels * 32, in_features]."""
    codes = codes_of(weight.panels)
    if weight.code == "e4m3":
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    else:
        values = (codes ^ 128) - 128 if weight.table is None else weight.table[codes]
    by_group = values.float().view(len(codes), weight.scales.shape[1], -1)
    by_group *= _numbers(weight.scales, weight.factors)
    if weight.mins is not None:
        by_group += _numbers(weight.mins, weight.min_factors)
    return by_group.flatten(1)


def _numbers(values: Tensor, factors: Tensor | None) -> Tensor:
    """Return numbers [panels, groups, 32] with their factors as [panels * 32, groups, 1]."""
    found = values.float()
    if factors is not None:
        found *= factors.float().repeat_interleave(values.shape[1] // factors.shape[1], dim=1)
    return found.transpose(1, 2).flatten(0, 1)[..., None]


def are_blocks_of(weight: QuantizedPanels, in_features: int) -> bool:
    """Whether compiled kernels multiply so many input features with a weight's groups."""
    features, groups = weight.panels.shape[1] * BLOCK, weight.scales.shape[1]
    return in_features == features and (groups == 1 or features // groups % LEAST_GROUP == 0)


@operator(
    is_compiled=lambda out, x, weight: are_blocks_of(weight, x.shape[1]) and x.stride(1) == 1 and out.stride(1) == 1,
    constants={"QUANTIZED_BLOCK": BLOCK},
)
def quantized_linear(
    out: Written[Wide],
    x: Tensor,
    weight: QuantizedPanels,
    bias: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> None:
    """Write `x @ weight.T + bias` into `out`, the weight in panels of blocks. CPU alone.

    Args:
        out: [rows, out_features], of x's dtype, or fp32; rows may be strided.
        x: [rows, in_features], float32, bfloat16 or float16, rows may be strided; any number of rows.
        weight: as `quantized_panels` returned it.
        bias: [out_features] or None.
        batch_invariant: multiply few rows as many are, so that a row's bits do not depend on their number.
    """
    product = x.float() @ dequantized_panels(weight)[: out.shape[1]].T
    out.copy_(product if bias is None else product + bias.float())
