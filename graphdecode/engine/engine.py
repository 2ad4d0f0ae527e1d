"""The engine's public interface: requests in, events out, from any thread."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from graphdecode.cache.ledger import prefix_root
from graphdecode.distributed import RankError
from graphdecode.engine.adapters import EngineAdapters
from graphdecode.engine.constraint import AfterReasoning, AtLeast, Constrain, Constraint, ConstraintError
from graphdecode.engine.loop import EngineLoop
from graphdecode.engine.metrics import RequestMetrics
from graphdecode.engine.request import Event, Request, RequestError, RequestRules
from graphdecode.engine.runner import SLEEP_TAGS, Runner
from graphdecode.engine.scheduler import Scheduler, Sequence
from graphdecode.engine.steps import RowSampling
from graphdecode.errors import ArgumentError, ClosedError, EngineStateError, shown
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS
from graphdecode.models.updates import NamedTensors

_INTERRUPTED = "the engine's step was interrupted"
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, as in SplitMix64


class Engine:
    """Generates tokens for many requests at once. It handles no text and starts no thread.

    All methods may be called from any thread. `step` does the work, in the thread that calls it. `add`, `finish` and
    `abort` do not wait for a running step: they take effect before the next one, or at once if none is running.

    Args:
        runner: the model, its cache and its graphs, which become attributes.
        seed: default for requests without a seed; an integer of 64 bits.
        target_itl_ms: largest time between two tokens of a row in milliseconds, kept by smaller chunks; 0: no limit.
        eos_token_id: the tokenizer's end-of-sequence token, used if the model's configuration names none.

    Attributes:
        rules: the limits of requests, as data that other processes can use.
        stats: counts since the engine was made.
        adapters: loaded adapters by name; they are loaded and unloaded while the engine runs.
        constrain: compiles a grammar to a constraint; None: grammars are refused. Set by the owner of the tokenizer.
    """

    def __init__(
        self, runner: Runner, *, seed: int = 0, target_itl_ms: float = 0.0, eos_token_id: int | None = None
    ) -> None:
        value: Any = seed
        if not isinstance(value, Integral) or isinstance(value, bool) or as_int64(int(value)) != value:
            raise ArgumentError(f"seed must be an integer of 64 bits, got {shown(seed)}")
        self.runner, self.seed = runner, seed
        self.model, self.cache, self.capacity, self.graphs = runner.model, runner.cache, runner.capacity, runner.graphs
        self.vocab_size = self.model.config.vocab_size
        named = self.model.config.eos_token_ids or (() if eos_token_id is None else (eos_token_id,))
        # a token outside the vocabulary is never sampled
        eos_token_ids = tuple(token for token in named if token < self.vocab_size)
        self.rules = RequestRules(
            self.vocab_size,
            eos_token_ids,
            self.capacity,
            self.cache.page_size,
            runner.setting.sampling_capacity,
            self.model.config.max_position_embeddings,
            self.model.hidden_size,
            0 if runner.label_rows is None else len(runner.label_rows),
        )
        self.adapters = EngineAdapters(self.model.adapters, runner.write_adapter, self._holding_weights)
        self.scheduler = Scheduler(self.cache, self.adapters, max_batch_size=runner.buffers.max_batch_size)
        self.loop = EngineLoop(self.scheduler, runner, target_itl_ms=target_itl_ms)
        self.stats = self.loop.stats
        self.constrain: Constrain | None = None
        self._sequences: dict[int, Sequence] = {}
        self._request_ids = itertools.count()
        self._inbox: deque[Callable[[], None]] = deque()
        self._stepping = threading.Lock()
        self._finished_ids: list[int] = []  # dropped at the next step: a stop text may still call `finish`
        self._has_aborted = False  # whether the next events may belong to aborted requests
        self._undelivered: list[Event] = []  # errors that the next step returns
        self._asleep: set[str] = set()
        self._has_weights = True  # False: `sleep(level=2)` has dropped them
        self._broken: str | None = None  # set during a change of state; still set later: it was interrupted
        self._closed = False

    @property
    def num_preemptions(self) -> int:
        """How often a sequence was preempted, and recomputed."""
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
        return bool(self._inbox or self._undelivered) or self._broken is not None or self.loop.has_work

    def add(self, request: Request, constraint: Constraint | None = None) -> int:
        """Add a request, and return its id in `step`'s events.

        `constraint`: the compiled grammar of the request; None: it is compiled here.

        Raises:
            RequestError: it can never be served; nothing has changed.
            ClosedError: the engine was closed.
            EngineStateError: it sleeps, or has no weights.
        """
        self._check_open()
        if (reason := self._unavailable_reason()) is not None:
            raise EngineStateError(reason)
        rules, params, adapter = self.rules, request.sampling_params, self.adapters.named(request.adapter)
        if not request.is_checked:
            rules.check(request)
        if -1 in (params.logprobs, params.prompt_logprobs):
            counts = {name: rules.counted(getattr(params, name)) for name in ("logprobs", "prompt_logprobs")}
            params = params.unchecked(**counts)
        tokens = [int(token) for token in request.prompt_token_ids]
        stop_ids, masked_only_ids = rules.stop_ids(params), rules.masked_only_ids(params)
        constraint, mask = self._constraint(request, constraint, stop_ids)
        request_id, max_length = next(self._request_ids), self.capacity.token_limit
        if request.pools:
            rules.check_pools(scores=request.scores)
            max_length = len(tokens)
        elif params.max_tokens is not None:
            max_length = min(len(tokens) + params.max_tokens, max_length)
        sampled = params
        if constraint is not None:  # which handles min_tokens itself
            sampled, masked_only_ids = params.unchecked(min_tokens=0), ()
        sampling = RowSampling.of(
            sampled,
            seed=derived_seed(self.seed, request_id) if params.seed is None else params.seed,
            stop_ids=stop_ids,
            masked_only_ids=masked_only_ids,
            prompt_length=len(tokens),
            max_length=max_length,
            vocab_size=self.vocab_size,
            bad_words=request.bad_words_token_ids,
            constrained=mask,
        )
        sequence = Sequence(
            request_id,
            tokens,
            params,
            len(tokens),
            max_length,
            stop_ids,
            rules.eos_token_ids,
            sampling,
            RequestMetrics(time.perf_counter()),
            service_order=(request.priority, request.start_tag, request_id),
            constraint=constraint,
            adapter=adapter,
            prefix_root=prefix_root(None if adapter is None else adapter.number, request.cache_salt),
            pooling=self.runner.setting.pooling if request.pools else None,
            label_rows=self.runner.label_rows if request.scores else None,
        )
        self._sequences[request_id] = sequence
        if adapter is not None:
            self.adapters.stats.requests[adapter.name] += 1
        # not scheduled if it was aborted before it started
        self._inbox.append(lambda: None if sequence.finished else self.scheduler.add(sequence))
        self._try_inbox()
        return request_id

    def _constraint(
        self, request: Request, constraint: Constraint | None, stop_ids: tuple[int, ...]
    ) -> tuple[Constraint, np.ndarray] | tuple[None, None]:
        grammar, markers, params = request.grammar, request.reasoning, request.sampling_params
        if grammar is None and (markers is None or params.thinking_token_budget is None):
            return None, None
        if not self.runner.step.takes_constraints:
            raise RequestError(f"structured_outputs: {type(self.runner.step).__name__} does not support them")
        mask = np.empty(-(-self.vocab_size // MASK_BITS), dtype=np.int32)
        try:
            if constraint is None and grammar is not None:
                if self.constrain is None:
                    raise RequestError("this engine reads no grammars: it has no tokenizer, or llguidance is missing")
                constraint = self.constrain(grammar)
            if markers is not None:
                constraint = AfterReasoning(markers, constraint, params.thinking_token_budget, self.vocab_size)
            assert constraint is not None
            if params.min_tokens:
                constraint = AtLeast(constraint, params.min_tokens, self.vocab_size, self.rules.eos_token_ids)
            constraint.fill(mask, stop_ids)
        except ConstraintError as error:
            raise RequestError(f"structured_outputs: {error}") from error
        return constraint, mask

    def abort(self, request_id: int) -> None:
        """Abort a request, if it is known and has not ended; it has no further events."""
        self.finish(request_id, None)

    def finish(self, request_id: int, num_tokens: int | None) -> None:
        """End a request whose output is complete after `num_tokens` (a stop text); None: like `abort`."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._has_aborted = True
            self._inbox.append(lambda: self._remove(sequence, num_tokens))
            self._try_inbox()

    def _remove(self, sequence: Sequence, num_tokens: int | None) -> None:
        was_running = self.loop.remove(sequence)
        self._has_aborted = True  # launches in flight have produced events for it
        if num_tokens is not None:
            self.stats.generated_tokens -= sequence.num_generated - num_tokens
            self.stats.finished_outputs += was_running

    def _try_inbox(self) -> None:
        """Process the inbox, unless a step is running: its thread does it afterwards."""
        while self._inbox and self._stepping.acquire(blocking=False):
            try:
                with contextlib.suppress(Exception):  # all requests have failed; the next step returns their events
                    self._take_inbox()
            finally:
                self._stepping.release()

    def _take_inbox(self) -> None:
        if self._broken is not None:  # by an exception that could not be caught, such as a second Ctrl-C
            self._fail_all(self._broken)
        while self._inbox:
            self._broken = _INTERRUPTED
            try:
                self._inbox.popleft()()
            except Exception as error:
                self._fail_all(error)
                raise
            self._broken = None

    def _fail_all(self, reason: Exception | str, *, spares_waiting: bool = False) -> None:
        """End all requests with an error, or all that have a row."""
        error = reason if isinstance(reason, str) else f"the engine's step failed: {type(reason).__name__}: {reason}"
        failed = dict(self._sequences)
        if spares_waiting:
            failed = {each.request_id: each for each in self.scheduler.admitted if each.request_id in failed}
        else:
            self._inbox.clear()
        events = self.loop.reset(keeps_waiting=spares_waiting)
        ended = {event.request_id for event in events if event.finish_reason is not None} | set(self._finished_ids)
        for request_id, sequence in failed.items():
            sequence.finish_reason = sequence.finish_reason or "error"
            if request_id not in ended:
                events.append(Event(request_id, [], None, "error", None, sequence.metrics, error))
        self.loop.outputs.ended += failed
        self._undelivered += events
        self._broken = None

    def step(self) -> list[Event]:
        """Run one step for all requests: at most one prefill and one launch; return the events.

        What one request alone raises ends that request. A step that raises otherwise fails all requests that have a
        row, or all if it failed before they were chosen: the next step returns their events. Others are served.
        """
        with self._stepping:
            self._check_open()
            self._take_inbox()
            if (self._asleep or not self._has_weights) and self.loop.has_work:
                self._fail_all(self._unavailable_reason() or _INTERRUPTED)  # added while `sleep` ran
            while self._finished_ids:
                self._sequences.pop(self._finished_ids.pop(), None)
            self._broken = _INTERRUPTED
            try:
                events = self.loop.step()
            except Exception as error:
                is_of_rows = self.loop.spares_waiting and bool(self.scheduler.admitted)
                self._fail_all(error, spares_waiting=is_of_rows and not isinstance(error, RankError))
                raise
            self._broken = None
            if self._undelivered or self._has_aborted:
                events, self._undelivered, self._has_aborted = self._undelivered + events, [], False
                events = [event for event in events if event.request_id in self._sequences]
            if self.loop.outputs.ended:
                self._finished_ids, self.loop.outputs.ended = self.loop.outputs.ended, []
        self._try_inbox()
        return events

    def capture_waiting(self) -> bool:
        """If idle, capture one graph of `capture_when="idle"`; return whether one was captured."""
        with self._stepping:
            return not (self._closed or self.has_work or self._unavailable_reason()) and self.runner.capture_waiting()

    def update_weights(self, weights: str | Path | NamedTensors) -> None:
        """Copy other values into the weights, in place; no graph is captured again. Cached prefixes are dropped.

        The new weights are loaded beside the old ones, checked, and then copied: memory for both is needed meanwhile.
        Configuration, tokenizer and adapters stay; slots of adapters are written again when they are next used.

        Args:
            weights: a checkpoint folder, a GGUF file or a repository id, of the same configuration; or tensors of any
                float type by their names in the checkpoint (in the module, of a model that transformers runs), as a
                mapping or pairs. They are rounded and quantized as the model was on loading. Tensors that are not named
                have the values of the files that were loaded last: each call names all that differ from these.

        Raises:
            EngineStateError: requests are running or waiting, or the weights sleep.
            NotSupportedError: the model was not loaded by its name.
            ValueError: a tensor is unknown, has another shape, is not finite, or is quantized otherwise; the
                configuration or the layout differs; a file cannot be read. Nothing was changed.
        """
        with self._while_idle("update_weights"):
            if "weights" in self._asleep:
                raise EngineStateError("the weights sleep: wake_up(tags=['weights']) comes before update_weights")
            self.runner.update_weights(weights)
            self._has_weights = True
            self.loop.reset()
            self.adapters.forget_slots()

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or cache sleep."""
        return bool(self._asleep)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes; raises `EngineStateError` if requests are running or waiting."""
        with self._while_idle("reset_prefix_cache"):
            self.loop.reset()

    def sleep(self, level: int = 1) -> int:
        """Give memory back to the system until `wake_up`; its addresses stay reserved, and the graphs valid.

        Requests are refused meanwhile, and cached prefixes are dropped. An engine that sleeps already gives back what
        is left. CUDA needs `enable_sleep_mode`.

        Args:
            level: 1: keys, values and states, and on CUDA the weights, which are copied to pinned host memory; on a CPU
                they stay where they are. 2: the weights, too, which `update_weights` has to give again.

        Returns:
            Bytes by which the processes of all ranks became smaller, on a CPU: what was never touched, or shares a
            page, does not count. On CUDA those of the devices.

        Raises:
            ArgumentError: there is no such level.
            EngineStateError: requests are running or waiting, or the host has no memory for the weights.
            NotSupportedError: the device is CUDA without `enable_sleep_mode`, or a CPU not under Linux.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ArgumentError(f"level must be 1 or 2, got {shown(level)}")
        with self._while_idle("sleep"):
            self.runner.prepare_sleep(weights=level == 2)
            self.loop.reset()
            self._asleep.update(SLEEP_TAGS)  # also if giving back fails halfway
            if level == 2:
                self._has_weights = False
                self.adapters.forget_slots()
            return self.runner.release_memory(weights=level == 2)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """End the sleep, of all or of what the tags name; what does not sleep stays as it is.

        Args:
            tags: "weights", "kv_cache"; None: both. Requests are served when both are awake.

        Raises:
            ArgumentError: there is no such tag.
            ClosedError: the engine was closed.
            EngineStateError: a GPU has too little memory now; what is still asleep can be woken up later. A
                RefusedError if it is that of another rank.
        """
        woken = set(SLEEP_TAGS if tags is None else [tags] if isinstance(tags, str) else tags)
        if unknown := woken.difference(SLEEP_TAGS):
            raise ArgumentError(f"tags must be of {', '.join(SLEEP_TAGS)}, got {shown(min(unknown, key=str))}")
        with self._stepping:
            self._check_open()
            for tag in sorted(woken & self._asleep, reverse=True):  # weights, which take most, first
                self.runner.restore_memory(tag)
                self._asleep.discard(tag)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this engine was closed")

    @contextlib.contextmanager
    def _holding_weights(self) -> Iterator[None]:
        """Block steps, updates and sleep meanwhile; raise EngineStateError if the weights are not there."""
        with self._stepping:
            self._check_open()
            if "weights" in self._asleep or not self._has_weights:
                raise EngineStateError(self._unavailable_reason())
            yield

    def _unavailable_reason(self) -> str | None:
        """Return why no request can be served; None if they can."""
        if self._asleep:
            return f"the engine sleeps ({', '.join(sorted(self._asleep))}): wake_up() first"
        return None if self._has_weights else "sleep(level=2) has dropped the weights: update_weights(...) first"

    @contextlib.contextmanager
    def _while_idle(self, method: str) -> Iterator[None]:
        """Block steps meanwhile; raise EngineStateError if there is work."""
        with self._stepping:
            self._check_open()
            self._take_inbox()
            if self.has_work:
                count = self.num_running + self.num_waiting
                raise EngineStateError(
                    f"{method} is for an engine without requests, and {count} are running or waiting"
                )
            yield
        self._try_inbox()

    def close(self) -> None:
        """Drop all requests, and release graphs and buffers; the engine cannot be used afterwards."""
        with self._stepping:
            if self._closed:
                return
            self._closed = True
            self.loop.reset()
            for pending in (self._inbox, self._undelivered, self._sequences):
                pending.clear()
            self.runner.close()


def derived_seed(seed: int, index: int) -> int:
    """Derive a seed from another, as a signed 64-bit integer: a Weyl step of SplitMix64 (Steele et al., 2014)."""
    return as_int64(seed + (index + 1) * _GOLDEN_GAMMA)


def as_int64(value: int) -> int:
    """Return the signed 64-bit integer that an integer wraps around to."""
    return (value + 2**63) % 2**64 - 2**63
