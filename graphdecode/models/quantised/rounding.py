"""From plain weights to groups of few bits: what `quantize=` asks for by name, and how a weight is rounded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.linear.groups import Code, Groups, packed

_VALUES_AT_ONCE = 1 << 22  # are rounded together, in fp32
_GROUP_SIZES = (128, 64, 32)  # that are tried, the first that divides all columns
_FLOAT8_MOST = 448.0
# a group's largest value over its scale: with the smaller ones nothing is cut off, with the larger ones most is finer
_LARGEST_CODES = (7.0, 7.5, 8.0, 8.5, 9.0, 10.0, 11.0)


@dataclass(frozen=True)
class GroupScheme:
    """Codes of a kind, with a scale for each group of a row or for each row.

    Attributes:
        name: what it is asked for by.
        code: what codes are.
        bits: of a code.
        is_grouped: whether a row has several groups where nobody says how large they are.
        group_size: columns that share a scale; None: all of a row.
    """

    name: str
    code: Code
    bits: int
    is_grouped: bool = False
    group_size: int | None = None

    @property
    def type_name(self) -> str:
        """What `Stored.dtype` says of such a weight."""
        return "FP8" if self.code == "e4m3" else f"INT{self.bits}"

    def sized(self, group_size: int | None, columns: Iterable[int]) -> GroupScheme:
        """Return the scheme with the size of its groups.

        Args:
            group_size: that is asked for; None: the largest usual one that fits, or all of a row.
            columns: of the weights.

        Raises:
            ValueError: groups of such a size do not fit.
        """
        if group_size is None and not self.is_grouped:
            return self
        if self.code != "integer":
            raise ArgumentError(f"quantize={self.name!r} has a scale for each row: leave the group size out")
        divisor = math.gcd(*columns)
        fitting = [size for size in _GROUP_SIZES if divisor % size == 0]
        size = group_size if group_size is not None else fitting[0] if fitting else 0
        if size < 16 or size % 16 or divisor % size:
            asked = "" if group_size is None else f"of {group_size} "
            can = f"; those of {', '.join(map(str, fitting))} are" if fitting else ""
            raise ArgumentError(
                f"groups {asked}cannot be had with quantize={self.name!r}: they must be a multiple of 16, and divide "
                f"all weights' columns, and so {divisor}{can}"
            )
        return replace(self, group_size=size)


GROUP_SCHEMES = {
    scheme.name: scheme
    for scheme in (
        GroupScheme("int8", "integer", 8),
        GroupScheme("int4", "integer", 4, is_grouped=True),
        GroupScheme("fp8", "e4m3", 8),
    )
}


def rounded(weight: Tensor, scheme: GroupScheme) -> Groups:
    """Return a weight in groups: to the nearest codes, with scales for which the squared error is small.

    Args:
        weight: [out_features, in_features], float32, bfloat16 or float16; scales have its dtype.
        scheme: says into what; its group size divides the columns.
    """
    rows, columns = weight.shape
    size = scheme.group_size or columns
    scales = torch.empty(rows, columns // size, dtype=weight.dtype)
    kind = torch.float8_e4m3fn if scheme.code == "e4m3" else torch.uint8
    codes = torch.empty(rows, columns * scheme.bits // 8, dtype=kind)
    step = max(1, _VALUES_AT_ONCE // columns)
    for begin in range(0, rows, step):
        some = slice(begin, begin + step)
        groups = weight[some].float().unflatten(1, (-1, size))
        scales[some] = _scales(groups, scheme, weight.dtype)
        found = groups / scales[some].float()[..., None]
        if scheme.code == "e4m3":
            codes[some] = found.clamp_(-_FLOAT8_MOST, _FLOAT8_MOST).flatten(1).to(kind)
            continue
        half = 2 ** (scheme.bits - 1)
        integers = (found.round_().clamp_(-half, half - 1) + half).flatten(1).to(torch.uint8)
        codes[some] = packed(integers) if scheme.bits == 4 else integers
    return Groups(scheme.code, scheme.bits, codes, scales, None, size)


def _scales(groups: Tensor, scheme: GroupScheme, dtype: torch.dtype) -> Tensor:
    """Return the scales of groups [rows, groups, columns], none of them 0."""
    largest = groups.abs().amax(-1)
    least = torch.finfo(dtype).tiny
    if scheme.bits == 8:
        return (largest / (_FLOAT8_MOST if scheme.code == "e4m3" else 127.0)).to(dtype).clamp_(min=least)
    best, best_error = torch.empty_like(largest, dtype=dtype), torch.full_like(largest, torch.inf)
    for code in _LARGEST_CODES:
        scales = (largest / code).to(dtype).clamp_(min=least)
        wide = scales.float()[..., None]
        error = ((groups / wide).round_().clamp_(-8, 7) * wide - groups).square_().sum(-1)
        best = torch.where(error < best_error, scales, best)
        best_error = torch.minimum(best_error, error)
    return best
