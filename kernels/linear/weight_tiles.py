"""A quantized weight in tiles, the layout for a GPU's products: words of codes, and scales by group.

A tile is the columns of one word (see `code_words`) of all rows: a program reads contiguous memory, 16 bytes per thread
at a time. Columns are padded to whole steps of a product's loop with codes and scales of 0; the scales of a step's
groups are adjacent for each row.

A group may have a second number beside its scale. The kind of the second number determines a weight's value:

- `none`: `scale * value`. Scales are floats of 16 or 32 bits, or bytes that are exponents.
- `least`: `scale * value + second`, of the same type.
- `zeros`: `scale * (value - second)`, bytes.
- `six bits`: as GGUF's Q4_K and Q5_K have it. A group of 32 has two integers of 6 bits, and eight groups two numbers in
  half precision, d and m: `d * s * value - m * t`. The sixteen integers s and t, in turn, stand in three words of 32
  bits: five in the lower 30 bits of each, and the last in the two upper bits of all three.
- `parts`: as Q6_K has it. A group of 16 has an integer of 8 bits, and sixteen groups a number in half precision:
  `d * s * value`.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from ..native.registration import AnyElement, OneOf
from .code_words import CODES, from_words, to_words, values_of

SECOND_KINDS = ("none", "least", "zeros", "six bits", "parts")
_LEAST_GROUP = 32
_FIELDS = 5  # 6-bit integers in the lower bits of a word
_OF_SUPER = {"six bits": (2, 3), "parts": (1, 16)}  # scales and seconds for 256 columns


class TileLayout(NamedTuple):
    """The layout of a tiled weight."""

    code: str  # one of CODES
    second_kind: str  # one of SECOND_KINDS
    group: int  # columns that share a scale; 0: all
    span: int  # adjacent columns of a tile
    step: int  # columns that a product reads at a time

    @property
    def has_totals(self) -> bool:
        """Whether products need the sums of groups' activations."""
        return self.second_kind in ("least", "zeros", "six bits")


class WeightTiles(NamedTuple):
    """A weight in tiles; see above, and `TileLayout`."""

    words: AnyElement  # int16 [tiles, rows, span]
    high: AnyElement | None  # int16 [tiles of higher bits, rows, span]; None: there are none
    scales: AnyElement  # [steps, rows, scales per step]; one per group if groups are larger than a step
    seconds: AnyElement | None  # likewise, or None
    code: Annotated[str, OneOf(tuple(CODES))]
    second_kind: Annotated[str, OneOf(SECOND_KINDS)]
    group: int
    step: int

    @classmethod
    def of(
        cls, words: Tensor, high: Tensor | None, scales: Tensor, seconds: Tensor | None, layout: TileLayout
    ) -> WeightTiles:
        """Return tensors with their layout."""
        return cls(words, high, scales, seconds, layout.code, layout.second_kind, layout.group, layout.step)

    @property
    def layout(self) -> TileLayout:
        """The layout of the tensors."""
        return TileLayout(self.code, self.second_kind, self.group, self.words.shape[2], self.step)


def can_tile(group: int) -> bool:
    """Whether tiles support groups of so many columns, 0 for all, with one-level scales."""
    return group == 0 or (group >= _LEAST_GROUP and group & group - 1 == 0)


def layout_of(code: str, group: int, second_kind: str = "none") -> TileLayout:
    """Return the layout for these fields; a ValueError if products do not support the group size."""
    if second_kind not in _OF_SUPER and not can_tile(group):
        raise ValueError(f"group is {group}; it must be 0 or a power of two >= {_LEAST_GROUP}")
    bits = CODES[code].bits
    span = 16 if bits in (5, 6) else 32 if bits == 4 or group == 32 else 64
    return TileLayout(code, second_kind, group, span, 128 if bits == 8 else 256)


def tiled(
    codes: Tensor, code: str, scales: Tensor, group: int, seconds: Tensor | None = None, second_kind: str = "none"
) -> WeightTiles:
    """Return a weight in tiles.

    Args:
        codes: uint8 [rows, columns].
        scales: [rows, groups], or the scales of all blocks of 256 columns.
        seconds: likewise, the second numbers; None: none.
        code, group, second_kind: see `TileLayout`.
    """
    layout = layout_of(code, group, second_kind)
    rows, columns = codes.shape
    steps = -(-columns // layout.step)
    if columns < steps * layout.step:
        padded = codes.new_zeros(rows, steps * layout.step)
        padded[:, :columns] = codes
        codes = padded
    unit = max(layout.step, group)
    counts = _OF_SUPER.get(second_kind, (unit // group,) * 2 if group else (1, 1))

    def by_unit(values: Tensor, count: int) -> Tensor:
        """Return numbers by row as [units, rows, count], with 0 for padding columns."""
        units = -(-codes.shape[1] // unit) if group else 1
        filled = values.new_zeros(rows, units * count)
        filled[:, : values.shape[1]] = values
        return filled.view(rows, units, count).transpose(0, 1).contiguous()

    others = None if seconds is None else by_unit(seconds, counts[1])
    return WeightTiles.of(*to_words(codes, code, layout.span), by_unit(scales, counts[0]), others, layout)


def six_bit_words(scales: Tensor, mins: Tensor) -> Tensor:
    """Pack 6-bit integers, uint8 [rows, blocks, 8] each, into words int32 [rows, 3 * blocks]; see above."""
    fields = torch.stack((scales, mins), dim=-1).flatten(2).long()  # [rows, blocks, 16]
    shifts = 6 * torch.arange(_FIELDS, device=scales.device)
    words = (fields[..., :-1].unflatten(-1, (3, _FIELDS)) << shifts).sum(-1)
    last = fields[..., -1:] >> torch.tensor([0, 2, 4], device=scales.device) & 3
    return (words | last << 30).flatten(1).to(torch.int32)


def _six_bits(words: Tensor) -> Tensor:
    """Inverse of `six_bit_words`: words [..., 3] to integers [..., 8, 2]."""
    shifts = 6 * torch.arange(_FIELDS, device=words.device)
    fields = (words.long()[..., None] >> shifts & 63).flatten(-2)
    last = (words.long() >> 30 & 3) << torch.tensor([0, 2, 4], device=words.device)
    return torch.cat((fields, last.sum(-1, keepdim=True)), dim=-1).unflatten(-1, (8, 2))


def _of_groups(tiles: WeightTiles) -> tuple[Tensor, Tensor | None]:
    """Return factor and summand of each group's values, float32 [units, rows, groups]."""
    scales, seconds, kind = tiles.scales, tiles.seconds, tiles.second_kind
    wide = scales.float()
    if scales.dtype == torch.uint8:  # exponents, e8m0
        wide = torch.ldexp(torch.ones_like(wide), scales.int() - 127)
    if seconds is None:
        return wide, None
    if kind == "six bits":
        factors = wide[..., None, :] * _six_bits(seconds)
        return factors[..., 0], -factors[..., 1]
    if kind == "parts":
        return wide * seconds.float(), None
    return wide, -wide * seconds.float() if kind == "zeros" else seconds.float()


def dequantized(tiles: WeightTiles) -> Tensor:
    """Return the weight in float32 [rows, columns], with padding columns."""
    codes = from_words(tiles.words, tiles.high, tiles.code)
    weight = values_of(tiles.code).to(codes.device)[codes.int()]

    def spread(values: Tensor) -> Tensor:
        each = tiles.group or codes.shape[1]
        return values.transpose(0, 1).flatten(1).repeat_interleave(each, 1)[:, : codes.shape[1]]

    scales, offsets = _of_groups(tiles)
    weight *= spread(scales)
    if offsets is not None:
        weight += spread(offsets)
    return weight


def columns_of(tiles: WeightTiles) -> int:
    """Return the columns of a weight in tiles, with padding."""
    return tiles.words.shape[0] * CODES[tiles.code].per_word * tiles.layout.span


def moved_tiles(tiles: WeightTiles, device: torch.device) -> WeightTiles:
    """Return the same weight on a device."""
    moved: list[Any] = [part.to(device) if isinstance(part, Tensor) else part for part in tiles]
    return WeightTiles(*moved)


def joined_tiles(parts: list[WeightTiles]) -> WeightTiles:
    """Concatenate weights of the same layout by rows."""
    if len(parts) == 1:
        return parts[0]
    fields = zip(*parts, strict=True)
    joined: list[Any] = [torch.cat(values, dim=1) if isinstance(values[0], Tensor) else values[0] for values in fields]
    return WeightTiles(*joined)
