"""Reports of captured graphs, bucket by bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any

from graphdecode.buckets import StepShape
from graphdecode.graphs.step_graph import CapturedStep

_NAMES_SHOWN = 8


@dataclass
class BucketReport:
    """One bucket's graph."""

    bucket: int  # rows
    state: str  # "captured", "waiting" (for its first use, or for `capture()`), or "eager"
    nodes: Counter[str] = field(default_factory=Counter)  # kind of node or operator -> count
    kernels: Counter[str] = field(default_factory=Counter)  # name of kernel or operator -> count
    capture_ms: float = 0.0  # the next five: see `StepGraph`
    instantiate_ms: float = 0.0
    pool_bytes: int = 0
    driver_bytes: int = 0
    moved_bytes: int = 0
    replays: int = 0  # steps that ran, in single replays and in loops
    live_rows: int = 0  # sum over these steps
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)  # by weight: the chosen product, its figures
    error: str | None = None  # why the capture failed, if the bucket stays eager
    loop: str | None = None  # `StepLoop.kind`
    loop_reason: str | None = None  # on a GPU: why it is not "while"
    launches: int = 0  # by the loop
    eager_runs: int = 0  # steps without a graph
    queries: int = 1  # per row
    along: int = 0  # prompt tokens of a mixed step

    @classmethod
    def of(cls, shape: StepShape, state: str) -> BucketReport:
        """Return the empty report of a shape; the bucket of a pass with only prompts is its number of tokens."""
        along = shape.prompt_tokens if shape.rows else 0
        return cls(shape.rows or shape.prompt_tokens, state, queries=shape.queries, along=along)

    @property
    def name(self) -> str:
        """Rows, "x" queries if several, "+" prompt tokens."""
        name = str(self.bucket) if self.queries == 1 else f"{self.bucket}x{self.queries}"
        return f"{name}+{self.along}" if self.along else name

    @property
    def padding_share(self) -> float:
        """The share of replayed rows that were padding."""
        return 1.0 - self.live_rows / (self.bucket * self.replays) if self.replays else 0.0

    def take(self, ready: CapturedStep, *, is_whole: bool) -> None:
        """Add the figures of a shape's graphs; times and memory of the halves are added to the whole's."""
        for graph, name in product(ready.graphs, ("capture_ms", "instantiate_ms", "pool_bytes", "driver_bytes")):
            setattr(self, name, getattr(self, name) + getattr(graph, name))
        if ready.loop is not None:
            self.loop, self.loop_reason = ready.loop.kind, ready.loop.reason
        if is_whole:
            self.state = "captured" if ready.graphs else "eager"
        if is_whole and ready.graphs:
            graph, self.error = ready.graphs[0], None
            self.nodes, self.kernels = graph.kinds, Counter(node.name for node in graph.nodes)
            self.moved_bytes = graph.moved_bytes

    def as_dict(self) -> dict:
        """Return the report as plain data."""
        fields = {**vars(self), "nodes": dict(self.nodes), "kernels": dict(self.kernels)}
        return fields | {"padding_share": self.padding_share}


@dataclass
class GraphReport:
    """The buckets of a graph table, smallest first."""

    backend: str  # "cuda", "recorded" or "eager"
    buckets: list[BucketReport]
    computed_in: str = ""  # dtype, weight forms and instruction set

    def as_dict(self) -> dict:
        """Return the report as plain data, for JSON."""
        buckets = [bucket.as_dict() for bucket in self.buckets]
        return {"backend": self.backend, "computed_in": self.computed_in, "buckets": buckets}

    def __str__(self) -> str:
        lines = [
            f"{len(self.buckets)} buckets, {self.backend} backend" + f", {self.computed_in}" * bool(self.computed_in),
            f"{'bucket':>7} {'state':>9} {'nodes':>6} {'capture ms':>11} {'of it driver':>12} {'pool MiB':>9} "
            f"{'driver MiB':>11} {'moved MiB':>10} {'replays':>8} {'padding':>8}",
        ]
        lines += [self._row(bucket) for bucket in self.buckets]
        if any(bucket.moved_bytes for bucket in self.buckets):
            lines.append("moved MiB is an upper bound: caches and tables count whole, whatever a step reads of them")
        for kernels, buckets in self._alike(lambda bucket: bucket.kernels):
            shown = kernels.most_common(_NAMES_SHOWN)
            lines += [f"most often in bucket {buckets}:", *(f"{count:>7} {name}" for name, count in shown)]
            if len(kernels) > len(shown):
                lines.append(f"{'':>7} and {len(kernels) - len(shown)} more")
        for loop, buckets in self._alike(lambda b: b.loop and b.loop + f", for {b.loop_reason}" * bool(b.loop_reason)):
            lines.append(f"loop of bucket {buckets}: {loop}")
        for choices, buckets in self._alike(lambda bucket: bucket.choices):
            lines.append(f"chosen for bucket {buckets}:")
            for name, facts in choices.items():
                lines.append(f"  {name}: " + ", ".join(f"{figure} {value}" for figure, value in facts.items()))
        return "\n".join(lines)

    def _alike(self, key: Callable[[BucketReport], Any]) -> Iterator[tuple[Any, str]]:
        for value, buckets in groupby(self.buckets, key=key):
            if value:
                yield value, ", ".join(bucket.name for bucket in buckets)

    def _row(self, b: BucketReport) -> str:
        has_driver = self.backend == "cuda"
        instantiate = f"{b.instantiate_ms:.1f}" if has_driver else "-"
        driver = f"{b.driver_bytes / 2**20:.2f}" if has_driver else "-"
        return (
            f"{b.name:>7} {b.state:>9} {b.nodes.total():>6} {b.capture_ms:>11.1f} {instantiate:>12} "
            f"{b.pool_bytes / 2**20:>9.2f} {driver:>11} {b.moved_bytes / 2**20:>10.1f} "
            f"{b.replays:>8} {b.padding_share:>8.1%}"
            + (f"  {b.eager_runs} without a graph" if b.eager_runs else "")
            + (f"  {b.error}" if b.error else "")
        )
