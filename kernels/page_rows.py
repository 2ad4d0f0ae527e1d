"""A row's keys or values in host memory, as one tensor: what the attention operators read on a CPU."""

from torch import Tensor


def row_tokens(cache: Tensor, pages: list[int], length: int) -> Tensor:
    """Return the first `length` tokens of a row, [length, heads, head_dim].

    A view where the row's pages follow one another in the pool, as they mostly do; else a copy of these pages alone.

    Args:
        cache: [pages, page_size, heads, head_dim], contiguous.
        pages: the row's pages, at least as many as `length` needs.
        length: tokens, >= 1.
    """
    page_size = cache.shape[1]
    count = -(-length // page_size)
    first = pages[0]
    if pages[count - 1] - first == count - 1 and pages[:count] == list(range(first, first + count)):
        return cache.flatten(0, 1).narrow(0, first * page_size, length)
    return cache[pages[:count]].flatten(0, 1).narrow(0, 0, length)
