"""Verification of drafts: what speculation keeps of each row, the queries of a pass, and what becomes of its results.

Rows with drafts become queries, each a row of its own, over its sequence's pages. The first query of a row is its token
to feed, the others are its drafts. A query that a row has no draft for, and all of dead rows, stand at position 0 of
the trash page: nobody reads what becomes of them.

A step samples a row's queries one after another, and `advance` takes each token as if it came from a step of its own:
counts, stop ids, lengths and the ring see nothing but tokens. Between two of them the drafts are judged: a row whose
draft was not what was sampled, or that has none, is held, so that what follows passes it by. Then rows that were held
go on, and the next step's drafts are counted.

A draft is fed at its position, and the token behind it is sampled there: none is taken whose token would stand past the
row's last position. Where the limits adapt, one that proved too low doubles, and one that proved too high goes half the
way down to what was accepted, but not below two.
"""

from typing import NamedTuple

from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Int64, Written, operator
from ..sampling.sampling_slots import DEAD_TOKEN

HELD = 2  # `finished` of a row whose step is over before those of its neighbours; 1 is a row that has ended
DRAFT_COLUMNS = 4  # of one step's entry in the ring of drafts:
VERIFIED, ACCEPTED, FOUND, MATCHED = range(DRAFT_COLUMNS)


class DraftConstants(NamedTuple):
    """The numbers above, by the names that they have in kernels, of Triton and in C."""

    ACCEPTED: int = ACCEPTED
    DRAFT_COLUMNS: int = DRAFT_COLUMNS
    FOUND: int = FOUND
    HELD: int = HELD
    MATCHED: int = MATCHED
    VERIFIED: int = VERIFIED


CONSTANTS = DraftConstants()


class DraftSizes(NamedTuple):
    """How many drafts a row has at most, how many steps the rings keep, and of how many rows."""

    most: int
    ring_length: int
    ring_rows: int


class DraftSlots(NamedTuple):
    """The drafts of a batch.

    Attributes:
        drafts: int32 [b, most], tokens that may follow the one to feed.
        num_drafts: int32 [b], how many of them there are.
        match_lengths: int32 [b], how many tokens agreed where they were found; 0: a guess of a model.
        draft_limit: int32 [b], how many of them a step may take; 0 for rows that are not to draft.
    """

    drafts: Int32
    num_drafts: Int32
    match_lengths: Int32
    draft_limit: Int32


_BLOCK = 512  # pages that are copied together


class Queries(NamedTuple):
    """The queries of a pass, those of a row side by side.

    Attributes:
        query_tokens: int64 [b * queries].
        query_positions: int32 [b * queries].
        query_pages: int32 [b * queries, pages].
        live_queries: int32 [1], the live rows' ones.
    """

    query_tokens: Int64
    query_positions: Int32
    query_pages: Int32
    live_queries: Int32


# One program a query. It copies a row of the page table.
@triton.jit
def _spread_queries_kernel(
    query_tokens,
    query_positions,
    query_pages,
    live_queries,
    tokens,
    pre_step_seqlens,
    finished,
    drafts,
    num_drafts,
    page_table,
    live_rows,
    most,
    pages,
    queries,
    trash_page,
    DEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    query = tl.program_id(0)
    row = query // queries
    behind = query % queries
    live = tl.load(live_rows)
    if query == 0:
        tl.store(live_queries, live * queries)
    is_alive = row < live
    ended = tl.load(finished + row, mask=is_alive, other=1) != 0
    count = tl.load(num_drafts + row, mask=is_alive & (ended == 0), other=0)
    used = is_alive & ((behind == 0) | (behind <= count))
    fed = tl.load(tokens + row, mask=used & (behind == 0), other=DEAD)
    draft = tl.load(drafts + row * most + behind - 1, mask=used & (behind > 0), other=DEAD)
    tl.store(query_tokens + query, tl.where(behind == 0, fed, draft.to(tl.int64)))
    position = tl.load(pre_step_seqlens + row, mask=used, other=0)
    tl.store(query_positions + query, tl.where(used, position + behind, 0))
    for first in range(0, pages, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        known = columns < tl.where(used, pages, 0)
        owned = tl.load(page_table + row * pages + columns, mask=known, other=trash_page)
        tl.store(query_pages + query.to(tl.int64) * pages + columns, owned, mask=columns < pages)


def spread_queries_triton(
    spread: Queries,
    tokens: Tensor,
    pre_step_seqlens: Tensor,
    finished: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    page_table: Tensor,
    live_rows: Tensor,
    *,
    queries: int,
    trash_page: int,
) -> None:
    """Launch the kernel; see `spread_queries`."""
    _spread_queries_kernel[(spread.query_tokens.shape[0],)](
        *spread,
        tokens,
        pre_step_seqlens,
        finished,
        drafts,
        num_drafts,
        page_table,
        live_rows,
        drafts.shape[1],
        page_table.shape[1],
        queries,
        trash_page,
        DEAD=DEAD_TOKEN,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@operator(triton_version=spread_queries_triton, is_compiled=True, constants={"DEAD_TOKEN": DEAD_TOKEN})
def spread_queries(
    spread: Written[Queries],
    tokens: Int64,
    pre_step_seqlens: Int32,
    finished: Int32,
    drafts: Int32,
    num_drafts: Int32,
    page_table: Int32,
    live_rows: Int32,
    *,
    queries: int,
    trash_page: int,
) -> None:
    """Write the queries of a pass.

    Args:
        spread: what is written.
        tokens: int64 [b], to feed.
        pre_step_seqlens: int32 [b], their positions.
        finished: int32 [b]; a row that has ended feeds its token again, and no draft.
        drafts: int32 [b, most], contiguous.
        num_drafts: int32 [b]; of more than `queries - 1` the first ones are taken.
        page_table: int32 [b, pages], contiguous.
        live_rows: int32 [1].
        queries: of each row.
        trash_page: nobody's.
    """
    live = int(live_rows.item())
    spread.query_tokens.fill_(DEAD_TOKEN)
    spread.query_positions.zero_()
    spread.query_pages.fill_(trash_page)
    spread.live_queries.fill_(live * queries)
    for row in range(live):
        count = 0 if finished[row] else min(int(num_drafts[row]), queries - 1)
        first = row * queries
        spread.query_tokens[first] = tokens[row]
        spread.query_tokens[first + 1 : first + 1 + count] = drafts[row, :count]
        for behind in range(count + 1):
            spread.query_positions[first + behind] = pre_step_seqlens[row] + behind
            spread.query_pages[first + behind] = page_table[row]


# One program does the whole batch; it reads and writes some 40 bytes a row.
@triton.jit
def _judge_drafts_kernel(
    finished,
    active_rows,
    history,
    ring_drafts,
    ring_tokens,
    step_index,
    pre_step_seqlens,
    drafts,
    num_drafts,
    live_rows,
    width,
    sizes,
    INDEX: tl.constexpr,
    QUERIES: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    live = rows < tl.load(live_rows)
    step = tl.load(step_index) - 1
    token = tl.load(ring_tokens + (step % sizes.ring_length) * sizes.ring_rows + rows, mask=live, other=-1)
    given = live & (token != -1)
    found = tl.load(num_drafts + rows, mask=given, other=0)
    verified = tl.minimum(found, QUERIES - 1)
    entry = ring_drafts + ((step - INDEX) % sizes.ring_length) * sizes.ring_rows * K.DRAFT_COLUMNS + rows
    if INDEX == 0:
        judged = given & (found > 0)
        accepted = tl.zeros([ROWS], dtype=tl.int32)
        tl.store(entry + K.VERIFIED * sizes.ring_rows, verified, mask=live)
    else:
        judged = given & (verified > INDEX)
        accepted = tl.load(entry + K.ACCEPTED * sizes.ring_rows, mask=live, other=0)
    draft = tl.load(drafts + rows * sizes.most + INDEX, mask=judged, other=-1)
    is_same = judged & (draft.to(tl.int64) == token)
    tl.store(entry + K.ACCEPTED * sizes.ring_rows, accepted + is_same.to(tl.int32), mask=live)
    ended = tl.load(finished + rows, mask=live, other=1)
    goes_on = given & (ended == 0)
    position = tl.load(pre_step_seqlens + rows, mask=goes_on, other=0)
    place = history + rows.to(tl.int64) * width + position
    tl.store(place, token.to(tl.int32), mask=goes_on & (position < width))
    still = goes_on & is_same & (verified > INDEX)
    tl.store(finished + rows, K.HELD, mask=goes_on & (still == 0))
    tl.store(active_rows, tl.max(tl.where(still, rows + 1, 0), axis=0))


def judge_drafts_triton(
    finished: Tensor,
    active_rows: Tensor,
    history: Tensor,
    ring_drafts: Tensor,
    ring_tokens: Tensor,
    step_index: Tensor,
    pre_step_seqlens: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    live_rows: Tensor,
    *,
    index: int,
    queries: int,
) -> None:
    """Launch the kernel; see `judge_drafts`."""
    ring_length, ring_rows = ring_tokens.shape
    _judge_drafts_kernel[(1,)](
        finished,
        active_rows,
        history,
        ring_drafts,
        ring_tokens,
        step_index,
        pre_step_seqlens,
        drafts,
        num_drafts,
        live_rows,
        history.shape[1],
        DraftSizes(drafts.shape[1], ring_length, ring_rows),
        INDEX=index,
        QUERIES=queries,
        K=CONSTANTS,
        ROWS=triton.next_power_of_2(ring_rows),
        num_warps=4,
    )


@operator(triton_version=judge_drafts_triton, is_compiled=True, constants=CONSTANTS._asdict())
def judge_drafts(
    finished: Written[Int32],
    active_rows: Written[Int32],
    history: Written[Int32],
    ring_drafts: Written[Int32],
    ring_tokens: Int64,
    step_index: Int64,
    pre_step_seqlens: Int32,
    drafts: Int32,
    num_drafts: Int32,
    live_rows: Int32,
    *,
    index: int,
    queries: int,
) -> None:
    """Judge the draft behind query `index`, whose token is the ring's newest.

    Args:
        finished: int32 [b]; HELD is written for rows whose step is over.
        active_rows: int32 [1], behind the last row whose step goes on.
        history: int32 [b, width]; a new token is written at its position.
        ring_drafts: int32 [R, DRAFT_COLUMNS, b_max]; the step's entry is that of its first token. VERIFIED gets how
            many drafts were fed, ACCEPTED how many were what was sampled; in a step without drafts the latter is 1
            where the first one would have been.
        ring_tokens: int64 [R, b_max], as `advance` left it.
        step_index: int64 [1], the same.
        pre_step_seqlens: int32 [b], the same.
        drafts: int32 [b, most], contiguous.
        num_drafts: int32 [b]; of more than `queries - 1` the first ones were fed.
        live_rows: int32 [1].
        index: of the query, from 0.
        queries: of each row.
    """
    newest = int(step_index.item()) - 1
    length = ring_tokens.shape[0]
    entry, ended = ring_drafts[(newest - index) % length], finished.numpy()
    tokens = ring_tokens.numpy()[newest % length]
    active = 0
    for row in range(int(live_rows.item())):
        token, found = int(tokens[row]), int(num_drafts[row])
        verified = min(found, queries - 1)
        if index == 0:
            entry[VERIFIED, row] = verified if token != -1 else 0
            entry[ACCEPTED, row] = 0
        if token == -1:
            continue
        is_fed = index < found and (index == 0 or index < verified)
        is_same = is_fed and int(drafts[row, index]) == token
        entry[ACCEPTED, row] += int(is_same)
        if ended[row]:
            continue
        position = int(pre_step_seqlens[row])
        if position < history.shape[1]:
            history[row, position] = token
        if is_same and index < verified:
            active = row + 1
        else:
            ended[row] = HELD
    active_rows.fill_(active)


# One program does the whole batch; it reads and writes some 50 bytes a row.
@triton.jit
def _settle_drafts_kernel(
    finished,
    running,
    step_entries,
    ring_drafts,
    slots,
    pre_step_seqlens,
    last_position,
    step_index,
    live_rows,
    sizes,
    queries,
    ADAPTS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    live = rows < tl.load(live_rows)
    ended = tl.load(finished + rows, mask=live, other=1)
    ended = tl.where(ended == K.HELD, 0, ended)
    goes_on = live & (ended == 0)
    tl.store(finished + rows, ended, mask=live)
    entry = (
        ring_drafts + ((tl.load(step_index) - queries) % sizes.ring_length) * sizes.ring_rows * K.DRAFT_COLUMNS + rows
    )
    limit = tl.load(slots.draft_limit + rows, mask=goes_on, other=0)
    if ADAPTS:
        verified = tl.load(entry + K.VERIFIED * sizes.ring_rows, mask=goes_on, other=0)
        accepted = tl.load(entry + K.ACCEPTED * sizes.ring_rows, mask=goes_on, other=0)
        higher = tl.minimum(2 * limit, sizes.most)
        lower = tl.minimum(tl.maximum((accepted + limit + 1) // 2, 2), sizes.most)
        limit = tl.where((verified > 0) & (limit > 0), tl.where(accepted >= verified, higher, lower), limit)
        tl.store(slots.draft_limit + rows, limit, mask=goes_on)
    position = tl.load(pre_step_seqlens + rows, mask=goes_on, other=0)
    room = tl.load(last_position + rows, mask=goes_on, other=0) - 1 - position
    found = tl.minimum(tl.load(slots.num_drafts + rows, mask=goes_on, other=0), limit)
    found = tl.maximum(tl.minimum(found, room), 0)
    tl.store(slots.num_drafts + rows, found, mask=live)
    tl.store(entry + K.FOUND * sizes.ring_rows, found, mask=live)
    tl.store(entry + K.MATCHED * sizes.ring_rows, tl.load(slots.match_lengths + rows, mask=goes_on, other=0), mask=live)
    tl.store(running, tl.sum(goes_on.to(tl.int32), axis=0))
    tl.store(step_entries, queries)


def settle_drafts_triton(
    finished: Tensor,
    running: Tensor,
    step_entries: Tensor,
    ring_drafts: Tensor,
    slots: DraftSlots,
    pre_step_seqlens: Tensor,
    last_position: Tensor,
    step_index: Tensor,
    live_rows: Tensor,
    *,
    queries: int,
    adapts: bool,
) -> None:
    """Launch the kernel; see `settle_drafts`."""
    ring_length, _, ring_rows = ring_drafts.shape
    _settle_drafts_kernel[(1,)](
        finished,
        running,
        step_entries,
        ring_drafts,
        slots,
        pre_step_seqlens,
        last_position,
        step_index,
        live_rows,
        DraftSizes(slots.drafts.shape[1], ring_length, ring_rows),
        queries,
        ADAPTS=adapts,
        K=CONSTANTS,
        ROWS=triton.next_power_of_2(ring_rows),
        num_warps=4,
    )


@operator(triton_version=settle_drafts_triton, is_compiled=True, constants=CONSTANTS._asdict())
def settle_drafts(
    finished: Written[Int32],
    running: Written[Int32],
    step_entries: Written[Int32],
    ring_drafts: Written[Int32],
    slots: Written[DraftSlots],
    pre_step_seqlens: Int32,
    last_position: Int32,
    step_index: Int64,
    live_rows: Int32,
    *,
    queries: int,
    adapts: bool,
) -> None:
    """Make the rows ready for the next step, whose drafts have been written.

    Args:
        finished: int32 [b]; HELD becomes 0.
        running: int32 [1], live rows that are not finished.
        step_entries: int32 [1], gets `queries`: entries of the rings that a step of this kind takes.
        ring_drafts: int32 [R, DRAFT_COLUMNS, b_max]; FOUND and MATCHED of the step's entry get the next step's drafts
            and what speaks for them.
        slots: num_drafts becomes how many the next step takes; draft_limit changes where it adapts.
        pre_step_seqlens: int32 [b].
        last_position: int32 [b].
        step_index: int64 [1], behind the step's `queries` entries.
        live_rows: int32 [1].
        queries: of each row.
        adapts: whether draft_limit follows what is accepted.
    """
    entry, ended = ring_drafts[(int(step_index.item()) - queries) % ring_drafts.shape[0]], finished.numpy()
    most, still = slots.drafts.shape[1], 0
    for row in range(int(live_rows.item())):
        ended[row] = 0 if ended[row] == HELD else ended[row]
        found = 0
        if not ended[row]:
            still += 1
            limit, verified, accepted = (
                int(slots.draft_limit[row]),
                int(entry[VERIFIED, row]),
                int(entry[ACCEPTED, row]),
            )
            if adapts and verified > 0 and limit > 0:
                limit = min(2 * limit, most) if accepted >= verified else min(max((accepted + limit + 1) // 2, 2), most)
                slots.draft_limit[row] = limit
            room = int(last_position[row]) - 1 - int(pre_step_seqlens[row])
            found = max(min(int(slots.num_drafts[row]), limit, room), 0)
        slots.num_drafts[row] = found
        entry[FOUND, row] = found
        entry[MATCHED, row] = 0 if ended[row] else int(slots.match_lengths[row])
    running.fill_(still)
    step_entries.fill_(queries)
