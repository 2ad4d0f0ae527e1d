"""Client of the engine's process: starts it, talks to it, and restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from graphdecode.distributed.child import start_child
from graphdecode.engine import Event, Request, RequestMetrics
from graphdecode.engine.request import RequestRules
from graphdecode.errors import AnswerError, ArgumentError
from graphdecode.server.http import RESTARTING
from graphdecode.server.messages import (
    Abort,
    Add,
    AddGrammar,
    DropGrammar,
    EngineReady,
    EngineSetup,
    EngineStatus,
    Finish,
    Heartbeat,
    Refused,
    framed,
    in_parts,
    receive,
    unpack_event,
)
from graphdecode.server.structured_outputs import KEPT_BYTES, KeptGrammars, ReadGrammar

_DIED = "the engine's process ended before the answer was complete"
_PAUSES = (1, 2, 4, 8, 16, 32, 60)  # seconds behind a start that failed; the last one again and again
_LISTENED = 4  # times within a silence, for it may be this process that stood still
_FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}  # else each thread that compiles a grammar keeps what it once took
_EVENTS_AT_ONCE = 16
_ENTRIES_AT_ONCE = 1000  # log-probabilities of a prompt, some milliseconds
_LARGE_SECONDS = 5.0  # that a grammar is held which is larger than all are to be
_END_SECONDS = 5.0  # for the process to end by itself

log = logging.getLogger(__name__)


class HeartbeatTimeouts(NamedTuple):
    """Heartbeat timeouts, after which the engine's process is killed."""

    starting_seconds: float = 300.0  # until it says for the first time that it runs
    loading_seconds: float = 60.0  # while it loads
    serving_seconds: float = 6.0  # while it serves


class EngineClient:
    """An engine in another process, with the methods that fronts need; for use from one event loop.

    Args:
        on_events: takes what it tells of requests.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        on_events: Callable[[Sequence[Event]], None],
        on_status: Callable[[EngineStatus], None],
        silence: HeartbeatTimeouts | None = None,
    ) -> None:
        self._setup = setup
        self._on_events = on_events
        self._on_vitals = on_status
        self._silence = silence or HeartbeatTimeouts()
        self._taught = KeptGrammars()  # what the process knows of grammars
        self._numbers = itertools.count()
        self._metrics: dict[int, RequestMetrics] = {}  # of the requests that the process knows
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._life: asyncio.Task[None] | None = None
        self.ready: EngineReady | None = None  # what a process said when it had loaded; None before the first one has
        self.serves = False  # whether one that has loaded is running
        self.restarts = 0  # how often the process was started again
        self._watch: asyncio.Task[None] | None = None
        self._heard = False  # since somebody listened last

    @property
    def rules(self) -> RequestRules:
        """Limits of what the engine can serve."""
        assert self.ready is not None
        return self.ready.rules

    @property
    def seed(self) -> int:
        """Seed of requests without one."""
        assert self.ready is not None
        return self.ready.seed

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return len(self._metrics)

    async def start(self) -> None:
        """Start the process, and wait until it serves.

        Raises:
            ArgumentError: the model or a setting cannot be used.
            AnswerError: the process ended.
        """
        reader = await self._spawn()
        await self._loaded(reader)
        self._life = asyncio.create_task(self._live(reader), name="engine")
        self._watch = asyncio.create_task(self._watched(), name="heartbeat")

    async def _spawn(self) -> asyncio.StreamReader:
        if self._writer is not None:
            self._writer.close()
        here, there = socket.socketpair()
        self._socket = here
        with there:
            self._process = start_child("graphdecode.server.engine_process", [there.fileno()], _FEW_ARENAS)
        self._taught = KeptGrammars()
        reader, self._writer = await asyncio.open_unix_connection(sock=here, limit=1 << 24)
        self._write(self._setup)
        return reader

    async def _loaded(self, reader: asyncio.StreamReader) -> None:
        message, patience = Heartbeat(), self._silence.starting_seconds
        try:
            while isinstance(message, Heartbeat):
                async with asyncio.timeout(patience):
                    message = await receive(reader)
                patience = self._silence.loading_seconds
        except TimeoutError:
            if self._process is not None:
                self._process.kill()
            still = "the engine's process stood still while it was loading the model"
            raise AnswerError(f"{still}: nothing came from it for {patience:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            raise AnswerError("the engine's process ended while it was loading the model") from None
        if isinstance(message, Refused):
            raise ArgumentError(message.message)
        assert isinstance(message, EngineReady)
        self.ready, self.serves = message, True

    async def _live(self, reader: asyncio.StreamReader) -> None:
        """Receive messages; when the process ends, fail all requests in flight, and restart it."""
        while True:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    await self._take(await receive(reader))
            self.serves = False
            lost, self._metrics = self._metrics, {}
            ended = (Event(number, [], None, "error", None, known, _DIED) for number, known in lost.items())
            self._on_events([event._replace(error_code=RESTARTING) for event in ended])
            reader = await self._started_again()

    async def _started_again(self) -> asyncio.StreamReader:
        began, pauses = time.monotonic(), itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1]))
        while True:
            await asyncio.to_thread(self._end_process)
            log.error("the engine's process ended; starting it again")
            self.restarts += 1
            try:
                reader = await self._spawn()
                await self._loaded(reader)
            except (AnswerError, ArgumentError, OSError) as error:
                pause = next(pauses)
                log.error("%s; the next attempt is in %d s", error, pause)
                await asyncio.sleep(pause)
            else:
                log.warning("the engine serves again after %.1f s", time.monotonic() - began)
                return reader

    async def _watched(self) -> None:
        """Kill the process when its heartbeat stops."""
        silent = 0
        while True:
            await asyncio.sleep(self._silence.serving_seconds / _LISTENED)
            silent = 0 if self._heard or not self.serves else silent + 1
            self._heard = False
            if silent == _LISTENED:
                nothing_s = self._silence.serving_seconds
                log.error("the engine's process stands still: nothing came from it for %g s", nothing_s)
                self.serves = False
                if self._process is not None:
                    self._process.kill()

    async def _take(self, message: Any) -> None:
        self._heard = True
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, EngineStatus):
            self._on_vitals(message)
            return
        for first in range(0, len(message), _EVENTS_AT_ONCE):
            if first:
                await asyncio.sleep(0)  # events may bring much to decode, and others wait
                self._heard = True
            packed = message[first : first + _EVENTS_AT_ONCE]
            known = [unpack_event(each, self._metrics[each[0]]) for each in packed if each[0] in self._metrics]
            for event in known:
                if event.finish_reason is not None:
                    del self._metrics[event.request_id]
            if all(event.prompt_logprobs is None for event in known):
                self._on_events(known)
                continue
            for event in known:
                for part in in_parts(event, _ENTRIES_AT_ONCE):
                    self._on_events([part])
                    await asyncio.sleep(0)
                    self._heard = True

    def _write(self, message: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(framed(message))

    def add(self, request: Request) -> int:
        """Hand in a request; one that can never be served is refused by the engine, in its first event.

        Raises:
            AnswerError: the engine is being started again.
        """
        if not self.serves:
            raise AnswerError("the engine is being started again; try again in a few seconds", RESTARTING)
        if request.grammar is not None and not self.has_grammar(request.grammar):  # forgotten since it was read
            self.add_grammar(ReadGrammar(request.grammar, None, KEPT_BYTES + 1))  # nobody knows its size any more
        request_id = next(self._numbers)
        self._metrics[request_id] = RequestMetrics(time.perf_counter())
        self._write(Add(request_id, request))
        return request_id

    def has_grammar(self, grammar: str) -> bool:
        """Whether the process holds a grammar."""
        return grammar in self._taught

    def add_grammar(self, read: ReadGrammar) -> None:
        """Send a grammar to the process, and evict others beyond its limits."""
        self._write(AddGrammar(read.grammar, read.automaton))
        for other in self._taught.add(read):
            self._write(DropGrammar(other))
        if read.nbytes > KEPT_BYTES:  # it stays for those who ask at once, and no longer
            asyncio.get_running_loop().call_later(_LARGE_SECONDS, self._let_go, read.grammar)

    def _let_go(self, grammar: str) -> None:
        if self._taught.drop(grammar):
            self._write(DropGrammar(grammar))

    def abort(self, request_id: int) -> None:
        """See `Engine.abort`."""
        if self._metrics.pop(request_id, None) is not None:
            self._write(Abort(request_id))

    def finish(self, request_id: int, num_tokens: int) -> None:
        """See `Engine.finish`."""
        if self._metrics.pop(request_id, None) is not None:
            self._write(Finish(request_id, num_tokens))

    def close(self, *, at_once: bool = False) -> None:
        """End the process; requests in flight fail."""
        for task in (self._life, self._watch):
            if task is not None:
                task.cancel()
        if at_once and self._process is not None:
            self._process.kill()
        self._end_process()

    def _end_process(self) -> None:
        """Wait for the process, which ends when its socket does; not for ever."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._process is None:
            return
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
