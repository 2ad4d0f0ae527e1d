"""Who gets a request, and what the front does where who got it is gone; tools/check replicas tries a real Ray."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import httpx2 as httpx
import pytest
from command_line import run_command
from starlette.types import Message, Scope

from graphdecode.cli.serve import prepare_ray
from graphdecode.config import ReplicaConfig, ServerConfig
from graphdecode.errors import ArgumentError, ConfigError
from graphdecode.server.replicas.front import LostError, make_front, merged
from graphdecode.server.replicas.routing import (
    BLOCK_CHARACTERS,
    MAX_BLOCKS,
    RequestsInFlight,
    RoutedPrefixes,
    choose,
    prompt_blocks,
)

SEEDS = range(5)


def common_blocks(one: str, other: str) -> int:
    """Count by the texts themselves what the index finds by digests."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same // BLOCK_CHARACTERS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replica_has_the_longest_beginning_that_it_was_sent(seed: int) -> None:
    draw = random.Random(seed)
    stems = ["".join(draw.choices("ab", k=draw.randrange(200))) for _ in range(6)]
    prompts = [draw.choice(stems)[: draw.randrange(200)] + draw.choice(stems) for _ in range(60)]
    index: RoutedPrefixes[int] = RoutedPrefixes()
    sent: dict[int, list[str]] = {}
    for prompt in prompts:
        expected = {
            replica: most for replica, had in sent.items() if (most := max(common_blocks(prompt, each) for each in had))
        }
        blocks = prompt_blocks({"prompt": prompt})
        assert index.matched(blocks) == expected, (seed, prompt)
        replica = draw.randrange(3)
        index.add(replica, blocks)
        sent.setdefault(replica, []).append(prompt)
    index.keep_only([0])
    assert set(index.matched(prompt_blocks({"prompt": sent[1][-1]}))) <= {0}


def test_what_was_used_longest_ago_is_forgotten_from_its_end() -> None:
    index: RoutedPrefixes[str] = RoutedPrefixes(max_blocks=6)
    index.add("a", [1, 2, 3, 4])
    index.add("a", [11, 12])
    assert index.matched([1, 2, 3, 4]) == {"a": 4}
    index.add("a", [21])
    assert index.matched([1, 2, 3, 4]) == {"a": 3}
    index.add("a", [1, 2, 3])
    index.add("a", [31, 32])
    assert (index.matched([1, 2, 3]), index.matched([11, 12])) == ({"a": 3}, {})


@pytest.mark.parametrize("seed", SEEDS)
def test_load_differs_by_at_most_the_slack_within_which_prefixes_decide(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        loads = {replica: draw.randrange(12) for replica in range(draw.randrange(1, 8))}
        matched = {replica: draw.randrange(1, 9) for replica in loads if draw.random() < 0.5}
        slack = draw.randrange(6)
        chosen = choose(loads, matched, slack, draw)
        near = [each for each, load in loads.items() if load <= min(loads.values()) + slack]
        assert chosen in near
        assert matched.get(chosen, 0) == max(matched.get(each, 0) for each in near)
        if not matched:
            assert loads[chosen] == min(loads.values())


def test_equals_have_turns_by_chance() -> None:
    draw = random.Random(0)
    counts = Counter(choose(dict.fromkeys("abcd", 3), {}, 0, draw) for _ in range(4000))
    assert all(900 < counts[each] < 1100 for each in "abcd")  # 3.6 standard deviations


def test_requests_in_flight_count_without_reports_of_their_replica() -> None:
    own: RequestsInFlight[str] = RequestsInFlight()
    for _ in range(30):
        own.sent("long")
    own.sent("short")
    own.ended("short")
    loads = {name: own.load(name, None) for name in ("long", "short")}
    assert loads == {"long": 30, "short": 0}
    assert choose(loads, {"long": 9}, 8, random.Random(0)) == "short"


def test_requests_of_other_fronts_count_and_old_news_does_not_hide_our_own() -> None:
    own: RequestsInFlight[str] = RequestsInFlight()
    for _ in range(5):
        own.sent("a")
    assert [own.load("a", told) for told in (12, 1, None)] == [12, 5, 5]
    for _ in range(6):  # one more than was sent, as where a replica's name comes back
        own.ended("a")
    own.sent("a")
    assert own.load("a", None) == 1


def test_of_many_requests_at_a_time_each_replica_gets_as_many() -> None:
    own, draw = RequestsInFlight[str](), random.Random(0)

    def load(name: str) -> int:
        return own.load(name, 0)  # as told before any of them came

    for request in range(200):
        own.chosen(request, choose({name: load(name) for name in "ab"}, {}, 8, draw))
    assert (load("a"), load("b")) == (100, 100)
    own.chosen(7, "a")  # again, as where the first choice had no room
    own.chosen(7, "a")
    for request in range(200):
        own.settled(request)
        own.settled(request)
    assert (load("a"), load("b")) == (0, 0)


def test_prompts_of_all_kinds_have_blocks_and_what_is_none_has_none() -> None:
    system = {"role": "system", "content": "x" * 100}
    one, two = ([system, {"role": "user", "content": text}] for text in ("first" * 9, "second" * 9))
    blocks = [prompt_blocks({"messages": each}) for each in (one, two)]
    assert blocks[0][:3] == blocks[1][:3]
    assert blocks[0] != blocks[1]
    assert prompt_blocks({"messages": one, "tools": [1]})[0] != blocks[0][0]
    asked = {"instructions": "y" * 64, "input": "z" * 64}
    assert prompt_blocks(asked)[0] == prompt_blocks(asked | {"input": "x" * 64})[0]
    assert prompt_blocks(asked)[-1] != prompt_blocks(asked | {"input": "x" * 64})[-1]
    assert prompt_blocks({"prompt": ["y" * 64, "z"]}) == prompt_blocks({"prompt": "y" * 64})
    assert len(prompt_blocks({"prompt": list(range(100))})) == len(json.dumps(list(range(100)))) // BLOCK_CHARACTERS
    assert len(prompt_blocks({"prompt": "y" * 10**6})) == MAX_BLOCKS
    assert [prompt_blocks(each) for each in (None, [], {}, {"prompt": 3}, {"prompt": "\ud800"})] == [[]] * 5


@pytest.mark.parametrize(
    "bad", [{"count": 0}, {"autoscale": "3"}, {"autoscale": "3:2"}, {"count": 1, "autoscale": "1:2"}]
)
def test_numbers_of_replicas_that_cannot_be_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"count|autoscale"):
        ReplicaConfig(**bad)  # type: ignore[arg-type]


def begin(status: int, kind: bytes) -> Message:
    headers = [(b"content-type", kind), (b"x-graphdecode-replica", b"busy")]
    return {"type": "http.response.start", "status": status, "headers": headers}


EVENTS, PLAIN = begin(200, b"text/event-stream"), begin(200, b"application/json")
FULL = begin(429, b"application/json")
RESTARTING = b'data: {"error":{"message":"the engine ended","code":"restarting"}}\n\n'


def body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Script:
    """Replicas that do, one request behind the other, what is written: messages, and an error where they are lost."""

    def __init__(self, *attempts: list[Message | Exception]) -> None:
        self._attempts = iter(attempts)
        self.avoided: list[list[str]] = []

    async def messages(
        self, scope: Scope, body: bytes, blocks: Sequence[int], avoid: Sequence[str]
    ) -> AsyncGenerator[Message, None]:
        self.avoided.append(list(avoid))
        for message in next(self._attempts):
            if isinstance(message, Exception):
                raise message
            yield message

    async def metrics(self) -> dict[str, str]:
        return {}


def answer(script: Script, **limits: float) -> httpx.Response:
    async def main() -> httpx.Response:
        app, _ = make_front(script, ServerConfig(**limits))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as http:
            return await http.post("/v1/completions", json={"prompt": "1+1="})

    return asyncio.run(main())


LOST = LostError("it is gone")
WHOLE: list[Message | Exception] = [PLAIN, body(b"{}", more=False)]


@pytest.mark.parametrize(
    ("first", "avoided"),
    [
        ([LOST], []),
        ([EVENTS, LOST], []),
        ([], []),
        ([FULL, body(b"{}", more=False)], ["busy"]),
        ([EVENTS, body(RESTARTING)], ["busy"]),
    ],
)
def test_a_response_that_has_not_begun_is_retried_elsewhere(
    first: list[Message | Exception], avoided: list[str]
) -> None:
    script = Script(first, WHOLE)
    assert answer(script).status_code == 200
    assert script.avoided == [[], avoided]


def test_a_stream_that_has_begun_ends_with_an_error_and_is_not_retried() -> None:
    script = Script([EVENTS, body(b"data: {}\n\n"), LOST], WHOLE)
    first, error, done, end = answer(script).text.split("\n\n")
    assert (first, done, end) == ("data: {}", "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(script.avoided) == 1


def test_what_is_no_stream_and_had_begun_is_cut() -> None:
    with pytest.raises(ConnectionAbortedError):
        answer(Script([PLAIN, body(b"{"), LOST], WHOLE))


def test_a_request_that_ends_its_replicas_is_not_handed_on_for_ever() -> None:
    script = Script([LOST], [LOST], [LOST], WHOLE)
    refused = answer(script)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
    assert len(script.avoided) == 3


def test_where_no_replica_is_left_that_has_room_the_last_ones_answer_counts() -> None:
    full: list[Message | Exception] = [FULL, body(b"{}", more=False)]
    assert answer(Script(full, full, full, WHOLE)).status_code == 429


def test_metrics_of_several_replicas_are_one_text_with_their_names() -> None:
    text = '# HELP a_total A.\n# TYPE a_total counter\na_total{model_name="m"} 1.0\n# HELP b B.\n# TYPE b gauge\n'
    assert merged({"x": text, "y": text.replace("1.0", "2.0")}) == (
        '# HELP a_total A.\n# TYPE a_total counter\na_total{replica="x",model_name="m"} 1.0\n'
        'a_total{replica="y",model_name="m"} 2.0\n# HELP b B.\n# TYPE b gauge\n'
    )


def test_what_replicas_need_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="ray, aiohttp"):
        prepare_ray("replicas", ReplicaConfig(count=2))


@pytest.mark.parametrize(
    "arguments", [("serve", "--direct"), ("serve", "--ray-address", "x:1"), ("batch", "a", "b", "--replicas", "2")]
)
def test_options_of_replicas_without_replicas_are_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = run_command(*arguments, folder=tmp_path)
    assert result.returncode == 2
    assert "--replicas" in result.stderr
