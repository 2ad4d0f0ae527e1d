"""The engine's public face: requests of tokens in, events of tokens out, from any thread."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np

from graphdecode.engine.adapters import EngineAdapters
from graphdecode.engine.constraint import AtLeast, Constrain, Constraint, ConstraintError
from graphdecode.engine.loop import EngineLoop
from graphdecode.engine.metrics import RequestMetrics
from graphdecode.engine.request import Event, Request, RequestError, RequestRules
from graphdecode.engine.runner import Runner
from graphdecode.engine.scheduler import Scheduler, Sequence
from graphdecode.engine.steps import RowSampling
from graphdecode.errors import ArgumentError, ClosedError, shown
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS

_INTERRUPTED = "the engine's step was interrupted"
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, as in SplitMix64


class Engine:
    """Generates tokens for many requests at once. It knows no text, and starts no thread.

    All methods may be called from any thread. Whoever calls `step` does the work of all. `add`, `finish` and `abort`
    wait for no other thread's step: they are done before the next one, or at once where none runs.

    Args:
        runner: the model, its cache and its graphs, which are attributes here, too.
        seed: of the requests that bring none; an integer of 64 bits.
        target_itl_ms: milliseconds between two tokens of a row at most, for which prompts are cut smaller; 0: none.

    Attributes:
        rules: what it can serve, as data that another process can hold too.
        stats: counts since the engine was made.
        adapters: those that requests can name; they are loaded and unloaded while it runs.
        constrain: makes constraints of grammars, for whoever knows what tokens spell to set; None: it takes none.
    """

    def __init__(self, runner: Runner, *, seed: int = 0, target_itl_ms: float = 0.0) -> None:
        given: Any = seed  # of whoever calls
        if not isinstance(given, Integral) or isinstance(given, bool) or as_int64(int(given)) != given:
            raise ArgumentError(f"seed must be an integer of 64 bits, got {shown(seed)}")
        self.runner, self.seed = runner, seed
        self.model, self.cache, self.capacity, self.graphs = runner.model, runner.cache, runner.capacity, runner.graphs
        self.vocab_size = self.model.config.vocab_size
        # a token that is not in the vocabulary ends nothing
        eos_token_ids = tuple(token for token in self.model.config.eos_token_ids if token < self.vocab_size)
        self.rules = RequestRules(
            self.vocab_size, eos_token_ids, self.capacity, self.cache.page_size, runner.setting.sampling_capacity
        )
        self.adapters = EngineAdapters(self.model.adapters)
        self.scheduler = Scheduler(self.cache, self.adapters, max_batch_size=runner.buffers.max_batch_size)
        self.loop = EngineLoop(self.scheduler, runner, target_itl_ms=target_itl_ms)
        self.stats = self.loop.stats
        self.constrain: Constrain | None = None
        self._sequences: dict[int, Sequence] = {}
        self._request_ids = itertools.count()
        self._inbox: deque[Callable[[], None]] = deque()
        self._stepping = threading.Lock()
        self._ended: list[int] = []  # known until the next step, for text that ends an answer earlier
        self._gave_up = False  # whether the next events may be of requests that nobody waits for any more
        self._lost: list[Event] = []  # what the next step tells those whose requests were given up
        self._torn: str | None = None  # set while the books are changed: who finds it set finds them torn
        self._closed = False

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions: a sequence gave its pages back for others and was recomputed."""
        return self.scheduler.num_preemptions

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self.scheduler.admitted)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox or self._lost) or self._torn is not None or self.loop.has_work

    def add(self, request: Request, constraint: Constraint | None = None) -> int:
        """Hand in a request, and return what names it in `step`'s events.

        `constraint` is the one of the request's grammar; None: it is made here where there is a grammar.

        Raises:
            RequestError: it can never be served; nothing has changed.
            ClosedError: the engine was closed.
        """
        if self._closed:
            raise ClosedError("this engine was closed")
        rules, params, adapter = self.rules, request.sampling_params, self.adapters.named(request.adapter)
        if not request.is_checked:
            rules.check(request)
        if -1 in (params.logprobs, params.prompt_logprobs):
            counts = {name: rules.counted(getattr(params, name)) for name in ("logprobs", "prompt_logprobs")}
            params = params.unchecked(**counts)
        tokens = [int(token) for token in request.prompt_token_ids]
        stop_ids, held_back_ids = rules.stop_ids(params), rules.held_back_ids(params)
        constraint, mask = self._constraint(request, constraint, stop_ids)
        request_id, max_length = next(self._request_ids), self.capacity.token_limit
        if params.max_tokens is not None:
            max_length = min(len(tokens) + params.max_tokens, max_length)
        sampled = params
        if constraint is not None:  # which sees to the least tokens of a form
            sampled, held_back_ids = params.unchecked(min_tokens=0), ()
        sampling = RowSampling.of(
            sampled,
            seed=derived_seed(self.seed, request_id) if params.seed is None else params.seed,
            stop_ids=stop_ids,
            held_back_ids=held_back_ids,
            prompt_length=len(tokens),
            max_length=max_length,
            vocab_size=self.vocab_size,
            bad_words=request.bad_words_token_ids,
            constrained=mask,
        )
        ends, turn = (max_length, stop_ids, rules.eos_token_ids), (request.priority, request.turn, request_id)
        told = (RequestMetrics(time.perf_counter()), turn, constraint)
        sequence = Sequence(request_id, tokens, params, len(tokens), *ends, sampling, *told, adapter=adapter)
        self._sequences[request_id] = sequence
        # one that was given up before it began stays out
        self._inbox.append(lambda: None if sequence.finished else self.scheduler.add(sequence))
        self._settle()
        return request_id

    def _constraint(
        self, request: Request, constraint: Constraint | None, stop_ids: tuple[int, ...]
    ) -> tuple[Constraint, np.ndarray] | tuple[None, None]:
        grammar, min_tokens = request.grammar, request.sampling_params.min_tokens
        if grammar is None:
            return None, None
        if not self.runner.step.takes_constraints:
            raise RequestError(f"a {type(self.runner.step).__name__} cannot hold answers to forms")
        mask = np.empty(-(-self.vocab_size // MASK_BITS), dtype=np.int32)
        try:
            if constraint is None:
                if self.constrain is None:
                    raise RequestError("this engine reads no grammars: it has no tokenizer, or llguidance is missing")
                constraint = self.constrain(grammar)
            if min_tokens:
                constraint = AtLeast(constraint, min_tokens, self.vocab_size, self.rules.eos_token_ids)
            constraint.fill(mask, stop_ids)
        except ConstraintError as error:
            raise RequestError(f"structured_outputs: {error}") from error
        return constraint, mask

    def abort(self, request_id: int) -> None:
        """Give up a request that is known and has not ended: no event names it any more."""
        self.finish(request_id, None)

    def finish(self, request_id: int, num_tokens: int | None) -> None:
        """Give up a request whose answer is complete with so many tokens (a stop text); None: like `abort`."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._gave_up = True
            self._inbox.append(lambda: self._remove(sequence, num_tokens))
            self._settle()

    def _remove(self, sequence: Sequence, num_tokens: int | None) -> None:
        was_there = self.loop.remove(sequence)
        self._gave_up = True  # what was in flight has given it tokens
        if num_tokens is not None:
            self.stats.generated_tokens -= sequence.num_generated - num_tokens
            self.stats.finished_answers += was_there

    def _settle(self) -> None:
        """Do now what was asked for, unless a step is running: whoever runs it looks again when it is done."""
        while self._inbox and self._stepping.acquire(blocking=False):
            try:
                with contextlib.suppress(Exception):  # it gave all up, and the next step says so to each owner
                    self._take_inbox()
            finally:
                self._stepping.release()

    def _take_inbox(self) -> None:
        if self._torn is not None:  # by what could not be caught where it came, such as a second Ctrl-C
            self._give_up_all(self._torn)
        while self._inbox:
            self._torn = _INTERRUPTED
            try:
                self._inbox.popleft()()
            except Exception as error:
                self._give_up_all(error)
                raise
            self._torn = None

    def _give_up_all(self, why: Exception | str) -> None:
        error = why if isinstance(why, str) else f"the engine's step failed: {type(why).__name__}: {why}"
        self._inbox.clear()
        events = self.loop.reset()
        told = {event.request_id for event in events if event.finish_reason is not None} | set(self._ended)
        for request_id, sequence in list(self._sequences.items()):
            sequence.finish_reason = sequence.finish_reason or "error"
            if request_id not in told:
                events.append(Event(request_id, [], None, "error", None, sequence.metrics, error))
        self.loop.ended = list(self._sequences)
        self._lost += events
        self._torn = None

    def step(self) -> list[Event]:
        """Run one step for all requests: at most one prefill and one launch; return the events.

        A step that fails gives up every request, whose owners are told by the next step; later requests are served.
        """
        with self._stepping:
            if self._closed:
                raise ClosedError("this engine was closed")
            self._take_inbox()
            while self._ended:
                self._sequences.pop(self._ended.pop(), None)
            self._torn = _INTERRUPTED
            try:
                events = self.loop.step()
            except Exception as error:
                self._give_up_all(error)
                raise
            self._torn = None
            if self._lost or self._gave_up:
                events, self._lost, self._gave_up = self._lost + events, [], False
                events = [event for event in events if event.request_id in self._sequences]
            if self.loop.ended:
                self._ended, self.loop.ended = self.loop.ended, []
        self._settle()
        return events

    def capture_waiting(self) -> bool:
        """Capture one graph that waits for leisure (`capture_when="idle"`); return whether there was both."""
        with self._stepping:
            return not (self._closed or self.has_work) and self.runner.capture_waiting()

    def close(self) -> None:
        """Give up what runs or waits, and release graphs and buffers; the engine cannot be used afterwards."""
        with self._stepping:
            if self._closed:
                return
            self._closed = True
            self.loop.reset()
            for books in (self._inbox, self._lost, self._sequences):
                books.clear()
            self.runner.close()


def derived_seed(seed: int, index: int) -> int:
    """Derive a seed from another, as a signed 64-bit integer: a Weyl step of SplitMix64 (Steele et al., 2014)."""
    return as_int64(seed + (index + 1) * _GOLDEN_GAMMA)


def as_int64(value: int) -> int:
    """Return the signed 64-bit integer that an integer wraps around to."""
    return (value + 2**63) % 2**64 - 2**63
