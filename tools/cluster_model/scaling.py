"""How many replicas there should be: the rule of Ray Serve's autoscaling."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Bounds:
    """What autoscaling aims at; see [replicas] of the configuration.

    Attributes:
        least: replicas.
        most: replicas.
        target: requests under way at each.
        upscale_delay_s: that the wish for more must last.
        downscale_delay_s: that the wish for fewer must last.
        start_s: until a new replica serves.
        look_back_s: over which the load is averaged.
        downscaling_factor: of the way to fewer, at a time.
    """

    least: int
    most: int
    target: float
    upscale_delay_s: float
    downscale_delay_s: float
    start_s: float
    look_back_s: float = 30.0
    downscaling_factor: float = 1.0


class Autoscaler:
    """Looks at the load now and then.

    Args:
        bounds: of its wishes.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._since: float | None = None  # a wish for more, or for fewer, has lasted
        self._sign = 0
        self._seen: deque[tuple[float, int]] = deque()

    def wanted(self, requests: int, replicas: int, now: float) -> int:
        """Return how many replicas there should be from now on.

        Args:
            requests: under way.
            replicas: that there are, or are being started.
            now: the time.
        """
        bounds = self._bounds
        self._seen.append((now, requests))
        while self._seen[0][0] <= now - bounds.look_back_s:
            self._seen.popleft()
        load = fmean(seen for _, seen in self._seen)
        wish = load / bounds.target
        if math.ceil(wish) < replicas:
            wish = min(replicas + bounds.downscaling_factor * (wish - replicas), replicas - 1)
        wish = min(max(math.ceil(wish), bounds.least), bounds.most)
        sign = (wish > replicas) - (wish < replicas)
        if sign != self._sign or self._since is None:
            self._sign, self._since = sign, now
        delay = bounds.upscale_delay_s if sign > 0 else bounds.downscale_delay_s
        if sign == 0 or now - self._since < delay:
            return replicas
        self._since = None
        return wish
