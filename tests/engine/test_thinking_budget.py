"""Reasoning that a budget closes, and structured outputs behind it: the tokens, alone and in any company."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from graphdecode import LLM, Request, SamplingParams
from graphdecode.engine import RequestError
from graphdecode.engine.constraint import Constraint, ReasoningMarkers, allow

PROMPT, LENGTH = list(b"sort zebra="), 24
END = (60, 62)


@pytest.fixture(
    scope="module",
    params=[({}, 0), ({"steps_per_launch": 5}, 1), ({"speculation": {"method": "ngram", "num_tokens": 3}}, 0), ({}, 1)],
    ids=["one step", "loops and look-ahead", "drafts", "look-ahead"],
)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    settings, lookahead = request.param
    with LLM("demo", dtype="float32", max_batch_size=4, max_sequence_length=128, **settings) as llm:
        llm.engine.loop.lookahead = lookahead
        yield llm


class Only(Constraint):
    """Allows these tokens, one after another."""

    num_words = -(-259 // 32)

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        words.fill(0)
        allow(words, self.tokens[:1])

    def accept(self, token_id: int) -> bool:
        assert token_id == self.tokens.pop(0)
        return not self.tokens


def greedy(llm: LLM, tokens: Sequence[int], length: int = LENGTH) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return list(llm.generate([list(tokens)], params, use_tqdm=False)[0].outputs[0].token_ids)


def run(llm: LLM, *requests: tuple[ReasoningMarkers | None, int | None, Constraint | None]) -> list[list[int]]:
    tokens = {}
    for markers, budget, constraint in requests:
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, thinking_token_budget=budget)
        grammar = None if constraint is None else "given"
        added = Request(PROMPT, params, reasoning=markers, grammar=grammar)
        tokens[llm.engine.add(added, constraint)] = list[int]()
    while llm.engine.has_work:
        for event in llm.engine.step():
            assert event.error is None, event.error
            tokens[event.request_id] += event.token_ids
    return list(tokens.values())


def closed_at(llm: LLM, budget: int, first: Sequence[int] = ()) -> list[int]:
    before = [*first, *greedy(llm, [*PROMPT, *first], max(budget, 1))[:budget], *END]
    return [*before, *greedy(llm, [*PROMPT, *before], LENGTH - len(before))]


def test_an_open_thought_is_closed_at_its_budget_by_all_of_its_marker(llm: LLM) -> None:
    budgets, markers = [0, 1, 7, 15], ReasoningMarkers((1,), END, is_open=True)
    assert run(llm, *[(markers, budget, None) for budget in budgets]) == [closed_at(llm, each) for each in budgets]
    # beside a row without one, and more budget than the output has tokens
    assert run(llm, (markers, 4, None), (None, None, None), (markers, LENGTH, None)) == [
        closed_at(llm, 4),
        greedy(llm, PROMPT),
        greedy(llm, PROMPT),
    ]


def test_a_thought_that_the_output_opens_counts_from_behind_its_marker(llm: LLM) -> None:
    first = greedy(llm, PROMPT)[:2]
    opening, other = ReasoningMarkers(tuple(first), END, is_open=False), ReasoningMarkers((first[0], 1), END, False)
    assert run(llm, (opening, 3, None), (opening, 0, None), (other, 3, None), (opening, None, None)) == [
        closed_at(llm, 3, first),
        closed_at(llm, 0, first),
        greedy(llm, PROMPT),
        greedy(llm, PROMPT),
    ]


def test_a_thought_that_closes_itself_leaves_the_answer_alone(llm: LLM) -> None:
    free = greedy(llm, PROMPT)
    markers = ReasoningMarkers((1,), tuple(free[4:6]), is_open=True)
    assert run(llm, (markers, 6, None), (markers, 5, None)) == [free, free]


def test_a_structured_output_begins_behind_the_thought(llm: LLM) -> None:
    free, only = greedy(llm, PROMPT), [100, 110, 105]
    own, forced = (ReasoningMarkers((1,), end, is_open=True) for end in (tuple(free[4:6]), END))
    absent = ReasoningMarkers((1,), END, is_open=False)
    assert run(llm, (own, None, Only(*only)), (forced, 3, Only(*only)), (absent, None, Only(*only))) == [
        [*free[:6], *only],
        [*free[:3], *END, *only],
        only,
    ]


def test_one_mask_holds_either_the_budget_or_allowed_tokens(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=[5], thinking_token_budget=3)
    with pytest.raises(RequestError, match="allowed_token_ids"):
        llm.engine.add(Request(PROMPT, params, reasoning=ReasoningMarkers((1,), END, is_open=True)))
