"""Ray Serve's own door for routing: chooses the replica of each request that a front hands on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from graphdecode.server.replicas.routing import OwnRequests, RoutedPrefixes, choose


class Route(NamedTuple):
    """What a request says about where it should go.

    Attributes:
        blocks: of its prompt; see `prompt_blocks`.
        avoid: names of replicas that could not serve it.
    """

    blocks: Sequence[int] = ()
    avoid: Sequence[str] = ()


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that `choose` names, by the requests under way at each.

    Replicas that say that their engine does not serve, and those that a request avoids, come last.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the settings: Ray's constructor has no room for them.

        Args:
            kwargs: `slack`, see `choose`, and `policy`, as `routing` of [replicas].
        """
        self.slack: int = kwargs["slack"]
        self.policy: str = kwargs["policy"]
        self.prefixes: RoutedPrefixes[ReplicaID] = RoutedPrefixes()
        self.own: OwnRequests[ReplicaID] = OwnRequests()
        self.draw = random.Random()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that there are now."""
        super().update_replicas(replicas)
        self.prefixes.keep_only([each.replica_id for each in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica for a request, and behind it the others: Ray takes the first that has room."""
        route = pending_request.kwargs.get("route", Route()) if pending_request is not None else Route()
        fit = [each for each in candidate_replicas if _serves(each) and each.replica_id.unique_id not in route.avoid]
        told = self.replica_queue_len_cache
        names = [each.replica_id for each in fit or candidate_replicas]
        loads = {name: self.own.load(name, told.get(name)) for name in names}
        if self.policy == "random":
            chosen = self.draw.choice(list(loads))
        else:
            chosen = choose(loads, self.prefixes.matched(route.blocks), self.slack, self.draw)
        if pending_request is not None:
            self.own.chosen(pending_request.future, chosen)
            pending_request.future.add_done_callback(self.own.settled)
        others = [each for each in candidate_replicas if each.replica_id != chosen]
        return [[each for each in candidate_replicas if each.replica_id == chosen], others]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Take note of who has the prompt now."""
        self.prefixes.add(replica_id, pending_request.kwargs.get("route", Route()).blocks)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Take note that a request is on its way."""
        super().on_send_request(replica_id)
        self.own.sent(replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Take note that it ended."""
        self.own.ended(replica_id)


def _serves(replica: RunningReplica) -> bool:
    return bool(replica.routing_stats.get("serves", True))
