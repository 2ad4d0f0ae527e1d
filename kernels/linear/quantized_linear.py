"""Linear layers with a quantized weight in panels, which is never dequantized in memory.

A weight has codes of 2 to 6 or 8 bits: indices into a table of integers, or float8. A group of adjacent input features
has a scale per output feature, and perhaps a minimum: weight = scale * value + minimum. Both may be int8 times a factor
that adjacent groups share. This covers GGUF blocks, and integers and float8 with the usual groups.

Codes are in the layout of `pack_codes`. Scales and minima: `[panels, groups, 32]`, of a panel's 32 output features.

Weights are not rounded. Rows of bf16 and fp16 are multiplied as integers (AVX2 and up; with AMX, bf16 by tiles): an
activation has a sign and 15 bits relative to the largest of its group, or 23 for one or two rows (AVX-512's VNNI and
VBMI). Otherwise, a group's integers times bf16 activations are summed in float32 and scaled; float32 activations are
multiplied with dequantized weights. A row's result depends neither on other rows nor on the number of threads, except
for this choice by the number of rows.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from ..native.registration import AnyElement, OneOf, Wide, Written, operator
from .pack_codes import BLOCK, PANEL, codes_of, pack_codes, whole_panels

LEAST_GROUP = 16
_SCALE_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class QuantizedPanels(NamedTuple):
    """A weight in panels; see above."""

    panels: AnyElement  # int16 [panels, blocks, words], the codes
    scales: AnyElement  # [panels, groups, 32], of scale_dtype; int8 if there are factors
    table: AnyElement | None  # int8 [2 ** bits], values of the codes; None for codes of 8 bits, which are values
    mins: AnyElement | None  # likewise, or None
    factors: AnyElement | None  # [panels, groups of factors, 32], of scale_dtype, or None
    min_factors: AnyElement | None  # likewise, for the minima
    scale_dtype: Annotated[str, OneOf(("float16", "bfloat16", "float32"))]
    code: Annotated[str, OneOf(("integer", "e4m3"))] = "integer"  # "e4m3": float8


class Numbers(NamedTuple):
    """Scales or minima by output feature."""

    values: Tensor  # [out_features, groups]; int8 if there are factors, else float16, bfloat16 or float32
    factors: Tensor | None = None  # [out_features, groups of factors], float16, bfloat16 or float32


def quantized_panels(
    codes: Tensor, bits: int, table: Tensor | None, scales: Numbers, mins: Numbers | None = None
) -> QuantizedPanels:
    """Return a weight in panels; output features that fill the last panel are zeros.

    Args:
        codes: uint8 or float8_e4m3fn [out_features, in_features], in_features a multiple of 32; or of 4 bits uint8
            [out_features, in_features / 32, 16], 16 features in the low nibbles, the next 16 in the high ones.
        bits: bits of a code: 2, 3, 4, 5, 6 or 8.
        table: int8 [2 ** bits], values of the codes; None for 8 bits, which are signed.
        scales: scales of groups of equal size: a multiple of 16 input features, or all.
        mins: minima of the same groups; of the scales' dtype.
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
    """Return the tensors by panel, by name."""
    names = ("panels", "scales", "mins", "factors", "min_factors")
    return {name: tensor for name in names if (tensor := getattr(weight, name)) is not None}


def joined_panels(parts: Sequence[QuantizedPanels], *, interleaved: bool = False) -> QuantizedPanels:
    """Join parts of one kind along their rows: all but the last have whole panels.

    Interleaved, panels of the parts, equally many, alternate.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    joined: dict[str, Any] = {}
    for name in by_panel(first):
        tensors = [getattr(part, name) for part in parts]
        joined[name] = torch.stack(tensors, 1).flatten(0, 1) if interleaved else torch.cat(tensors)
    return first._replace(**joined)


def _rows_by_panel(numbers: Tensor | None) -> Any:
    """Return [out_features, groups], if any, as [panels, groups, 32]."""
    if numbers is None:
        return None
    return whole_panels(numbers).view(-1, PANEL, numbers.shape[1]).transpose(1, 2).contiguous()


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes as words [panels, blocks, words]; see `quantized_panels`."""
    by_block = codes if codes.dim() == 3 else codes.unflatten(1, (-1, BLOCK))
    rows, blocks = by_block.shape[:2]
    words = torch.empty(-(-rows // PANEL), blocks, BLOCK * PANEL * bits // 16, dtype=torch.int16)
    pack_codes(words, by_block, bits)
    return words


def dequantized_panels(weight: QuantizedPanels) -> Tensor:
    """Return a weight in panels dequantized, float32 [panels * 32, in_features]."""
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
    """Return scales or minima [panels, groups, 32] with their factors as [panels * 32, groups, 1]."""
    numbers = values.float()
    if factors is not None:
        numbers *= factors.float().repeat_interleave(values.shape[1] // factors.shape[1], dim=1)
    return numbers.transpose(1, 2).flatten(0, 1)[..., None]


def are_blocks_of(weight: QuantizedPanels, in_features: int) -> bool:
    """Whether compiled kernels support the input features with a weight's groups."""
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
    """Write `x @ weight.T + bias` into `out`, the weight in panels. Only on a CPU.

    Args:
        out: [rows, out_features], of x's dtype, or fp32; rows may be strided.
        x: [rows, in_features], float32, bfloat16 or float16, rows may be strided.
        weight: from `quantized_panels`.
        bias: [out_features] or None.
        batch_invariant: multiply few rows like many, so that a row's bits do not depend on their number.
    """
    product = x.float() @ dequantized_panels(weight)[: out.shape[1]].T
    out.copy_(product if bias is None else product + bias.float())
