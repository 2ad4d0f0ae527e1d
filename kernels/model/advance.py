"""Advance a batch by one token, on the device: the step feeds itself as long as the membership stays.

A row's new token goes to the output ring, into its counts, and, unless it ended the row, into the slot of the
token to feed, one position on. What a step changes is decided by device memory alone, so a loop of steps on
the device needs no host.

A row that finishes does not advance: its token is in the ring, and steps that still run over the row write
the same key and value at the same place again. It needs no page past the last token it was fed. A row that
`sample` found no choice for ends the same way: the code is in the ring, and it neither counts nor is fed.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Float32, Int32, Int64, Written
from ..sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    FLAG_BAD_WORDS,
    FLAG_LOGPROBS,
    FLAG_PENALTIES,
    LogprobOutputs,
    SamplingSlots,
)

_TOPS_BLOCK = 32  # likeliest tokens that are copied to the ring at once


class AdvanceState(NamedTuple):
    """What `advance` changes in place.

    Attributes:
        tokens: int64 [b], the token to feed next.
        pre_step_seqlens: int32 [b], its position.
        finished: int32 [b], 1 for a row that ended; the host clears it when it stages a row.
        step_index: int64 [1], steps taken so far; its remainder by R names the ring's current entry.
        running: int32 [1], live rows that are not finished after the step.
        ring_tokens: int64 [R, b_max], the tokens of the last R steps; -1 where a row had none, less where no choice.
        token_counts: int32 [b, vocab], see `sampling_slots`; None where no row may have penalties.
        ring_logprob: float32 [R, b_max] or None, log-probability of the ring's tokens.
        ring_rank: int32 [R, b_max] or None, their ranks.
        ring_top_logprobs: float32 [R, b_max, logprobs] or None.
        ring_top_ids: int32 [R, b_max, logprobs] or None.
        recent_tokens: int32 [b, BAD_WORD_LENGTH], the last generated tokens, each at the remainder of its position, -1
            where there is none; None where no row may have bad words.
    """

    tokens: Int64
    pre_step_seqlens: Int32
    finished: Int32
    step_index: Int64
    running: Int32
    ring_tokens: Int64
    token_counts: Int32 | None = None
    ring_logprob: Float32 | None = None
    ring_rank: Int32 | None = None
    ring_top_logprobs: Float32 | None = None
    ring_top_ids: Int32 | None = None
    recent_tokens: Int32 | None = None


@triton.jit
def advance_rows(
    tokens,
    pre_step_seqlens,
    finished,
    step_index,
    running,
    ring_tokens,
    token_counts,
    ring_logprob,
    ring_rank,
    ring_top_logprobs,
    ring_top_ids,
    recent_tokens,
    sampled,
    sampled_logprob,
    sampled_rank,
    top_logprobs,
    top_ids,
    live_rows,
    sampling_flags,
    stop_ids,
    min_position,
    last_position,
    num_logprobs,
    ring_length,
    ring_rows,
    counts_stride,
    PENALTIES: tl.constexpr,
    PENALTIES_FLAG: tl.constexpr,
    LOGPROBS: tl.constexpr,
    LOGPROBS_FLAG: tl.constexpr,
    ROWS: tl.constexpr,
    STOPS: tl.constexpr,
    TOPS: tl.constexpr,
    TOPS_BLOCK: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    BAD_WORDS_FLAG: tl.constexpr,
    RECENT: tl.constexpr,
):
    """Do the whole batch in one program: ROWS is b_max rounded up. It reads some 60 bytes a row and writes some 30."""
    rows = tl.arange(0, ROWS)
    live = rows < tl.load(live_rows)
    step = tl.load(step_index)
    ended = tl.load(finished + rows, mask=live, other=1) != 0
    active = live & (ended == 0)
    token = tl.load(sampled + rows, mask=active, other=-1)
    position = tl.load(pre_step_seqlens + rows, mask=active, other=0) + 1
    flags = tl.load(sampling_flags + rows, mask=active, other=0)

    index = 0
    stops = tl.load(stop_ids + rows * STOPS, mask=active, other=-1)
    matches = tl.zeros([ROWS], dtype=tl.int32)
    while tl.max(stops, axis=0) >= 0:  # what is used comes first
        matches += ((stops >= 0) & (stops.to(tl.int64) == token)).to(tl.int32)
        index += 1
        stops = tl.load(stop_ids + rows * STOPS + tl.minimum(index, STOPS - 1), mask=active, other=-1)
        stops = tl.where(index < STOPS, stops, -1)
    stopped = matches > 0
    stopped = stopped & (position >= tl.load(min_position + rows, mask=active, other=0))
    last = tl.load(last_position + rows, mask=active, other=0)
    ends_now = active & (stopped | (position >= last) | (token < 0))
    goes_on = active & (ends_now == 0)

    entry = (step % ring_length) * ring_rows
    tl.store(ring_tokens + entry + rows, tl.where(active, token, -1), mask=rows < ring_rows)
    if LOGPROBS:
        wanted = active & ((flags & LOGPROBS_FLAG) != 0)
        chosen = tl.load(sampled_logprob + rows, mask=wanted, other=0.0)
        tl.store(ring_logprob + entry + rows, chosen, mask=wanted)
        tl.store(ring_rank + entry + rows, tl.load(sampled_rank + rows, mask=wanted, other=0), mask=wanted)
        tops = tl.minimum(tl.load(num_logprobs + rows, mask=wanted, other=0), TOPS)
        for first in range(0, tl.max(tops, axis=0), TOPS_BLOCK):
            places = first + tl.arange(0, TOPS_BLOCK)[None, :]
            inside = places < tops[:, None]
            source = rows[:, None] * TOPS + places
            target = entry * TOPS + source
            tl.store(ring_top_logprobs + target, tl.load(top_logprobs + source, mask=inside, other=0.0), mask=inside)
            tl.store(ring_top_ids + target, tl.load(top_ids + source, mask=inside, other=0), mask=inside)
    if PENALTIES:
        counted = active & ((flags & PENALTIES_FLAG) != 0) & (token >= 0) & (token < counts_stride)
        place = token_counts + rows.to(tl.int64) * counts_stride + token
        tl.store(place, tl.load(place, mask=counted, other=0) + 1, mask=counted)

    if BAD_WORDS:
        remembered = active & ((flags & BAD_WORDS_FLAG) != 0)
        tl.store(recent_tokens + rows * RECENT + position % RECENT, token.to(tl.int32), mask=remembered)

    tl.store(tokens + rows, token, mask=goes_on)
    tl.store(pre_step_seqlens + rows, position, mask=goes_on)
    tl.store(finished + rows, (goes_on == 0).to(tl.int32), mask=active)
    tl.store(running, tl.sum(goes_on.to(tl.int32), axis=0))
    tl.store(step_index, step + 1)


@triton.jit
def _advance_kernel(
    tokens,
    pre_step_seqlens,
    finished,
    step_index,
    running,
    ring_tokens,
    token_counts,
    ring_logprob,
    ring_rank,
    ring_top_logprobs,
    ring_top_ids,
    recent_tokens,
    sampled,
    sampled_logprob,
    sampled_rank,
    top_logprobs,
    top_ids,
    live_rows,
    sampling_flags,
    stop_ids,
    min_position,
    last_position,
    num_logprobs,
    ring_length,
    ring_rows,
    counts_stride,
    PENALTIES: tl.constexpr,
    PENALTIES_FLAG: tl.constexpr,
    LOGPROBS: tl.constexpr,
    LOGPROBS_FLAG: tl.constexpr,
    ROWS: tl.constexpr,
    STOPS: tl.constexpr,
    TOPS: tl.constexpr,
    TOPS_BLOCK: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    BAD_WORDS_FLAG: tl.constexpr,
    RECENT: tl.constexpr,
):
    advance_rows(
        tokens,
        pre_step_seqlens,
        finished,
        step_index,
        running,
        ring_tokens,
        token_counts,
        ring_logprob,
        ring_rank,
        ring_top_logprobs,
        ring_top_ids,
        recent_tokens,
        sampled,
        sampled_logprob,
        sampled_rank,
        top_logprobs,
        top_ids,
        live_rows,
        sampling_flags,
        stop_ids,
        min_position,
        last_position,
        num_logprobs,
        ring_length,
        ring_rows,
        counts_stride,
        PENALTIES,
        PENALTIES_FLAG,
        LOGPROBS,
        LOGPROBS_FLAG,
        ROWS,
        STOPS,
        TOPS,
        TOPS_BLOCK,
        BAD_WORDS,
        BAD_WORDS_FLAG,
        RECENT,
    )


def advance_options(
    state: AdvanceState | None,
    sampled: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    logprobs: LogprobOutputs | None,
) -> dict[str, Any]:
    """Return the arguments of `advance_rows` by name; without a state those that tell of tokens alone."""
    present = state or AdvanceState(*(None,) * len(AdvanceState._fields))  # type: ignore[arg-type]
    ring_length, ring_rows = (1, 1) if state is None else state.ring_tokens.shape
    return {
        **present._asdict(),
        "sampled": sampled,
        **dict.fromkeys(LogprobOutputs._fields),
        **({} if logprobs is None else logprobs._asdict()),
        "live_rows": live_rows,
        "sampling_flags": slots.sampling_flags,
        "stop_ids": slots.stop_ids,
        "min_position": slots.min_position,
        "last_position": slots.last_position,
        "num_logprobs": slots.num_logprobs,
        "ring_length": ring_length,
        "ring_rows": ring_rows,
        "counts_stride": 0 if present.token_counts is None else present.token_counts.stride(0),
        "PENALTIES": present.token_counts is not None,
        "PENALTIES_FLAG": FLAG_PENALTIES,
        "LOGPROBS": present.ring_logprob is not None and logprobs is not None,
        "LOGPROBS_FLAG": FLAG_LOGPROBS,
        "ROWS": triton.next_power_of_2(ring_rows),
        "STOPS": slots.stop_ids.shape[1],
        "TOPS": 1 if logprobs is None else logprobs.top_ids.shape[1],
        "TOPS_BLOCK": _TOPS_BLOCK,
        "BAD_WORDS": present.recent_tokens is not None,
        "BAD_WORDS_FLAG": FLAG_BAD_WORDS,
        "RECENT": BAD_WORD_LENGTH,
    }


def advance_triton(
    state: AdvanceState,
    sampled: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    logprobs: LogprobOutputs | None,
) -> None:
    """Launch the kernel; see `advance`."""
    _advance_kernel[(1,)](**advance_options(state, sampled, live_rows, slots, logprobs), num_warps=4)


@operator(
    triton_version=advance_triton,
    is_compiled=True,
    constants={
        "FLAG_PENALTIES": FLAG_PENALTIES,
        "FLAG_LOGPROBS": FLAG_LOGPROBS,
        "FLAG_BAD_WORDS": FLAG_BAD_WORDS,
        "BAD_WORD_LENGTH": BAD_WORD_LENGTH,
    },
)
def advance(
    state: Written[AdvanceState],
    sampled: Int64,
    live_rows: Int32,
    slots: SamplingSlots,
    logprobs: LogprobOutputs | None = None,
) -> None:
    """Take the sampled tokens into the state of every live row that is not finished.

    The position of a row's new token is `pre_step_seqlens + 1`. The row finishes with it if that is
    `last_position` or more, if the token is a stop id at `min_position` or more, or if it is none (< 0). The
    ring's entry gets -1 in the columns of all other rows. Counts change for rows with FLAG_PENALTIES alone, recent
    tokens for rows with FLAG_BAD_WORDS; the logprob rings for rows with FLAG_LOGPROBS, as far as `num_logprobs`,
    where rings and outputs are given.

    Args:
        state: what is changed; finished and dead rows are left as they are.
        sampled: int64 [b], from `sample`.
        live_rows: int32 [1].
        slots: sampling_flags, stop_ids, min_position, last_position and num_logprobs are read.
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
