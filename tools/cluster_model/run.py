"""The events of a simulated cluster, one behind the other."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster_model.costs import StepCosts
from cluster_model.replica import Replica, Request
from cluster_model.routing import policies
from cluster_model.scaling import Autoscaler, Bounds
from graphdecode.server.replicas.routing import PrefixIndex

LOOK_EVERY_S = 10.0  # of the autoscaler


@dataclass
class Outcome:
    """What came of a simulation.

    Attributes:
        requests: that ended, in that order.
        looks: time, requests under way and replicas that serve or end, each time that the autoscaler looked.
        replica_seconds: that replicas were there for, their start included.
    """

    requests: list[Request] = field(default_factory=list)
    looks: list[tuple[float, int, int]] = field(default_factory=list)
    replica_seconds: float = 0.0


class Cluster:
    """Replicas and the front before them.

    Args:
        costs: of each replica.
        policy: how they are chosen; see `policies`.
        replicas: at the beginning.
        kept_prefixes: that a replica's cache has room for.
        slack: see `policies`.
        bounds: of autoscaling; None: there is none.
        seed: of chance.
    """

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
        self._prefixes: PrefixIndex[int] = PrefixIndex(kept_prefixes)
        self._choose = policies(self._prefixes, slack, seed)[policy]
        self._replicas = {name: Replica(costs) for name in range(replicas)}
        self._loads = dict.fromkeys(self._replicas, 0)  # of those that take requests
        self._starting: list[float] = []  # when they will serve
        self._bounds = bounds
        self._scaler = Autoscaler(bounds) if bounds is not None else None
        self._begun = replicas
        self._finishes: list[tuple[float, int, int]] = []  # time, replica, the version of its future
        self._open = 0
        self.outcome = Outcome()

    def run(self, requests: Iterable[Request]) -> Outcome:
        """Serve all requests, which come in the order of their times."""
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
            else:  # it was only to finish what it had
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
        """Send nothing more to the least loaded, which ends when it has finished what it has."""
        name = min(self._loads, key=self._loads.__getitem__)
        del self._loads[name]
        self._prefixes.keep_only(list(self._loads))
        if not self._replicas[name].load:
            del self._replicas[name]
