"""Client of the engine's process: starts it, talks to it, and restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from graphdecode.child import ConnectedChild
from graphdecode.engine import Event, Request, RequestMetrics
from graphdecode.engine.request import RequestRules
from graphdecode.errors import AnswerError, ArgumentError
from graphdecode.server import messages, start_engine_process
from graphdecode.server.http import RESTARTING

_DIED = "the engine's process ended before the output was complete"
_PAUSES = (1, 2, 4, 8, 16, 32, 60)  # seconds after a failed start; the last one repeats
_CHECKS = 4  # per timeout; one miss may mean that this process itself was suspended
_EVENT_CHUNK = 16
_LOGPROB_CHUNK = 1000  # log-probabilities of a prompt, some milliseconds
_LARGE_SECONDS = 5.0  # for which a grammar larger than MAX_GRAMMAR_BYTES is kept
MAX_GRAMMAR_BYTES = 32 << 20  # size of grammars in the engine's process
_MAX_GRAMMARS = 64
_END_SECONDS = 5.0  # for the process to end by itself

log = logging.getLogger(__name__)


class HeartbeatTimeouts(NamedTuple):
    """How long the engine's process may be silent before it is killed."""

    starting_seconds: float = 300.0  # until its first heartbeat
    loading_seconds: float = 60.0
    serving_seconds: float = 6.0


class GrammarCache(OrderedDict[str, int]):
    """The grammars that the engine's process holds, with their bytes: those used last, bounded in number and bytes."""

    def use(self, grammar: str) -> bool:
        """Return whether a grammar is held, and mark it as used."""
        if grammar in self:
            self.move_to_end(grammar)
        return grammar in self

    def add(self, added: messages.AddGrammar) -> list[str]:
        """Add a grammar; return the grammars that were evicted for it."""
        self[added.grammar] = added.nbytes
        evicted = []
        while len(self) > 1 and (len(self) > _MAX_GRAMMARS or sum(self.values()) > MAX_GRAMMAR_BYTES):
            evicted.append(self.popitem(last=False)[0])
        return evicted


class EngineClient:
    """An engine in another process, for use from one event loop; `on_events` is called with the events of requests."""

    def __init__(
        self,
        setup: messages.EngineSetup,
        *,
        on_events: Callable[[Sequence[Event]], None],
        on_status: Callable[[messages.EngineStatus], None],
        timeouts: HeartbeatTimeouts | None = None,
    ) -> None:
        self._setup = setup
        self._on_events = on_events
        self._on_status = on_status
        self._timeouts = timeouts or HeartbeatTimeouts()
        self._grammars = GrammarCache()  # grammars that the process has
        self._numbers = itertools.count()
        self.adapters: dict[str, str] = dict(setup.adapters)  # name -> folder; a restarted process loads them, too
        self._calls: dict[int, asyncio.Future[Any]] = {}  # in flight
        self._metrics: dict[int, RequestMetrics] = {}  # by requests in flight
        self.prestarted: ConnectedChild | None = None  # the first process, if it was started ahead
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.ready: messages.EngineReady | None = None  # None until a process has loaded for the first time
        self.serves = False
        self.restarts = 0
        self._heard = False  # whether a message came since the last check of the heartbeat

    @property
    def rules(self) -> RequestRules:
        """Limits of what the engine can serve."""
        assert self.ready is not None
        return self.ready.rules

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return len(self._metrics)

    async def start(self) -> None:
        """Start the process, and wait until it serves; raises `ArgumentError`, or `AnswerError` if it ends."""
        reader = await self._spawn()
        await self._loaded(reader)
        self._tasks = [
            asyncio.create_task(self._receive(reader), name="engine"),
            asyncio.create_task(self._check_heartbeat(), name="heartbeat"),
        ]

    async def _spawn(self) -> asyncio.StreamReader:
        if self._writer is not None:
            self._writer.close()
        self._process, self._socket = self.prestarted or start_engine_process()
        self.prestarted = None
        self._grammars = GrammarCache()
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=1 << 24)
        self._write(self._setup._replace(adapters=tuple(self.adapters.items())))
        return reader

    async def _loaded(self, reader: asyncio.StreamReader) -> None:
        message, timeout = messages.Heartbeat(), self._timeouts.starting_seconds
        try:
            while isinstance(message, messages.Heartbeat):
                async with asyncio.timeout(timeout):
                    message = await messages.receive(reader)
                timeout = self._timeouts.loading_seconds
        except TimeoutError:
            self._kill()
            hangs = "the engine's process did not respond while it was loading the model"
            raise AnswerError(f"{hangs}: no message for {timeout:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            raise AnswerError("the engine's process ended while it was loading the model") from None
        if isinstance(message, messages.Refused):
            raise ArgumentError(message.message)
        assert isinstance(message, messages.EngineReady)
        self.ready, self.serves = message, True

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Receive messages; when the process ends, fail all requests in flight, and restart it."""
        while True:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    await self._handle(await messages.receive(reader))
            self.serves = False
            for number in list(self._calls):
                self._end_call(messages.CallResult(number, None, AnswerError("the engine's process ended", RESTARTING)))
            lost, self._metrics = self._metrics, {}
            ended = (Event(number, [], None, "error", None, metrics, _DIED) for number, metrics in lost.items())
            self._on_events([event._replace(error_code=RESTARTING) for event in ended])
            reader = await self._restarted()

    async def _restarted(self) -> asyncio.StreamReader:
        began, pauses = time.monotonic(), itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1]))
        while True:
            await asyncio.to_thread(messages.end_process, self._process, self._socket, _END_SECONDS)
            log.error("the engine's process ended; restarting it")
            self.restarts += 1
            try:
                reader = await self._spawn()
                await self._loaded(reader)
            except (AnswerError, ArgumentError, OSError) as error:
                pause = next(pauses)
                log.error("%s; retrying in %d s", error, pause)
                await asyncio.sleep(pause)
            else:
                log.warning("the engine is serving again after %.1f s", time.monotonic() - began)
                return reader

    async def _check_heartbeat(self) -> None:
        missed, timeout = 0, self._timeouts.serving_seconds
        while True:
            await asyncio.sleep(timeout / _CHECKS)
            missed = 0 if self._heard or not self.serves else missed + 1
            self._heard = False
            if missed == _CHECKS:
                log.error("the engine's process does not respond: no message for %g s", timeout)
                self.serves = False
                self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def _handle(self, message: Any) -> None:
        self._heard = True
        if isinstance(message, messages.EngineStatus):
            self._on_status(message)
        elif isinstance(message, messages.CallResult):
            self._end_call(message)
        elif isinstance(message, list):
            await self._handle_events(message)

    def _end_call(self, answer: messages.CallResult) -> None:
        call = self._calls.get(answer.number)
        if call is not None and not call.done():
            call.set_result(answer.result) if answer.error is None else call.set_exception(answer.error)

    async def _handle_events(self, events: list[tuple[Any, ...]]) -> None:
        for first in range(0, len(events), _EVENT_CHUNK):
            if first:
                await asyncio.sleep(0)  # decoding may take long, and other tasks wait
                self._heard = True
            packed = events[first : first + _EVENT_CHUNK]
            unpacked = [
                messages.unpack_event(each, self._metrics[each[0]]) for each in packed if each[0] in self._metrics
            ]
            for event in unpacked:
                if event.finish_reason is not None:
                    del self._metrics[event.request_id]
            if all(event.prompt_logprobs is None for event in unpacked):
                self._on_events(unpacked)
                continue
            for event in unpacked:
                for part in messages.in_parts(event, _LOGPROB_CHUNK):
                    self._on_events([part])
                    await asyncio.sleep(0)
                    self._heard = True

    def _write(self, message: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.framed(message))

    def _check_serving(self) -> None:
        if not self.serves:
            raise AnswerError("the engine is restarting; try again in a few seconds", RESTARTING)

    def add(self, request: Request) -> int:
        """Send a request; raises `AnswerError` during a restart. The engine refuses one with its first event."""
        self._check_serving()
        if request.grammar is not None and not self.has_grammar(request.grammar):  # evicted meanwhile
            self.add_grammar(
                messages.AddGrammar(request.grammar, None, MAX_GRAMMAR_BYTES + 1)
            )  # its size is no longer known
        request_id = next(self._numbers)
        self._metrics[request_id] = RequestMetrics(time.perf_counter())
        self._write(messages.Add(request_id, request))
        return request_id

    def has_grammar(self, grammar: str) -> bool:
        """Whether the process holds a grammar."""
        return self._grammars.use(grammar)

    def add_grammar(self, added: messages.AddGrammar) -> None:
        """Send a grammar to the process, and evict others beyond its limits."""
        self._write(added)
        for other in self._grammars.add(added):
            self._write(messages.DropGrammar(other))
        if added.nbytes > MAX_GRAMMAR_BYTES:  # only requests that come at once share it
            asyncio.get_running_loop().call_later(_LARGE_SECONDS, self._drop_grammar, added.grammar)

    def _drop_grammar(self, grammar: str) -> None:
        if self._grammars.pop(grammar, None) is not None:
            self._write(messages.DropGrammar(grammar))

    async def change_adapter(self, name: str, folder: str | None) -> None:
        """Load an adapter, or forget it (None), while requests are served.

        Raises `ArgumentError` if it cannot be used or none has that name, `AnswerError` during a restart.
        """
        if folder is None:
            await self.call("unload_adapter", name)
            self.adapters.pop(name, None)
        else:
            await self.call("load_adapter", name, folder)
            self.adapters[name] = folder

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine (see `Call`); raises `AnswerError` if it refuses, or during a restart."""
        self._check_serving()
        number = next(self._numbers)
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        self._write(messages.Call(number, method, arguments))
        try:
            return await call
        finally:
            del self._calls[number]

    def abort(self, request_id: int) -> None:
        """See `Engine.abort`."""
        self.finish(request_id, None)

    def finish(self, request_id: int, num_tokens: int | None) -> None:
        """See `Engine.finish`."""
        if self._metrics.pop(request_id, None) is not None:
            self._write(messages.Finish(request_id, num_tokens))

    async def end(self) -> None:
        """End the process, and wait for that without blocking other tasks."""
        self.serves = False
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(messages.end_process, self._process, self._socket, _END_SECONDS)

    def close(self, *, force: bool = False) -> None:
        """End the process; requests in flight fail."""
        for task in self._tasks:
            task.cancel()
        if force:
            self._kill()
        messages.end_process(self._process, self._socket, _END_SECONDS)
