"""On a CPU with compiled kernels: a weight in the groups of few bits in which its source has it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphdecode.kernels.linear.quantised_linear import (
    BLOCK,
    LEAST_GROUP,
    Numbers,
    QuantisedPanels,
    joined_panels,
    quantised_linear,
    quantised_panels,
)
from graphdecode.linear.groups import TABLES, Groups, GroupSource, fused, unpacked
from graphdecode.linear.panels import Panels
from graphdecode.linear.weight_form import (
    FormOptions,
    LinearNames,
    Shard,
    TensorSource,
    WeightForm,
    fused_shape,
    read_bias,
)

KEPT_GROUPS = frozenset({"INT4", "INT8", "FP8", "MXFP4"})  # whose codes mean integers, or float8
_ROWS_AT_ONCE = 2048  # are put in order together: what that needs beside the result is a few MB


@dataclass(frozen=True)
class GroupPanels(WeightForm):
    """A weight in panels of groups, whose values are the source's own, not rounded."""

    path = "groups"
    is_of_source = True
    weight: QuantisedPanels
    order: Tensor | None  # int32 [in_features], the input feature of each column; None: as they stand
    batch_invariant: bool

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: as for plain panels."""
        return Panels.why_not(options)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return a weight that has no groups in plain panels."""
        return Panels.of(weight, bias, options)

    @classmethod
    def keeps(cls, source: TensorSource, names: LinearNames) -> bool:
        """Whether all of a layer's tensors are groups of a kind that can be multiplied."""
        return has_groups(source, names)

    @classmethod
    def load(cls, source: TensorSource, names: LinearNames, shard: Shard | None, options: FormOptions) -> WeightForm:
        """Read a layer's groups, or a part of them; what cannot be fused or cut so is put in plain panels."""
        groups = fused_groups(source, names, shard)
        held = None if groups is None else panels_of_groups(groups)
        if groups is None or held is None:
            return Panels.load(source, names, shard, options)
        order = None if groups.order is None else groups.order.clone()
        shape, bias = fused_shape(source, names.weights, shard), read_bias(source, names, shard, options)
        return cls(shape, bias, held, order, options.batch_invariant)

    @property
    def gives_floats(self) -> bool:
        """Sums are written as they are."""
        return True

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        if self.order is not None:
            x = torch.index_select(x, 1, self.order)
        quantised_linear(out, x, self.weight, self.bias, batch_invariant=self.batch_invariant)


def has_groups(source: TensorSource, names: LinearNames) -> bool:
    """Whether all of a layer's tensors are groups of a kind that can be multiplied."""
    return isinstance(source, GroupSource) and {source.tensors[name].dtype for name in names.weights} <= KEPT_GROUPS


def fused_groups(source: TensorSource, names: LinearNames, shard: Shard | None) -> Groups | None:
    """Return a layer's tensors, or a part of each, as one weight in groups; None where they are not of one kind."""
    if not isinstance(source, GroupSource):
        return None
    parts = [groups for name in names.weights if (groups := source.read_groups(name, shard)) is not None]
    return fused(parts) if len(parts) == len(names.weights) else None


def panels_of_groups(groups: Groups) -> QuantisedPanels | None:
    """Return a weight in panels; None where its groups are too small for that."""
    columns = groups.shape[1]
    even = _evenly(groups.by_row())
    if columns % BLOCK or (even.group_size < columns and even.group_size % LEAST_GROUP):
        return None
    if even.zeros is not None and even.bits == 8 and not bool(even.zeros.all()):  # 128 - 0 is no int8
        even = replace(even, scales=even.scales.float())
    return joined_panels([_some_panels(some) for some in even.split(_ROWS_AT_ONCE)])


def _evenly(groups: Groups) -> Groups:
    """Return the same weight in groups that divide the columns."""
    columns, size = groups.shape[1], groups.group_size
    divisor = math.gcd(size, columns)
    if divisor == size:
        return groups
    each, count = size // divisor, columns // divisor
    zeros = None if groups.zeros is None else groups.zeros.repeat_interleave(each, 1)[:, :count]
    scales = groups.scales.float().repeat_interleave(each, 1)[:, :count]
    return replace(groups, group_size=divisor, scales=scales, zeros=zeros)


def _some_panels(groups: Groups) -> QuantisedPanels:
    """Return some rows in panels; their groups divide the columns."""
    codes = unpacked(groups.codes) if groups.bits == 4 else groups.codes.contiguous()
    scales = groups.scales.bfloat16() if groups.scales.dtype == torch.float8_e8m0fnu else groups.scales
    if groups.code == "e4m3":
        return quantised_panels(codes, 8, None, Numbers(scales))
    if groups.code == "e2m1":  # twice the values are integers; half a scale is exact where it is a power of two
        halves = scales / 2 if scales.dtype == torch.bfloat16 else scales.float() / 2
        table = torch.tensor(TABLES["e2m1"]).mul(2).to(torch.int8)
        return quantised_panels(codes, 4, table, Numbers(halves))
    half = 2 ** (groups.bits - 1)
    mins = None
    if groups.zeros is not None:
        from_half = half - groups.zeros.to(torch.int16)
        is_float = groups.bits == 8 and scales.dtype == torch.float32
        mins = Numbers(from_half * scales) if is_float else Numbers(from_half.to(torch.int8), scales)
    if groups.bits == 8:
        return quantised_panels(codes ^ half, 8, None, Numbers(scales), mins)
    return quantised_panels(codes, 4, torch.arange(-half, half, dtype=torch.int8), Numbers(scales), mins)
