"""The end of a step: sample the next tokens, make their log-probabilities, advance the rows, and follow their automata.

On a GPU it is two launches: each block of a row says what it has, and then programs choose the rows' tokens; the one
that has a row's token takes the row along. On a CPU it is the operations one after another.
"""

from typing import Any

from torch import Tensor

from ..native.registration import operator
from ..native.signature import Int32, Int64, Written
from ..sampling.block_max import launch_block_max
from ..sampling.choose import launch_choose
from ..sampling.follow_automata import AutomatonRows, Guides, follow_automata
from ..sampling.sample import sample
from ..sampling.sampler_memory import SamplerForm, SamplerMemory, SamplerSizes
from ..sampling.sampling_slots import LogprobOutputs, SamplingSlots
from .advance import AdvanceState, advance

BLOCK = 4096  # ids of the vocabulary that a program takes at once
CAPACITY = 16384  # candidates of a row that are listed


def sample_and_advance_triton(
    state: AdvanceState,
    sampled: Tensor,
    outputs: LogprobOutputs,
    logits: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    guides: Guides | None = None,
    block: int = BLOCK,
    capacity: int = CAPACITY,
) -> None:
    """Launch the kernels, `block` ids of the vocabulary per program; see `sample_and_advance`."""
    form = SamplerForm.of(logits.shape[1], state, outputs, slots, guides, block, capacity)
    memory = SamplerMemory.allocate(logits.shape[0], form, logits.device)
    sizes = SamplerSizes.of(logits, memory.scaled, state)
    launch_block_max(memory, logits, live_rows, slots, state, sizes, form)
    launch_choose(memory, sampled, logits, live_rows, slots, state, outputs, guides, sizes, form)


def _parts(
    state: AdvanceState,
    sampled: Tensor,
    outputs: LogprobOutputs,
    logits: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    guides: Guides | None,
) -> list[tuple[str, tuple[Any, ...]]]:
    books = (state.token_counts, state.recent_tokens)
    asked = (slots.sampling_flags, slots.num_logprobs)
    followed = []
    if guides is not None:
        rows = (guides.automaton_state, slots.token_mask, state.finished, state.running)
        given = (*rows, sampled, live_rows, guides.automaton, slots.stop_ids, *guides.tables)
        followed = [("follow_automata", given)]
    return [
        ("sample", (sampled, logits, state.pre_step_seqlens, live_rows, *slots, *books)),
        ("token_logprobs", (*outputs, logits, sampled, live_rows, *asked)),
        ("advance", (*state, sampled, live_rows, *slots, *outputs)),
        *followed,
    ]


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
    """Give each live row its next token, and make it ready for the step after; see `sample` and `advance`.

    Args:
        state: what is changed; the positions, counts and recent tokens that sampling looks at are in it too. Its rings
            may be pinned memory of the host, which is written as the device's own.
        sampled: int64 [b]; dead rows get token 1, rows without a choice a code below -1.
        outputs: log-probabilities of the rows that want them, see `token_logprobs`.
        logits: [b, vocab], any float dtype, rows contiguous.
        live_rows: int32 [1]; nothing of the rows from there on is read.
        slots: what each row asks for.
        guides: what the rows that follow an automaton are taken into, see `follow_automata`; `next_mask` is the slots'
            `token_mask`. None: no row follows one.
    """
    books = (state.token_counts, state.recent_tokens)
    sample(sampled, logits, state.pre_step_seqlens, live_rows, slots, *books, outputs)
    advance(state, sampled, live_rows, slots, outputs)
    if guides is not None:
        rows = AutomatonRows(guides.automaton_state, slots.token_mask, state.finished, state.running)
        follow_automata(rows, sampled, live_rows, guides.automaton, slots.stop_ids, guides.tables)
