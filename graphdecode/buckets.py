"""Bucket ladders: which batch sizes get a graph of their own, and which bucket a batch runs in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphdecode.errors import ArgumentError

QUERY_WIDTHS = (2, 4, 8)  # queries of a row that a step may have, beside 1: the other axis of the ladder
MOST_DRAFTS = QUERY_WIDTHS[-1] - 1


def auto_batch_sizes(max_batch_size: int, max_graphs: int) -> tuple[int, ...]:
    """Choose at most `max_graphs` batch sizes up to and including `max_batch_size`.

    Sizes are `k * 2^e` with a k of few bits: dense at small sizes, where one padded row weighs most, then in
    growing steps that stay multiples of the powers of two that matrix units like. What is left of the number of
    graphs goes to the smallest sizes of the next denser ladder.
    """
    if max_graphs >= max_batch_size:
        return tuple(range(1, max_batch_size + 1))
    chosen: set[int] = set()
    for mantissa_bits in range(max_batch_size.bit_length() + 1):
        ladder = _sizes_with_bits(max_batch_size, mantissa_bits)
        if len(ladder) > max_graphs:
            if not chosen:
                return _geometric_sizes(max_batch_size, max_graphs)
            spare = max_graphs - len(chosen)
            return tuple(sorted(chosen | set(sorted(ladder - chosen)[:spare])))
        chosen = ladder
    return tuple(sorted(chosen))


def _sizes_with_bits(max_batch_size: int, mantissa_bits: int) -> set[int]:
    sizes = {max_batch_size}
    for size in range(1, max_batch_size):
        exponent = max(size.bit_length() - 1 - mantissa_bits, 0)
        if size % (1 << exponent) == 0:
            sizes.add(size)
    return sizes


def _geometric_sizes(max_batch_size: int, count: int) -> tuple[int, ...]:
    if count == 1:
        return (max_batch_size,)
    return tuple(sorted({round(max_batch_size ** (i / (count - 1))) for i in range(count)}))


class BucketLadder:
    """The ascending batch sizes that have a graph; `max_batch_size` is always one of them.

    Args:
        batch_sizes: any order, duplicates allowed, each in 1..max_batch_size.
        max_batch_size: the capacity in rows; added where it is missing, so that no batch size is without a bucket.

    Raises:
        ValueError: a size is no integer or outside the range.
    """

    def __init__(self, batch_sizes: Iterable[int], max_batch_size: int) -> None:
        if not _is_int(max_batch_size) or max_batch_size < 1:
            raise ArgumentError(f"max_batch_size must be an integer >= 1, got {max_batch_size!r}")
        sizes = list(batch_sizes)
        for size in sizes:
            if not _is_int(size) or not 1 <= size <= max_batch_size:
                raise ArgumentError(f"batch_sizes must be integers in 1..max_batch_size={max_batch_size}, got {size!r}")
        self.sizes: tuple[int, ...] = tuple(sorted({*sizes, max_batch_size}))
        self.max_batch_size = max_batch_size
        self._bucket_of: list[int] = [0]
        for size in self.sizes:
            self._bucket_of.extend([size] * (size - len(self._bucket_of) + 1))

    @classmethod
    def auto(cls, max_batch_size: int, max_graphs: int = 16) -> BucketLadder:
        """Return the default ladder; see `auto_batch_sizes`."""
        if not _is_int(max_graphs) or max_graphs < 1:
            raise ArgumentError(f"max_graphs must be an integer >= 1, got {max_graphs!r}")
        if not _is_int(max_batch_size) or max_batch_size < 1:
            raise ArgumentError(f"max_batch_size must be an integer >= 1, got {max_batch_size!r}")
        return cls(auto_batch_sizes(max_batch_size, max_graphs), max_batch_size)

    def bucket_for(self, batch_size: int) -> int:
        """Return the smallest bucket that holds `batch_size` rows, in O(1).

        Raises:
            ValueError: `batch_size` is outside 1..max_batch_size.
        """
        if not _is_int(batch_size) or not 1 <= batch_size <= self.max_batch_size:
            raise ArgumentError(f"batch size must be in 1..max_batch_size={self.max_batch_size}, got {batch_size!r}")
        return self._bucket_of[batch_size]

    def worst_padding(self) -> tuple[int, float]:
        """Return the batch size that wastes the largest share of its bucket's rows, and that share."""
        shares = {n: (self._bucket_of[n] - n) / self._bucket_of[n] for n in range(1, self.max_batch_size + 1)}
        worst = max(shares, key=lambda n: shares[n])
        return worst, shares[worst]

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketLadder) and other.sizes == self.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        return f"BucketLadder({list(self.sizes)})"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def query_widths(num_drafts: int | str) -> tuple[int, ...]:
    """Return the queries of a row that steps with so many drafts at most need; "auto" means as many as there can be."""
    most = MOST_DRAFTS if isinstance(num_drafts, str) else num_drafts
    return tuple(width for width in QUERY_WIDTHS if width // 2 <= most)
