"""End a step with several queries a row: rows that were held go on, and the next step's drafts are counted.

A draft is fed at its position, and the token behind it is sampled there: none is taken whose token would stand past
the row's last position. Where the limits adapt, one that proved too low doubles, and one that proved too high goes
half the way down to what was accepted, but not below two.
"""

from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, Int64, Written
from .draft_slots import ACCEPTED, CONSTANTS, FOUND, HELD, MATCHED, VERIFIED, DraftSizes, DraftSlots


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
