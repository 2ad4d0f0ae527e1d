"""What one request raises within a step ends that request alone; what a launch raises spares those that wait."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from graphdecode import BucketConfig, Engine, Request, SamplingParams
from graphdecode.engine import RequestError
from graphdecode.engine.adapters import LoadedAdapter
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.constraint import Constraint, Guide
from graphdecode.engine.request import Event
from graphdecode.engine.runner import LaunchPlan
from graphdecode.engine.steps import RowInputs
from graphdecode.models import Chunks, load_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
BAD = 120  # a token of the request that fails
GOOD_PROMPTS = ([97, 98, 99], [100] * 9, [101, 102])
BAD_PROMPT = [103, BAD, 104, 105]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(make_runner(load_model("demo", device="cpu"), BucketConfig(max_batch_size=4, max_sequence_length=64)))
    made.graphs.capture(progress=False, kinds=["steps"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[int]]:
    """The answers to the good prompts, one by one."""
    return [tokens_of(engine, [engine.add(Request(prompt, GREEDY))])[0] for prompt in GOOD_PROMPTS]


def run(engine: Engine, *raises: type[Exception]) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        with suppress(*raises):
            events += engine.step()
    assert engine.cache.pool.used == 0
    assert engine.num_running == engine.num_waiting == 0
    return events


def tokens_of(engine: Engine, ids: list[int], events: list[Event] | None = None) -> list[list[int]]:
    events = run(engine) if events is None else events
    return [[t for event in events if event.request_id == name for t in event.token_ids] for name in ids]


class Raising(Constraint):
    """Allows every token, and raises in a method after some calls."""

    def __init__(self, where: str, calls: int) -> None:
        self.num_words, self._where, self._calls = -(-259 // 32), where, calls

    def _called(self, name: str) -> None:
        self._calls -= name == self._where
        if self._calls < 0:
            raise ZeroDivisionError("a library's own")

    @property
    def guide(self) -> Guide | None:
        self._called("guide")
        return None

    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        self._called("fill")
        words.fill(-1)

    def accept(self, token_id: int) -> bool:
        self._called("accept")
        return False


def fail_prefill(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = engine.model.prefill

    def failing(chunks: Chunks, *others: Any, **options: bool) -> Any:
        if BAD in chunks.token_ids.tolist():
            raise ZeroDivisionError("a module's own")
        return prefill(chunks, *others, **options)

    monkeypatch.setattr(engine.model, "prefill", failing)


def fail_prefill_of_staged_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_prefill(engine, monkeypatch)
    monkeypatch.setattr(engine.graphs, "can_mix", lambda rows, tokens: rows == 1)


def fail_scores(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    score = engine.runner.prompts.score

    def failing(chunks: Any, passed: Any) -> Any:
        if any(BAD in chunk.token_ids for chunk in chunks):
            raise ZeroDivisionError("of a score")
        return score(chunks, passed)

    monkeypatch.setattr(engine.runner.prompts, "score", failing)


def fail_staging(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = engine.runner.step.stage

    def failing(rows: Sequence[RowInputs]) -> None:
        if any(BAD in row.token_ids for row in rows):
            raise ZeroDivisionError("of a row")
        stage(rows)

    monkeypatch.setattr(engine.runner.step, "stage", failing)


def fail_adapter(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(_: LoadedAdapter) -> int:
        raise ZeroDivisionError("of a slot")

    adapter = LoadedAdapter("bad", "", 0, None)  # type: ignore[arg-type]
    monkeypatch.setattr(engine.adapters, "named", lambda name: adapter if name else None)
    monkeypatch.setattr(engine.adapters, "acquire", acquire)


FAULTS: dict[str, tuple[Callable[[Engine, pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "prefill": (fail_prefill, {}),
    "prefill of a pass whose rows are staged": (fail_prefill_of_staged_rows, {}),
    "scores": (fail_scores, {"sampling_params": GREEDY.unchecked(prompt_logprobs=1)}),
    "staging": (fail_staging, {}),
    "adapter": (fail_adapter, {"adapter": "bad"}),
}


@pytest.mark.parametrize("running", [0, 1, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_an_error_of_one_request_fails_it_alone(engine, alone, monkeypatch, name, running):
    """Some of the others already decode when it comes."""
    plant, changes = FAULTS[name]
    ids = [engine.add(Request(prompt, GREEDY)) for prompt in GOOD_PROMPTS[:running]]
    events = [*engine.step(), *engine.step()] if running else []
    plant(engine, monkeypatch)
    bad = engine.add(Request(BAD_PROMPT, **{"sampling_params": GREEDY, **changes}))
    ids += [engine.add(Request(prompt, GREEDY)) for prompt in GOOD_PROMPTS[running:]]
    events += run(engine)
    ended = [event for event in events if event.request_id == bad]
    assert [(event.finish_reason, event.prompt_logprobs) for event in ended] == [("error", None)]
    assert "ZeroDivisionError: of a" in ended[0].error or "ZeroDivisionError: a module's own" in ended[0].error
    assert tokens_of(engine, ids, events) == alone


@pytest.mark.parametrize(
    ("where", "calls"), [("guide", 0), ("guide", 1), ("fill", 1), ("fill", 3), ("accept", 0), ("accept", 4)]
)
def test_a_constraint_that_raises_ends_its_request_alone(engine, alone, where, calls):
    """Rows are staged again in between."""
    ids = [engine.add(Request(GOOD_PROMPTS[0], GREEDY))]
    kept, bad = (
        engine.add(Request(BAD_PROMPT, GREEDY, grammar="any"), Raising(method, calls)) for method in ("none", where)
    )
    events = [*engine.step(), *engine.step()]
    ids.append(engine.add(Request(GOOD_PROMPTS[1], GREEDY)))
    events += engine.step()
    engine.abort(engine.add(Request(GOOD_PROMPTS[2], GREEDY)))
    events += run(engine)
    reasons = {event.request_id: (event.finish_reason, str(event.error)) for event in events if event.finish_reason}
    assert reasons[bad][0] == "error"
    assert "ZeroDivisionError: a library's own" in reasons[bad][1]
    assert reasons[kept] == ("length", "None")
    assert tokens_of(engine, ids, events) == alone[:2]


def test_a_launch_that_raises_spares_those_that_wait_or_come_meanwhile(engine, alone, monkeypatch):
    launch, later = engine.runner.launch, []

    def failing(plan: LaunchPlan, *others: Any) -> Any:
        if plan.shape.rows:
            monkeypatch.undo()
            later.append(engine.add(Request(GOOD_PROMPTS[2], GREEDY)))
            raise MemoryError("no room")
        return launch(plan, *others)

    monkeypatch.setattr(engine.runner, "launch", failing)
    ids = [engine.add(Request(BAD_PROMPT, GREEDY)) for _ in range(4)]
    waiting = [engine.add(Request(prompt, GREEDY)) for prompt in GOOD_PROMPTS[:2]]
    events = run(engine, MemoryError)
    failed = [event for event in events if event.error is not None]
    assert sorted(event.request_id for event in failed) == ids
    assert all("MemoryError: no room" in str(event.error) for event in failed)
    assert tokens_of(engine, waiting + later, events) == alone


@pytest.mark.parametrize("wrong", [{"priority": "high"}, {"priority": 1.5}, {"start_tag": float("nan")}])
def test_an_order_that_cannot_be_compared_is_refused_before_others_see_it(
    engine: Engine, wrong: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        engine.add(Request([97], GREEDY, **wrong))
