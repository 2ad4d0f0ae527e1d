"""From rows with drafts to the queries of a pass: each a row of its own, over its sequence's pages.

The first query of a row is its token to feed, the others are its drafts. A query that a row has no draft for, and all
of dead rows, stand at position 0 of the trash page: nobody reads what becomes of them.
"""

from typing import NamedTuple

from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, Int64, Written
from ..sampling.sampling_slots import DEAD_TOKEN

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
