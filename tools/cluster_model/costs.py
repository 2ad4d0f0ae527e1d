"""What a replica's steps cost, from a profile that was measured."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StepCosts:
    """Times of an engine.

    Attributes:
        step_s: of a decode step by its rows, from none to the most that there can be.
        prompt_token_s: of a token of a prompt that is not cached.
    """

    step_s: Sequence[float]
    prompt_token_s: float

    @property
    def max_rows(self) -> int:
        """Requests that are decoded side by side at most."""
        return len(self.step_s) - 1


def read_costs(profile: Path, context: int) -> StepCosts:
    """Return the costs of a measured profile at a context between or beyond those that it has.

    A step takes what its bucket takes, and between two measured contexts a share of both. A token of a prompt takes
    what a row of the widest bucket does at the shortest context: prompts are computed in wide passes.

    Args:
        profile: `profile.json` of `graphdecode profile`, with two contexts.
        context: tokens in the cache of each row.
    """
    rows = json.loads(profile.read_text())["rows"]
    contexts = sorted({row["context"] for row in rows})
    times = {(row["bucket"], row["context"]): row["step_ms"]["p50"] / 1e3 for row in rows}
    buckets = sorted({row["bucket"] for row in rows})
    low, high = contexts[0], contexts[-1]
    share = (context - low) / (high - low)
    of_bucket = [times[bucket, low] + share * (times[bucket, high] - times[bucket, low]) for bucket in buckets]
    step_s = [of_bucket[bisect_left(buckets, count)] for count in range(buckets[-1] + 1)]
    return StepCosts(step_s, times[buckets[-1], low] / buckets[-1])
