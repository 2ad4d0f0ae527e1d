"""Move whole rows of a contiguous cache when sequences change rows: plan on the device, then move in place.

Each row of a layer remembers the tag of the sequence whose tokens it holds (`owners`). A step names the tags that it
wants in each row. Where they agree, nothing moves, and that is found out on the device: a captured step stays right
for any later membership, and running it twice moves nothing twice.

A plan is int32: [number of moves, tokens to move, (to, from), (to, from), ...]. Moves run in order; row -1 is a
temporary of the mover, which breaks cycles.
"""

import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Written, operator

PLAN_HEADER = 2
_TEMPORARY = -1
_TILE = 16
_MOVE_BLOCK = 1024
_MOVE_PROGRAMS = 528  # a few waves on any chip; each walks its share of a row
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plan_words(rows: int) -> int:
    """Return the int32 words that a plan for so many rows may take: a move each, and one more for each cycle."""
    return PLAN_HEADER + 2 * (rows + rows // 2)


# One program plans all moves. It reads 2 * rows tags, and nothing more where they agree; else it matches tags with
# owners, tile by tile, and puts the moves in an order in which no row is overwritten before it was read: from a row
# that waits it walks to a row that reads it, until nobody reads the row, which can then be written. A walk that comes
# back to its start is a cycle: the start is saved in the temporary.
@triton.jit
def _plan_row_moves_kernel(
    plan, owners, tags, origins, cu_seqlens_q, cu_seqlens_kv, rows, ROWS: tl.constexpr, TILE: tl.constexpr
):
    i = tl.arange(0, ROWS)
    inside = i < rows
    tag = tl.load(tags + i, mask=inside, other=0)
    changed = tl.sum((tag != tl.load(owners + i, mask=inside, other=0)).to(tl.int32), axis=0)
    count = 0
    bound = 0
    if changed > 0:
        origin = tl.load(origins + i, mask=inside, other=0)
        source = tl.full([ROWS], -1, tl.int32)
        copied = tl.full([ROWS], -1, tl.int32)
        for first in range(0, ROWS, TILE):
            j = first + tl.arange(0, TILE)
            owner = tl.load(owners + j, mask=j < rows, other=0)[None, :]
            named = owner > 0
            source = tl.maximum(source, tl.max(tl.where(named & (owner == tag[:, None]), j[None, :], -1), axis=1))
            copied = tl.maximum(copied, tl.max(tl.where(named & (owner == origin[:, None]), j[None, :], -1), axis=1))
        source = tl.where(source >= 0, source, copied)
        pending = ((source >= 0) & (source != i) & inside).to(tl.int32)
        after = tl.load(cu_seqlens_kv + 1 + i, mask=inside, other=0) - tl.load(cu_seqlens_kv + i, mask=inside, other=0)
        step = tl.load(cu_seqlens_q + 1 + i, mask=inside, other=0) - tl.load(cu_seqlens_q + i, mask=inside, other=0)
        bound = tl.max(tl.where(pending > 0, after - step, 0), axis=0)
        left = tl.sum(pending, axis=0)
        walking = 0
        start = 0
        current = 0
        while left > 0:
            # whoever waits for the temporary comes first, so that there is never need for two
            key = tl.where(pending > 0, tl.where(source == -1, i, i + ROWS), 2 * ROWS)
            picked = tl.min(key, axis=0) % ROWS
            current = tl.where(walking > 0, current, picked)
            start = tl.where(walking > 0, start, picked)
            reader = tl.max(tl.where((pending > 0) & (source == current), i, -1), axis=0)
            free = reader < 0
            closed = reader == start
            read_from = tl.sum(tl.where(i == current, source, 0), axis=0)
            emits = free | closed
            tl.store(plan + 2 + 2 * count, tl.where(free, current, -1), mask=emits)
            tl.store(plan + 3 + 2 * count, tl.where(free, read_from, start), mask=emits)
            count += emits.to(tl.int32)
            source = tl.where(closed & (source == start), -1, source)
            pending = tl.where(free & (i == current), 0, pending)
            left -= free.to(tl.int32)
            waits = tl.max(tl.where(i == read_from, pending, 0), axis=0)
            walking = tl.where(free, waits, 1)
            current = tl.where(free, read_from, tl.where(closed, start, reader))
            start = tl.where(free, read_from, start)
        tl.debug_barrier()
        tl.store(owners + i, tag, mask=inside)
    tl.store(plan, count)
    tl.store(plan + 1, bound)


# One program moves its columns of all rows, in the order of the plan: it reads and writes moves * columns * itemsize
# bytes. No two programs touch the same column, so nothing is overwritten before it was read.
@triton.jit
def _move_rows_kernel(k_cache, v_cache, plan, max_length, token_k, token_v, BLOCK: tl.constexpr):
    count = tl.load(plan)
    if count > 0:
        length = tl.minimum(tl.load(plan + 1), max_length).to(tl.int64)
        values = tl.program_id(1) == 1
        token = tl.where(values, token_v, token_k).to(tl.int64)
        k_end = tl.where(values, 0, length * token)
        v_end = tl.where(values, length * token, 0)
        for first in range(tl.program_id(0) * BLOCK, length * token, tl.num_programs(0) * BLOCK):
            column = first + tl.arange(0, BLOCK)
            saved = tl.zeros([BLOCK], k_cache.dtype.element_ty)
            for move in range(count):
                to = tl.load(plan + 2 + 2 * move).to(tl.int64)
                origin = tl.load(plan + 3 + 2 * move).to(tl.int64)
                read = column + origin * max_length * token
                write = column + to * max_length * token
                moved = tl.load(k_cache + read, mask=column < tl.where(origin < 0, 0, k_end), other=0)
                moved += tl.load(v_cache + read, mask=column < tl.where(origin < 0, 0, v_end), other=0)
                moved = tl.where(origin < 0, saved, moved)
                saved = tl.where(to < 0, moved, saved)
                tl.store(k_cache + write, moved, mask=column < tl.where(to < 0, 0, k_end))
                tl.store(v_cache + write, moved, mask=column < tl.where(to < 0, 0, v_end))


def plan_row_moves_triton(
    plan: Tensor, owners: Tensor, tags: Tensor, origins: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor
) -> None:
    """Launch the kernel; see `plan_row_moves`."""
    rows = owners.shape[0]
    block = max(triton.next_power_of_2(rows), _TILE)
    _plan_row_moves_kernel[(1,)](
        plan, owners, tags, origins, cu_seqlens_q, cu_seqlens_kv, rows, ROWS=block, TILE=_TILE, num_warps=4
    )


def move_rows_triton(k_cache: Tensor, v_cache: Tensor, plan: Tensor) -> None:
    """Launch the kernel; see `move_rows`."""
    as_int = _INT_OF_SIZE[k_cache.element_size()]
    token_k, token_v = k_cache[0, 0].numel(), v_cache[0, 0].numel()
    programs = min(triton.cdiv(k_cache.shape[1] * max(token_k, token_v), _MOVE_BLOCK), _MOVE_PROGRAMS)
    _move_rows_kernel[(programs, 2)](
        k_cache.view(as_int),
        v_cache.view(as_int),
        plan,
        k_cache.shape[1],
        token_k,
        token_v,
        BLOCK=_MOVE_BLOCK,
        num_warps=4,
    )


def _ordered(source: dict[int, int]) -> list[tuple[int, int]]:
    """Order the moves `row <- source[row]` so that each row is read before it is written."""
    readers: dict[int, int] = {}
    for origin in source.values():
        readers[origin] = readers.get(origin, 0) + 1
    moves: list[tuple[int, int]] = []
    waiting = dict(source)
    ready = [row for row in waiting if not readers.get(row)]
    while waiting:
        if not ready:  # only cycles are left, each row of them with one reader
            saved = next(iter(waiting))
            moves.append((_TEMPORARY, saved))
            reader = next(row for row, origin in waiting.items() if origin == saved)
            waiting[reader] = _TEMPORARY
            ready.append(saved)
        row = ready.pop()
        origin = waiting.pop(row)
        moves.append((row, origin))
        if origin != _TEMPORARY:
            readers[origin] -= 1
            if not readers[origin] and origin in waiting:
                ready.append(origin)
    return moves


@operator(triton_version=plan_row_moves_triton)
def plan_row_moves(
    plan: Written[Int32],
    owners: Written[Int32],
    tags: Int32,
    origins: Int32,
    cu_seqlens_q: Int32,
    cu_seqlens_kv: Int32,
) -> None:
    """Plan the moves that bring each row the tokens it is meant to have, and note the new owners.

    A row gets the tokens of the row whose owner is its tag, or else, for a fork, whose owner is its origin. A row
    whose tag is found nowhere is a new sequence and stays as it is.

    Args:
        plan: int32 [plan_words(rows)], written.
        owners: int32 [rows], tags of the tokens in each row; becomes `tags`.
        tags: int32 [rows], wanted; > 0 and unique, 0 for no sequence.
        origins: int32 [rows], the tag to copy from where the row's own is not found; 0 for none.
        cu_seqlens_q: int32 [rows + 1], sums of the step lengths.
        cu_seqlens_kv: int32 [rows + 1], sums of the lengths after the step; the tokens before the step are moved.
    """
    plan[:PLAN_HEADER] = 0
    if torch.equal(owners, tags):
        return
    row_of = {owner: row for row, owner in enumerate(owners.tolist()) if owner > 0}
    source: dict[int, int] = {}
    for row, (tag, origin) in enumerate(zip(tags.tolist(), origins.tolist(), strict=True)):
        found = row_of.get(tag, row_of.get(origin))
        if found is not None and found != row:
            source[row] = found
    if source:
        before = cu_seqlens_kv.diff() - cu_seqlens_q.diff()
        bound = max(int(before[row]) for row in source)
        moves = _ordered(source)
        plan[: PLAN_HEADER + 2 * len(moves)] = torch.tensor(
            [len(moves), bound, *(row for move in moves for row in move)], dtype=torch.int32
        )
    owners.copy_(tags)


@operator(triton_version=move_rows_triton)
def move_rows(k_cache: Written[Tensor], v_cache: Written[Tensor], plan: Int32) -> None:
    """Move rows in place as planned by `plan_row_moves`.

    Args:
        k_cache: [rows, max_seq, h, d_k], contiguous.
        v_cache: [rows, max_seq, h, d_v], contiguous.
        plan: int32, see the head of this file.
    """
    count, length = plan[:PLAN_HEADER].tolist()
    if not count:
        return
    moves = plan[PLAN_HEADER : PLAN_HEADER + 2 * count].view(count, 2).tolist()
    for cache in (k_cache, v_cache):
        saved = cache.new_empty(0)
        for to, origin in moves:
            moved = saved if origin == _TEMPORARY else cache[origin, :length]
            if to == _TEMPORARY:
                saved = moved.clone()
            else:
                cache[to, :length] = moved
