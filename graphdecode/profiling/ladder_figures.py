"""Ladders beside each other: the one in force and the best ones for a load, with what each costs and gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphdecode.buckets import BucketLadder
from graphdecode.profiling.tuner import GraphCost, StepCost, best_ladders, expected_step_ms, padding_share

SCHEMA_VERSION = 1  # of the report that holds these figures
TODAY = "today"


@dataclass(frozen=True)
class LadderFigures:
    """What a ladder means for a load.

    Attributes:
        name: "today", "auto K" (made without knowing the load) or "best of K" graphs.
        sizes: the buckets.
        expected_ms: mean cost of a step.
        gain_ms: what a step of "best of K" saves against "best of K-1"; None for others.
        padding_share: share of the computed rows that are padding.
        capture_ms: expected time to capture all graphs; None where no profile tells.
        pool_bytes: expected memory of their intermediates; None likewise.
    """

    name: str
    sizes: tuple[int, ...]
    expected_ms: float
    gain_ms: float | None
    padding_share: float
    capture_ms: float | None
    pool_bytes: float | None

    @property
    def ladder(self) -> BucketLadder:
        """The ladder itself."""
        return BucketLadder(self.sizes, self.sizes[-1])


def compare_ladders(
    counts: Mapping[int, int],
    today: BucketLadder,
    cost: StepCost,
    max_graphs: int,
    graph_cost: GraphCost | None = None,
) -> list[LadderFigures]:
    """Put the ladder in force first, then the best ones of 1, 2, ... graphs; the last is the one to take.

    Where `max_graphs` is not the number of graphs in force, the ladder that would be made of so many without knowing
    the load stands between them.

    Args:
        counts: batch size -> decode steps.
        today: the ladder in force; its largest bucket is the capacity.
        cost: of a step.
        max_graphs: how many buckets there may be.
        graph_cost: of having a graph.

    Raises:
        ValueError: a batch size is outside the capacity, nothing was counted, or there may be no bucket.
    """
    top = today.max_batch_size
    best = best_ladders(counts, cost, top, max_graphs)
    named = {TODAY: today}
    if len(today) != max_graphs:
        named[f"auto {max_graphs}"] = BucketLadder.auto(top, max_graphs)
    named |= {f"best of {graphs}": ladder for graphs, ladder in enumerate(best, 1)}
    figures: list[LadderFigures] = []
    for name, ladder in named.items():
        expected_ms = expected_step_ms(ladder, counts, cost)
        follows = name.startswith("best") and figures[-1].name.startswith("best")
        figures.append(
            LadderFigures(
                name,
                ladder.sizes,
                expected_ms,
                figures[-1].expected_ms - expected_ms if follows else None,
                padding_share(ladder, counts),
                None if graph_cost is None else float(graph_cost.capture_ms[list(ladder)].sum()),
                None if graph_cost is None else float(graph_cost.pool_bytes[list(ladder)].sum()),
            )
        )
    return figures
