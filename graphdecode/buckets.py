"""Ladders: the batch sizes and step shapes that have a graph, and the smallest one that fits a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from graphdecode.errors import ArgumentError

QUERY_WIDTHS = (2, 4, 8)  # queries per row of steps with drafts
MOST_DRAFTS = QUERY_WIDTHS[-1] - 1
KINDS = ("steps", "prompts", "mixed", "pooled")
HALVES = ("logits", "choose")


def auto_batch_sizes(max_batch_size: int, max_graphs: int) -> tuple[int, ...]:
    """Choose at most `max_graphs` batch sizes up to and including `max_batch_size`.

    Sizes are `k * 2^e` with small k: dense at small sizes, where a padded row costs most. Remaining graphs are for the
    smallest sizes of the next denser ladder.
    """
    if max_graphs >= max_batch_size:
        return tuple(range(1, max_batch_size + 1))
    chosen: set[int] = set()
    for bits in range(max_batch_size.bit_length() + 1):
        sizes = range(1, max_batch_size)
        ladder = {n for n in sizes if n % (1 << max(n.bit_length() - 1 - bits, 0)) == 0} | {max_batch_size}
        if len(ladder) > max_graphs and not chosen:  # fewer graphs than powers of two
            return tuple(sorted({round(max_batch_size ** (1 - i / max(max_graphs - 1, 1))) for i in range(max_graphs)}))
        if len(ladder) > max_graphs:
            chosen |= set(sorted(ladder - chosen)[: max_graphs - len(chosen)])
            break
        chosen = ladder
    return tuple(sorted(chosen))


class BucketLadder:
    """The ascending batch sizes that have a graph; `max_batch_size` is always one of them.

    `batch_sizes` may be in any order, with duplicates; an ArgumentError names one that is not in 1..max_batch_size.
    """

    def __init__(self, batch_sizes: Iterable[int], max_batch_size: int) -> None:
        _require_count(max_batch_size=max_batch_size)
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
        _require_count(max_graphs=max_graphs, max_batch_size=max_batch_size)
        return cls(auto_batch_sizes(max_batch_size, max_graphs), max_batch_size)

    def bucket_for(self, batch_size: int) -> int:
        """Return the smallest bucket for `batch_size` rows, in O(1); raises ArgumentError outside of the capacity."""
        if not _is_int(batch_size) or not 1 <= batch_size <= self.max_batch_size:
            raise ArgumentError(f"batch size must be in 1..max_batch_size={self.max_batch_size}, got {batch_size!r}")
        return self._bucket_of[batch_size]

    def worst_padding(self) -> tuple[int, float]:
        """Return the batch size with the largest share of padding in its bucket, and that share."""
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


def _require_count(**values: int) -> None:
    for name, value in values.items():
        if not _is_int(value) or value < 1:
            raise ArgumentError(f"{name} must be an integer >= 1, got {value!r}")


def query_widths(num_drafts: int | str) -> tuple[int, ...]:
    """Return the queries per row of steps with up to `num_drafts` drafts; "auto" means the maximum."""
    most = MOST_DRAFTS if isinstance(num_drafts, str) else num_drafts
    return tuple(width for width in QUERY_WIDTHS if width // 2 <= most)


class StepShape(NamedTuple):
    """The shape of a step: the key of the table of graphs."""

    rows: int  # decoding rows; 0 for a pass with only prompts
    queries: int = 1  # tokens of each row
    prompt_tokens: int = 0  # in the same pass
    part: str = "whole"  # or a half: "logits", or "choose", which samples after the host has computed masks
    has_adapters: bool = False  # whether any row has an adapter; else products skip adapters
    pools: bool = False  # a pass with only prompts also pools their hidden states

    @property
    def tokens(self) -> int:
        """Tokens of rows and prompts together."""
        return self.rows * self.queries + self.prompt_tokens

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if not self.prompt_tokens:
            return "steps"
        return "mixed" if self.rows else "pooled" if self.pools else "prompts"

    @property
    def halves(self) -> tuple[StepShape, StepShape]:
        """The shapes of the step's halves."""
        return self._replace(part=HALVES[0]), self._replace(part=HALVES[1])

    def holds(self, requested: StepShape) -> bool:
        """Whether a step can be padded to this shape: rows and prompt tokens suffice, and all else is equal."""
        return (
            self.rows >= requested.rows
            and self.prompt_tokens >= requested.prompt_tokens
            and self.kind == requested.kind
            and self == requested._replace(rows=self.rows, prompt_tokens=self.prompt_tokens)
        )

    def __str__(self) -> str:
        if not self.rows:
            suffix = ", adapters" * self.has_adapters + ", pooled" * self.pools
            return f"the pass of {self.prompt_tokens} prompt tokens{suffix}"
        beside = f" + {self.prompt_tokens} prompt tokens" if self.prompt_tokens else ""
        suffix = ("" if self.part == "whole" else f", {self.part}") + ", adapters" * self.has_adapters
        return f"bucket {self.rows}" + f" x {self.queries}" * (self.queries > 1) + beside + suffix


class ShapeLadder:
    """The shapes that have a graph, sorted by tokens; an ArgumentError if `max_batch_size` rows lack one.

    `startup_tokens`: shapes with more prompt tokens are captured at their first use; None: there are none.
    """

    def __init__(self, shapes: Iterable[StepShape], max_batch_size: int, *, startup_tokens: int | None = None) -> None:
        self._startup_tokens = startup_tokens
        self.shapes: tuple[StepShape, ...] = tuple(sorted(set(shapes), key=lambda shape: (shape.tokens, shape)))
        self.max_batch_size = max_batch_size
        self.queries = tuple(sorted({shape.queries for shape in self.of("steps")}))
        self._fits: dict[StepShape, StepShape] = {}
        for queries in self.queries:
            if StepShape(max_batch_size, queries) not in self.shapes:
                raise ArgumentError(f"max_batch_size={max_batch_size} has no shape of {queries} queries")

    def of(self, *kinds: str) -> list[StepShape]:
        """Return the shapes of whole steps of some kinds."""
        return [shape for shape in self.shapes if shape.kind in kinds and shape.part == "whole"]

    @property
    def at_startup(self) -> list[StepShape]:
        """The shapes captured at startup: whole steps, and mixed ones or else passes with only prompts."""
        shapes, most = self.of("steps", "mixed" if self.of("mixed") else "prompts"), self._startup_tokens
        return [shape for shape in shapes if most is None or shape.prompt_tokens <= most]

    def fit(self, requested: StepShape) -> StepShape | None:
        """Return the smallest shape for a step; None if it has too many prompt tokens.

        Raises `ArgumentError` if it has too many rows, or another number of queries than any shape.
        """
        fitting = self._fits.get(requested)
        if fitting is None:
            fitting = next(self.holding(requested), None)
            if fitting is not None:
                self._fits[requested] = fitting
        return fitting

    def holding(self, requested: StepShape) -> Iterator[StepShape]:
        """Yield the shapes that a step can run in, the smallest first; see `fit`."""
        rows, queries, tokens = requested.rows, requested.queries, requested.prompt_tokens
        if not 0 <= rows <= self.max_batch_size or tokens < 0 or rows + tokens < 1:
            raise ArgumentError(f"batch size must be in 1..max_batch_size={self.max_batch_size}, got {rows!r}")
        if queries not in self.queries:
            raise ArgumentError(f"queries must be one of {list(self.queries)}, got {queries!r}")
        if requested.part not in {shape.part for shape in self.shapes}:
            raise ArgumentError(f"no step runs in part {requested.part!r}")
        return (shape for shape in self.shapes if shape.holds(requested))

    def without(self, kind: str) -> ShapeLadder:
        """Return the ladder without one kind."""
        shapes = (shape for shape in self.shapes if shape.kind != kind)
        return ShapeLadder(shapes, self.max_batch_size, startup_tokens=self._startup_tokens)
