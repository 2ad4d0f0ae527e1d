"""Move whole rows of a contiguous cache when sequences change rows: plan on the device, then move in place.

Each row of a layer has the tag of the sequence whose tokens it holds (`owners`). A step has the required tag of each
row. Rows with equal tags do not move. The comparison is on the device: a captured step stays valid when the batch
changes, and running it twice moves nothing twice.

A plan is int32: [number of rows that move, tokens to move, each row's source or -1].
"""

import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Written, operator

PLAN_HEADER = 2
_TILE = 16
_MOVE_TILE = 4096  # elements per program at a time
_MOST_COLUMNS = 1024
_MOVE_PROGRAMS = 528  # a few waves on any GPU; each moves its share of a row
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plan_words(rows: int) -> int:
    """Return the int32 words of a plan for so many rows."""
    return PLAN_HEADER + rows


# One program plans all moves. It reads 2 * rows tags; if they differ it matches tags with owners, tile by tile.
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
        moves = (source >= 0) & (source != i) & inside
        after = tl.load(cu_seqlens_kv + 1 + i, mask=inside, other=0) - tl.load(cu_seqlens_kv + i, mask=inside, other=0)
        step = tl.load(cu_seqlens_q + 1 + i, mask=inside, other=0) - tl.load(cu_seqlens_q + i, mask=inside, other=0)
        count = tl.sum(moves.to(tl.int32), axis=0)
        bound = tl.max(tl.where(moves, after - step, 0), axis=0)
        tl.store(plan + 2 + i, tl.where(moves, source, -1), mask=inside)
        tl.debug_barrier()  # all owners are read before one of them is written
        tl.store(owners + i, tag, mask=inside)
    tl.store(plan, count)
    tl.store(plan + 1, bound)


@triton.jit
def _move_columns(cache, source, rows, length, row_size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    to = tl.arange(0, ROWS).to(tl.int64)
    moves = (source >= 0) & (to < rows)
    for first in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = moves[:, None] & (column < length)[None, :]
        moved = tl.load(cache + source[:, None] * row_size + column[None, :], mask=mask, other=0)
        tl.debug_barrier()  # all rows are read before one of them is written
        tl.store(cache + to[:, None] * row_size + column[None, :], moved, mask=mask)


# One program moves its columns of all rows of the keys, or of the values: it reads and writes
# moves * columns * itemsize bytes. No two programs touch the same column.
@triton.jit
def _move_rows_kernel(
    k_cache, v_cache, plan, rows, max_length, token_k, token_v, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    if tl.load(plan) > 0:
        i = tl.arange(0, ROWS)
        source = tl.load(plan + 2 + i, mask=i < rows, other=-1).to(tl.int64)
        length = tl.minimum(tl.load(plan + 1), max_length).to(tl.int64)
        whole = max_length.to(tl.int64)
        if tl.program_id(1) == 0:
            _move_columns(k_cache, source, rows, length * token_k, whole * token_k, ROWS, BLOCK)
        else:
            _move_columns(v_cache, source, rows, length * token_v, whole * token_v, ROWS, BLOCK)


def plan_row_moves_triton(plan, owners, tags, origins, cu_seqlens_q, cu_seqlens_kv) -> None:
    """Launch the kernel; see `plan_row_moves`."""
    rows = owners.shape[0]
    block = max(triton.next_power_of_2(rows), _TILE)
    _plan_row_moves_kernel[(1,)](
        plan, owners, tags, origins, cu_seqlens_q, cu_seqlens_kv, rows, ROWS=block, TILE=_TILE, num_warps=4
    )


def move_rows_triton(k_cache, v_cache, plan) -> None:
    """Launch the kernel; see `move_rows`."""
    as_int = _INT_OF_SIZE[k_cache.element_size()]
    rows, max_length = k_cache.shape[:2]
    token_k, token_v = k_cache[0, 0].numel(), v_cache[0, 0].numel()
    padded = triton.next_power_of_2(rows)
    block = min(max(_MOVE_TILE // padded, 8), _MOST_COLUMNS)
    programs = min(triton.cdiv(max_length * max(token_k, token_v), block), _MOVE_PROGRAMS)
    _move_rows_kernel[(programs, 2)](
        k_cache.view(as_int), v_cache.view(as_int), plan, rows, max_length, token_k, token_v,
        ROWS=padded, BLOCK=block, num_warps=4,
    )  # fmt: skip


@operator(triton_version=plan_row_moves_triton)
def plan_row_moves(
    plan: Written[Int32], owners: Written[Int32], tags: Int32, origins: Int32, cu_seqlens_q: Int32, cu_seqlens_kv: Int32
) -> None:
    """Plan the moves that give each row its tokens, and write the new owners.

    A row gets the tokens of the row whose owner is its tag, or else, for a fork, whose owner is its origin. A row whose
    tag is not found is a new sequence and unchanged.

    Args:
        plan: int32 [plan_words(rows)], written.
        owners: int32 [rows], tags of the tokens in each row; becomes `tags`.
        tags: int32 [rows], required tags; > 0 and unique, 0: no sequence.
        origins: int32 [rows], the tag to copy from if the row's own is not found; 0: none.
        cu_seqlens_q: int32 [rows + 1], sums of the step lengths.
        cu_seqlens_kv: int32 [rows + 1], sums of the lengths after the step; the tokens before the step are moved.
    """
    plan[:PLAN_HEADER] = 0
    if torch.equal(owners, tags):
        return
    row_of = {owner: row for row, owner in enumerate(owners.tolist()) if owner > 0}
    source = [row_of.get(tag, row_of.get(o, -1)) for tag, o in zip(tags.tolist(), origins.tolist(), strict=True)]
    sources = torch.tensor(source, dtype=torch.int32)
    sources[sources == torch.arange(len(source))] = -1
    plan[PLAN_HEADER:] = sources
    if (sources >= 0).any():
        plan[0] = (sources >= 0).sum()
        plan[1] = (cu_seqlens_kv.diff() - cu_seqlens_q.diff())[sources >= 0].max()
    owners.copy_(tags)


@operator(triton_version=move_rows_triton)
def move_rows(k_cache: Written[Tensor], v_cache: Written[Tensor], plan: Int32) -> None:
    """Move rows in place as planned by `plan_row_moves`.

    Args:
        k_cache: [rows, max_seq, h, d_k], contiguous.
        v_cache: [rows, max_seq, h, d_v], contiguous.
        plan: int32 [plan_words(rows)].
    """
    count, length = plan[:PLAN_HEADER].tolist()
    if not count:
        return
    source = plan[PLAN_HEADER:].long()
    to = (source >= 0).nonzero().squeeze(1)
    for cache in (k_cache, v_cache):
        bits = cache.view(_INT_OF_SIZE[cache.element_size()])[:, :length]
        bits[to] = bits[source[to]]
