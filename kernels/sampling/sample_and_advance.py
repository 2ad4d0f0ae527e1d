"""The end of a step: sample the next tokens, compute log-probabilities, advance the rows and their automata.

On a GPU it is two launches: in the first, each block of a row's logits finds its largest logit, or holds its own
`race`; in the second, programs choose the rows' tokens, for rows with filters among those that are kept. The program
that has a row's token also advances the row. On a CPU the operators run one after another.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..model.advance import AdvanceState, advance, advance_row, end_step, row_before
from ..native.optional_triton import early_start_options, tl, triton, wait_and_trigger
from ..native.registration import Int32, Int64, Written, operator
from .candidates import candidate_window, sketch_bin, take_blocks
from .follow_automata import Guides, follow_automata, follow_row
from .logit_processing import processed_logits
from .logprobs import row_logprobs, store_block_sums, token_logprobs
from .philox import noise_of_block, noise_of_ids
from .race import best_of, race_keys
from .sample import sample
from .sampler_memory import SamplerMemory, SamplerMeta, SamplerSizes
from .sampling_slots import CONSTANTS, LogprobOutputs, SamplingSlots
from .token_filters import fraction_of_total, kept_weight, ordered_key, threshold_key, weights_of


@triton.jit
def filters_of(slots, row, vocab):
    """Return a row's top_k, top_p and min_p; whether top-k removes a token, and whether there is any filter."""
    k = tl.load(slots.top_k + row)
    top_p = tl.load(slots.top_p + row)
    min_p = tl.load(slots.min_p + row)
    by_count = (k > 0) & (k < vocab)
    return k, top_p, min_p, by_count, by_count | (top_p < 1.0) | (min_p > 0.0)


# One program reads one block of one row and finds its largest logit after processing: a greedy row needs no more. For a
# row with a temperature it draws the block's token, its key relative to the block's largest logit; if the row has
# filters, it writes the scaled logits, in fp32, their sketch (see `candidates`) and the sum of their exponentials
# instead. For rows with log-probabilities it writes the sum of exponentials of the unprocessed logits. A NaN counts as
# +inf, so that the maximum shows it. It resets the counters of the next launch, which are not in use meanwhile.
@triton.jit
def _block_max_kernel(
    memory, logits, live_rows, slots, state, sizes, META: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        wait_and_trigger()
    row = tl.program_id(0)
    block = tl.program_id(1)
    if block == 0:
        tl.store(memory.counters + 2 * row, 0)
        tl.store(memory.counters + 2 * row + 1, 0)
        if row == 0:
            tl.store(memory.counters + 2 * tl.num_programs(0), 0)
            tl.store(memory.counters + 2 * tl.num_programs(0) + 1, 0)
    live = tl.load(live_rows)
    flags = tl.load(slots.sampling_flags + row)
    position = tl.load(state.pre_step_seqlens + row) + 1
    temperature = tl.load(slots.temperature + row)
    _, _, _, _, is_filtered = filters_of(slots, row, sizes.vocab)
    seed = tl.load(slots.seed + row)
    if row < live:
        columns = block * META.BLOCK + tl.arange(0, META.BLOCK)
        inside = columns < sizes.vocab
        wide_row = row.to(tl.int64)
        index = row * tl.num_programs(1) + block
        values = tl.load(logits + wide_row * sizes.logits_stride + columns, mask=inside, other=float("-inf")).to(
            tl.float32
        )
        if (flags & K.FLAG_LOGPROBS) != 0:
            store_block_sums(memory.raw_max, memory.raw_sum, index, values)
        values = processed_logits(
            values, columns, inside, row, flags, position, slots, state, sizes.counts_stride, META, K
        )
        values = tl.where(values != values, float("inf"), values)
        largest, best = best_of(values, columns)
        tl.store(memory.block_max + index, largest)
        if (flags & K.FLAG_SAMPLE) != 0:
            values = tl.div_rn(values, temperature)
            distances = tl.where(values > float("-inf"), values - tl.div_rn(largest, temperature), float("-inf"))
            if is_filtered:
                tl.store(memory.scaled + wide_row * sizes.scaled_stride + columns, values, mask=inside)
                tl.store(memory.block_sum + index, tl.sum(tl.exp(distances), axis=0))
                counts = tl.histogram(sketch_bin(-distances), META.BINS)
                tl.store(memory.sketch + index.to(tl.int64) * META.BINS + tl.arange(0, META.BINS), counts)
            else:
                words = noise_of_block(seed, position, block * META.BLOCK, META.BLOCK)
                key, best = best_of(race_keys(distances, words), columns)
                tl.store(memory.block_key + index, key)
        tl.store(memory.block_id + index, best)


@triton.jit
def draw_token(
    row_memory, count, vocab, largest, least, most, params, lowest_weight, is_thresholded, META: tl.constexpr
):
    """Return the token of one row, whose blocks are drawn from and summed and whose `count` candidates are listed.

    Thresholds are searched among the candidates; among all logits if the list is too short, or a bound was wrong.
    """
    blocks = tl.arange(0, META.BLOCKS_PADDED)
    is_block = blocks < META.BLOCKS
    best, token = best_of(
        tl.load(row_memory.keys + blocks, mask=is_block, other=float("-inf"), cache_modifier=".cg"),
        tl.load(row_memory.ids + blocks, mask=is_block, other=2147483647, cache_modifier=".cg"),
    )
    if is_thresholded:
        by_count = params.by_count
        by_weight = params.top_p < 1.0
        lowest_key = ordered_key(tl.full([], float("-inf"), dtype=tl.float32))
        list_begin = META.BLOCKS * META.BLOCK
        listed = count
        sums = row_memory.sums + blocks
        above = tl.sum(tl.load(sums, mask=is_block, other=0, cache_modifier=".cg"), axis=0)
        between = tl.sum(tl.load(sums + META.BLOCKS, mask=is_block, other=0, cache_modifier=".cg"), axis=0)
        total = tl.sum(tl.load(sums + 2 * META.BLOCKS, mask=is_block, other=0, cache_modifier=".cg"), axis=0)
        needed = tl.maximum(fraction_of_total(total, (params.top_p * 16777216.0).to(tl.int64)), 1)
        needed = tl.where(by_count, params.k.to(tl.int64), needed)
        between = tl.where(by_count, count.to(tl.int64), between)
        has_all = least <= largest - 25.0  # unlisted logits have no weight
        is_listed = (count <= META.CAPACITY) & (above < needed) & (has_all | (above + between >= needed))
        if is_listed:
            needed -= above
        else:
            best = tl.full([], float("-inf"), dtype=tl.float32)
            token = tl.full([], 2147483647, dtype=tl.int32)
            list_begin = 0
            listed = vocab
            between = needed
            least = tl.full([], float("-inf"), dtype=tl.float32)
            most = largest
        line = row_memory.scaled + list_begin
        if needed <= between:
            lowest_key = threshold_key(
                line, listed, largest, ordered_key(least), ordered_key(most), needed, by_count, META.LIST_BLOCK
            )
        if by_count & by_weight:
            total = kept_weight(line, listed, largest, lowest_key, META.LIST_BLOCK)
            needed = tl.maximum(fraction_of_total(total, (params.top_p * 16777216.0).to(tl.int64)), 1)
            lowest_key = threshold_key(
                line, listed, largest, lowest_key, ordered_key(largest), needed, False, META.LIST_BLOCK
            )
        for block in range(tl.cdiv(listed, META.LIST_BLOCK)):
            offsets = block * META.LIST_BLOCK + tl.arange(0, META.LIST_BLOCK)
            values = tl.load(line + offsets, mask=offsets < listed, other=float("-inf"))
            keep = (ordered_key(values) >= lowest_key) & (weights_of(values, largest) >= lowest_weight)
            if tl.max(keep.to(tl.int32), axis=0) > 0:
                is_candidate = offsets < tl.where(is_listed, listed, 0)
                ids = tl.load(row_memory.candidate_ids + offsets, mask=is_candidate, other=0, cache_modifier=".cg")
                ids = tl.where(is_listed, ids, offsets)
                keys = race_keys(values - largest, noise_of_ids(params.seed, params.position, ids))
                key, first = best_of(tl.where(keep, keys, float("-inf")), ids)
                token = tl.where((key > best) | ((key == best) & (first < token)), first, token)
                best = tl.maximum(key, best)
    return token


PROGRAMS = 128  # programs that share the rows of a batch: as many as a large GPU runs at once


class RowParameters(NamedTuple):
    """A row's sampling parameters and position."""

    temperature: Any
    k: Any
    by_count: Any  # whether top-k removes a token
    top_p: Any
    min_p: Any
    seed: Any
    position: Any


class RowMemory(NamedTuple):
    """Where a row's part of `SamplerMemory` begins."""

    keys: Any
    ids: Any
    sums: Any
    scaled: Any
    candidates: Any
    candidate_ids: Any
    candidate_count: Any


@triton.jit
def count_row(counter, continues):
    """Count a finished row in int32 [2], 8-byte aligned; return how many have finished, and how many continue."""
    mine = 1 + (continues.to(tl.int64) << 32)
    counts = tl.atomic_add(counter.to(tl.pointer_type(tl.int64)), mine, sem="acq_rel") + mine
    return counts.to(tl.int32), (counts >> 32).to(tl.int32)


@triton.jit
def _drawn_token(row, params, top, memory, sizes, META: tl.constexpr):
    """Draw from a program's blocks of a row with filters; return whether it was the last one, and then the token."""
    wide_row = row.to(tl.int64)
    line = memory.scaled + wide_row * sizes.scaled_stride
    row_memory = RowMemory(
        memory.block_key + row * META.BLOCKS,
        memory.block_id + row * META.BLOCKS,
        memory.sums + wide_row * (3 * META.BLOCKS),
        line,
        line + META.BLOCKS * META.BLOCK,
        memory.candidate_ids + wide_row * META.CAPACITY,
        memory.counters + 2 * row + 1,
    )
    lowest_weight = tl.where(params.min_p > 0.0, tl.maximum((params.min_p * 68719476736.0).to(tl.int64), 1), 1)
    is_thresholded = params.by_count | (params.top_p < 1.0)
    least = tl.full([], float("inf"), dtype=tl.float32)
    most = tl.full([], float("-inf"), dtype=tl.float32)
    if is_thresholded:
        least, most = candidate_window(
            memory.sketch + wide_row * (META.BLOCKS * META.BINS), memory.block_max + row * META.BLOCKS,
            memory.block_sum + row * META.BLOCKS, params.temperature, top, params.k, params.top_p, params.by_count,
            META,
        )  # fmt: skip
        if params.by_count & (params.top_p < 1.0):
            most = top  # top-p weighs all tokens kept by top-k
    take_blocks(row_memory, sizes.vocab, top, least, most, params, lowest_weight, is_thresholded, META)
    tl.debug_barrier()  # all threads have written before the counter is incremented
    is_last = tl.atomic_add(memory.counters + 2 * row, 1, sem="acq_rel") == tl.num_programs(1) - 1
    token = tl.full([], 0, dtype=tl.int32)
    if is_last:
        count = tl.load(row_memory.candidate_count, cache_modifier=".cg")
        token = draw_token(
            row_memory, count, sizes.vocab, top, least, most, params, lowest_weight, is_thresholded, META
        )
    return is_last, token


# Several programs share a row with filters; each draws from its blocks of the row's scaled logits, which are in L2, and
# sums them, and the last one to arrive searches the candidates for the threshold, and draws from them too. For other
# rows the first program reduces the blocks' largest logits or keys. The program with the token computes
# log-probabilities, and advances the row and its automaton; that of the last row ends the step. Results do not depend
# on which is last. Parameters and positions were written before the previous launch, and are read before the wait.
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
    META: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    is_live = row < tl.load(live_rows)
    flags = tl.where(is_live, tl.load(slots.sampling_flags + row), 0)
    temperature = tl.load(slots.temperature + row)
    k, top_p, min_p, by_count, is_filtered = filters_of(slots, row, sizes.vocab)
    seed = tl.load(slots.seed + row)
    before = row_before(row, slots, state, META)
    automaton_state = -1
    automaton = 0
    if META.FOLLOW:
        automaton_state = tl.load(guides.automaton_state + row)
        automaton = tl.load(guides.automaton + row)
    if PDL:
        wait_and_trigger()
    is_last = tl.program_id(1) == 0
    token = tl.full([], K.DEAD_TOKEN, dtype=tl.int32)
    draws = is_live & ((flags & K.FLAG_SAMPLE) != 0)
    is_filtered &= draws
    if is_filtered | (is_live & is_last):
        blocks = tl.arange(0, META.BLOCKS_PADDED)
        is_block = blocks < META.BLOCKS
        maxima = tl.load(memory.block_max + row * META.BLOCKS + blocks, mask=is_block, other=float("-inf"))
        largest = tl.max(maxima, axis=0)
        code = tl.where(largest == float("inf"), K.WITHOUT_NUMBERS, 0)
        code = tl.where(largest == float("-inf"), K.WITHOUT_FINITE, code)
        temperature = tl.where(draws, temperature, 1.0)
        top = tl.div_rn(largest, temperature)
        code = tl.where(draws & (code == 0) & ~(tl.abs(top) < float("inf")), K.TOO_COLD, code)
        token = code.to(tl.int32)
        if is_filtered & (code == 0):
            params = RowParameters(temperature, k, by_count, top_p, min_p, seed, before.position)
            is_last, token = _drawn_token(row, params, top, memory, sizes, META)
        elif code == 0:
            ids = tl.load(memory.block_id + row * META.BLOCKS + blocks, mask=is_block, other=2147483647)
            keys = maxima
            if draws:
                keys = tl.load(memory.block_key + row * META.BLOCKS + blocks, mask=is_block, other=float("-inf"))
                keys = tl.where(maxima > float("-inf"), keys + (tl.div_rn(maxima, temperature) - top), float("-inf"))
            _, token = best_of(keys, ids)
        token = tl.minimum(token, sizes.vocab - 1)
    if is_last:
        tl.store(sampled + row, token.to(tl.int64))
        if (flags & K.FLAG_LOGPROBS) != 0:
            line = logits + row.to(tl.int64) * sizes.logits_stride
            row_logprobs(outputs, memory.raw_max, memory.raw_sum, line, row, token, before.tops, sizes.vocab, META)
            tl.debug_barrier()  # all of it is written before it is copied
        continues = advance_row(row, token.to(tl.int64), is_live, flags, before, state, outputs, sizes, META, K)
        if META.FOLLOW:  # noqa: SIM102 - decided at compile time
            if continues & (automaton_state >= 0):
                continues = follow_row(
                    row, token, automaton_state, automaton, before.stops, guides, state.finished, sizes.vocab, META, K
                )
        done, going_on = count_row(memory.counters + 2 * rows, continues)
        if done == rows:
            end_step(before.step, going_on, rows, state, sizes, META)


BLOCK = 4096  # vocabulary ids per program
CAPACITY = 16384  # listed candidates per row


def sample_and_advance_triton(
    state, sampled, outputs, logits, live_rows, slots, guides=None, block=BLOCK, capacity=CAPACITY
) -> None:
    """Launch the kernels, `block` ids of the vocabulary per program; see `sample_and_advance`."""
    meta = SamplerMeta.of(logits.shape[1], state, outputs, slots, guides, block, capacity)
    memory = SamplerMemory.allocate(logits.shape[0], meta, logits.device)
    sizes = SamplerSizes.of(logits, memory.scaled, state)
    rows, options = logits.shape[0], {"K": CONSTANTS, "num_warps": 16, **early_start_options(logits.device)}
    inputs = (logits, live_rows, slots, state)
    _block_max_kernel[(rows, meta.BLOCKS)](memory, *inputs, sizes, META=meta, **options)
    _choose_kernel[(rows, min(max(PROGRAMS // rows, 1), meta.BLOCKS))](
        memory, sampled, *inputs, outputs, guides, sizes, META=meta, **options
    )


def _parts(
    state: AdvanceState,
    sampled: Tensor,
    outputs: LogprobOutputs,
    logits: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    guides: Guides | None,
) -> list[tuple[str, tuple[Any, ...]]]:
    calls: list[tuple[str, tuple[Any, ...]]] = [
        (
            "sample",
            (sampled, logits, state.pre_step_seqlens, live_rows, *slots, state.token_counts, state.recent_tokens),
        ),
        ("token_logprobs", (*outputs, logits, sampled, live_rows, slots.sampling_flags, slots.num_logprobs)),
        ("advance", (*state, sampled, live_rows, *slots, *outputs)),
    ]
    if guides is not None:
        followed = guides._replace(next_mask=slots.token_mask)
        calls.append(
            ("follow_automata", (*followed, state.finished, state.running, sampled, live_rows, slots.stop_ids))
        )
    return calls


@operator(triton_version=sample_and_advance_triton, parts=_parts)
def sample_and_advance(
    state: Written[AdvanceState],
    sampled: Written[Int64],
    outputs: Written[LogprobOutputs],
    logits: Tensor,
    live_rows: Int32,
    slots: SamplingSlots,
    guides: Guides | None = None,
) -> None:
    """Sample each live row's next token, and prepare the next step; see `sample` and `advance`.

    Args:
        state: changed in place; includes positions, counts and recent tokens for sampling. Its rings may be in pinned
            host memory.
        sampled: int64 [b]; dead rows get token 1, rows without a choice a code below -1.
        outputs: log-probabilities, see `token_logprobs`.
        logits: [b, vocab], any float dtype, rows contiguous.
        live_rows: int32 [1]; rows from there on are not read.
        slots: the rows' sampling parameters.
        guides: the rows' automata, see `follow_automata`; `next_mask` is the slots' `token_mask`. None: no row has one.
    """
    sample(sampled, logits, state.pre_step_seqlens, live_rows, slots, state.token_counts, state.recent_tokens)
    token_logprobs(outputs, logits, sampled, live_rows, slots.sampling_flags, slots.num_logprobs)
    advance(state, sampled, live_rows, slots, outputs)
    if guides is not None:
        followed = guides._replace(next_mask=slots.token_mask)
        follow_automata(followed, state.finished, state.running, sampled, live_rows, slots.stop_ids)
