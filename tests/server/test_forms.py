"""What is remembered of forms, who waits for whose, and whose turn it is."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from graphdecode.engine import StructuredOutputsParams
from graphdecode.errors import ArgumentError
from graphdecode.server.app import KeyGuard, caller_of
from graphdecode.server.engine_client import KeptGrammars
from graphdecode.server.fork_pool import CALLERS_KEPT, FairQueue, JobError
from graphdecode.server.http import HttpError
from graphdecode.server.messages import AddGrammar
from graphdecode.server.structured_outputs import GrammarReader


class Reader:
    """Reads forms in the place of children, and of the engine that is taught them."""

    def __init__(self, becomes: Callable[[str], Any] = lambda text: None) -> None:
        self.reads: list[str] = []
        self.ended: list[str] = []
        self.taught = KeptGrammars()
        self._becomes = becomes
        self.goes_on = asyncio.Event()

    async def run(self, function: Any, params: StructuredOutputsParams, *, caller: str, **_: Any) -> AddGrammar:
        text = str(params.regex)
        self.reads.append(text)
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            self.ended.append(text)
            raise
        if (error := self._becomes(text)) is not None:
            raise error
        return AddGrammar(f"grammar of {text}", None, 1 << 20)

    def has_grammar(self, grammar: str) -> bool:
        return grammar in self.taught

    def add_grammar(self, form: AddGrammar) -> None:
        assert form.grammar not in self.taught
        self.taught.add(form)


def asked(forms: GrammarReader, text: str, caller: str = "a") -> asyncio.Task[str]:
    return asyncio.ensure_future(forms.grammar(StructuredOutputsParams(regex=text), caller))


def test_only_what_the_form_itself_takes_is_remembered_against_it() -> None:
    errors = {
        "wrong": ArgumentError("structured_outputs: wrong"),
        "endless": JobError("takes more than 4 s of a processor"),
        "unlucky": HttpError(503, "the machine is under load", headers={"Retry-After": "1"}),
    }

    async def main() -> list[str]:
        reader = Reader(lambda text: errors.get(text))
        reader.goes_on.set()
        forms = GrammarReader(reader, reader)  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(ArgumentError, match="^structured_outputs: wrong$"):
                await asked(forms, "wrong")
            with pytest.raises(ArgumentError, match="^structured_outputs: reading the regex takes more than 4 s"):
                await asked(forms, "endless")
            with pytest.raises(HttpError, match="under load"):
                await asked(forms, "unlucky")
            assert await asked(forms, "good") == "grammar of good"
        return reader.reads

    assert asyncio.run(main()) == ["wrong", "endless", "unlucky", "good", "unlucky"]


def test_a_form_is_read_once_for_all_who_ask_at_once_and_no_longer_than_somebody_waits() -> None:
    async def main() -> None:
        reader = Reader()
        forms = GrammarReader(reader, reader)  # type: ignore[arg-type]
        equal, alone = [asked(forms, "equal") for _ in range(256)], asked(forms, "alone")
        other = asked(forms, "equal", "b")  # who waits for another caller's would wait for his turn, too
        await asyncio.sleep(0.01)
        assert reader.reads == ["equal", "alone", "equal"]
        for task in [*equal[1:], alone]:
            task.cancel()
        await asyncio.sleep(0.01)
        assert reader.ended == ["alone"]
        reader.goes_on.set()
        assert await asyncio.gather(equal[0], other) == ["grammar of equal"] * 2

    asyncio.run(main())


def test_a_form_that_the_engine_has_forgotten_is_read_again() -> None:
    async def main() -> list[str]:
        reader = Reader()
        reader.goes_on.set()
        forms = GrammarReader(reader, reader)  # type: ignore[arg-type]
        for text in ("a", "b", "a"):
            await asked(forms, text)
        reader.taught = KeptGrammars()
        await asked(forms, "a")
        return reader.reads

    assert asyncio.run(main()) == ["a", "b", "a"]


def test_an_engine_keeps_no_more_forms_than_fit_in_some_memory_and_those_that_were_used_last() -> None:
    taught, kept, rng = KeptGrammars(), list[tuple[str, int]](), random.Random(3)
    for number in range(300):
        nbytes = rng.choice([1 << 10, 1 << 20, 5 << 20, 40 << 20])
        name = f"form {number}"
        gone = taught.add(AddGrammar(name, None, nbytes))
        kept.append((name, nbytes))
        expected = []
        while len(kept) > 1 and (len(kept) > 64 or sum(size for _, size in kept) > 32 << 20):
            expected.append(kept.pop(0)[0])
        assert gone == expected
        used = rng.choice(kept)
        assert used[0] in taught
        kept.remove(used)
        kept.append(used)
        assert not any(each in taught for each in gone)


def test_callers_without_number_neither_fill_the_queue_nor_slow_it() -> None:
    queue = FairQueue()
    assert queue.start_tag("greedy", 1000) == 0
    assert queue.start_tag("greedy", 1000) == 1000
    for number in range(3 * CALLERS_KEPT):
        assert queue.start_tag(f"caller {number}", 10) == 0
    assert queue.start_tag("greedy", 1) == 0  # who has not asked for longest is forgotten
    assert queue.start_tag(f"caller {3 * CALLERS_KEPT - 1}", 10) == 10
    queue.began(50)
    assert queue.start_tag("new", 1) == 50
    assert queue.start_tag("new", 1) == 51


def caller(scope: dict[str, Any], keys: list[str]) -> str:
    found = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(caller_of(scope))

    async def nothing(*_: Any) -> Any: ...

    asyncio.run(KeyGuard(app, keys)(scope, nothing, nothing) if keys else app(scope, nothing, nothing))
    return found[0]


def test_who_asks_is_told_by_the_key_that_let_him_in_and_else_by_his_address() -> None:
    def scope(key: str, host: str | None, path: str = "/v1/completions") -> dict[str, Any]:
        client = None if host is None else (host, 1234)
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"x-forwarded-for", key.encode())]
        return {"type": "http", "method": "POST", "path": path, "headers": headers, "client": client}

    hosts = ("10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", None)
    assert len({caller(scope(key, host), []) for key in ("a", "b") for host in hosts}) == len(hosts) - 1
    assert caller(scope("a", "10.0.0.1"), []) == caller(scope("b", "10.0.0.1"), [])
    by_key = [caller(scope(key, host), ["a", "b"]) for key in ("a", "b") for host in hosts]
    assert len(set(by_key)) == 2
    assert not {"a", "b"} & set(by_key)
    assert caller(scope("a", "10.0.0.1", "/tokenize"), ["a", "b"]) == "10.0.0.1"
