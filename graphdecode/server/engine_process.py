"""The engine's own process: it loads a model, and then only steps.

    python -m graphdecode.server.engine_process FD

FD is the socket to the process that speaks HTTP; what to load is the first message over it. It lives as long as the
other side does.
"""

from __future__ import annotations

import gc
import logging
import socket
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from graphdecode.child import leave_signals
from graphdecode.distributed import RankError
from graphdecode.engine import Engine, Event, RequestMetrics
from graphdecode.engine.constraint import Constraint, ConstraintError
from graphdecode.engine.loading import load_engine
from graphdecode.errors import AnswerError, ArgumentError, EngineStateError, GraphdecodeError
from graphdecode.memory import trim_heap
from graphdecode.profiling.environment import cache_bytes, read_bandwidth
from graphdecode.server import messages
from graphdecode.server.http import BUSY, REFUSED, SLEEPING
from graphdecode.server.jobs import STACK_BYTES
from graphdecode.text.grammar import Grammars

_STATUS_EVERY_SECONDS = 0.25
_BANDWIDTH_BYTES = 256 << 20
_STACK_BYTES = 4 * STACK_BYTES  # of threads; a grammar that compiled in a child does not overflow it
_COMPILERS = 2  # grammars that are compiled at a time
_POLL_SECONDS = 0.005  # for messages, while grammars are compiled and there is nothing else to do

log = logging.getLogger(__name__)


class EngineProcess:
    """Runs one engine for the process at the other end of a socket; `grammars`: None if it has none."""

    def __init__(self, engine: Engine, connection: messages.MessageSocket, grammars: Grammars | None = None) -> None:
        self._engine = engine
        self._grammars = grammars
        self._connection = connection
        self._client_ids: dict[int, int] = {}  # the engine's id of a request -> the client's
        self._engine_ids: dict[int, int] = {}
        self._begun: set[int] = set()  # requests whose first event was sent
        # compiled in threads, so that no step waits; None: no request has needed it yet
        self._compiled: dict[str, Future[Any] | None] = {}
        self._waiting: dict[int, tuple[Future[Any], messages.Add]] = {}  # client id -> the grammar that it waits for
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar")
        self._callers = ThreadPoolExecutor(1, thread_name_prefix="call")  # one after another, as they were sent
        self._status_sent = 0.0  # seconds

    def serve(self) -> None:
        """Step while there is work, and wait for messages otherwise, until the other side is gone."""
        engine, may_capture = self._engine, True
        while True:
            try:
                self._send_status()
                is_idle, may_capture = not (engine.has_work or self._waiting or may_capture), False
                for message in self._connection.receive(wait=is_idle):
                    self._handle(message)
                may_capture = engine.capture_waiting()
                if self._waiting:
                    self._add_compiled()
                if engine.has_work:
                    self._send(engine.step())
            except RankError as error:  # the other ranks cannot go on; a new process has new ones
                log.error("%s", error)
                with suppress(GraphdecodeError, OSError):
                    self._send(engine.step())  # fails every request with the rank in the error
                return
            except GraphdecodeError as error:
                log.warning("%s", error)
            except (EOFError, OSError):
                return
            except Exception:  # the engine has failed all requests, and its next step returns their errors
                log.exception("a step failed")

    def _handle(self, message: Any) -> None:
        if isinstance(message, messages.Add):
            grammar = message.request.grammar
            if grammar is None or grammar not in self._compiled:
                self._add(message)
            else:
                self._waiting[message.request_id] = self._compile(grammar), message
        elif isinstance(message, messages.AddGrammar):
            self._compiled[message.grammar] = None
            if message.automaton is not None:
                compiled = self._compiled[message.grammar] = Future()
                compiled.set_result(message.automaton)
        elif isinstance(message, messages.DropGrammar):
            self._cancel_unused(self._compiled.pop(message.grammar, None))
            self._compilers.submit(trim_heap)  # a grammar is scattered over the heap
        elif isinstance(message, messages.Call):
            self._callers.submit(self._call, message)  # no step waits for an adapter's file
        elif isinstance(message, messages.Finish):
            self._cancel_unused(self._waiting.pop(message.request_id, (None,))[0])
            self._engine.finish(self._forget(message.request_id), message.num_tokens)

    def _call(self, message: messages.Call) -> None:
        result, failure = None, None
        adapters = {"load_adapter": self._engine.adapters.load, "unload_adapter": self._engine.adapters.unload}
        try:
            method = adapters.get(message.method) or getattr(self._engine, message.method)
            result = method(*message.arguments) if callable(method) else method
        except Exception as error:  # whatever a file's contents lead to, the client learns of it
            text = str(error) or type(error).__name__
            code = BUSY if isinstance(error, EngineStateError) else REFUSED
            failure = ArgumentError(text) if message.method in adapters else AnswerError(text, code)
        self._connection.send(messages.CallResult(message.number, result, failure))

    def _add_compiled(self) -> None:
        if not self._engine.has_work:
            wait([future for future, _ in self._waiting.values()], _POLL_SECONDS, FIRST_COMPLETED)
        for request_id, (future, message) in list(self._waiting.items()):
            if future.done():
                del self._waiting[request_id]
                self._add(message, future)

    def _compile(self, grammar: str) -> Future[Any]:
        """Return the compilation of a grammar, started if it was not."""
        assert self._grammars is not None
        future = self._compiled[grammar]
        if future is None or future.cancelled():
            future = self._compiled[grammar] = self._compilers.submit(self._grammars.compiled, grammar)
        return future

    def _cancel_unused(self, future: Future[Any] | None) -> None:
        """Cancel a compilation that no request waits for, unless it has begun."""
        if future is not None and not any(future is other for other, _ in self._waiting.values()):
            future.cancel()

    def _constraint(self, compiled: Future[Any]) -> Constraint:
        assert self._grammars is not None
        try:
            return self._grammars.new_constraint(compiled.result())
        except GraphdecodeError:
            raise
        except BaseException as error:  # a library's, Rust's panics too: only this request fails
            log.exception("a grammar that compiled in a child does not compile here")
            raise AnswerError(f"the grammar could not be compiled: {type(error).__name__}") from error

    def _add(self, message: messages.Add, compiled: Future[Any] | None = None) -> None:
        try:
            engine_id = self._engine.add(message.request, None if compiled is None else self._constraint(compiled))
        except GraphdecodeError as error:
            metrics = RequestMetrics(time.perf_counter())
            code = REFUSED if isinstance(error, ArgumentError | ConstraintError) else None
            code = SLEEPING if isinstance(error, EngineStateError) else code
            refusal = Event(message.request_id, [], None, "error", None, metrics, str(error), error_code=code)
            self._connection.send([messages.pack_event(refusal, message.request_id, with_metrics=True)])
        else:
            self._client_ids[engine_id], self._engine_ids[message.request_id] = message.request_id, engine_id

    def _forget(self, request_id: int) -> int:
        """Return the engine's id of a request, or one that it does not know."""
        engine_id = self._engine_ids.pop(request_id, -1)
        self._client_ids.pop(engine_id, None)
        self._begun.discard(engine_id)
        return engine_id

    def _send(self, events: list[Event]) -> None:
        packed = []
        for event in events:
            client_id = self._client_ids.get(event.request_id)
            if client_id is None:
                continue
            is_last = event.finish_reason is not None
            packed.append(
                messages.pack_event(event, client_id, with_metrics=is_last or event.request_id not in self._begun)
            )
            self._begun.add(event.request_id)
            if is_last:
                self._forget(client_id)
        if packed:
            self._connection.send(packed)

    def _send_status(self) -> None:
        now, engine = time.perf_counter(), self._engine
        if now - self._status_sent < _STATUS_EVERY_SECONDS and engine.has_work:
            return
        self._status_sent = now
        pool, stats = engine.cache.pool, engine.stats
        counts = engine.num_running, engine.num_waiting, pool.used, pool.total, engine.num_preemptions
        deferred = engine.scheduler.num_deferred
        self._connection.send(messages.EngineStatus(*counts, stats, engine.adapters.stats, deferred))
        stats.step_seconds.clear()
        stats.decode_seconds.clear()
        stats.launch_seconds.clear()
        stats.step_tokens.clear()


def _floor_seconds(engine: Engine) -> float | None:
    """Return the seconds to read the weights once; None if they may fit the last-level cache."""
    device, size = engine.model.device, engine.model.weight_bytes
    if size <= cache_bytes(device):
        return None
    return size / read_bandwidth(device, size_bytes=_BANDWIDTH_BYTES, repeats=3)


def _beat(connection: messages.MessageSocket) -> None:
    with suppress(OSError):
        while True:
            time.sleep(messages.HEARTBEAT_SECONDS)
            connection.send(messages.Heartbeat())


def main() -> None:
    """Load the engine that the first message describes, and serve."""
    leave_signals()
    threading.stack_size(_STACK_BYTES)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    connection = messages.MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    try:
        (setup,) = connection.receive(wait=True)
    except EOFError:
        return
    assert isinstance(setup, messages.EngineSetup)
    threading.Thread(target=_beat, args=(connection,), name="heartbeat", daemon=True).start()
    try:
        engine = load_engine(setup.model, setup.config, progress=setup.progress, eos_token_id=setup.eos_token_id)
        for name, folder in setup.adapters:
            engine.adapters.load(name, folder)
    except GraphdecodeError as error:
        connection.send(messages.Refused(str(error)))
        return
    grammars = None
    if setup.tokenizer is not None:
        rules = engine.rules
        grammars = Grammars(setup.tokenizer, rules.vocab_size, rules.eos_token_ids)
        try:
            grammars.load()
        except GraphdecodeError as error:  # such requests are refused, and others served
            log.warning("%s", error)
    connection.send(messages.EngineReady(engine.rules, engine.seed, engine.graphs.buckets, _floor_seconds(engine)))
    gc.collect()
    gc.freeze()  # what was loaded stays; the collector need not look at it between two steps
    EngineProcess(engine, connection, grammars).serve()
    engine.close()


if __name__ == "__main__":
    main()
