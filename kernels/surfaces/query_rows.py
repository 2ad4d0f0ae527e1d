"""Rows of several queries as rows of one query each, for the plan of decode attention over latent keys.

A query's heads all read the same latent keys, and fill a program's tile: queries of one row gain nothing together.
"""

import numpy as np

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Written, operator


# One program finds the row of one query, among all rows' ends, 4 bytes each in L2, and writes two int32.
@triton.jit(do_not_specialize=["rows", "width"])
def _query_rows_kernel(
    starts, lengths, q_indptr, kv_indptr, kv_lens, rows, width, page_size, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):
    query = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    ends = tl.load(q_indptr + 1 + index, mask=index < rows, other=2147483647)
    row = tl.sum((ends <= query).to(tl.int32))
    in_range = row < rows
    begin = row * width
    end = begin + width
    if kv_indptr is not None:
        begin = tl.load(kv_indptr + row, mask=in_range, other=0)
        end = tl.load(kv_indptr + row + 1, mask=in_range, other=0)
    length = tl.load(kv_lens + row, mask=in_range, other=0)
    length = tl.minimum(length.to(tl.int64), (end - begin).to(tl.int64) * page_size)
    if CAUSAL:
        length -= tl.load(q_indptr + row + 1, mask=in_range, other=0) - 1 - query
    length = tl.where(in_range, tl.maximum(length, 0), 0)
    tl.store(starts + query, tl.where(in_range, begin, 0).to(tl.int32))
    tl.store(lengths + query, length.to(tl.int32))


def query_rows_triton(starts, lengths, q_indptr, kv_indptr, kv_lens, width, page_size, causal) -> None:
    """Launch the kernel; see `query_rows`."""
    rows = q_indptr.shape[0] - 1
    block = triton.next_power_of_2(rows)
    _query_rows_kernel[(starts.shape[0],)](
        starts, lengths, q_indptr, kv_indptr, kv_lens, rows, width, page_size, CAUSAL=causal, BLOCK=block,
        num_warps=1 if rows <= 256 else 4,
    )  # fmt: skip


def check_query_rows(
    q_indptr: np.ndarray, kv_indptr: np.ndarray | None, kv_lens: np.ndarray, pages: int, page_size: int
) -> None:
    """Raise ValueError for lists that no rows could have; `pages`: of all rows, or without kv_indptr of one."""
    for name, indptr in (("qo_indptr", q_indptr), ("kv_indptr", kv_indptr)):
        if indptr is not None and (indptr[0] != 0 or (np.diff(indptr) < 0).any()):
            raise ValueError(f"{name} must rise from 0, got {indptr.tolist()}")
    if kv_indptr is not None and kv_indptr[-1] > pages:
        raise ValueError(f"kv_indptr must end at most at the {pages} pages of kv_indices, got {kv_indptr.tolist()}")
    most = (pages if kv_indptr is None else np.diff(kv_indptr)) * page_size
    if ((kv_lens < 0) | (kv_lens > most)).any():
        raise ValueError(f"kv_len_arr must be in 0..{most}, what the rows' pages hold, got {kv_lens.tolist()}")


@operator(triton_version=query_rows_triton)
def query_rows(
    starts: Written[Int32],
    lengths: Written[Int32],
    q_indptr: Int32,
    kv_indptr: Int32 | None,
    kv_lens: Int32,
    *,
    width: int,
    page_size: int,
    causal: bool,
) -> None:
    """Write where the pages of each query's row begin, and how many keys the query sees.

    Args:
        starts: int32 [queries], written: 0 for those behind the rows' last.
        lengths: int32 [queries], written: the same.
        q_indptr: int32 [rows + 1], where each row's queries begin, its newest tokens.
        kv_indptr: int32 [rows + 1], where each row's pages begin; None: each row has `width` of them.
        kv_lens: int32 [rows], tokens of each row, those of its queries included; no more than its pages hold are seen.
        width: pages of a row of a table; with kv_indptr, pages that are listed in all.
        page_size: tokens a page.
        causal: whether a query sees no later token than its own, or else the whole row.

    Raises:
        ValueError: on a CPU, lists that cannot be. A GPU is not waited for.
    """
    ends, lens = q_indptr.numpy(), kv_lens.numpy().astype(np.int64)
    first = None if kv_indptr is None else kv_indptr.numpy()
    check_query_rows(ends, first, lens, width, page_size)
    queries = np.arange(starts.shape[0])
    row = np.searchsorted(ends[1:], queries, side="right")
    in_range = row < lens.shape[0]
    row = np.where(in_range, row, 0)
    begins = row * width if first is None else first[row]
    num_keys = lens[row] - (ends[row + 1] - 1 - queries if causal else 0)
    starts.numpy()[:] = np.where(in_range, begins, 0)
    lengths.numpy()[:] = np.where(in_range, np.maximum(num_keys, 0), 0)
