"""Between the process that speaks HTTP and the one that steps the engine: whole messages over a socket."""

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
    """The first message to the engine's process: what it loads.

    Attributes:
        model: the path.
        config: of the engine.
        progress: show bars while loading.
        tokenizer: as `tokenizers.Tokenizer.to_str` writes it, for answers of a form; None: there are none.
    """

    model: Path
    config: EngineConfig
    progress: bool
    tokenizer: str | None = None


class Alive(NamedTuple):
    """The engine's process runs, however long its step may take."""


class Add(NamedTuple):
    """A request, under the number that its sender gave it."""

    request_id: int
    request: Request


class Teach(NamedTuple):
    """A grammar that requests will name, known to be good: it is read when this comes, and kept.

    Attributes:
        grammar: its text.
        automaton: that it became; None: it is no such grammar.
    """

    grammar: str
    automaton: TokenAutomaton | None


class Forget(NamedTuple):
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
    """The engine can be asked.

    Attributes:
        rules: what it can serve.
        seed: of the requests that bring none.
        buckets: that were captured.
        load_seconds: to load the model and to capture its graphs.
        floor_seconds: what reading the weights once takes at the bandwidth that was measured; None: a cache holds them.
    """

    rules: RequestRules
    seed: int
    buckets: tuple[int, ...]
    load_seconds: float
    floor_seconds: float | None


@dataclass(frozen=True)
class Refused:
    """The model cannot be loaded: what was wrong with what was asked for."""

    message: str


@dataclass(frozen=True)
class Vitals:
    """How the engine is, now and then.

    Attributes:
        running: requests that have a row.
        waiting: requests that have none.
        used_pages: of the cache.
        total_pages: of the cache.
        preemptions: since the start.
        prefilled_tokens: since the start.
        bucket_steps: bucket -> steps since the start.
        batch_sizes: live rows -> steps since the start.
        step_seconds: of each step since the last message.
        launch_seconds: of the host, for each launch since the last message.
        drafts: runs of drafts that were verified, since the start.
        draft_tokens: drafts of them.
        accepted_tokens: those that were what was sampled.
        accepted_per_pos: of the first, the second, ... draft of a run, how many were.
    """

    running: int
    waiting: int
    used_pages: int
    total_pages: int
    preemptions: int
    prefilled_tokens: int
    bucket_steps: dict[int, int]
    batch_sizes: dict[int, int]
    step_seconds: list[float]
    launch_seconds: list[float]
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_pos: list[int]

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
        event: of the engine.
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


class Wire:
    """The engine's end: blocking where there is nothing to do, and never where there is.

    Args:
        connection: a connected stream socket.
    """

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

        Args:
            wait: until there is something.

        Raises:
            EOFError: the other side is gone.
        """
        messages: list[Any] = []
        while not messages and (wait or select.select([self._socket], [], [], 0)[0]):
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise EOFError("the other side is gone")
            self._unread += data
            messages = self._whole_messages()
        return messages

    def _whole_messages(self) -> list[Any]:
        messages, start = [], 0
        while len(self._unread) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread, start)
            end = start + _LENGTH.size + length
            if len(self._unread) < end:
                break
            messages.append(pickle.loads(memoryview(self._unread)[start + _LENGTH.size : end]))
            start = end
        del self._unread[:start]
        return messages
