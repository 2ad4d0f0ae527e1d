"""Verification of drafts.

A row's token to feed and its drafts become queries, each a row of the pass over the sequence's pages. Queries without a
draft, and those of dead rows, are at position 0 of the null page.

A step samples a row's queries one after another, and `advance` takes each token as if it came from a separate step:
counts, stop ids, lengths and the ring need no knowledge of drafts. After each query `judge_drafts` holds the rows
without a draft, or whose draft differs from the sampled token, so that further queries skip them. Then `settle_drafts`
releases the rows, and counts the next step's drafts.

A draft is fed at its position, and its successor is sampled there: drafts whose successor would be past the row's last
position are not used. An adaptive limit doubles if it was too low, and otherwise falls halfway to the number of
accepted drafts, but not below two.
"""

from collections import namedtuple
from typing import Any, NamedTuple, Self

import torch

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Int64, Written, operator
from ..sampling.sampling_slots import DEAD_TOKEN

PAUSED = 2  # `finished` of a row that skips the rest of the step; 1: the row has ended
DRAFT_COLUMNS = 4  # columns of an entry in the ring of drafts:
VERIFIED, ACCEPTED, CANDIDATES, MATCHED = range(DRAFT_COLUMNS)

_NAMES = ("ACCEPTED", "DRAFT_COLUMNS", "CANDIDATES", "PAUSED", "MATCHED", "VERIFIED")
CONSTANTS: Any = namedtuple("DraftConstants", _NAMES)(*(globals()[name] for name in _NAMES))  # for Triton and C


class DraftSizes(NamedTuple):
    """Most drafts per row, and length and rows of the rings."""

    most: int
    ring_length: int
    ring_rows: int

    @classmethod
    def of(cls, rows: "DraftRows") -> Self:
        """Return the sizes of a batch."""
        return cls(rows.drafts.shape[1], *rows.ring_tokens.shape)


class DraftRows(NamedTuple):
    """The rows of a batch with drafts; `advance` and the draft source write the fields that are only read here."""

    tokens: Int64  # int64 [b], to feed
    pre_step_seqlens: Int32  # int32 [b], their positions
    last_position: Int32  # int32 [b]
    live_rows: Int32  # int32 [1]
    step_index: Int64  # int64 [1], after the newest ring entry
    ring_tokens: Int64  # int64 [R, b_max]
    drafts: Int32  # int32 [b, most], contiguous
    match_lengths: Int32  # int32 [b], match length; 0: drafts of a model
    # int32 [b], number of drafts; a step feeds as many as it has queries for
    num_drafts: Written[Int32]
    draft_limit: Written[Int32]  # int32 [b], most drafts per step; 0: the row does not draft
    finished: Written[Int32]  # int32 [b]; PAUSED for rows that skip the rest of the step
    active_rows: Written[Int32]  # int32 [1], after the last row that continues the step
    running: Written[Int32]  # int32 [1], live rows that are not finished
    step_entries: Written[Int32]  # int32 [1], ring entries of a step of this kind
    history: Written[Int32]  # int32 [b, width], the rows' tokens
    # int32 [R, DRAFT_COLUMNS, b_max], at the entry of a step's first token. VERIFIED: fed drafts; ACCEPTED: drafts
    # equal to the sampled tokens (in a step without drafts, 1 if the first one would have been); CANDIDATES and
    # MATCHED: number and match length of the next step's drafts
    ring_drafts: Written[Int32]


_BLOCK = 512  # pages copied together


class Queries(NamedTuple):
    """The queries of a pass; those of a row are adjacent."""

    query_tokens: Int64  # int64 [b * queries]
    query_positions: Int32  # int32 [b * queries]
    query_pages: Int32  # int32 [b * queries, pages]
    live_queries: Int32  # int32 [1], those of live rows


# One program per query. It copies a row of the page table.
@triton.jit
def _spread_queries_kernel(
    spread, batch, page_table, most, pages, queries, null_page, DEAD: tl.constexpr, BLOCK: tl.constexpr
):
    query = tl.program_id(0)
    row = query // queries
    behind = query % queries
    live = tl.load(batch.live_rows)
    if query == 0:
        tl.store(spread.live_queries, live * queries)
    is_alive = row < live
    ended = tl.load(batch.finished + row, mask=is_alive, other=1) != 0
    count = tl.load(batch.num_drafts + row, mask=is_alive & (ended == 0), other=0)
    used = is_alive & ((behind == 0) | (behind <= count))
    fed = tl.load(batch.tokens + row, mask=used & (behind == 0), other=DEAD)
    draft = tl.load(batch.drafts + row * most + behind - 1, mask=used & (behind > 0), other=DEAD)
    tl.store(spread.query_tokens + query, tl.where(behind == 0, fed, draft.to(tl.int64)))
    position = tl.load(batch.pre_step_seqlens + row, mask=used, other=0)
    tl.store(spread.query_positions + query, tl.where(used, position + behind, 0))
    for first in range(0, pages, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        is_read = columns < tl.where(used, pages, 0)
        owned = tl.load(page_table + row * pages + columns, mask=is_read, other=null_page)
        tl.store(spread.query_pages + query.to(tl.int64) * pages + columns, owned, mask=columns < pages)


def spread_queries_triton(spread, rows, page_table, *, queries, null_page) -> None:
    """Launch the kernel; see `spread_queries`."""
    most, pages = rows.drafts.shape[1], page_table.shape[1]
    _spread_queries_kernel[(spread.query_tokens.shape[0],)](
        spread, rows, page_table, most, pages, queries, null_page, DEAD=DEAD_TOKEN, BLOCK=_BLOCK, num_warps=4
    )


@operator(triton_version=spread_queries_triton, is_compiled=True, constants={"DEAD_TOKEN": DEAD_TOKEN})
def spread_queries(
    spread: Written[Queries], rows: DraftRows, page_table: Int32, *, queries: int, null_page: int
) -> None:
    """Write the queries of a pass.

    Args:
        spread: the queries, written.
        rows: tokens, positions and drafts are read; a row that has ended feeds its token again, without drafts.
        page_table: int32 [b, pages], contiguous.
        queries: queries per row.
        null_page: the null page.
    """
    live = int(rows.live_rows.item())
    spread.query_tokens.fill_(DEAD_TOKEN)
    spread.query_positions.zero_()
    spread.query_pages.fill_(null_page)
    spread.live_queries.fill_(live * queries)
    for row in range(live):
        count = 0 if rows.finished[row] else min(int(rows.num_drafts[row]), queries - 1)
        first, behind = row * queries, row * queries + 1 + count
        spread.query_tokens[first] = rows.tokens[row]
        spread.query_tokens[first + 1 : behind] = rows.drafts[row, :count]
        spread.query_positions[first:behind] = rows.pre_step_seqlens[row] + torch.arange(count + 1)
        spread.query_pages[first:behind] = page_table[row]


# One program for the whole batch; it reads and writes some 40 bytes per row.
@triton.jit
def _judge_drafts_kernel(
    batch, width, sizes, INDEX: tl.constexpr, QUERIES: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.arange(0, ROWS)
    live = rows < tl.load(batch.live_rows)
    step = tl.load(batch.step_index) - 1
    token = tl.load(batch.ring_tokens + (step % sizes.ring_length) * sizes.ring_rows + rows, mask=live, other=-1)
    has_token = live & (token != -1)
    num_drafts = tl.load(batch.num_drafts + rows, mask=has_token, other=0)
    verified = tl.minimum(num_drafts, QUERIES - 1)
    entry = batch.ring_drafts + ((step - INDEX) % sizes.ring_length) * sizes.ring_rows * K.DRAFT_COLUMNS + rows
    if INDEX == 0:
        is_verified = has_token & (num_drafts > 0)
        accepted = tl.zeros([ROWS], dtype=tl.int32)
        tl.store(entry + K.VERIFIED * sizes.ring_rows, verified, mask=live)
    else:
        is_verified = has_token & (verified > INDEX)
        accepted = tl.load(entry + K.ACCEPTED * sizes.ring_rows, mask=live, other=0)
    draft = tl.load(batch.drafts + rows * sizes.most + INDEX, mask=is_verified, other=-1)
    is_same = is_verified & (draft.to(tl.int64) == token)
    tl.store(entry + K.ACCEPTED * sizes.ring_rows, accepted + is_same.to(tl.int32), mask=live)
    ended = tl.load(batch.finished + rows, mask=live, other=1)
    is_running = has_token & (ended == 0)
    position = tl.load(batch.pre_step_seqlens + rows, mask=is_running, other=0)
    address = batch.history + rows.to(tl.int64) * width + position
    tl.store(address, token.to(tl.int32), mask=is_running & (position < width))
    still = is_running & is_same & (verified > INDEX)
    tl.store(batch.finished + rows, K.PAUSED, mask=is_running & (still == 0))
    tl.store(batch.active_rows, tl.max(tl.where(still, rows + 1, 0), axis=0))


def judge_drafts_triton(rows, *, index, queries) -> None:
    """Launch the kernel; see `judge_drafts`."""
    sizes = DraftSizes.of(rows)
    padded = triton.next_power_of_2(sizes.ring_rows)
    _judge_drafts_kernel[(1,)](
        rows, rows.history.shape[1], sizes, INDEX=index, QUERIES=queries, K=CONSTANTS, ROWS=padded, num_warps=4
    )


@operator(triton_version=judge_drafts_triton, is_compiled=True, constants=CONSTANTS._asdict())
def judge_drafts(rows: DraftRows, *, index: int, queries: int) -> None:
    """Compare the draft after query `index` with the query's sampled token, the ring's newest.

    Args:
        rows: finished, active_rows, history, and ACCEPTED of ring_drafts are written; with the first query VERIFIED.
        index: index of the query.
        queries: queries per row.
    """
    newest = int(rows.step_index.item()) - 1
    length = rows.ring_tokens.shape[0]
    entry, ended = rows.ring_drafts[(newest - index) % length], rows.finished.numpy()
    tokens = rows.ring_tokens.numpy()[newest % length]
    active = 0
    for row in range(int(rows.live_rows.item())):
        token, num_drafts = int(tokens[row]), int(rows.num_drafts[row])
        verified = min(num_drafts, queries - 1)
        if index == 0:
            entry[VERIFIED, row] = verified if token != -1 else 0
            entry[ACCEPTED, row] = 0
        if token == -1:
            continue
        is_fed = index < num_drafts and (index == 0 or index < verified)
        is_same = is_fed and int(rows.drafts[row, index]) == token
        entry[ACCEPTED, row] += int(is_same)
        if ended[row]:
            continue
        position = int(rows.pre_step_seqlens[row])
        if position < rows.history.shape[1]:
            rows.history[row, position] = token
        if is_same and index < verified:
            active = row + 1
        else:
            ended[row] = PAUSED
    rows.active_rows.fill_(active)


# One program for the whole batch; it reads and writes some 50 bytes per row.
@triton.jit
def _settle_drafts_kernel(batch, sizes, queries, ADAPTS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    live = rows < tl.load(batch.live_rows)
    ended = tl.load(batch.finished + rows, mask=live, other=1)
    ended = tl.where(ended == K.PAUSED, 0, ended)
    is_running = live & (ended == 0)
    tl.store(batch.finished + rows, ended, mask=live)
    first = (tl.load(batch.step_index) - queries) % sizes.ring_length
    entry = batch.ring_drafts + first * sizes.ring_rows * K.DRAFT_COLUMNS + rows
    limit = tl.load(batch.draft_limit + rows, mask=is_running, other=0)
    if ADAPTS:
        verified = tl.load(entry + K.VERIFIED * sizes.ring_rows, mask=is_running, other=0)
        accepted = tl.load(entry + K.ACCEPTED * sizes.ring_rows, mask=is_running, other=0)
        higher = tl.minimum(2 * limit, sizes.most)
        lower = tl.minimum(tl.maximum((accepted + limit + 1) // 2, 2), sizes.most)
        limit = tl.where((verified > 0) & (limit > 0), tl.where(accepted >= verified, higher, lower), limit)
        tl.store(batch.draft_limit + rows, limit, mask=is_running)
    position = tl.load(batch.pre_step_seqlens + rows, mask=is_running, other=0)
    room = tl.load(batch.last_position + rows, mask=is_running, other=0) - 1 - position
    num_drafts = tl.minimum(tl.load(batch.num_drafts + rows, mask=is_running, other=0), limit)
    num_drafts = tl.maximum(tl.minimum(num_drafts, room), 0)
    tl.store(batch.num_drafts + rows, num_drafts, mask=live)
    tl.store(entry + K.CANDIDATES * sizes.ring_rows, num_drafts, mask=live)
    tl.store(
        entry + K.MATCHED * sizes.ring_rows, tl.load(batch.match_lengths + rows, mask=is_running, other=0), mask=live
    )
    tl.store(batch.running, tl.sum(is_running.to(tl.int32), axis=0))
    tl.store(batch.step_entries, queries)


def settle_drafts_triton(rows, *, queries, adapts) -> None:
    """Launch the kernel; see `settle_drafts`."""
    sizes = DraftSizes.of(rows)
    padded = triton.next_power_of_2(sizes.ring_rows)
    _settle_drafts_kernel[(1,)](rows, sizes, queries, ADAPTS=adapts, K=CONSTANTS, ROWS=padded, num_warps=4)


@operator(triton_version=settle_drafts_triton, is_compiled=True, constants=CONSTANTS._asdict())
def settle_drafts(rows: DraftRows, *, queries: int, adapts: bool) -> None:
    """Prepare the rows for the next step, whose drafts are written.

    Args:
        rows: PAUSED becomes 0, num_drafts the number of drafts for the next step; running, step_entries, and
            CANDIDATES and MATCHED of ring_drafts are written.
        queries: queries per row.
        adapts: whether draft_limit adapts.
    """
    first = (int(rows.step_index.item()) - queries) % rows.ring_drafts.shape[0]
    entry, ended = rows.ring_drafts[first], rows.finished.numpy()
    most, still = rows.drafts.shape[1], 0
    for row in range(int(rows.live_rows.item())):
        ended[row] = 0 if ended[row] == PAUSED else ended[row]
        num_drafts = 0
        if not ended[row]:
            still += 1
            limit, verified, accepted = (int(x) for x in (rows.draft_limit[row], *entry[: ACCEPTED + 1, row]))
            if adapts and verified > 0 and limit > 0:
                limit = min(2 * limit, most) if accepted >= verified else min(max((accepted + limit + 1) // 2, 2), most)
                rows.draft_limit[row] = limit
            room = int(rows.last_position[row]) - 1 - int(rows.pre_step_seqlens[row])
            num_drafts = max(min(int(rows.num_drafts[row]), limit, room), 0)
        rows.num_drafts[row] = entry[CANDIDATES, row] = num_drafts
        entry[MATCHED, row] = 0 if ended[row] else int(rows.match_lengths[row])
    rows.running.fill_(still)
    rows.step_entries.fill_(queries)
