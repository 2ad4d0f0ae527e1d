"""What Ray's autoscaling aims at; `tools/bench cluster` simulates days with it."""

from __future__ import annotations

# Of the way down, at a time. Requests under way tell little of what few replicas could take: 17 that are half busy have
# as many as one that is full, and one step down to what these would fill leaves a backlog that takes more than 17.
DOWNSCALING_FACTOR = 0.25


def target_requests(rows: int) -> int:
    """Return how many requests each replica should have under way, so that it can take more while others start.

    Args:
        rows: that it can decode side by side.
    """
    return max(rows // 4, 1)
