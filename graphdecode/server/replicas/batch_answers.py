"""The requests of a batch, answered by replicas.

They are calls of Ray Serve, and not of Ray Data: Data gives answers back by blocks, of which one that was begun is
done again as a whole, and reads requests into columns of Arrow, which bodies of JSON with different fields do not keep
to. A call gives one answer, whose line is written as soon as it is there, so that a killed run loses what was under way
and nothing else, as with one engine; and it finds the replica that has its prefix.
"""

from __future__ import annotations

import logging
from typing import Any

from graphdecode.server.batch import ATTEMPTS
from graphdecode.server.batch_lines import BatchRequest
from graphdecode.server.http_errors import HttpError
from graphdecode.server.replicas.channel import LostError
from graphdecode.server.replicas.cluster import Cluster
from graphdecode.server.replicas.ray_channel import losses
from graphdecode.server.replicas.router import Route
from graphdecode.server.replicas.routing import prompt_blocks

log = logging.getLogger(__name__)


class ReplicaAnswers:
    """See `Answers`.

    Args:
        cluster: of the replicas; `start` starts it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._handle: Any = None

    async def start(self) -> None:
        """See `Answers`."""
        await self._cluster.start()
        self._handle = self._cluster.handle()

    def close(self, *, at_once: bool = False) -> None:
        """See `Answers`."""
        self._cluster.close(at_once=at_once)

    async def answer(self, request: BatchRequest) -> tuple[int, dict[str, Any]]:
        """See `Answers`; a request whose replica ended is asked of another one."""
        route = Route(prompt_blocks(request.body))
        for _ in range(ATTEMPTS):
            try:
                with losses():
                    return await self._handle.whole.remote(request, route=route)  # type: ignore[no-any-return]
            except LostError as lost:
                log.warning("%r: %s", request.custom_id, lost)
        return 503, HttpError(503, f"{ATTEMPTS} replicas ended while they answered it").body
