"""Weights in tiles without values, for launches that are only compiled, and for random bits."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.kernels.linear.code_words import CODES
from graphdecode.kernels.linear.weight_tiles import WeightTiles, layout_of

_SECOND_DTYPES = {"zeros": torch.uint8, "six bits": torch.int32, "parts": torch.int8}
_OF_SUPER = {"six bits": (2, 3), "parts": (1, 16)}  # scales and seconds for 256 columns


def empty_tiles(
    kind: tuple[str, int, str, torch.dtype], rows: int, columns: int, device: torch.device | str = "meta"
) -> WeightTiles:
    """Return a weight; `kind`: code, columns of a group, kind of the second numbers, dtype of the scales."""
    code, group, second_kind, dtype = kind
    layout = layout_of(code, group, second_kind)
    codes, unit = CODES[code], max(layout.step, group)
    columns = -(-columns // layout.step) * layout.step
    counts = _OF_SUPER.get(second_kind, (unit // (group or unit),) * 2)
    units = -(-columns // unit) if group else 1

    def words(per_word: int) -> Tensor:
        return torch.empty(columns // (per_word * layout.span), rows, layout.span, dtype=torch.int16, device=device)

    seconds = torch.empty(units, rows, counts[1], dtype=_SECOND_DTYPES.get(second_kind, dtype), device=device)
    return WeightTiles.of(
        words(codes.per_word),
        words(codes.spans_of_high) if codes.spans_of_high else None,
        torch.empty(units, rows, counts[0], dtype=dtype, device=device),
        None if second_kind == "none" else seconds,
        layout,
    )
