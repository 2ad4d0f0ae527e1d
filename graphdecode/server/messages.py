"""Messages between the HTTP process and its child processes, over a socket."""

from __future__ import annotations

import pickle
import select
import socket
import struct
import subprocess
import threading
from asyncio import StreamReader
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from graphdecode.config import EngineConfig
from graphdecode.engine import EngineStats, Event, Request, RequestMetrics
from graphdecode.engine.adapters import AdapterStats
from graphdecode.engine.constraint import TokenAutomaton
from graphdecode.engine.request import RequestRules
from graphdecode.errors import GraphdecodeError

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 20
HEARTBEAT_SECONDS = 1.0


class EngineSetup(NamedTuple):
    """The first message to the engine's process: what it loads."""

    model: Path
    config: EngineConfig
    progress: bool  # show bars while loading
    tokenizer: str | None = None  # `tokenizers.Tokenizer.to_str`, for structured outputs; None: there are none
    adapters: tuple[tuple[str, str], ...] = ()  # name and folder of each
    eos_token_id: int | None = None  # of the tokenizer


class Heartbeat(NamedTuple):
    """The engine's process runs, however long its step may take."""


class Add(NamedTuple):
    """A request, with the id that the sender chose for it."""

    request_id: int
    request: Request


class AddGrammar(NamedTuple):
    """A valid grammar, for requests to refer to."""

    grammar: str  # as `Grammars.compiled` takes it
    automaton: TokenAutomaton | None  # what it compiles to; None: a matcher, which cannot be sent
    nbytes: int  # size of the compiled grammar


class DropGrammar(NamedTuple):
    """A grammar that no later request refers to, unless it is added again."""

    grammar: str


class Finish(NamedTuple):
    """A request ends: a stop text completed its output, or its client is gone; see `Engine.finish`."""

    request_id: int
    num_tokens: int | None


class Call(NamedTuple):
    """Call a method of the engine; `CallResult` answers with the same number."""

    number: int
    method: str  # "load_adapter", "unload_adapter", or a method or property of `Engine`
    arguments: tuple[Any, ...]


class CallResult(NamedTuple):
    """The result of a `Call`."""

    number: int
    result: Any
    error: GraphdecodeError | None  # why nothing was changed


class EngineReady(NamedTuple):
    """The engine serves."""

    rules: RequestRules  # limits of requests
    seed: int  # for requests without one
    buckets: tuple[int, ...]  # captured ones
    floor_seconds: float | None  # to read the weights once at the measured bandwidth; None: a cache holds them


class Refused(NamedTuple):
    """The model or a setting cannot be used."""

    message: str


class EngineStatus(NamedTuple):
    """State of the engine, sent periodically."""

    running: int  # requests that have a row
    waiting: int  # requests that have none
    used_pages: int
    total_pages: int
    preemptions: int  # since the start
    stats: EngineStats  # since the start; times of steps and launches: since the last message
    adapters: AdapterStats = AdapterStats()
    deferred: int = 0  # waiting requests whose adapters find no slot


def pack_event(event: Event, request_id: int, *, with_metrics: bool) -> tuple[Any, ...]:
    """Return an event as plain values; `with_metrics`: in the first and the last event of a request."""
    metrics = tuple(vars(event.metrics).values()) if with_metrics else None
    return tuple(event._replace(request_id=request_id, metrics=metrics))  # type: ignore[arg-type]


def unpack_event(packed: tuple[Any, ...], metrics: RequestMetrics) -> Event:
    """Return the event; `metrics`: for one that was packed without."""
    event = Event(*packed)
    return event._replace(metrics=metrics if event.metrics is None else RequestMetrics(*event.metrics))  # type: ignore[misc]


def in_parts(event: Event, entries: int) -> list[Event]:
    """Split an event into parts of about `entries` log-probabilities of the prompt each."""
    scores = event.prompt_logprobs
    if not scores:
        return [event]
    size = max(entries // (len(scores[0].top) + 1), 1)
    cuts = range(0, max(len(scores) - size, 0), size)
    nothing = event._replace(token_ids=[], logprobs=None, finish_reason=None, stop_reason=None, error=None)
    parts = [nothing._replace(prompt_logprobs=scores[cut : cut + size]) for cut in cuts]
    return [*parts, event._replace(prompt_logprobs=scores[len(parts) * size :])]


def framed(message: Any) -> bytes:
    """Return a message with its length in front."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: StreamReader) -> Any:
    """Return the next message; raises `asyncio.IncompleteReadError` if the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))  # both ends are this project's processes, and trusted


def end_process(process: subprocess.Popen[bytes] | None, connection: socket.socket | None, seconds: float) -> None:
    """Shut a child's socket down, so that it ends; kill it if it does not within some seconds."""
    if connection is not None:
        with suppress(OSError):  # it is closed already
            connection.shutdown(socket.SHUT_RDWR)
    if process is not None:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class MessageSocket:
    """The child's end of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unread = bytearray()
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message, from any thread; raises OSError if the other side is gone."""
        data = framed(message)
        with self._sending:
            self._socket.sendall(data)

    def receive(self, *, wait: bool) -> list[Any]:
        """Return the messages that have come, at least one if `wait`; raises EOFError if the other side is gone."""
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
