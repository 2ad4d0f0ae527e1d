"""Messages between the HTTP process and the engine's process, over a socket."""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
from asyncio import StreamReader
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from graphdecode.config import EngineConfig
from graphdecode.engine import Event, Request, RequestMetrics
from graphdecode.engine.constraint import TokenAutomaton
from graphdecode.engine.request import RequestRules

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 20
HEARTBEAT_SECONDS = 1.0


class EngineSetup(NamedTuple):
    """The first message to the engine's process: what it loads."""

    model: Path  # the path
    config: EngineConfig  # of the engine
    progress: bool  # show bars while loading
    # as `tokenizers.Tokenizer.to_str` writes it, for structured outputs; None: there are none
    tokenizer: str | None = None


class Heartbeat(NamedTuple):
    """The engine's process runs, however long its step may take."""


class Add(NamedTuple):
    """A request, under the number that its sender gave it."""

    request_id: int
    request: Request


class AddGrammar(NamedTuple):
    """A grammar that requests will name, known to be good: it is read when this comes, and kept."""

    grammar: str  # its text
    automaton: TokenAutomaton | None  # that it became; None: it is no such grammar


class DropGrammar(NamedTuple):
    """A grammar that no further request will name, unless it is taught again."""

    grammar: str


class Finish(NamedTuple):
    """The text of an answer ended it; see `Engine.finish`."""

    request_id: int
    num_tokens: int


class Abort(NamedTuple):
    """Nobody wants an answer any more."""

    request_id: int


@dataclass(frozen=True)
class EngineReady:
    """The engine can be asked."""

    rules: RequestRules  # what it can serve
    seed: int  # of the requests that bring none
    buckets: tuple[int, ...]  # that were captured
    load_seconds: float  # to load the model and to capture its graphs
    # what reading the weights once takes at the bandwidth that was measured; None: a cache holds them
    floor_seconds: float | None


@dataclass(frozen=True)
class Refused:
    """The model cannot be loaded: what was wrong with what was asked for."""

    message: str


@dataclass(frozen=True)
class EngineStatus:
    """State of the engine, sent periodically."""

    running: int  # requests that have a row
    waiting: int  # requests that have none
    used_pages: int  # of the cache
    total_pages: int  # of the cache
    preemptions: int  # since the start
    prefilled_tokens: int  # since the start
    bucket_steps: dict[int, int]  # bucket -> steps since the start
    batch_sizes: dict[int, int]  # live rows -> steps since the start
    step_seconds: list[float]  # of each step since the last message
    launch_seconds: list[float]  # of the host, for each launch since the last message
    drafts: int  # runs of drafts that were verified, since the start
    draft_tokens: int  # drafts of them
    accepted_tokens: int  # those that were what was sampled
    accepted_per_pos: list[int]  # of the first, the second, ... draft of a run, how many were.

    @property
    def padding_share(self) -> float:
        """The share of computed rows that were padding."""
        computed = sum(bucket * steps for bucket, steps in self.bucket_steps.items())
        live = sum(size * steps for size, steps in self.batch_sizes.items())
        return 1.0 - live / computed if computed else 0.0


PackedEvent = tuple[Any, ...]


def pack_event(event: Event, request_id: int, *, whole: bool) -> PackedEvent:
    """Return an event as plain values.

    Args:
        request_id: the number that the other side knows the request by.
        whole: send the metrics too; they matter with the first and the last event of a request.
    """
    metrics = event.metrics
    times = (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time)
    kept = (*times, metrics.num_cached_tokens, metrics.num_preemptions) if whole else None
    return tuple(event._replace(request_id=request_id, metrics=kept))  # type: ignore[arg-type]


def unpack_event(packed: PackedEvent, known: RequestMetrics) -> Event:
    """Return the event; `known` are the metrics where it brings none."""
    event = Event(*packed)
    return event._replace(metrics=known if event.metrics is None else RequestMetrics(*event.metrics))  # type: ignore[misc]


def in_parts(event: Event, entries: int) -> list[Event]:
    """Return events that say the same together, none of them with many more log-probabilities of the prompt."""
    scores = event.prompt_logprobs
    if not scores:
        return [event]
    size = max(entries // (len(scores[0].top) + 1), 1)
    cuts = range(0, max(len(scores) - size, 0), size)
    nothing = event._replace(token_ids=[], logprobs=None, finish_reason=None, stop_reason=None, error=None)
    parts = [nothing._replace(prompt_logprobs=scores[cut : cut + size]) for cut in cuts]
    return [*parts, event._replace(prompt_logprobs=scores[len(parts) * size :])]


def framed(message: Any) -> bytes:
    """Return a message as it goes over the socket."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: StreamReader) -> Any:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError: the other side is gone.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))  # of this project's own process: both ends are trusted


class MessageSocket:
    """The engine's end: blocking where there is nothing to do, and never where there is."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unread = bytearray()
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message; any thread may.

        Raises:
            OSError: the other side is gone.
        """
        data = framed(message)
        with self._sending:
            self._socket.sendall(data)

    def receive(self, *, wait: bool) -> list[Any]:
        """Return what has come.

        Raises:
            EOFError: the other side is gone.
        """
        messages: list[Any] = []
        while not messages and (wait or select.select([self._socket], [], [], 0)[0]):
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise EOFError("the other side is gone")
            self._unread += data
            start = 0
            while len(self._unread) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._unread, start)
                end = start + _LENGTH.size + length
                if len(self._unread) < end:
                    break
                messages.append(pickle.loads(memoryview(self._unread)[start + _LENGTH.size : end]))
                start = end
            del self._unread[:start]
        return messages
