"""Accept drafts while they are what was sampled: run behind `advance` for each query of a step.

A step with several queries a row samples them one after another, and `advance` takes each token as if it came from a
step of its own: counts, stop ids, lengths and the ring see nothing but tokens. Between two of them the drafts are
judged: a row whose draft was not what was sampled, or that has none, is held, so that what follows passes it by.
"""

from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, Int64, Written
from .draft_slots import ACCEPTED, CONSTANTS, HELD, VERIFIED, DraftSizes


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
