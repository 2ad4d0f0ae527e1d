"""The scheduler: rows and pages by priority, then arrival; the last sequence is preempted when pages run out."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from graphdecode.cache import CacheFullError, PagedKVCache
from graphdecode.config.sampling_params import SamplingParams
from graphdecode.distributed import RankError
from graphdecode.engine.adapters import EngineAdapters, LoadedAdapter
from graphdecode.engine.constraint import Constraint, ConstraintError
from graphdecode.engine.metrics import RequestMetrics
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.request import TokenLogprobs
from graphdecode.engine.steps import NO_CHOICE, RowInputs, RowSampling, SequenceMemory
from graphdecode.kernels.linear.add_adapters import NO_ADAPTER
from graphdecode.kernels.sampling.sampling_slots import WITHOUT_FINITE

_SERVICE_ORDER = attrgetter("service_order")


@dataclass(eq=False)
class Sequence:
    """A request in the engine: its prompt and output so far.

    The last token, also of a prompt, is fed to the next decode step, which writes its keys and values and samples its
    successor.
    """

    request_id: int  # its id in the engine and the cache
    token_ids: list[int]  # prompt and output
    params: SamplingParams
    prompt_length: int  # tokens of the prompt
    max_length: int  # limit of prompt and output together
    stop_ids: tuple[int, ...]  # tokens that end the output
    eos_token_ids: tuple[int, ...]  # the model's own stop tokens among them
    sampling: RowSampling  # values of its row's sampling slots
    metrics: RequestMetrics
    service_order: tuple[int, float, int] = (0, 0.0, 0)  # priority, start tag, id; the lowest first
    constraint: Constraint | None = None  # of the structured output, if any
    adapter: LoadedAdapter | None = None
    prefix_root: bytes = b""  # its cached prefixes are shared by sequences of this root alone
    slot: int = NO_ADAPTER  # its adapter's slot, while it has a row
    cached_length: int = 0  # tokens whose keys and values are in the cache
    drafted_length: int = 0  # tokens whose keys a draft model has computed
    finish_reason: str | None = None  # "stop", "length" or "error" once it has ended; None before
    stop_reason: int | None = None  # the request's stop token that ended it
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the second prompt token on, so far
    prompt_reported: bool = False  # whether an event has carried `prompt_logprobs`
    failure: Exception | None = None  # why it cannot go on, such as its constraint's; ends the output
    error_code: str | None = None  # see `Event.error_code`
    is_complete: bool = False  # whether the constraint ended the output by a token of text
    pooling: str | None = None  # "last" or "mean": its hidden states are pooled, and nothing is generated
    pooled: np.ndarray | None = None  # float32 [hidden], so far: the last token's hidden state, or the sum of all
    label_rows: np.ndarray | None = None  # float32 [labels, hidden], for the logits that it asks for

    @property
    def unscored(self) -> bool:
        """Whether prompt log-probabilities are missing, so that the whole prompt has to be computed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def is_computed_whole(self) -> bool:
        """Whether cached tokens do not help: each one's logits or hidden state is needed."""
        return self.unscored or self.pooling == "mean"

    @property
    def embedding(self) -> np.ndarray | None:
        """What was pooled of the whole prompt, float32 [hidden], or the labels' logits; None before, and without."""
        if self.pooled is None or self.cached_length < self.prompt_length:
            return None
        pooled = self.pooled / np.float32(self.prompt_length) if self.pooling == "mean" else self.pooled
        return pooled if self.label_rows is None else self.label_rows @ pooled

    @property
    def prefill_length(self) -> int:
        """Tokens that prompt passes compute: a decode step feeds the last one, unless its hidden state is pooled."""
        return len(self.token_ids) - (self.pooling is None)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def prefilled(self) -> bool:
        """Whether all tokens but the last are cached, so that decode steps can take over; or all, to be pooled."""
        return self.cached_length >= self.prefill_length

    @property
    def is_full(self) -> bool:
        """Whether it has `max_length` tokens."""
        return len(self.token_ids) >= self.max_length

    @property
    def num_generated(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.prompt_length

    def length_ahead(self, tokens_ahead: int) -> int:
        """Return the cached length after `tokens_ahead` more tokens."""
        return min(self.cached_length + tokens_ahead, self.max_length)

    def accept(self, token_id: int) -> None:
        """Append a sampled token, and decide whether it ends the output."""
        tokens, constraint = self.token_ids, self.constraint
        self.cached_length = len(tokens)
        tokens.append(token_id)
        if token_id in self.stop_ids and self.num_generated > self.params.min_tokens:
            self.finish_reason = "stop"
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
        elif constraint is not None and constraint.accept(token_id):
            self.finish_reason, self.is_complete = "stop", token_id not in self.eos_token_ids
        elif len(tokens) >= self.max_length:
            self.finish_reason = "length"

    def fail(self, reason: int | Exception) -> str:
        """End the output because no token can be sampled (NO_CHOICE, or the constraint), or of an error.

        Returns the message.
        """
        self.finish_reason = "error"
        if self.pooling is not None and not isinstance(reason, Exception):
            return f"request {self.request_id} was ended: a hidden state is NaN or infinite"
        if self.constraint is not None and reason == WITHOUT_FINITE:
            reason = ConstraintError("its grammar cannot be followed further: bad_words forbid all")
        if isinstance(reason, ConstraintError):
            self.error_code = "form_too_complex"
            return f"request {self.request_id} was ended: {reason}"
        if isinstance(reason, Exception):
            return f"request {self.request_id} was ended: {type(reason).__name__}: {reason}"
        return (
            f"request {self.request_id} was ended: no token can be chosen at position {len(self.token_ids)} "
            f"(temperature {self.params.temperature:g}): {NO_CHOICE[reason]}"
        )

    def row_inputs(self, memory: SequenceMemory, window: int = 1) -> RowInputs:
        """Return the inputs of its row; `window`: the tokens for which no mask has to be filled to have drafts."""
        may_draft = self.constraint is None or self.constraint.num_free_tokens >= window
        guide = None if self.constraint is None else self.constraint.guide
        return RowInputs(self.token_ids, self.prompt_length, memory, self.sampling, may_draft, guide)


class FailedSequence(Exception):
    """The error that scheduling one sequence raised."""

    def __init__(self, sequence: Sequence, reason: Exception) -> None:
        super().__init__(str(reason))
        self.sequence, self.reason = sequence, reason


class Scheduler:
    """All sequences: waiting for a row and pages, prefilling, or decoding (row i is `decoding[i]`)."""

    def __init__(self, cache: PagedKVCache, adapters: EngineAdapters, *, max_batch_size: int) -> None:
        self.cache, self.adapters, self.max_batch_size = cache, adapters, max_batch_size
        self.waiting: list[Sequence] = []  # in service order
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def admitted(self) -> list[Sequence]:
        """Sequences that have a row."""
        return [*self.prefilling, *self.decoding]

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self.decoding or self.prefilling or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Enqueue a sequence."""
        insort(self.waiting, sequence, key=_SERVICE_ORDER)

    def next_chunks(self, budget: int) -> list[tuple[Sequence, PromptChunk]]:
        """Return the chunks to prefill now, at most `budget` tokens; admit sequences while rows and pages last.

        Raises:
            FailedSequence: the adapter of one cannot be written; without that sequence, the same call goes on.
        """
        chunks: list[tuple[Sequence, PromptChunk]] = []
        for sequence in self.prefilling:
            budget -= self._take_chunk(sequence, budget, chunks)
        index, slots_are_full = 0, False
        while index < len(self.waiting) and budget > 0 and len(self.admitted) < self.max_batch_size:
            candidate = self.waiting[index]
            if candidate.adapter is not None:
                slot = None if slots_are_full else self._acquire(candidate, candidate.adapter)
                if slot is None:  # requests without an adapter may pass; others would take the slot from this one
                    slots_are_full, index = True, index + 1
                    continue
                candidate.slot = slot
            if self._shares_unwritten_prefix(candidate, chunks) or not self._admit(candidate):
                self._release_slot(candidate)
                break
            del self.waiting[index]
            budget -= self._take_chunk(candidate, budget, chunks)
        return chunks

    def _acquire(self, sequence: Sequence, adapter: LoadedAdapter) -> int | None:
        try:
            return self.adapters.acquire(adapter)
        except RankError:
            raise
        except Exception as error:
            raise FailedSequence(sequence, error) from error

    def _take_chunk(self, sequence: Sequence, budget: int, chunks: list[tuple[Sequence, PromptChunk]]) -> int:
        start, tokens, border = sequence.cached_length, sequence.token_ids, self.cache.checkpoint_tokens
        end = min(sequence.prefill_length, start + budget)
        if end <= start:
            return 0
        if border is not None:  # the state at the next checkpoint has to exist
            end = min(end, (start // border + 1) * border)
        scored = tokens[start + 1 : end + 1] if sequence.unscored else ()
        likely, pooling = sequence.params.prompt_logprobs or 0, sequence.pooling
        pools = pooling == "mean" or (pooling == "last" and end == len(tokens))
        chunk = PromptChunk(tokens[start:end], start, self.memory_of(sequence), scored, likely, pools)
        chunks.append((sequence, chunk))
        return end - start

    @property
    def num_deferred(self) -> int:
        """Waiting sequences whose adapters find no slot."""
        has_slot = self.adapters.has_slot
        return sum(each.adapter is not None and not has_slot(each.adapter) for each in self.waiting)

    def memory_of(self, sequence: Sequence) -> SequenceMemory:
        """Return the device memory of a sequence with a row."""
        name = sequence.request_id
        return SequenceMemory(self.cache.pages_of(name), self.cache.state_row_of(name), sequence.slot)

    def _shares_unwritten_prefix(self, candidate: Sequence, chunks: list[tuple[Sequence, PromptChunk]]) -> bool:
        """Whether a chunk of this step writes a page that the candidate can share in the next step."""
        if not self.cache.shares_with_running or candidate.is_computed_whole:
            return False
        unit = self.cache.checkpoint_tokens or self.cache.page_size
        for sequence, chunk in chunks:
            end = (chunk.start // unit + 1) * unit  # end of the first page, or checkpoint, that the chunk completes
            if end <= chunk.end and end < len(candidate.token_ids):
                shares = candidate.prefix_root == sequence.prefix_root
                if shares and candidate.token_ids[:end] == sequence.token_ids[:end]:
                    return True
        return False

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its pages; if there are too few, change nothing and return False."""
        # a scored prompt is computed whole: cached tokens have no logits
        tokens = None if sequence.is_computed_whole else sequence.token_ids
        cached = self.cache.add(sequence.request_id, tokens, sequence.prefix_root)
        # one page stays free for each running sequence that may grow, so that admission causes no preemption
        spare = sum(map(self._may_grow, self.admitted))
        try:
            self.cache.reserve(sequence.request_id, len(sequence.token_ids))
            if self.cache.available_pages < spare:
                raise CacheFullError("no spare pages")
        except CacheFullError:
            self.cache.free(sequence.request_id)
            return False
        # if more than half of the pool stays free, take all pages of the output at once, so that the page table never
        # changes; `make_room` gives them back
        if self.cache.pool.free - sequence.max_length // self.cache.page_size > self.cache.pool.total // 2:
            self.cache.reserve(sequence.request_id, sequence.max_length)
        self.cache.restore_state(sequence.request_id)
        sequence.cached_length, sequence.drafted_length, sequence.pooled = cached, cached, None
        metrics = sequence.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.perf_counter()
        if not sequence.num_generated:
            metrics.num_cached_tokens = max(metrics.num_cached_tokens, cached)
        self.prefilling.append(sequence)
        return True

    def prefilled(self, chunks: list[tuple[Sequence, PromptChunk]]) -> list[Sequence]:
        """Record computed chunks; move complete prompts to `decoding`, return those with nothing to generate."""
        for sequence, chunk in chunks:
            sequence.cached_length = sequence.drafted_length = chunk.end
            self.publish(sequence)
        ready = [sequence for sequence in self.prefilling if sequence.prefilled]
        complete = [sequence for sequence in ready if sequence.is_full]
        self.decoding.extend(sequence for sequence in ready if not sequence.is_full)
        self.prefilling = [sequence for sequence in self.prefilling if not sequence.prefilled] + complete
        return complete

    def save_states(self, chunks: list[tuple[Sequence, PromptChunk]]) -> None:
        """Save the recurrent states of chunks that end at a checkpoint, right after these were launched."""
        for sequence, chunk in chunks:
            self.cache.save_state(sequence.request_id, chunk.end, sequence.token_ids)

    def save_state(self, sequence: Sequence) -> None:
        """Keep the recurrent state behind a sequence's cached tokens, if they end at a checkpoint.

        A conversation goes on behind the last one of an output: those before it in the output go first.
        """
        before = sequence.cached_length - (self.cache.checkpoint_tokens or 0)
        superseded = before if before > sequence.prompt_length else 0
        self.cache.save_state(sequence.request_id, sequence.cached_length, sequence.token_ids, superseded=superseded)

    def saves_last(self, sequence: Sequence, chunk: PromptChunk) -> bool:
        """Whether a prompt's last chunk ends at a checkpoint; a decode step in the same pass would change the state."""
        border = self.cache.checkpoint_tokens
        return border is not None and chunk.end % border == 0 and chunk.end == len(sequence.token_ids) - 1

    def publish(self, sequence: Sequence) -> None:
        """Add a sequence's full pages to the prefix cache."""
        self.cache.publish(sequence.request_id, sequence.cached_length, sequence.token_ids)

    def reserve(self, tokens_ahead: int) -> bool:
        """Reserve pages for the next tokens of each decoding sequence; return whether any pages changed.

        If pages are plentiful, every sequence takes one more as soon as any needs one, so that the page table changes
        once per page length. On CacheFullError some sequences may have new pages.
        """
        changed = [self._reserve(sequence, tokens_ahead) for sequence in self.decoding]
        if any(changed) and self.cache.available_pages >= 2 * len(self.decoding):
            for sequence in self.decoding:
                self._reserve(sequence, tokens_ahead + self.cache.page_size)
        return any(changed)

    def steps_with_pages(self) -> int:
        """Return for how many more tokens the pages of every decoding sequence suffice."""
        growing = filter(self._may_grow, self.decoding)
        return min(
            (self._allocated_tokens(sequence) - sequence.cached_length for sequence in growing), default=sys.maxsize
        )

    def _allocated_tokens(self, sequence: Sequence) -> int:
        return len(self.cache.pages_of(sequence.request_id)) * self.cache.page_size

    def _may_grow(self, sequence: Sequence) -> bool:
        return self._allocated_tokens(sequence) < sequence.max_length

    def make_room(self, tokens_ahead: int) -> int:
        """Free pages for the next tokens of all sequences; return for how many tokens, 1 to `tokens_ahead`.

        Pages reserved ahead are freed first, then sequences are preempted, the last first. Nothing may be in flight.
        """
        for sequence in self.decoding:
            self.publish(sequence)
            self.cache.truncate(sequence.request_id, sequence.cached_length)
        tokens = range(1, tokens_ahead + 1)
        while not (fitting := bisect_right(tokens, self.cache.available_pages, key=self._missing_pages)):
            last = max(self.admitted, key=_SERVICE_ORDER)
            self._release(last)
            last.cached_length = 0
            last.metrics.num_preemptions += 1
            self.num_preemptions += 1
            self.add(last)
        self.reserve(fitting)
        return fitting

    def _missing_pages(self, tokens_ahead: int) -> int:
        missing = 0
        for sequence in self.decoding:
            needed = -(-sequence.length_ahead(tokens_ahead) // self.cache.page_size)
            missing += max(needed - len(self.cache.pages_of(sequence.request_id)), 0)
        return missing

    def _reserve(self, sequence: Sequence, tokens_ahead: int) -> bool:
        return self.cache.reserve(sequence.request_id, sequence.length_ahead(tokens_ahead))

    def remove(self, sequence: Sequence, *, keeps_prefix: bool = True) -> None:
        """Remove a sequence in any state; its pages stay in the prefix cache if `keeps_prefix`."""
        if sequence in self.admitted:
            self._release(sequence, keeps_prefix=keeps_prefix)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def reset(self, *, keeps_waiting: bool = False) -> None:
        """Remove all sequences, or all that have a row, and empty the cache, in whatever state both are."""
        self.adapters.reset()
        if not keeps_waiting:
            self.waiting.clear()
        self.prefilling, self.decoding = [], []
        self.cache.reset()

    def _release(self, sequence: Sequence, *, keeps_prefix: bool = True) -> None:
        if keeps_prefix:
            self.publish(sequence)
        else:
            self.cache.hide(sequence.request_id)
        self.cache.free(sequence.request_id)
        self._release_slot(sequence)
        (self.decoding if sequence in self.decoding else self.prefilling).remove(sequence)

    def _release_slot(self, sequence: Sequence) -> None:
        if sequence.slot != NO_ADAPTER:
            self.adapters.release(sequence.slot)
            sequence.slot = NO_ADAPTER

    def draft_gaps(self, sequences: Iterable[Sequence], max_tokens: int) -> list[list[PromptChunk]]:
        """Return the chunks that the draft model has not computed yet, in passes of at most `max_tokens`.

        One missing token does not count: drafting begins with the last two.
        """
        passes: list[list[PromptChunk]] = []
        room = 0
        for sequence in sequences:
            if sequence.drafted_length >= sequence.cached_length - 1:
                continue
            memory = SequenceMemory(self.cache.pages_of(sequence.request_id))
            while (start := sequence.drafted_length) < sequence.cached_length:
                if room == 0:
                    passes.append([])
                    room = max_tokens
                end = min(start + room, sequence.cached_length)
                passes[-1].append(PromptChunk(sequence.token_ids[start:end], start, memory))
                room -= end - start
                sequence.drafted_length = end
        return passes
