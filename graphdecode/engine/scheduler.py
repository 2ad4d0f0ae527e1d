"""The scheduler: rows and pages by priority, then by order of arrival; the last is preempted when pages run out."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right, insort
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import attrgetter

from graphdecode.cache import CacheFullError, PagedKVCache
from graphdecode.config.sampling_params import SamplingParams
from graphdecode.engine.adapters import NO_ADAPTER, EngineAdapters, LoadedAdapter
from graphdecode.engine.constraint import Constraint, ConstraintError
from graphdecode.engine.metrics import RequestMetrics
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.request import TokenLogprobs
from graphdecode.engine.steps import NO_CHOICE, RowInputs, RowSampling
from graphdecode.kernels.sampling.sampling_slots import WITHOUT_FINITE

_TURN = attrgetter("turn")


@dataclass(eq=False)
class Sequence:
    """A prompt and its tokens so far.

    Keys and values are kept for all tokens but the last: the last one, of a prompt too, is fed to the next decode step,
    which writes its keys and values and samples its successor.
    """

    request_id: int  # names it, in the engine and in the cache
    token_ids: list[int]  # prompt and answer
    params: SamplingParams  # what was asked for
    prompt_length: int  # tokens of the prompt
    max_length: int  # tokens that prompt and answer may have together
    stop_ids: tuple[int, ...]  # tokens that end it
    eos_token_ids: tuple[int, ...]  # those of them that are the model's
    sampling: RowSampling  # what the step is told of it
    metrics: RequestMetrics  # times and counts
    turn: tuple[int, float, int] = (0, 0.0, 0)  # priority, turn, id: the lowest is served first, preempted last
    constraint: Constraint | None = None  # of its structured output; None: there is none
    adapter: LoadedAdapter | None = None  # that changes the model for it; None: there is none
    slot: int = NO_ADAPTER  # the adapter's, as long as the sequence has a row
    cached_length: int = 0  # tokens whose keys and values are in the cache; the one book of it
    drafted_length: int = 0  # tokens that a source of drafts with keys of its own has seen
    finish_reason: str | None = None  # "stop", "length" or "error" once it has ended; None before
    stop_reason: int | None = None  # the request's stop token that ended it
    # of the prompt's tokens from the second on, as far as they are computed
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_told_prompt: bool = False  # whether an event has brought them to the owner
    failure: ConstraintError | None = None  # why the constraint cannot be kept any further; the answer ends with it
    error_code: str | None = None  # of its error, as an event has it
    is_complete: bool = False  # whether the constraint has ended the answer, by a token that is part of its text

    @property
    def unscored(self) -> bool:
        """Whether tokens of its prompt are still to be scored, so that the whole prompt has to be computed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def prefilled(self) -> bool:
        """Whether only the last token waits to be fed, so that decode steps can take over."""
        return self.cached_length >= len(self.token_ids) - 1

    @property
    def is_full(self) -> bool:
        """Whether it has all the tokens that it may have."""
        return len(self.token_ids) >= self.max_length

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.prompt_length

    def length_ahead(self, tokens_ahead: int) -> int:
        """Return how many of its tokens are cached in so many steps."""
        return min(self.cached_length + tokens_ahead, self.max_length)

    def accept(self, token_id: int) -> None:
        """Take a sampled token, whose step has cached the one before, and decide whether it ends the answer."""
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

    def fail(self, why: int | ConstraintError) -> str:
        """End it, for no token can be chosen (see NO_CHOICE, or its constraint); return an error that says so."""
        self.finish_reason = "error"
        if self.constraint is not None and why == WITHOUT_FINITE:
            why = ConstraintError("its grammar cannot be followed further: bad_words forbid all")
        if isinstance(why, ConstraintError):
            self.error_code = "form_too_complex"
            return f"request {self.request_id} was ended: {why}"
        return (
            f"request {self.request_id} was ended: no token can be chosen at position {len(self.token_ids)} "
            f"(temperature {self.params.temperature:g}): {NO_CHOICE[why]}"
        )

    def row_inputs(self, pages: SequenceOf[int], state_row: int | None = None) -> RowInputs:
        """Return what a step is told of it, and of its place in the cache."""
        may_draft = self.constraint is None
        guide = None if self.constraint is None else self.constraint.guide
        tokens = (self.token_ids, self.prompt_length, pages)
        return RowInputs(*tokens, self.sampling, may_draft, guide, state_row, self.slot)


class Scheduler:
    """Holds every sequence from its arrival to its end: it waits, gets a row and pages, is prefilled, and decoded.

    Row i of a decode step is the i-th sequence of `decoding`.
    """

    def __init__(self, cache: PagedKVCache, adapters: EngineAdapters, *, max_batch_size: int) -> None:
        self.cache, self.adapters, self.max_batch_size = cache, adapters, max_batch_size
        self.waiting: list[Sequence] = []  # in the order of their turns
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def admitted(self) -> list[Sequence]:
        """The sequences that have a row."""
        return [*self.prefilling, *self.decoding]

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self.decoding or self.prefilling or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Enqueue a sequence."""
        insort(self.waiting, sequence, key=_TURN)

    def next_chunks(self, budget: int) -> list[tuple[Sequence, PromptChunk]]:
        """Choose what to prefill now, at most `budget` tokens, admitting sequences as rows and pages allow."""
        chunks: list[tuple[Sequence, PromptChunk]] = []
        for sequence in self.prefilling:
            budget -= self._take_chunk(sequence, budget, chunks)
        slots_are_full = False
        for candidate in list(self.waiting):
            if budget <= 0 or len(self.admitted) >= self.max_batch_size:
                break
            if candidate.adapter is not None and not slots_are_full:
                slot = self.adapters.acquire(candidate.adapter)
                slots_are_full = slot is None
                candidate.slot = NO_ADAPTER if slot is None else slot
            if candidate.adapter is not None and slots_are_full:
                continue  # whoever needs no slot may pass; whoever does would keep one from those before
            if self._shares_unwritten_prefix(candidate, chunks) or not self._admit(candidate):
                self._release_slot(candidate)
                break
            self.waiting.remove(candidate)
            budget -= self._take_chunk(candidate, budget, chunks)
        return chunks

    def _take_chunk(self, sequence: Sequence, budget: int, chunks: list[tuple[Sequence, PromptChunk]]) -> int:
        start, tokens = sequence.cached_length, sequence.token_ids
        end = min(len(tokens) - 1, start + budget)
        if end <= start:
            return 0
        scored = tokens[start + 1 : end + 1] if sequence.unscored else ()
        likely = sequence.params.prompt_logprobs or 0
        pages, state_row = self.cache.pages_of(sequence.request_id), self.cache.state_row_of(sequence.request_id)
        chunk = PromptChunk(tokens[start:end], start, pages, scored, likely, state_row, sequence.slot)
        chunks.append((sequence, chunk))
        return end - start

    def _shares_unwritten_prefix(self, candidate: Sequence, chunks: list[tuple[Sequence, PromptChunk]]) -> bool:
        """Whether the candidate had better wait a step, because a chunk of this step writes a page to share."""
        if not self.cache.shares_with_running or candidate.unscored:
            return False
        page = self.cache.page_size
        for sequence, chunk in chunks:
            end = (chunk.start // page + 1) * page  # of the first page that the chunk completes
            if end <= chunk.end and end < len(candidate.token_ids):  # noqa: SIM102 - numbers first, lists where they fit
                if candidate.adapter is sequence.adapter and candidate.token_ids[:end] == sequence.token_ids[:end]:
                    return True
        return False

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its pages, or leave everything as it was and return False."""
        # a prompt that is to be scored is computed whole: what is read from the cache has no logits
        root = b"" if sequence.adapter is None else sequence.adapter.prefix_root
        cached = self.cache.add(sequence.request_id, None if sequence.unscored else sequence.token_ids, root)
        # one page stays free for each running sequence that may want more: whoever enters must not push out who works
        spare = sum(map(self._may_grow, self.admitted))
        try:
            self.cache.reserve(sequence.request_id, len(sequence.token_ids))
            if self.cache.available_pages < spare:
                raise CacheFullError("no spare pages")
        except CacheFullError:
            self.cache.free(sequence.request_id)
            return False
        # where more than half of the pool stays free, all pages of the answer are taken at once: its page table never
        # changes; whoever needs them more gets them back in `make_room`
        if self.cache.pool.free - sequence.max_length // self.cache.page_size > self.cache.pool.total // 2:
            self.cache.reserve(sequence.request_id, sequence.max_length)
        sequence.cached_length = sequence.drafted_length = cached
        metrics = sequence.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.perf_counter()
        if not sequence.num_generated:
            metrics.num_cached_tokens = max(metrics.num_cached_tokens, cached)
        self.prefilling.append(sequence)
        return True

    def prefilled(self, chunks: list[tuple[Sequence, PromptChunk]]) -> list[Sequence]:
        """Record that chunks were computed; whose prompt is complete joins `decoding`, or is returned to be removed."""
        for sequence, chunk in chunks:
            sequence.cached_length = sequence.drafted_length = chunk.end
            self.publish(sequence)
        ready = [sequence for sequence in self.prefilling if sequence.prefilled]
        complete = [sequence for sequence in ready if sequence.is_full]
        self.decoding.extend(sequence for sequence in ready if not sequence.is_full)
        self.prefilling = [sequence for sequence in self.prefilling if not sequence.prefilled] + complete
        return complete

    def publish(self, sequence: Sequence) -> None:
        """Publish the computed length of a sequence; its full pages become prefixes that others can find."""
        self.cache.publish(sequence.request_id, sequence.cached_length, sequence.token_ids)

    def reserve(self, tokens_ahead: int) -> bool:
        """Make sure that each decoding sequence has pages for its next tokens; return whether any pages changed.

        Where pages are plentiful, a page more is taken for everyone as soon as one sequence needs one: the page table
        changes once in a page's length. At a CacheFullError some sequences may have got theirs.
        """
        changed = [self._reserve(sequence, tokens_ahead) for sequence in self.decoding]
        if any(changed) and self.cache.available_pages >= 2 * len(self.decoding):
            for sequence in self.decoding:
                self._reserve(sequence, tokens_ahead + self.cache.page_size)
        return any(changed)

    def steps_with_pages(self) -> int:
        """Return how many next tokens of every decoding sequence its pages suffice for."""
        growing = filter(self._may_grow, self.decoding)
        return min((self._room(sequence) - sequence.cached_length for sequence in growing), default=sys.maxsize)

    def _room(self, sequence: Sequence) -> int:
        return len(self.cache.pages_of(sequence.request_id)) * self.cache.page_size

    def _may_grow(self, sequence: Sequence) -> bool:
        return self._room(sequence) < sequence.max_length

    def make_room(self, tokens_ahead: int) -> int:
        """Find pages for everybody's next tokens; return for how many of each, 1 to `tokens_ahead`.

        Pages taken ahead are given back first, then the last sequences are preempted. Nothing may be in flight.
        """
        for sequence in self.decoding:
            self.publish(sequence)
            self.cache.truncate(sequence.request_id, sequence.cached_length)
        tokens = range(1, tokens_ahead + 1)
        while not (fitting := bisect_right(tokens, self.cache.available_pages, key=self._missing_pages)):
            last = max(self.admitted, key=_TURN)
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
            wanted = -(-sequence.length_ahead(tokens_ahead) // self.cache.page_size)
            missing += max(wanted - len(self.cache.pages_of(sequence.request_id)), 0)
        return missing

    def _reserve(self, sequence: Sequence, tokens_ahead: int) -> bool:
        return self.cache.reserve(sequence.request_id, sequence.length_ahead(tokens_ahead))

    def remove(self, sequence: Sequence, *, findable: bool = True) -> None:
        """Forget a sequence wherever it stands; its pages may serve others, unless they are not to be findable."""
        if sequence in self.admitted:
            self._release(sequence, findable=findable)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def reset(self) -> None:
        """Forget every sequence and all that the cache holds, in whatever state both are."""
        self.adapters.reset()
        self.waiting.clear()
        self.prefilling, self.decoding = [], []
        self.cache.reset()

    def _release(self, sequence: Sequence, *, findable: bool = True) -> None:
        if findable:
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


def draft_gaps(sequences: Iterable[Sequence], cache: PagedKVCache, max_tokens: int) -> list[list[PromptChunk]]:
    """Return the chunks, in passes of at most `max_tokens`, that bring a source of drafts up to date.

    One token that is missing is no gap: drafting begins with the last two.
    """
    passes: list[list[PromptChunk]] = []
    room = 0
    for sequence in sequences:
        if sequence.drafted_length >= sequence.cached_length - 1:
            continue
        pages = cache.pages_of(sequence.request_id)
        while (start := sequence.drafted_length) < sequence.cached_length:
            if room == 0:
                passes.append([])
                room = max_tokens
            end = min(start + room, sequence.cached_length)
            passes[-1].append(PromptChunk(sequence.token_ids[start:end], start, pages))
            room -= end - start
            sequence.drafted_length = end
    return passes
