"""The first of the sampler's two launches: what each block of a row has to say of its logits."""

from torch import Tensor

from ..model.advance import AdvanceState
from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from .candidates import sketch_bin
from .logit_processing import processed_logits
from .logprobs import store_block_sums
from .sampler_memory import SamplerForm, SamplerMemory, SamplerSizes
from .sampling_slots import CONSTANTS, SamplingSlots


# One program reads one block of one row and finds its largest logit, after bias, penalties and what is forbidden: that
# is all a greedy row needs. For rows that draw it also writes the logits over the temperature, in fp32, their sketch
# (see `candidates`) and the sum of their exponentials; for rows with log-probabilities the sum of exponentials of the
# model's own logits. A NaN counts as +inf, so that the maximum tells of it. It leaves the counters of the next launch
# at 0, which nobody else uses while it runs.
@triton.jit
def _block_max_kernel(
    memory,
    logits,
    live_rows,
    slots,
    state,
    sizes,
    FORM: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
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
    warmth = tl.load(slots.temperature + row)
    if row < live:
        columns = block * FORM.BLOCK + tl.arange(0, FORM.BLOCK)
        inside = columns < sizes.vocab
        wide_row = row.to(tl.int64)
        place = row * tl.num_programs(1) + block
        values = tl.load(logits + wide_row * sizes.logits_stride + columns, mask=inside, other=float("-inf")).to(
            tl.float32
        )
        if (flags & K.FLAG_LOGPROBS) != 0:
            store_block_sums(memory.own_max, memory.own_sum, place, values)
        values = processed_logits(
            values, columns, inside, row, flags, position, slots, state, sizes.counts_stride, FORM, K
        )
        values = tl.where(values != values, float("inf"), values)
        largest = tl.max(values, axis=0)
        tl.store(memory.block_max + place, largest)
        tl.store(memory.block_id + place, tl.min(tl.where(values == largest, columns, 2147483647), axis=0))
        if (flags & K.FLAG_SAMPLE) != 0:
            values = tl.div_rn(values, warmth)
            tl.store(memory.scaled + wide_row * sizes.scaled_stride + columns, values, mask=inside)
            distances = tl.where(values > float("-inf"), tl.div_rn(largest, warmth) - values, 32.0)
            tl.store(
                memory.block_sum + place, tl.sum(tl.where(values > float("-inf"), tl.exp(-distances), 0.0), axis=0)
            )
            counts = tl.histogram(sketch_bin(distances), FORM.BINS)
            tl.store(memory.sketch + place.to(tl.int64) * FORM.BINS + tl.arange(0, FORM.BINS), counts)


def launch_block_max(
    memory: SamplerMemory,
    logits: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    state: AdvanceState,
    sizes: SamplerSizes,
    form: SamplerForm,
) -> None:
    """Launch the kernel; see `sample_and_advance`. It writes `memory`."""
    _block_max_kernel[(logits.shape[0], form.BLOCKS)](
        memory,
        logits,
        live_rows,
        slots,
        state,
        sizes,
        FORM=form,
        K=CONSTANTS,
        num_warps=16,
        **early_start_options(logits.device),
    )
