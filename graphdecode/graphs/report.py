"""What was captured, bucket by bucket."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class BucketReport:
    """One bucket's graph.

    Attributes:
        bucket: rows.
        state: "captured", "waiting" (for its first use), or "eager" (nothing is captured).
        nodes: kind of node or operator -> count.
        capture_ms: time that the capture took, without warm-up.
        pool_bytes: memory of the intermediates.
        replays: how often it was replayed.
        error: why the capture failed, for a bucket that stays eager.
    """

    bucket: int
    state: str
    nodes: Counter[str] = field(default_factory=Counter)
    capture_ms: float = 0.0
    pool_bytes: int = 0
    replays: int = 0
    error: str | None = None


@dataclass
class GraphReport:
    """All buckets of a manager, smallest first."""

    backend: str
    buckets: list[BucketReport]

    def as_dict(self) -> dict:
        """Return the report as plain data, for JSON."""
        return {
            "backend": self.backend,
            "buckets": [{**vars(bucket), "nodes": dict(bucket.nodes)} for bucket in self.buckets],
        }

    def __str__(self) -> str:
        lines = [
            f"{len(self.buckets)} buckets, {self.backend} backend",
            f"{'bucket':>8} {'state':>9} {'nodes':>6} {'capture ms':>11} {'pool MiB':>9} {'replays':>8}",
        ]
        lines += [
            f"{b.bucket:>8} {b.state:>9} {b.nodes.total():>6} {b.capture_ms:>11.1f} "
            f"{b.pool_bytes / 2**20:>9.2f} {b.replays:>8}" + (f"  {b.error}" if b.error else "")
            for b in self.buckets
        ]
        return "\n".join(lines)
