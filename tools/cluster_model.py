"""A discrete-event simulation of a cluster of replicas, for `tools/bench cluster`.

Arrivals follow a day with a night and bursts; most prompts share few prefixes. Step times are from a measured profile.
The number of replicas follows Ray Serve's autoscaling rule. Routing policies of the server are its own code.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from graphdecode.server.replicas.routing import RoutedPrefixes, choose

LOOK_EVERY_S = 10.0  # interval of the autoscaler
Rate = Callable[[float], float]  # time -> requests per second
Policy = Callable[[Mapping[int, int], int], int]


@dataclass(frozen=True)
class StepCosts:
    """Times of an engine."""

    step_s: Sequence[float]  # time of a decode step by its rows, from 0 to the largest number
    prompt_token_s: float  # time of an uncached prompt token

    @property
    def max_rows(self) -> int:
        """The maximum number of rows."""
        return len(self.step_s) - 1


def read_costs(profile: Path, context: int) -> StepCosts:
    """Return the step times of a measured profile at an interpolated or extrapolated context.

    A step takes its bucket's time. A prompt token takes a row's share of the widest bucket at the shortest context,
    since prompts are computed in wide passes.
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


@dataclass(slots=True)
class Request:
    """One request; times are in seconds since the simulation began.

    Attributes:
        arrived: time of arrival.
        prefix: identity of the prompt's prefix.
        prefix_tokens: length of the prefix.
        prompt_tokens: length of the rest of the prompt.
        answer_tokens: length of the output.
        cached: whether the replica had cached the prefix.
        first_token: time of the first token.
        finished: time of the end.
    """

    arrived: float
    prefix: int
    prefix_tokens: int
    prompt_tokens: int
    answer_tokens: int
    cached: bool = False
    first_token: float = 0.0
    finished: float = 0.0


def arrivals(rate: Rate, peak: float, seconds: float, draw: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process whose rate changes (thinning; Lewis and Shedler, 1979)."""
    now = draw.expovariate(peak)
    while now < seconds:
        if draw.random() * peak <= rate(now):
            yield now
        now += draw.expovariate(peak)


def day(mean: float, seconds: float, bursts: list[tuple[float, float, float]]) -> Rate:
    """Return the rate of a day that starts at its minimum, with bursts on top."""

    def rate(now: float) -> float:
        factor = max((more for begin, end, more in bursts if begin <= now < end), default=1.0)
        return mean * factor * (1 - 0.5 * math.cos(2 * math.pi * now / seconds))

    return rate


def requests(times: Iterator[float], *, prefixes: int, sizes: tuple[int, int, int], seed: int) -> Iterator[Request]:
    """Yield a request for each time; the popularity of prefixes is Zipf's, output lengths are exponential."""
    draw = random.Random(seed)
    sums = list(accumulate(1 / rank for rank in range(1, prefixes + 1)))
    prefix_tokens, prompt_tokens, answer_tokens = sizes
    for time in times:
        prefix = bisect_left(sums, draw.random() * sums[-1])
        length = max(1, round(draw.expovariate(1 / answer_tokens)))
        yield Request(time, prefix, prefix_tokens, prompt_tokens, length)


class Replica:
    """An engine with continuous batching.

    All rows run at the same speed, one token per step. `_tokens` counts a row's tokens since the start of the
    simulation: a request ends when it has grown by the request's length, however often the speed has changed. A prompt
    is computed in one piece, while all rows wait.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[float, int, Request]] = []  # by `_tokens` at their end
        self._numbers = itertools.count()
        self._tokens = 0.0
        self._clock = 0.0  # the time of `_tokens`; in the future while prompts are computed
        self.version = 0  # predictions of earlier versions are invalid

    @property
    def load(self) -> int:
        """Requests in flight."""
        return len(self._waiting) + len(self._running)

    def add(self, request: Request, now: float) -> None:
        """Add a request."""
        self._go_on(now)
        self._waiting.append(request)
        self._admit(now)

    def finish_next(self, now: float) -> Request:
        """End the next request, and return it."""
        self._go_on(now)
        _, _, request = heapq.heappop(self._running)
        request.finished = now
        self._admit(now)
        return request

    def next_finish(self) -> float | None:
        """Return the time of the next end of a request, without further arrivals."""
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


def policies(prefixes: RoutedPrefixes[int], slack: int, seed: int) -> dict[str, Policy]:
    """Return the routing policies: functions of all loads and a prompt's prefix."""
    draw, turns = random.Random(seed), itertools.count(1)
    return {
        "random": lambda loads, prefix: draw.choice(list(loads)),
        "round robin": lambda loads, prefix: list(loads)[next(turns) % len(loads)],
        "least loaded": lambda loads, prefix: choose(loads, {}, 0, draw),
        "prefix": lambda loads, prefix: choose(loads, prefixes.matched([prefix]), slack, draw),
    }


@dataclass(frozen=True)
class Bounds:
    """Parameters of autoscaling; see [replicas] of the configuration."""

    least: int  # replicas
    most: int  # replicas
    target: float  # requests in flight per replica
    upscale_delay_s: float  # before a replica is added
    downscale_delay_s: float  # before a replica is removed
    start_s: float  # startup time of a replica
    look_back_s: float = 30.0  # window over which the load is averaged
    downscaling_factor: float = 1.0  # share of the surplus that is removed at a time


class Autoscaler:
    """Decides on the number of replicas at intervals."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._since: float | None = None  # start of the present need for more or fewer
        self._sign = 0
        self._seen: deque[tuple[float, int]] = deque()

    def wanted(self, requests: int, replicas: int, now: float) -> int:
        """Return the new number of replicas."""
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


@dataclass
class Outcome:
    """The result of a simulation."""

    requests: list[Request] = field(default_factory=list)  # in the order of their ends
    # (time, requests in flight, running replicas) at each decision of the autoscaler
    looks: list[tuple[float, int, int]] = field(default_factory=list)
    replica_seconds: float = 0.0  # total running time of replicas, including startup


class Cluster:
    """Replicas and their front."""

    def __init__(
        self,
        costs: StepCosts,
        policy: str,
        replicas: int,
        *,
        kept_prefixes: int = 1,
        slack: int = 8,
        bounds: Bounds | None = None,
        seed: int = 0,
    ) -> None:
        self._costs = costs
        self._prefixes: RoutedPrefixes[int] = RoutedPrefixes(kept_prefixes)
        self._choose = policies(self._prefixes, slack, seed)[policy]
        self._replicas = {name: Replica(costs) for name in range(replicas)}
        self._loads = dict.fromkeys(self._replicas, 0)  # of replicas that accept requests
        self._starting: list[float] = []  # times at which they are ready
        self._bounds = bounds
        self._scaler = Autoscaler(bounds) if bounds is not None else None
        self._begun = replicas
        self._finishes: list[tuple[float, int, int]] = []  # (time, replica, its version)
        self._open = 0
        self.outcome = Outcome()

    def run(self, requests: Iterable[Request]) -> Outcome:
        """Simulate requests, given in order of arrival."""
        look, last = 0.0, 0.0
        for request in requests:
            while look <= request.arrived:
                self._finish_until(look)
                self._look(look, look - last)
                look, last = look + LOOK_EVERY_S, look
            self._finish_until(request.arrived)
            self._take(request)
        self._finish_until(float("inf"))
        return self.outcome

    def _take(self, request: Request) -> None:
        name = self._choose(self._loads, request.prefix)
        request.cached = name in self._prefixes.matched([request.prefix])
        self._prefixes.add(name, [request.prefix])
        self._replicas[name].add(request, request.arrived)
        self._loads[name] += 1
        self._open += 1
        self._foretell(name)

    def _foretell(self, name: int) -> None:
        replica = self._replicas[name]
        if (time := replica.next_finish()) is not None:
            heapq.heappush(self._finishes, (time, name, replica.version))

    def _finish_until(self, now: float) -> None:
        while self._finishes and self._finishes[0][0] <= now:
            time, name, version = heapq.heappop(self._finishes)
            replica = self._replicas.get(name)
            if replica is None or replica.version != version:
                continue
            self.outcome.requests.append(replica.finish_next(time))
            self._open -= 1
            if name in self._loads:
                self._loads[name] -= 1
            if name in self._loads or replica.load:
                self._foretell(name)
            else:  # it was being drained
                del self._replicas[name]

    def _look(self, now: float, since: float) -> None:
        there = len(self._replicas) + len(self._starting)
        self.outcome.replica_seconds += there * since
        self.outcome.looks.append((now, self._open, len(self._replicas)))
        if self._scaler is None or self._bounds is None:
            return
        for time in [time for time in self._starting if time <= now]:
            self._starting.remove(time)
            self._begin()
        serving = len(self._loads) + len(self._starting)
        wanted = self._scaler.wanted(self._open, serving, now)
        self._starting += [now + self._bounds.start_s] * max(wanted - serving, 0)
        for _ in range(min(serving - wanted, len(self._loads) - 1)):
            self._end()

    def _begin(self) -> None:
        self._replicas[self._begun] = Replica(self._costs)
        self._loads[self._begun] = 0
        self._begun += 1

    def _end(self) -> None:
        """Drain the least loaded replica."""
        name = min(self._loads, key=self._loads.__getitem__)
        del self._loads[name]
        self._prefixes.keep_only(list(self._loads))
        if not self._replicas[name].load:
            del self._replicas[name]
