"""The second of the sampler's two launches: the token of each row, and with it the batch's advance."""

from typing import Any, NamedTuple

from torch import Tensor

from ..model.advance import AdvanceState, advance_row, end_step, row_before
from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from .candidates import candidate_window, take_blocks
from .draw_token import draw_token
from .follow_automata import Guides, follow_row
from .logprobs import row_logprobs
from .philox import uniform_bits_of
from .sampler_memory import SamplerForm, SamplerMemory, SamplerSizes
from .sampling_slots import CONSTANTS, LogprobOutputs, SamplingSlots

PROGRAMS = 128  # that share the rows of a batch: what a large GPU runs at once


class Wish(NamedTuple):
    """What a row asks of a draw, and where it stands."""

    temperature: Any
    k: Any
    share: Any
    minimum: Any
    seed: Any
    position: Any


@triton.jit
def count_row(counter, goes_on):
    """Count a row that is done in int32 [2], at a multiple of 8 bytes; return how many are, and how many go on."""
    mine = 1 + (goes_on.to(tl.int64) << 32)
    counts = tl.atomic_add(counter.to(tl.pointer_type(tl.int64)), mine, sem="acq_rel") + mine
    return counts.to(tl.int32), (counts >> 32).to(tl.int32)


@triton.jit
def _drawn_token(row, wish, top, memory, sizes, FORM: tl.constexpr):
    """Add up a program's blocks of a row, and return whether it was the last to do so, and then the row's token."""
    wide_row = row.to(tl.int64)
    line = memory.scaled + wide_row * sizes.scaled_stride
    row_sums = memory.sums + wide_row * (4 * FORM.BLOCKS)
    ids = memory.candidate_ids + wide_row * FORM.CAPACITY
    lowest_weight = tl.maximum((wish.minimum * 68719476736.0).to(tl.int64), 1)
    lowest_weight = tl.where(wish.minimum > 0.0, lowest_weight, 1)
    by_count = (wish.k > 0) & (wish.k < sizes.vocab)
    is_filtered = by_count | (wish.share < 1.0)
    least = tl.full([], float("inf"), dtype=tl.float32)
    most = tl.full([], float("-inf"), dtype=tl.float32)
    if is_filtered:
        least, most = candidate_window(
            memory.sketch + wide_row * (FORM.BLOCKS * FORM.BINS),
            memory.block_max + row * FORM.BLOCKS,
            memory.block_sum + row * FORM.BLOCKS,
            wish.temperature,
            top,
            wish.k,
            wish.share,
            by_count,
            FORM,
        )
        if by_count & (wish.share < 1.0):
            most = top  # top-p weighs all that top-k keeps
    take_blocks(
        row_sums,
        line + FORM.BLOCKS * FORM.BLOCK,
        ids,
        memory.counters + 2 * row + 1,
        line,
        sizes.vocab,
        top,
        least,
        most,
        lowest_weight,
        is_filtered,
        by_count,
        FORM,
    )
    tl.debug_barrier()  # all threads have written before one of them says so
    is_last = tl.atomic_add(memory.counters + 2 * row, 1, sem="acq_rel") == tl.num_programs(1) - 1
    token = tl.full([], 0, dtype=tl.int32)
    if is_last:
        token = draw_token(
            row_sums,
            line,
            ids,
            tl.load(memory.counters + 2 * row + 1, cache_modifier=".cg"),
            sizes.vocab,
            top,
            least,
            most,
            wish.k,
            wish.share,
            lowest_weight,
            uniform_bits_of(wish.seed, wish.position),
            FORM,
        )
        token = tl.minimum(token, sizes.vocab - 1)
    return is_last, token


# Some programs share a row that draws; each adds up its blocks of the row's scaled logits, which are in L2, and the
# last one to arrive looks at the candidates, and then at one block for the token. Of a row that does not draw the first
# one reduces the blocks' maxima. Whoever has the token makes the row's log-probabilities, advances the row and takes it
# into its automaton; the last row's ends the step. Nothing depends on who was last. What a row asks for and where it
# stands was written before the launch before this one, and is read before the wait.
@triton.jit
def _choose_kernel(
    memory,
    sampled,
    logits,
    live_rows,
    slots,
    state,
    outputs,
    guides,
    sizes,
    FORM: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    is_live = row < tl.load(live_rows)
    flags = tl.where(is_live, tl.load(slots.sampling_flags + row), 0)
    warmth = tl.load(slots.temperature + row)
    k = tl.load(slots.top_k + row)
    share = tl.load(slots.top_p + row)
    minimum = tl.load(slots.min_p + row)
    seed = tl.load(slots.seed + row)
    before = row_before(row, slots, state, FORM)
    automaton_state = -1
    automaton = 0
    if FORM.FOLLOW:
        automaton_state = tl.load(guides.automaton_state + row)
        automaton = tl.load(guides.automaton + row)
    if PDL:
        wait_and_trigger()
    is_last = tl.program_id(1) == 0
    token = tl.full([], K.DEAD_TOKEN, dtype=tl.int32)
    draws = is_live & ((flags & K.FLAG_SAMPLE) != 0)
    if draws | (is_live & is_last):
        blocks = tl.arange(0, FORM.BLOCKS_PADDED)
        is_block = blocks < FORM.BLOCKS
        maxima = tl.load(memory.block_max + row * FORM.BLOCKS + blocks, mask=is_block, other=float("-inf"))
        ids = tl.load(memory.block_id + row * FORM.BLOCKS + blocks, mask=is_block, other=2147483647)
        largest = tl.max(maxima, axis=0)
        code = tl.where(largest == float("inf"), K.WITHOUT_NUMBERS, 0)
        code = tl.where(largest == float("-inf"), K.WITHOUT_FINITE, code)
        warmth = tl.where(draws, warmth, 1.0)
        top = tl.div_rn(largest, warmth)
        code = tl.where(draws & (code == 0) & ~(tl.abs(top) < float("inf")), K.TOO_COLD, code)
        token = code.to(tl.int32)
        if draws & (code == 0):
            wish = Wish(warmth, k, share, minimum, seed, before.position)
            is_last, token = _drawn_token(row, wish, top, memory, sizes, FORM)
        elif code == 0:
            token = tl.min(tl.where(maxima == largest, ids, 2147483647), axis=0)
            token = tl.minimum(token, sizes.vocab - 1)
    if is_last:
        tl.store(sampled + row, token.to(tl.int64))
        if (flags & K.FLAG_LOGPROBS) != 0:
            line = logits + row.to(tl.int64) * sizes.logits_stride
            row_logprobs(outputs, memory.own_max, memory.own_sum, line, row, token, before.wanted, sizes.vocab, FORM)
            tl.debug_barrier()  # all of it is there before it is copied
        goes_on = advance_row(row, token.to(tl.int64), is_live, flags, before, state, outputs, sizes, FORM, K)
        if FORM.FOLLOW:  # noqa: SIM102 - decided at compile time
            if goes_on & (automaton_state >= 0):
                goes_on = follow_row(
                    row, token, automaton_state, automaton, before.stops, guides, state.finished, sizes.vocab, FORM, K
                )
        done, going_on = count_row(memory.counters + 2 * rows, goes_on)
        if done == rows:
            end_step(before.step, going_on, rows, state, sizes, FORM)


def launch_choose(
    memory: SamplerMemory,
    sampled: Tensor,
    logits: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    state: AdvanceState,
    outputs: LogprobOutputs,
    guides: Guides | None,
    sizes: SamplerSizes,
    form: SamplerForm,
) -> None:
    """Launch the kernel behind `launch_block_max`; see `sample_and_advance`."""
    rows = logits.shape[0]
    _choose_kernel[(rows, min(max(PROGRAMS // rows, 1), form.BLOCKS))](
        memory,
        sampled,
        logits,
        live_rows,
        slots,
        state,
        outputs,
        guides,
        sizes,
        FORM=form,
        K=CONSTANTS,
        num_warps=16,
        **early_start_options(logits.device),
    )
