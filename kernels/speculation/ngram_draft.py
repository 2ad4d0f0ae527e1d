"""Prompt lookup (Saxena, 2023): drafts are the tokens that followed an earlier occurrence of the last tokens.

The longest match is used, up to `ngram_max`; ties: the latest. Drafts that reach the row's end wrap around: a periodic
text continues.
"""

import numpy as np

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Written, operator

_BLOCK = 1024  # positions compared together


# One program per row. It reads the row's history `ngram_max` times, from cache, and writes its drafts.
@triton.jit
def _ngram_draft_kernel(
    drafts,
    num_drafts,
    match_lengths,
    history,
    positions,
    live_rows,
    width,
    most,
    ngram_min,
    ngram_max,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row < tl.load(live_rows):
        line = history + row.to(tl.int64) * width
        last = tl.minimum(tl.load(positions + row), width - 1)
        best = tl.full([], 0, dtype=tl.int64)
        for first in range(0, last, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            lengths = tl.zeros([BLOCK], dtype=tl.int32)
            agrees = offsets < last
            for back in range(ngram_max):
                agrees = agrees & (offsets >= back)
                token = tl.load(line + offsets - back, mask=agrees, other=-1)
                agrees = agrees & (token == tl.load(line + tl.maximum(last - back, 0)))
                lengths += agrees.to(tl.int32)
            matches = tl.where(lengths >= ngram_min, (lengths.to(tl.int64) << 32) + offsets, 0)
            best = tl.maximum(best, tl.max(matches, axis=0))
        length = (best >> 32).to(tl.int32)
        match_end = (best & 0x7FFFFFFF).to(tl.int32)
        columns = tl.arange(0, MOST)
        period = tl.maximum(last - match_end, 1)
        inside = columns < tl.where(length > 0, most, 0)
        tokens = tl.load(line + match_end + 1 + columns % period, mask=inside, other=0)
        tl.store(drafts + row * most + columns, tokens, mask=inside)
        tl.store(num_drafts + row, tl.where(length > 0, most, 0))
        tl.store(match_lengths + row, length)


def ngram_draft_triton(
    drafts, num_drafts, match_lengths, history, positions, live_rows, *, ngram_min, ngram_max
) -> None:
    """Launch the kernel; see `ngram_draft`."""
    rows, most = drafts.shape
    _ngram_draft_kernel[(rows,)](
        drafts, num_drafts, match_lengths, history, positions, live_rows, history.shape[1], most, ngram_min, ngram_max,
        MOST=triton.next_power_of_2(most), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@operator(triton_version=ngram_draft_triton, is_compiled=True)
def ngram_draft(
    drafts: Written[Int32],
    num_drafts: Written[Int32],
    match_lengths: Written[Int32],
    history: Int32,
    positions: Int32,
    live_rows: Int32,
    *,
    ngram_min: int,
    ngram_max: int,
) -> None:
    """Write each live row's drafts, as many as fit, or none.

    Args:
        drafts: int32 [b, most], contiguous.
        num_drafts: int32 [b]; 0 without an earlier match of `ngram_min` tokens.
        match_lengths: int32 [b], length of the match; 0 without drafts.
        history: int32 [b, width], the rows' tokens, contiguous.
        positions: int32 [b], position of each row's last token.
        live_rows: int32 [1].
        ngram_min: shortest match.
        ngram_max: longest match.
    """
    most, tokens, last_positions = drafts.shape[1], history.numpy(), positions.numpy()
    for row in range(int(live_rows.item())):
        last = min(int(last_positions[row]), tokens.shape[1] - 1)
        line, lengths = tokens[row], np.zeros(max(last, 0), dtype=np.int32)
        agrees = np.ones(max(last, 0), dtype=bool)
        for back in range(min(ngram_max, last)):
            agrees[:back] = False
            agrees[back:] &= line[: last - back] == line[last - back]
            lengths += agrees
        length = int(lengths.max(initial=0))
        has_match = length >= ngram_min
        num_drafts[row], match_lengths[row] = most * has_match, length * has_match
        if has_match:
            match_end = int(np.flatnonzero(lengths == length)[-1])
            drafts.numpy()[row] = line[match_end + 1 + np.arange(most) % (last - match_end)]
