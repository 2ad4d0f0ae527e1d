"""Advance a batch by one token on the device: the step feeds itself as long as the batch has the same rows.

A row's new token goes to the output ring, into its counts, and, unless it ended the row, into the slot of the token to
feed, at the next position. A step depends only on device memory, so a loop of steps on the device needs no host.

A finished row does not advance: its token is in the ring, and further steps over the row write the same key and value
at the same position again. It needs no page past the last token that it was fed. A row without a choice in `sample`
ends in the same way: the ring has the code, which is neither counted nor fed.
"""

from typing import Any, NamedTuple

from ..native.optional_triton import tl, triton
from ..native.registration import Float32, Int32, Int64, Written, operator
from ..sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    CONSTANTS,
    FLAG_BAD_WORDS,
    FLAG_LOGPROBS,
    FLAG_PENALTIES,
    LogprobOutputs,
    SamplingSlots,
)


class AdvanceState(NamedTuple):
    """The tensors that `advance` changes in place."""

    tokens: Int64  # int64 [b], the token to feed next
    pre_step_seqlens: Int32  # int32 [b], its position
    finished: Int32  # int32 [b], 1 for a row that ended; the host clears it when it stages a row
    step_index: Int64  # int64 [1], steps taken so far; modulo R: the ring's current entry
    running: Int32  # int32 [1], live rows that are not finished after the step
    # int64 [R, b_max], the tokens of the last R steps; -1: none, less: no choice
    ring_tokens: Int64
    token_counts: Int32 | None = None  # int32 [b, vocab], see `sampling_slots`; None: no row may have penalties
    ring_logprob: Float32 | None = None  # float32 [R, b_max] or None, log-probability of the ring's tokens
    ring_rank: Int32 | None = None  # int32 [R, b_max] or None, their ranks
    ring_top_logprobs: Float32 | None = None  # float32 [R, b_max, logprobs] or None
    ring_top_ids: Int32 | None = None  # int32 [R, b_max, logprobs] or None
    # int32 [b, BAD_WORD_LENGTH], the last generated tokens, each at its position modulo BAD_WORD_LENGTH, -1: none;
    # None: no row may have bad words
    recent_tokens: Int32 | None = None


class Before(NamedTuple):
    """The inputs of a row's advance that are read before its new token is known."""

    position: Any
    was_finished: Any
    step: Any
    stops: Any
    first_stop: Any
    last: Any
    tops: Any


@triton.jit
def row_before(row, slots, state, META: tl.constexpr):
    """Return the inputs of a row's advance."""
    columns = tl.arange(0, META.STOPS_PADDED)
    of_row = slots.stop_ids + tl.cast(row, tl.int64) * META.STOPS
    stops = tl.load(of_row + columns, mask=columns < META.STOPS, other=-1)
    return Before(
        tl.load(state.pre_step_seqlens + row) + 1,
        tl.load(state.finished + row) != 0,
        tl.load(state.step_index),
        stops,
        tl.load(slots.min_position + row),
        tl.load(slots.last_position + row),
        tl.load(slots.num_logprobs + row),
    )


@triton.jit
def advance_row(row, token, is_live, flags, before, state, outputs, sizes, META: tl.constexpr, K: tl.constexpr):
    """Advance one row by its token, and return whether it continues; reads some 600 bytes and writes some 30."""
    wide_row = tl.cast(row, tl.int64)
    position = before.position
    active = is_live & (before.was_finished == 0)
    is_stop = tl.max(((before.stops >= 0) & (before.stops.to(tl.int64) == token)).to(tl.int32), axis=0) > 0
    ends_now = (is_stop & (position >= before.first_stop)) | (position >= before.last) | (token < 0)
    continues = active & (ends_now == 0)
    entry = (before.step % sizes.ring_length) * sizes.ring_rows + row
    # all loads come before any store: the compiler does not move loads before stores
    counted = active & ((flags & K.FLAG_PENALTIES) != 0) & (token >= 0) & (token < sizes.counts_stride)
    count = 0
    if META.PENALTIES:
        counter = state.token_counts + wide_row * sizes.counts_stride + token
        count = tl.load(counter, mask=counted, other=0)
    if META.LOGPROBS:
        wants = active & ((flags & K.FLAG_LOGPROBS) != 0)
        logprob = tl.load(outputs.sampled_logprob + row, mask=wants, other=0.0)
        rank = tl.load(outputs.sampled_rank + row, mask=wants, other=0)
        columns = tl.arange(0, META.TOPS_PADDED)
        inside = columns < tl.where(wants, tl.minimum(before.tops, META.TOPS), 0)
        logprobs = tl.load(outputs.top_logprobs + wide_row * META.TOPS + columns, mask=inside, other=0.0)
        ids = tl.load(outputs.top_ids + wide_row * META.TOPS + columns, mask=inside, other=0)
        tl.store(state.ring_logprob + entry, logprob, mask=wants)
        tl.store(state.ring_rank + entry, rank, mask=wants)
        tl.store(state.ring_top_logprobs + entry * META.TOPS + columns, logprobs, mask=inside)
        tl.store(state.ring_top_ids + entry * META.TOPS + columns, ids, mask=inside)
    if META.PENALTIES:
        tl.store(counter, count + 1, mask=counted)
    tl.store(state.ring_tokens + entry, tl.where(active, token, -1))
    if META.BAD_WORDS:
        remembered = active & ((flags & K.FLAG_BAD_WORDS) != 0)
        recent = state.recent_tokens + wide_row * K.BAD_WORD_LENGTH + position % K.BAD_WORD_LENGTH
        tl.store(recent, token.to(tl.int32), mask=remembered)
    tl.store(state.finished + row, ends_now.to(tl.int32), mask=active)
    tl.store(state.tokens + row, token, mask=continues)
    tl.store(state.pre_step_seqlens + row, position, mask=continues)
    return continues


@triton.jit
def end_step(step, going_on, rows, state, sizes, META: tl.constexpr):
    """Count a step whose rows have all advanced, `going_on` of which continue; other ring columns get -1."""
    columns = tl.arange(0, META.RING_ROWS)
    entry = (step % sizes.ring_length) * sizes.ring_rows
    tl.store(state.ring_tokens + entry + columns, -1, mask=(columns >= rows) & (columns < sizes.ring_rows))
    tl.store(state.running, going_on)
    tl.store(state.step_index, step + 1)


@operator(is_compiled=True, constants=CONSTANTS._asdict())
def advance(
    state: Written[AdvanceState],
    sampled: Int64,
    live_rows: Int32,
    slots: SamplingSlots,
    logprobs: LogprobOutputs | None = None,
) -> None:
    """Advance every live row that is not finished by its sampled token.

    The position of a row's new token is `pre_step_seqlens + 1`. The row finishes with it if that is `last_position` or
    more, if the token is a stop id at `min_position` or more, or if there is no token (< 0). The ring's entry gets -1
    in the columns of all other rows. Counts change only for rows with FLAG_PENALTIES, recent tokens for rows with
    FLAG_BAD_WORDS, the logprob rings for rows with FLAG_LOGPROBS, up to `num_logprobs`, if rings and outputs are given.

    Args:
        state: changed in place; finished and dead rows are left unchanged.
        sampled: int64 [b], from `sample`.
        live_rows: int32 [1].
        slots: the rows' parameters.
        logprobs: from `token_logprobs`, or None.
    """
    live = int(live_rows.item())
    step = int(state.step_index.item())
    entry = step % state.ring_tokens.shape[0]
    ring = state.ring_tokens.numpy()[entry]
    ring.fill(-1)
    next_tokens, seqlens, ended = state.tokens.numpy(), state.pre_step_seqlens.numpy(), state.finished.numpy()
    # Python lists of a few numbers are read faster than tensors or arrays.
    new_tokens, positions = sampled.numpy()[:live].tolist(), seqlens[:live].tolist()
    flags, stops = slots.sampling_flags.numpy()[:live].tolist(), slots.stop_ids.numpy()[:live].tolist()
    first, last = slots.min_position.numpy()[:live].tolist(), slots.last_position.numpy()[:live].tolist()
    still = 0
    for row, was_ended in enumerate(ended[:live].tolist()):
        if was_ended:
            continue
        token, position = new_tokens[row], positions[row] + 1
        ring[row] = token
        if flags[row] & FLAG_PENALTIES and state.token_counts is not None and token >= 0:
            state.token_counts.numpy()[row, token] += 1
        if flags[row] & FLAG_LOGPROBS and state.ring_logprob is not None and logprobs is not None:
            state.ring_logprob[entry, row] = logprobs.sampled_logprob[row]
            state.ring_rank[entry, row] = logprobs.sampled_rank[row]  # type: ignore[index]
            tops = max(int(slots.num_logprobs[row]), 0)
            state.ring_top_logprobs[entry, row, :tops] = logprobs.top_logprobs[row, :tops]  # type: ignore[index]
            state.ring_top_ids[entry, row, :tops] = logprobs.top_ids[row, :tops]  # type: ignore[index]
        if flags[row] & FLAG_BAD_WORDS and state.recent_tokens is not None:
            state.recent_tokens.numpy()[row, position % BAD_WORD_LENGTH] = token
        if token < 0 or position >= last[row] or (token in stops[row] and position >= first[row]):
            ended[row] = 1
        else:
            next_tokens[row] = token
            seqlens[row] = position
            still += 1
    state.running.numpy()[0] = still
    state.step_index.numpy()[0] = step + 1


# One program writes 8 bytes for each row of the ring and skipped step, and reads and writes a few numbers.
@triton.jit
def _skip_steps_kernel(
    step_index,
    ring_tokens,
    loop_limit,
    loop_count,
    step_entries,
    ring_length,
    ring_rows,
    HAS_ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    step = tl.load(step_index)
    skipped = tl.load(loop_limit) - tl.load(loop_count)
    if HAS_ENTRIES:
        skipped = skipped * tl.load(step_entries)
    nothing = tl.full([ROWS], -1, tl.int64)
    for later in range(skipped):
        entry = ((step + later) % ring_length) * ring_rows
        tl.store(ring_tokens + entry + rows, nothing, mask=rows < ring_rows)
    tl.store(step_index, step + tl.maximum(skipped, 0))


def skip_steps_triton(step_index, ring_tokens, loop_limit, loop_count, step_entries=None) -> None:
    """Launch the kernel; see `skip_steps`."""
    _skip_steps_kernel[(1,)](
        step_index, ring_tokens, loop_limit, loop_count, step_entries, *ring_tokens.shape,
        HAS_ENTRIES=step_entries is not None, ROWS=triton.next_power_of_2(ring_tokens.shape[1]), num_warps=4,
    )  # fmt: skip


@operator(triton_version=skip_steps_triton)
def skip_steps(
    step_index: Written[Int64],
    ring_tokens: Written[Int64],
    loop_limit: Int32,
    loop_count: Int32,
    step_entries: Int32 | None = None,
) -> None:
    """Skip the ring entries of a launch's steps that did not run, and write -1 into them.

    Args:
        step_index: int64 [1], entries taken so far; the entries of `loop_limit - loop_count` steps are added.
        ring_tokens: int64 [R, b_max]; -1 is written into the skipped entries.
        loop_limit: int32 [1], requested steps of the launch.
        loop_count: int32 [1], steps that ran.
        step_entries: int32 [1], entries per step; None: one.
    """
    step, ring = step_index.numpy(), ring_tokens.numpy()
    skipped = max(int(loop_limit.numpy()[0]) - int(loop_count.numpy()[0]), 0)
    skipped *= 1 if step_entries is None else int(step_entries.numpy()[0])
    for later in range(int(step[0]), int(step[0]) + skipped):
        ring[later % len(ring)] = -1
    step[0] += skipped
