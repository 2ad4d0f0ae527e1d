"""Two profiles side by side: what got slower, and by how much."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One bucket at one context in two profiles; times are medians in milliseconds."""

    bucket: int
    context: int
    before_ms: float
    after_ms: float
    noisy: bool

    @property
    def ratio(self) -> float:
        """After over before: above 1 is slower."""
        return self.after_ms / self.before_ms


def compare_profiles(before: dict, after: dict) -> list[Change]:
    """Return the points that both profiles measured.

    Raises:
        ValueError: they have no point in common, or one is of another schema.
    """
    for profile in (before, after):
        if profile.get("schema") != 1:
            raise ValueError(f"a profile of schema 1 is needed, got {profile.get('schema')!r}")
    old = {(row["bucket"], row["context"]): row for row in before["rows"]}
    new = {(row["bucket"], row["context"]): row for row in after["rows"]}
    common = [point for point in new if point in old]
    if not common:
        raise ValueError("the two profiles have no bucket and context in common")
    return [
        Change(
            bucket,
            context,
            old[bucket, context]["step_ms"]["p50"],
            new[bucket, context]["step_ms"]["p50"],
            old[bucket, context]["noisy"] or new[bucket, context]["noisy"],
        )
        for bucket, context in common
    ]


def overall_ratio(changes: list[Change]) -> float:
    """Return the geometric mean of the ratios: one noisy point does not decide it."""
    product = 1.0
    for change in changes:
        product *= change.ratio
    return product ** (1 / len(changes))
