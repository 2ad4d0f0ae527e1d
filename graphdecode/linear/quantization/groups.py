"""Weights quantized in groups: some columns of a row share a scale, and perhaps a zero point.

Checkpoints of compressed-tensors, GPTQ, AWQ, fp8 and MXFP4 are read as these. `Groups.dequantized` is the reference for
every product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from graphdecode.errors import CheckpointError
from graphdecode.kernels.linear.pack_codes import BLOCK
from graphdecode.kernels.linear.quantized_linear import LEAST_GROUP, Numbers, QuantizedPanels, quantized_panels
from graphdecode.kernels.linear.weight_tiles import WeightTiles, can_tile, tiled
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight, WeightType
from graphdecode.linear.weight_form import Shard

Code = Literal["integer", "e4m3", "e2m1", "nf4"]
INT4, INT8, FP8 = WeightType("INT4", 4), WeightType("INT8", 8), WeightType("FP8", 8)
MXFP4 = WeightType("MXFP4", 4.25)
NF4 = WeightType("NF4", 4, devices=())  # codes are no integers, and no float8
_BITS: dict[str, tuple[int, ...]] = {"integer": (4, 8), "e4m3": (8,), "e2m1": (4,), "nf4": (4,)}  # by code
_PART_OF_ROW = 128  # group size in tiles if all columns share a scale and there are zeros

# by code; e2m1: OCP Microscaling Formats, 2023, 5.3.3; nf4: Dettmers et al., 2023 (QLoRA), appendix E
TABLES: dict[str, tuple[float, ...]] = {
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
}


@dataclass(frozen=True)
class Groups(QuantizedWeight):
    """A weight [out_features, in_features] in groups; the last group of a row may be shorter.

    Column `c` of row `r` is `(value(codes[r, c]) - zero) * scales[r // rows_of_scale, c // group_size]`, and is
    multiplied with the input feature `order[c]`, or `c`. `value` is the integer itself, the entry of `TABLES`, or the
    float8; only integers have zeros.
    """

    path = "groups"
    code: Code
    bits: int  # of a code, 4 or 8
    codes: Tensor  # uint8 [out_features, in_features * bits / 8], the low nibble first; or float8_e4m3fn for e4m3
    # [out_features / rows_of_scale, groups], both rounded up; float32, float16, bfloat16 or float8_e8m0fnu
    scales: Tensor
    zeros: Tensor | None  # uint8 [out_features, groups], the codes of 0; None: all are 2 ** (bits - 1)
    group_size: int  # columns that share a scale
    rows_of_scale: int = 1  # rows that share a scale; zeros are by row
    order: Tensor | None = None  # int32 [in_features], the input feature of each column; None: in order

    def __post_init__(self) -> None:
        if self.bits not in _BITS.get(self.code, ()):  # else it would be multiplied as another code
            known = ", ".join(f"{code} of {' or '.join(map(str, bits))}" for code, bits in _BITS.items())
            raise ValueError(f"there are no groups of {self.code} codes of {self.bits} bits; there are {known}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    def dequantized(self) -> Tensor:
        """Return the weight in float32 [out_features, in_features], its columns by input feature."""
        spread = self.by_row()
        scales = spread.scales.float().repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]
        weight = self.values() * scales
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order.long(), weight)

    def values(self) -> Tensor:
        """Return the unscaled values, float32 [out_features, in_features], columns not reordered."""
        if self.code == "e4m3":
            return self.codes.float()
        codes = self.codes if self.bits == 8 else unpacked(self.codes)
        if self.code != "integer":
            return torch.tensor(TABLES[self.code], device=codes.device)[codes.int()]
        if self.zeros is None:
            return codes.float() - 2 ** (self.bits - 1)
        return codes.float() - self.zeros.float().repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]

    def explicit_zeros(self) -> Tensor:
        """Return the codes of 0, uint8 [out_features, groups], of integers."""
        if self.zeros is not None:
            return self.zeros
        groups = math.ceil(self.shape[1] / self.group_size)
        return self.codes.new_full((self.shape[0], groups), 2 ** (self.bits - 1))

    @classmethod
    def joined(cls, parts: Sequence[Groups]) -> Groups | None:
        first = parts[0]
        kinds = {(part.code, part.bits, part.shape[1], part.group_size, part.scales.dtype) for part in parts}
        if len(kinds) > 1 or any(not _same_order(first, part) for part in parts):
            return None
        whole_blocks = all(part.shape[0] % part.rows_of_scale == 0 for part in parts[:-1])
        if len({part.rows_of_scale for part in parts}) > 1 or not whole_blocks:
            parts = [part.by_row() for part in parts]
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([part.explicit_zeros() for part in parts])
        return replace(
            parts[0],
            codes=_as(torch.cat([_bytes(part.codes) for part in parts]), first.codes),
            scales=_as(torch.cat([_bytes(part.scales) for part in parts]), first.scales),
            zeros=zeros,
        )

    def by_row(self) -> Groups:
        """Return the same weight with a scale per row."""
        if self.rows_of_scale == 1:
            return self
        scales = _bytes(self.scales).repeat_interleave(self.rows_of_scale, dim=0)[: self.shape[0]]
        return replace(self, scales=_as(scales, self.scales), rows_of_scale=1)

    def part(self, shard: Shard) -> Groups:
        rows, *columns = shard.slices(self.shape)
        shard_rows = self.rows(slice(*rows.indices(self.shape[0])[:2]))
        return shard_rows._columns(slice(*columns[0].indices(self.shape[1])[:2])) if columns else shard_rows

    def rows(self, rows: slice) -> Groups:
        size = self.rows_of_scale
        is_cut = rows.start % size or (rows.stop % size and rows.stop != self.shape[0])
        if is_cut or (size > 1 and rows.step not in (None, 1)):
            return self.by_row().rows(rows)
        blocks = slice(rows.start // size, -(-rows.stop // size), rows.step)
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[blocks], zeros=zeros)

    def for_panels(self, *, by_values: bool) -> Groups | None:
        """Return the weight in groups that divide the columns, with scales by row; None if groups are too small."""
        columns = self.shape[1]
        even = self.by_row()._evenly()
        if self.code == "nf4" or columns % BLOCK or (even.group_size < columns and even.group_size % LEAST_GROUP):
            return None
        if even.zeros is None or even.bits < 8 or (by_values and bool(even.zeros.all())):
            return even
        return replace(even, scales=even.scales.float())  # 128 - 0 does not fit int8

    def _evenly(self) -> Groups:
        """Return the same weight in groups that divide the columns."""
        columns, size = self.shape[1], self.group_size
        divisor = math.gcd(size, columns)
        if divisor == size:
            return self
        each, count = size // divisor, columns // divisor
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(each, 1)[:, :count]
        scales = self.scales.float().repeat_interleave(each, 1)[:, :count]
        return replace(self, group_size=divisor, scales=scales, zeros=zeros)

    def some_panels(self) -> QuantizedPanels:
        codes = unpacked(self.codes) if self.bits == 4 else self.codes.contiguous()
        scales = self.scales.bfloat16() if self.scales.dtype == torch.float8_e8m0fnu else self.scales
        if self.code == "e4m3":
            return quantized_panels(codes, 8, None, Numbers(scales))
        if self.code == "e2m1":  # twice the values are integers; half a scale is exact where it is a power of two
            halves = scales / 2 if scales.dtype == torch.bfloat16 else scales.float() / 2
            table = torch.tensor(TABLES["e2m1"]).mul(2).to(torch.int8)
            return quantized_panels(codes, 4, table, Numbers(halves))
        half = 2 ** (self.bits - 1)
        mins = None
        if self.zeros is not None:
            from_half = half - self.zeros.to(torch.int16)
            is_float = self.bits == 8 and scales.dtype == torch.float32
            mins = Numbers(from_half * scales) if is_float else Numbers(from_half.to(torch.int8), scales)
        if self.bits == 8:
            return quantized_panels(codes ^ half, 8, None, Numbers(scales), mins)
        return quantized_panels(codes, 4, torch.arange(-half, half, dtype=torch.int8), Numbers(scales), mins)

    def for_tiles(self) -> Groups | None:
        """Return the weight with scales by row; None if tiles do not support code or group size."""
        group = 0 if self.group_size >= self.shape[1] else self.group_size
        return None if self.code == "nf4" or not can_tile(group) else self.by_row()

    def some_tiles(self) -> WeightTiles:
        codes = unpacked(self.codes) if self.bits == 4 else self.codes.view(torch.uint8)
        group = 0 if self.group_size >= self.shape[1] else self.group_size
        scales, zeros = self.scales, self.zeros
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.view(torch.uint8)
        if self.code != "integer":
            return tiled(codes, self.code, scales, group)
        if zeros is None:
            return tiled(codes, "s4", scales, group) if self.bits == 4 else tiled(codes ^ 128, "s8", scales, group)
        if not group:  # zeros are by group
            group, parts = _PART_OF_ROW, -(-self.shape[1] // _PART_OF_ROW)
            scales, zeros = scales.expand(-1, parts), zeros.expand(-1, parts)
        if self.bits == 4:
            return tiled(codes, "u4", scales, group, zeros, "zeros")
        wide = scales.float()  # a zero point times its scale is not rounded to 16 bits
        return tiled(codes ^ 128, "s8", wide, group, wide * (128 - zeros.float()), "least")

    def _columns(self, columns: slice) -> Groups:
        if self.order is not None:
            raise ValueError("columns that were reordered cannot be shared out by input feature")
        width = columns.stop - columns.start
        size = min(self.group_size, width) if self.group_size >= self.shape[1] else self.group_size
        if columns.start % size and self.group_size < self.shape[1]:
            raise ValueError(f"a part begins at column {columns.start}, within a group of {self.group_size}")
        if columns.start * self.bits % 8 or width * self.bits % 8:
            raise ValueError(f"a part of the columns {columns.start} to {columns.stop} begins or ends within a byte")
        groups = slice(columns.start // self.group_size, -(-columns.stop // self.group_size))
        return replace(
            self,
            codes=self.codes[:, columns.start * self.bits // 8 : columns.stop * self.bits // 8],
            scales=self.scales[:, groups],
            zeros=None if self.zeros is None else self.zeros[:, groups],
            group_size=size,
        )


def packed(codes: Tensor) -> Tensor:
    """Pack codes of 4 bits, uint8 [..., n], two per byte, [..., n / 2]."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpacked(codes: Tensor) -> Tensor:
    """Inverse of `packed`."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)


def sorted_by_group(groups: Groups, group_of: Tensor | None, name: str) -> Groups:
    """Return a weight with its columns sorted by their groups, for GPTQ's `desc_act`.

    `group_of`: the group of each column, integers [in_features]; None: already sorted.
    """
    expected = torch.arange(groups.shape[1]) // groups.group_size
    if group_of is None or torch.equal(group_of.long(), expected):
        return groups
    order = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[order].long(), expected):
        raise CheckpointError(f"{name}: g_idx has groups that have not {groups.group_size} columns each")
    codes = (unpacked(groups.codes) if groups.bits == 4 else groups.codes).index_select(1, order)
    return replace(groups, codes=packed(codes) if groups.bits == 4 else codes, order=order.int())


def _same_order(one: Groups, other: Groups) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _bytes(tensor: Tensor) -> Tensor:
    """Return 8-bit floats as bytes, which torch can repeat and concatenate; others unchanged."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.view(like.dtype)
