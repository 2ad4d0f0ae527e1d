"""The engine's process and who stands for it: readings that nobody waits for, forms that fail, and silence."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from preprocessors import READY
from served import until

from graphdecode import SamplingParams, child
from graphdecode.config import EngineConfig
from graphdecode.engine import EngineStats, Event, Request, RequestMetrics
from graphdecode.engine.adapters import AdapterStats
from graphdecode.engine.constraint import ConstraintError
from graphdecode.errors import AnswerError
from graphdecode.models import resolve_model_path
from graphdecode.server.engine_client import MAX_GRAMMAR_BYTES, EngineClient, HeartbeatTimeouts
from graphdecode.server.engine_process import EngineProcess
from graphdecode.server.messages import (
    Add,
    AddGrammar,
    DropGrammar,
    EngineSetup,
    EngineStatus,
    Finish,
    Heartbeat,
    MessageSocket,
    framed,
    pack_event,
)

HANG_SECONDS = 60


class Idle:
    """An engine that takes requests, and has never anything to do."""

    capture_waiting = staticmethod(lambda: False)
    has_work, num_running, num_waiting, num_preemptions = False, 0, 0, 0
    cache = SimpleNamespace(pool=SimpleNamespace(used=0, total=1))
    adapters = SimpleNamespace(stats=AdapterStats())
    scheduler = SimpleNamespace(num_deferred=0)

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.added: list[tuple[str | None, Any]] = []

    def add(self, request: Request, constraint: Any) -> int:
        self.added.append((request.grammar, constraint))
        return len(self.added)

    def finish(self, request_id: int, num_tokens: int | None) -> None: ...


class Panic(BaseException):
    """As those of Rust are."""


class Slow:
    """Reads forms, once it is let."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end = threading.Event()

    def compiled(self, grammar: str) -> str:
        self.begun.append(grammar)
        self.may_end.wait(4 * HANG_SECONDS)
        raising = {"panics": Panic("index out of range"), "fails": MemoryError(), "wrong": ConstraintError("no form")}
        if grammar in raising:
            raise raising[grammar]
        return grammar.upper()

    def new_constraint(self, compiled: str) -> str:
        if compiled == "HELD BADLY":
            raise RuntimeError("a library's")
        return f"held {compiled}"


@pytest.fixture
def process() -> Iterator[tuple[Idle, Slow, Callable[[Any], None], Callable[[], list[Any]]]]:
    engine, grammars = Idle(), Slow()
    here, there = socket.socketpair()
    served = EngineProcess(engine, MessageSocket(there), grammars)  # type: ignore[arg-type]
    thread = threading.Thread(target=served.serve)
    thread.start()
    connection = MessageSocket(here)

    def events() -> list[Any]:
        while True:
            for message in connection.receive(wait=True):
                if not isinstance(message, EngineStatus):
                    return list(message)

    yield engine, grammars, connection.send, events
    grammars.may_end.set()
    here.close()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def asks(number: int, grammar: str) -> Add:
    return Add(number, Request([1], SamplingParams(), grammar=grammar))


def test_the_engine_process_compiles_no_grammar_without_a_waiting_request(process: Any) -> None:
    engine, grammars, send, _ = process
    for number in range(40):
        send(AddGrammar(f"form {number}", None, 0))
    for number in range(40):
        send(asks(number, f"form {number}"))
    until(lambda: len(grammars.begun) == 2)
    for number in range(39):
        send(Finish(number, None))
    send(DropGrammar("form 5"))
    send(asks(100, "form 7"))  # was left, and is wanted again
    send(Add(200, Request([1], SamplingParams())))
    until(lambda: engine.added == [(None, None)])  # so it has taken all that was sent before
    grammars.may_end.set()
    until(lambda: len(engine.added) == 3)
    assert sorted(engine.added[1:]) == [("form 39", "held FORM 39"), ("form 7", "held FORM 7")]
    assert set(grammars.begun) == {"form 0", "form 1", "form 7", "form 39"}


@pytest.mark.parametrize("grammar", ["panics", "fails", "wrong", "held badly"])
def test_any_error_of_compiling_a_grammar_fails_only_its_request(process: Any, grammar: str) -> None:
    engine, grammars, send, events = process
    grammars.may_end.set()
    send(AddGrammar(grammar, None, 0))
    send(asks(3, grammar))
    (event,) = events()
    assert (event[0], event[3]) == (3, "error")
    assert "no form" in event[6] or "the grammar could not be compiled" in event[6]
    send(AddGrammar("good", None, 0))
    send(asks(4, "good"))
    until(lambda: engine.added == [("good", "held GOOD")])


class Scripted:
    """A process that says what a test has it say, and then nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *said: Any) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self._sockets: list[socket.socket] = []

        def start(module: str, descriptors: list[int], *_: Any) -> subprocess.Popen[bytes]:
            there = socket.fromfd(descriptors[0], socket.AF_UNIX, socket.SOCK_STREAM)
            self._sockets.append(there)
            for message in said:
                there.sendall(framed(message))
            return self.process

        monkeypatch.setattr(child, "start_child", start)

    def say(self, message: Any) -> None:
        self._sockets[-1].sendall(framed(message))

    def heard(self) -> list[Any]:
        return MessageSocket(self._sockets[-1]).receive(wait=True)

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize(("said", "silent"), [((), "1"), ((Heartbeat(), Heartbeat()), "0.5")])
def test_an_engine_that_stands_still_while_it_loads_is_ended(
    monkeypatch: pytest.MonkeyPatch, said: tuple[Any, ...], silent: str
) -> None:
    scripted = Scripted(monkeypatch, *said)
    client = client_of(HeartbeatTimeouts(1, 0.5, 0.5))
    with pytest.raises(AnswerError, match=f"{silent} s"):
        asyncio.run(client.start())
    assert scripted.process.wait(HANG_SECONDS) < 0
    scripted.close()


def test_an_engine_that_stands_still_is_noticed_in_less_than_two_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HeartbeatTimeouts().serving_seconds * 5 / 4 + 1 < 10

    sleep, slept = asyncio.sleep, list[float]()

    async def counted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async def main() -> None:
        scripted = Scripted(monkeypatch, Heartbeat(), READY)
        client = client_of(HeartbeatTimeouts(HANG_SECONDS, HANG_SECONDS, 4.0))
        monkeypatch.setattr(asyncio, "sleep", counted)
        await client.start()
        assert client.serves
        while client.serves:
            await sleep(0)
        assert 4.0 <= sum(slept) < 8.0
        assert scripted.process.wait(HANG_SECONDS) < 0
        client.close(force=True)
        scripted.close()

    asyncio.run(main())


def test_others_have_their_turn_between_the_events_of_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scripted = Scripted(monkeypatch, READY)
        taken, turns = list[int](), list[int]()
        client = client_of(HeartbeatTimeouts(), lambda events: taken.extend(event.request_id for event in events))
        await client.start()
        numbers = [client.add(Request([1])) for _ in range(100)]
        events = [Event(each, [5], None, None, None, RequestMetrics(0.0)) for each in numbers]
        scripted.say([pack_event(event, event.request_id, with_metrics=True) for event in events])
        client.abort(99)
        while len(taken) < 99:
            turns.append(len(taken))
            await asyncio.sleep(0)
        assert taken == numbers[:99]
        assert len(set(turns)) > 4
        client.close(force=True)
        scripted.close()

    asyncio.run(main())


def test_a_grammar_above_the_cache_limit_is_cached_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", lambda loop, _, call, *given: loop.call_soon(call, *given))

    async def main() -> None:
        scripted = Scripted(monkeypatch, READY)
        client = client_of(HeartbeatTimeouts())
        await client.start()
        for nbytes in (MAX_GRAMMAR_BYTES, MAX_GRAMMAR_BYTES + 1):
            client.add_grammar(AddGrammar(f"form of {nbytes}", None, nbytes))
            assert client.has_grammar(f"form of {nbytes}")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not client.has_grammar(f"form of {MAX_GRAMMAR_BYTES + 1}")
        assert [type(message) for message in scripted.heard()][-3:] == [AddGrammar, DropGrammar, DropGrammar]
        client.close(force=True)
        scripted.close()

    asyncio.run(main())


def client_of(silence: HeartbeatTimeouts, on_events: Callable[[Any], object] = lambda _: None) -> EngineClient:
    setup = EngineSetup(resolve_model_path("demo"), EngineConfig(), False)
    return EngineClient(setup, on_events=on_events, on_status=lambda _: None, timeouts=silence)  # type: ignore[arg-type]
