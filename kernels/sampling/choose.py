"""The second of the sampler's two launches: the token of each row, and with it the batch's advance."""

from torch import Tensor

from ..model.advance import AdvanceState, advance_options, advance_row, end_step, row_before
from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from .candidates import SKETCH_BINS, candidate_window, take_blocks
from .draw_token import draw_token
from .follow_automata import Guides, follow_row, guide_options
from .logprobs import row_logprobs
from .philox import uniform_bits_of
from .sampler_memory import SamplerMemory
from .sampling_slots import (
    DEAD_TOKEN,
    FLAG_SAMPLE,
    TOO_COLD,
    WITHOUT_FINITE,
    WITHOUT_NUMBERS,
    LogprobOutputs,
    SamplingSlots,
)

_LIST_BLOCK = 1024  # candidates that are looked at together
_PARTS = 8  # of a block, of which one is looked at for the token
PROGRAMS = 128  # that share the rows of a batch: what a large GPU runs at once


@triton.jit
def count_row(counter, goes_on):
    """Count a row that is done in int32 [2], at a multiple of 8 bytes; return how many are, and how many go on."""
    mine = 1 + (goes_on.to(tl.int64) << 32)
    counts = tl.atomic_add(counter.to(tl.pointer_type(tl.int64)), mine, sem="acq_rel") + mine
    return counts.to(tl.int32), (counts >> 32).to(tl.int32)


# Some programs share a row that draws; each adds up its blocks of the row's scaled logits, which are in L2, and the
# last one to arrive looks at the candidates, and then at one block for the token. Of a row that does not draw the first
# one reduces the blocks' maxima. Whoever has the token makes the row's log-probabilities, advances the row and takes it
# into its automaton; the last row's ends the step. Nothing depends on who was last. What a row asks for and where it
# stands was written before the launch before this one, and is read before the wait.
@triton.jit
def _choose_kernel(
    block_max,
    block_id,
    block_sum,
    own_max,
    own_sum,
    sketch,
    scaled,
    candidate_ids,
    sums,
    counters,
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    vocab,
    logits_stride,
    scaled_stride,
    sampled,
    automaton_state,
    next_mask,
    automaton,
    automaton_classes,
    automaton_next,
    automaton_masks,
    automaton_ends,
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
    FOLLOW: tl.constexpr,
    SAMPLE_FLAG: tl.constexpr,
    LOGPROBS_FLAG: tl.constexpr,
    DEAD: tl.constexpr,
    NUMBERS_MISS: tl.constexpr,
    FINITE_MISS: tl.constexpr,
    COLD: tl.constexpr,
    CAPACITY: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
    PENALTIES: tl.constexpr,
    PENALTIES_FLAG: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    STOPS: tl.constexpr,
    STOPS_PADDED: tl.constexpr,
    TOPS: tl.constexpr,
    TOPS_PADDED: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    BAD_WORDS_FLAG: tl.constexpr,
    RECENT: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    CLASSES: tl.constexpr,
    ACCEPTS_BIT: tl.constexpr,
    COMPLETES_BIT: tl.constexpr,
    BITS: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    wide_row = row.to(tl.int64)
    rows = tl.num_programs(0)
    is_live = row < tl.load(live_rows)
    flags = tl.where(is_live, tl.load(sampling_flags + row), 0)
    warmth = tl.load(temperature + row)
    k = tl.load(top_k + row)
    share = tl.load(top_p + row)
    minimum = tl.load(min_p + row)
    own_seed = tl.load(seed + row)
    position, was_finished, step, stops, first_stop, last, wanted = row_before(
        row,
        pre_step_seqlens,
        finished,
        step_index,
        stop_ids,
        min_position,
        last_position,
        num_logprobs,
        STOPS,
        STOPS_PADDED,
    )
    state = -1
    which = 0
    if FOLLOW:
        state = tl.load(automaton_state + row)
        which = tl.load(automaton + row)
    if PDL:
        wait_and_trigger()
    is_last = tl.program_id(1) == 0
    token = tl.full([], DEAD, dtype=tl.int32)
    draws = is_live & ((flags & SAMPLE_FLAG) != 0)
    if draws | (is_live & is_last):
        blocks = tl.arange(0, BLOCKS_PADDED)
        maxima = tl.load(block_max + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf"))
        ids = tl.load(block_id + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=2147483647)
        largest = tl.max(maxima, axis=0)
        code = tl.where(largest == float("inf"), NUMBERS_MISS, 0)
        code = tl.where(largest == float("-inf"), FINITE_MISS, code)
        warmth = tl.where(draws, warmth, 1.0)
        top = tl.div_rn(largest, warmth)
        code = tl.where(draws & (code == 0) & ~(tl.abs(top) < float("inf")), COLD, code)
        token = code.to(tl.int32)
        if draws & (code == 0):
            line = scaled + wide_row * scaled_stride
            row_sums = sums + wide_row * (4 * BLOCKS)
            lowest_weight = tl.maximum((minimum * 68719476736.0).to(tl.int64), 1)
            lowest_weight = tl.where(minimum > 0.0, lowest_weight, 1)
            by_count = (k > 0) & (k < vocab)
            is_filtered = by_count | (share < 1.0)
            least = tl.full([], float("inf"), dtype=tl.float32)
            most = tl.full([], float("-inf"), dtype=tl.float32)
            if is_filtered:
                least, most = candidate_window(
                    sketch + wide_row * (BLOCKS * BINS),
                    block_max + row * BLOCKS,
                    block_sum + row * BLOCKS,
                    warmth,
                    top,
                    k,
                    share,
                    by_count,
                    BLOCK,
                    BLOCKS,
                    BLOCKS_PADDED,
                    BINS,
                )
                if by_count & (share < 1.0):
                    most = top  # top-p weighs all that top-k keeps
            take_blocks(
                row_sums,
                line + BLOCKS * BLOCK,
                candidate_ids + wide_row * CAPACITY,
                counters + 2 * row + 1,
                line,
                vocab,
                top,
                least,
                most,
                lowest_weight,
                is_filtered,
                by_count,
                CAPACITY,
                BLOCK,
                BLOCKS,
            )
            tl.debug_barrier()  # all threads have written before one of them says so
            is_last = tl.atomic_add(counters + 2 * row, 1, sem="acq_rel") == tl.num_programs(1) - 1
            if is_last:
                token = draw_token(
                    row_sums,
                    line,
                    candidate_ids + wide_row * CAPACITY,
                    tl.load(counters + 2 * row + 1, cache_modifier=".cg"),
                    vocab,
                    top,
                    least,
                    most,
                    k,
                    share,
                    lowest_weight,
                    uniform_bits_of(own_seed, position),
                    CAPACITY,
                    BLOCK,
                    BLOCKS,
                    BLOCKS_PADDED,
                    LIST_BLOCK,
                    PARTS,
                )
                token = tl.minimum(token, vocab - 1)
        elif code == 0:
            token = tl.min(tl.where(maxima == largest, ids, 2147483647), axis=0)
            token = tl.minimum(token, vocab - 1)
    if is_last:
        tl.store(sampled + row, token.to(tl.int64))
        if (flags & LOGPROBS_FLAG) != 0:
            row_logprobs(
                sampled_logprob,
                sampled_rank,
                top_logprobs,
                top_ids,
                own_max,
                own_sum,
                logits + wide_row * logits_stride,
                row,
                token,
                wanted,
                vocab,
                TOPS,
                BLOCK,
                BLOCKS,
                BLOCKS_PADDED,
            )
            tl.debug_barrier()  # all of it is there before it is copied
        goes_on = advance_row(
            row,
            token.to(tl.int64),
            is_live,
            flags,
            position,
            was_finished,
            step,
            stops,
            first_stop,
            last,
            wanted,
            tokens,
            pre_step_seqlens,
            finished,
            ring_tokens,
            token_counts,
            ring_logprob,
            ring_rank,
            ring_top_logprobs,
            ring_top_ids,
            recent_tokens,
            sampled_logprob,
            sampled_rank,
            top_logprobs,
            top_ids,
            ring_length,
            ring_rows,
            counts_stride,
            PENALTIES,
            PENALTIES_FLAG,
            LOGPROBS,
            LOGPROBS_FLAG,
            TOPS,
            TOPS_PADDED,
            BAD_WORDS,
            BAD_WORDS_FLAG,
            RECENT,
        )
        if FOLLOW:  # noqa: SIM102 - decided at compile time
            if goes_on & (state >= 0):
                goes_on = follow_row(
                    row,
                    token,
                    state,
                    which,
                    stops,
                    automaton_state,
                    next_mask,
                    finished,
                    automaton_classes,
                    automaton_next,
                    automaton_masks,
                    automaton_ends,
                    vocab,
                    MASK_WORDS,
                    CLASSES,
                    ACCEPTS_BIT,
                    COMPLETES_BIT,
                    BITS,
                    MASK_BLOCK,
                )
        done, going_on = count_row(counters + 2 * rows, goes_on)
        if done == rows:
            end_step(step, going_on, rows, step_index, running, ring_tokens, ring_length, ring_rows, RING_ROWS)


def launch_choose(
    memory: SamplerMemory,
    sampled: Tensor,
    logits: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    logprobs: LogprobOutputs,
    state: AdvanceState,
    guides: Guides | None = None,
) -> None:
    """Launch the kernel; see `sample_and_advance`.

    Args:
        memory: what `launch_block_max` wrote.
        sampled: int64 [b].
        logits: [b, vocab].
        live_rows: int32 [1].
        slots: of the rows.
        logprobs: written for rows that want them.
        state: advanced.
        guides: followed; None: no row has one.
    """
    rows, vocab = logits.shape
    blocks = memory.blocks
    options = advance_options(state, live_rows, slots, logprobs) | guide_options(guides)
    _choose_kernel[(rows, min(max(PROGRAMS // rows, 1), blocks))](
        memory.block_max,
        memory.block_id,
        memory.block_sum,
        memory.own_max,
        memory.own_sum,
        memory.sketch,
        memory.scaled,
        memory.candidate_ids,
        memory.sums,
        memory.counters,
        logits,
        slots.temperature,
        slots.top_k,
        slots.top_p,
        slots.min_p,
        slots.seed,
        vocab,
        logits.stride(0),
        memory.scaled.stride(0),
        sampled,
        SAMPLE_FLAG=FLAG_SAMPLE,
        DEAD=DEAD_TOKEN,
        NUMBERS_MISS=WITHOUT_NUMBERS,
        FINITE_MISS=WITHOUT_FINITE,
        COLD=TOO_COLD,
        CAPACITY=memory.capacity,
        BINS=SKETCH_BINS,
        BLOCK=memory.block,
        BLOCKS=blocks,
        BLOCKS_PADDED=triton.next_power_of_2(blocks),
        LIST_BLOCK=min(_LIST_BLOCK, memory.block),
        PARTS=_PARTS,
        num_warps=16,
        **options,
        **early_start_options(logits.device),
    )
