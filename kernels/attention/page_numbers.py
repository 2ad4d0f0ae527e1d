"""A check of page numbers that are in host memory: rows read pages of the pool, as many as they have."""

import numpy as np

from ..native.registration import Int32, operator


def _unread(table, indptr, lengths, page_size, num_pages, window) -> None:
    """Check nothing: a GPU is not waited for."""


@operator(triton_version=_unread)
def check_page_numbers(
    table: Int32, indptr: Int32 | None, lengths: Int32, page_size: int, num_pages: int, window: int
) -> None:
    """Raise ValueError for a page number outside the pool, where the numbers can be read without waiting.

    Args:
        table: int32, pages of each row: [rows, pages], or with `indptr` the concatenation of all rows' pages.
        indptr: int32 [rows + 1], where each row begins in `table`; None for a dense table.
        lengths: int32 [rows], tokens of each row, or with `indptr` those in its last page.
        page_size: tokens a page.
        num_pages: pages of the pool.
        window: the newest tokens of a row that are read; 0: all.

    Raises:
        ValueError: on a CPU, a number outside 0..num_pages - 1, or a length that a row of a dense table does not hold.
    """
    tokens, numbers = lengths.numpy().astype(np.int64), table.numpy()
    if indptr is None:
        most = numbers.shape[1] * page_size
        if tokens.size and not 0 <= tokens.min() <= tokens.max() <= most:
            raise ValueError(f"seq_lens must be in 0..{most}, what the pages of a row hold, got {tokens.tolist()}")
        counts = -(-tokens // page_size)
        page_index = np.broadcast_to(np.arange(numbers.shape[1]), numbers.shape)
        counts, first = counts[:, None], tokens[:, None] - window
    else:
        starts = indptr.numpy().astype(np.int64)
        of_row = np.diff(starts)
        first = np.repeat((of_row - 1) * page_size + tokens - window, of_row)
        numbers = numbers[: len(first)]
        page_index, counts = np.arange(len(first)) - np.repeat(starts[:-1], of_row), np.repeat(of_row, of_row)
    read = numbers[(page_index < counts) & (page_index >= (first // page_size if window else 0))]
    if read.size and not 0 <= read.min() <= read.max() < num_pages:
        name = "block_tables" if indptr is None else "indices"
        raise ValueError(f"pages must be in 0..{num_pages - 1}, got {read.min()}..{read.max()} in {name}")
