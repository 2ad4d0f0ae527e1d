"""The engine's public face: tokens in, events out, and nothing of text."""

from collections.abc import Iterator
from typing import Any

import pytest

from graphdecode import LLM, BucketConfig, Engine, Request, SamplingParams
from graphdecode.engine import RequestError
from graphdecode.engine.loading import make_runner
from graphdecode.engine.runner import Launch, LaunchPlan
from graphdecode.models import load_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = BucketConfig(max_batch_size=4, max_sequence_length=64)
    made = Engine(make_runner(load_model("demo", device="cpu"), config))
    made.graphs.capture(progress=False, kinds=["steps"])
    yield made
    made.close()


def run(engine: Engine) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
    return tokens


def assert_idle(engine: Engine) -> None:
    assert not engine.has_work
    assert engine.cache.pool.used == 0
    assert not engine.cache.ledger.pages
    assert engine.num_waiting == 0


def test_every_token_comes_once_in_order_and_the_last_event_says_why(engine: Engine) -> None:
    first = engine.add(Request([97, 98], GREEDY))
    second = engine.add(Request([99] * 5, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)))
    events = []
    while engine.has_work:
        events += engine.step()
    reasons = [(event.request_id, event.finish_reason) for event in events if event.finish_reason]
    assert sorted(reasons) == [(first, "length"), (second, "length")]
    counts = {i: sum(len(event.token_ids) for event in events if event.request_id == i) for i in (first, second)}
    assert counts == {first: 12, second: 3}
    assert_idle(engine)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([]), "empty"),
        (Request([97] * 64), "64 tokens; with one token to generate, at most 63"),
        (Request([97, 259]), r"0\.\.258, got \[259\]"),
        (Request([-1]), r"0\.\.258, got \[-1\]"),
        (Request([97], SamplingParams(stop="x")), "stop must be resolved above it"),
        (Request([97], SamplingParams(n=2)), "n must be 1, got 2"),
        (Request([97], SamplingParams(stop_token_ids=[259])), "stop_token_ids names"),
        (Request([97], SamplingParams(logit_bias={10**6: 1.0})), "logit_bias names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_never_be_served_is_refused_before_anything_changed(
    engine: Engine, request_: Request, words: str
) -> None:
    running = engine.add(Request([97, 98], GREEDY))
    alone = run(engine)[running]
    running = engine.add(Request([97, 98], GREEDY))
    tokens = [token for event in engine.step() for token in event.token_ids]
    with pytest.raises(RequestError, match=words):
        engine.add(request_)
    assert tokens + run(engine)[running] == alone
    assert_idle(engine)


def test_an_aborted_request_is_never_named_again_and_its_neighbours_go_on(engine: Engine) -> None:
    alone = run_one(engine, [97, 98])
    kept, gone = engine.add(Request([97, 98], GREEDY)), engine.add(Request([99], GREEDY))
    before = [event for _ in range(3) for event in engine.step()]
    assert {event.request_id for event in before} == {kept, gone}
    taken = sum(len(event.token_ids) for event in before if event.request_id == kept)
    used = engine.cache.pool.used
    engine.abort(gone)
    assert engine.cache.pool.used < used, "between two steps its pages are free at once"
    engine.abort(gone)
    engine.abort(10**9)
    events = []
    while engine.has_work:
        events += engine.step()
    assert {event.request_id for event in events} == {kept}
    assert sum(len(event.token_ids) for event in events) == len(alone) - taken
    assert_idle(engine)


@pytest.mark.parametrize("steps_per_launch", [1, 8])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_no_launch_goes_beyond_the_last_token_and_only_steps_that_gave_one_are_counted(
    monkeypatch: pytest.MonkeyPatch, lookahead: int, steps_per_launch: int
) -> None:
    config = BucketConfig(max_batch_size=4, max_sequence_length=64, steps_per_launch=steps_per_launch)
    engine = Engine(make_runner(load_model("demo", device="cpu"), config))
    engine.graphs.capture(progress=False, kinds=["steps"])
    engine.loop.lookahead = lookahead
    launches: list[int] = []
    launch = engine.runner.launch

    def noted(plan: LaunchPlan, meanwhile: Any = None) -> Launch:
        if plan.wanted.rows:
            launches.append(plan.wanted.rows)
        return launch(plan, meanwhile)

    monkeypatch.setattr(engine.runner, "launch", noted)

    def counted(params: SamplingParams) -> tuple[int, int]:
        """Tokens, and steps of the batch record."""
        launches.clear()
        engine.stats.batch_sizes.clear()
        tokens = run_one(engine, list(b"rev oceanic="), params)
        assert set(engine.stats.batch_sizes) == {1}
        return len(tokens), engine.stats.batch_sizes[1]

    assert counted(SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)) == (30, 30)
    assert len(launches) == -(-30 // steps_per_launch)
    answer = run_one(engine, list(b"rev oceanic="), GREEDY)
    stop = next(token for place, token in enumerate(answer) if place and token not in answer[:place])
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    assert counted(params) == (answer.index(stop) + 1,) * 2, "a step that only the stop made useless was counted"
    engine.close()


def run_one(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    request_id = engine.add(Request(prompt, params))
    return run(engine)[request_id]


def test_what_a_stop_text_cuts_off_is_not_counted() -> None:
    config = BucketConfig(max_batch_size=2, max_sequence_length=128, steps_per_launch=64)
    with LLM("demo", config=config) as llm:
        full = llm.generate("rev abcdefgh=", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[
            0
        ]
        before = llm.stats.generated_tokens, llm.stats.finished_answers
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, stop=full.text[3:5])
        output = llm.generate("rev abcdefgh=", params)[0].outputs[0]
        assert output.token_ids == full.token_ids[:5]
        assert llm.stats.generated_tokens - before[0] == 5
        assert llm.stats.finished_answers - before[1] == 1
        assert llm.cache.pool.used == 0


def test_a_step_that_fails_gives_everything_up_and_the_engine_serves_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [engine.add(Request([97 + n] * 20, GREEDY)) for n in range(6)]
    expected = {}
    for event in engine.step():
        expected.setdefault(event.request_id, []).extend(event.token_ids)
    launch = engine.runner.launch

    def failing(chunks: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine.runner, "launch", failing)
    ids.append(engine.add(Request([120], GREEDY)))
    monkeypatch.setattr(engine.scheduler, "next_chunks", failing)
    with pytest.raises(MemoryError):
        engine.step()
    monkeypatch.undo()
    assert engine.runner.launch == launch
    events = engine.step()
    assert {event.request_id for event in events} == set(ids)
    assert {event.finish_reason for event in events} == {"error"}
    assert all("MemoryError: no room" in (event.error or "") for event in events)
    assert_idle(engine)
    assert len(run_one(engine, [97, 98])) == 12


def test_seeds_of_requests_without_one_come_from_the_engines() -> None:
    def tokens(seed: int) -> list[list[int]]:
        config = BucketConfig(max_batch_size=2, max_sequence_length=64)
        made = Engine(make_runner(load_model("demo", device="cpu"), config), seed=seed)
        made.graphs.capture(progress=False, kinds=["steps"])
        params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
        for _ in range(2):
            made.add(Request([97], params))
        given = list(run(made).values())
        made.close()
        return given

    first, second = tokens(1), tokens(2)
    assert tokens(1) == first
    assert first != second
    assert first[0] != first[1]


def test_a_closed_engine_takes_nothing() -> None:
    made = Engine(make_runner(load_model("demo", device="cpu"), BucketConfig(max_batch_size=1, max_sequence_length=64)))
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.add(Request([97], GREEDY))
    assert not made.has_work
    with pytest.raises(RuntimeError, match="closed"):
        made.step()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_fails_while_a_request_is_taken_out_is_told_to_all(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    monkeypatch.setattr(engine.loop, "lookahead", lookahead)
    kept, gone = engine.add(Request([97, 98], GREEDY)), engine.add(Request([99], GREEDY))
    for _ in range(3):
        engine.step()

    def failing(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine.runner, "read", failing)
    monkeypatch.setattr(engine.scheduler, "remove", failing)
    engine.abort(gone)
    monkeypatch.undo()
    events = []
    for _ in range(20):
        events += engine.step() if engine.has_work else []
    assert [(event.request_id, event.finish_reason) for event in events if event.finish_reason] == [(kept, "error")]
    assert_idle(engine)
    assert len(run_one(engine, [97, 98])) == 12
