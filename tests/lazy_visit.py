"""Callers of an engine on a lazy device: they come and go as a seed says, and compare what they are told."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from lazy_stream import LazyStreams

from graphdecode import Engine, Event, Request
from graphdecode.engine.constraint import Constraint
from graphdecode.engine.steps.step import token_mask
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS

VOCABULARY = 259
MOST_ROUNDS, MOST_ABORTS = 250, 3
REQUESTS_OF_A_RUN = 9
ARRIVAL_SHARE, ABORT_SHARE, REFUSAL_SHARE = 0.4, 0.06, 0.4
MOST_LAUNCHES = 20  # before the one that is refused
SHARED = list(b"rev oceanic=")

Answer = tuple[list[int], list[float]]


class Letters(Constraint):
    """A form whose next letters depend on the last one."""

    num_words = -(-VOCABULARY // MASK_BITS)

    def __init__(self, _grammar: str) -> None:
        self.last = 0

    def fill(self, words: np.ndarray, _stop_ids: Sequence[int]) -> None:
        words[:] = token_mask([letter for letter in range(97, 123) if (letter + self.last) % 3 == 0], VOCABULARY)

    def accept(self, token_id: int) -> bool:
        self.last = token_id + 1
        return False


def answered(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Return what an engine answers to requests that come all at once; close it."""
    engine.constrain = Letters
    engine.graphs.capture(progress=False, kinds=["steps"])
    names = {engine.add(request): number for number, request in enumerate(requests)}
    answers: list[Answer] = [([], []) for _ in requests]
    while engine.has_work:
        for event in engine.step():
            _take(answers[names[event.request_id]], event)
    engine.close()
    return answers


def _take(answer: Answer, event: Event) -> None:
    assert event.error is None, event.error
    answer[0].extend(event.token_ids)
    answer[1].extend(entry.sampled for entry in event.logprobs or ())


class Visit:
    """An engine on a lazy device, its callers, and what they were told.

    Args:
        engine: ready to serve.
        requests: what may be asked.
        expected: what each of them is to be answered with.
        chosen: who comes and goes, and when.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[Request], expected: Sequence[Answer], chosen: random.Random
    ) -> None:
        self.engine, self.requests, self.expected, self.chosen = engine, requests, expected, chosen
        engine.constrain = Letters
        self.to_come: list[int] = []
        self.number_of: dict[int, int] = {}
        self.told: dict[int, Answer] = {}
        self.failed_steps = self.aborted = 0

    def enter(self) -> None:
        number = self.to_come.pop()
        name = self.engine.add(self.requests[number])
        self.number_of[name], self.told[name] = number, ([], [])

    def leave(self) -> None:
        """Abort a request; what it was told is the beginning of what it would have been."""
        name = self.chosen.choice(sorted(self.told))
        self.aborted += 1
        self.engine.abort(name)
        tokens, _ = self.told.pop(name)
        assert tokens == self.expected[self.number_of[name]][0][: len(tokens)], f"request {self.number_of[name]}"

    def step(self) -> None:
        """Take a round's events; whose request is given up comes again."""
        try:
            events = self.engine.step()
        except RuntimeError as error:
            if str(error) != "the device refuses this launch":
                raise
            self.failed_steps += 1
            return
        for event in events:
            if event.finish_reason == "error":
                assert self.failed_steps, event.error
                self.to_come.append(self.number_of[event.request_id])
                del self.told[event.request_id]
                continue
            _take(self.told[event.request_id], event)
            if event.finish_reason is not None:
                number = self.number_of[event.request_id]
                assert self.told.pop(event.request_id) == self.expected[number], f"request {number}"

    def run(self) -> None:
        self.to_come = self.chosen.sample(range(len(self.requests)), REQUESTS_OF_A_RUN)
        for _ in range(MOST_ROUNDS):
            while self.to_come and self.chosen.random() < ARRIVAL_SHARE:
                self.enter()
            self.step()
            if self.told and self.aborted < MOST_ABORTS and self.chosen.random() < ABORT_SHARE:
                self.leave()
            if not self.to_come and not self.engine.has_work:
                break
        assert not self.to_come
        assert not self.told

    def run_on(self, streams: LazyStreams) -> None:
        """Do so while the device may refuse a launch; then close the engine in the middle of a step."""
        if self.chosen.random() < REFUSAL_SHARE:
            streams.refused_launch = streams.launches + self.chosen.randint(1, MOST_LAUNCHES)
        self.run()
        streams.refused_launch = None
        self.engine.add(self.requests[0])
        self.engine.step()
        self.engine.close()
