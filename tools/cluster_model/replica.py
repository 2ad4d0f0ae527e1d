"""One simulated replica: rows that are decoded side by side, and a queue before them."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass

from cluster_model.costs import StepCosts


@dataclass(slots=True)
class Request:
    """One request; times are in seconds since the simulation began.

    Attributes:
        arrived: when it came.
        prefix: whose beginning its prompt has.
        prefix_tokens: of that beginning.
        prompt_tokens: behind it.
        answer_tokens: that are generated.
        cached: whether its beginning was in the replica's cache.
        first_token: when the answer began.
        finished: when it ended.
    """

    arrived: float
    prefix: int
    prefix_tokens: int
    prompt_tokens: int
    answer_tokens: int
    cached: bool = False
    first_token: float = 0.0
    finished: float = 0.0


class Replica:
    """An engine with continuous batching.

    All its rows go on at the same speed, one token a step. `tokens` counts those that a row has had since the beginning
    of time, so that a request ends when it has grown by the request's own, however often the speed changes between.
    A prompt is computed in one piece, while all rows stand still.

    Args:
        costs: of its steps.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[float, int, Request]] = []  # by the count of tokens at which they end
        self._numbers = itertools.count()
        self._tokens = 0.0
        self._clock = 0.0  # when `_tokens` was that; ahead of the time while prompts are computed
        self.version = 0  # of its future: what was foretold by an earlier one does not happen

    @property
    def load(self) -> int:
        """Requests under way."""
        return len(self._waiting) + len(self._running)

    def add(self, request: Request, now: float) -> None:
        """Take a request."""
        self._go_on(now)
        self._waiting.append(request)
        self._admit(now)

    def finish_next(self, now: float) -> Request:
        """Return the request that ends now."""
        self._go_on(now)
        _, _, request = heapq.heappop(self._running)
        request.finished = now
        self._admit(now)
        return request

    def next_finish(self) -> float | None:
        """Return when the next request ends, if nothing comes between."""
        if not self._running:
            return None
        return self._clock + max(self._running[0][0] - self._tokens, 0.0) * self._costs.step_s[len(self._running)]

    def _go_on(self, now: float) -> None:
        if now > self._clock:
            if self._running:
                self._tokens += (now - self._clock) / self._costs.step_s[len(self._running)]
            self._clock = now

    def _admit(self, now: float) -> None:
        self.version += 1
        while self._waiting and len(self._running) < self._costs.max_rows:
            request = self._waiting.popleft()
            computed = request.prompt_tokens + (0 if request.cached else request.prefix_tokens)
            self._clock = max(self._clock, now) + computed * self._costs.prompt_token_s
            heapq.heappush(self._running, (self._tokens + request.answer_tokens, next(self._numbers), request))
            request.first_token = self._clock + self._costs.step_s[len(self._running)]
