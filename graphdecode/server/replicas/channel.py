"""What a front asks of its way to the replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from starlette.types import Message, Scope

from graphdecode.errors import GraphdecodeError

REPLICA_HEADER = b"x-graphdecode-replica"  # of each response: who answered


class LostError(GraphdecodeError, RuntimeError):
    """The replica that was to answer is gone."""


class Channel(Protocol):
    """How requests reach replicas."""

    def messages(
        self, scope: Scope, body: bytes, blocks: Sequence[int], avoid: Sequence[str]
    ) -> AsyncGenerator[Message, None]:
        """Yield a replica's response as ASGI has it; the first message tells status and headers.

        Args:
            scope: of the request, as ASGI has it.
            body: of the request.
            blocks: of its prompt; see `prompt_blocks`.
            avoid: replicas that could not serve it.

        Raises:
            LostError: the replica is gone.
        """
        ...

    async def metrics(self) -> dict[str, str]:
        """Return what each replica tells Prometheus, by its name."""
        ...
