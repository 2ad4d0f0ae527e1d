"""Advance each row's token automaton by its sampled token, and write the token mask of the next step.

An automaton has for each state the allowed tokens and the next states: structured output is followed in tables, without
the host. Tokens with the same transitions in all states are one class, which keeps tables small for any vocabulary.
Automata share the tables; a state is a line.
"""

from typing import NamedTuple

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Int64, Written, operator
from .sampling_slots import ACCEPTS, COMPLETES, CONSTANTS, MASK_BITS

NO_AUTOMATON = -1  # state of a row without an automaton


class Guides(NamedTuple):
    """The automata of a batch's rows."""

    automaton_state: Written[Int32]  # int32 [b], line of the row's state, or NO_AUTOMATON
    next_mask: Written[Int32]  # int32 [b, words], the next step's `token_mask`, see `SamplingSlots`
    automaton: Int32  # int32 [b], the row's automaton
    automaton_classes: Int32  # int32 [automata, vocab], the class of each token
    # int32 [lines, classes], the next line; -1: none, the row ends
    automaton_next: Int32
    automaton_masks: Int32  # int32 [lines, words], the allowed tokens, including those that end a text
    automaton_ends: Int32  # int32 [lines], ACCEPTS and COMPLETES


@triton.jit
def follow_row(row, token, state, automaton, stops, guides, finished, vocab, META: tl.constexpr, K: tl.constexpr):
    """Advance the automaton of a running row by a token, and return whether the row continues.

    It reads the token's class, its line and a mask of vocab / 8 bytes, and writes the mask.

    Args:
        stops: int32, the row's stop ids, -1: none.
    """
    kind = tl.load(guides.automaton_classes + automaton.to(tl.int64) * vocab + token)
    line = tl.load(guides.automaton_next + state.to(tl.int64) * META.CLASSES + kind)
    from_line = guides.automaton_masks + tl.maximum(line, 0).to(tl.int64) * META.MASK_WORDS
    ends = tl.load(guides.automaton_ends + tl.maximum(line, 0))
    continues = (line >= 0) & ((ends & K.COMPLETES) == 0)
    if continues:
        tl.store(guides.automaton_state + row, line)
        mask_of_row = guides.next_mask + row.to(tl.int64) * META.MASK_WORDS
        for first in range(0, META.MASK_WORDS, META.MASK_BLOCK):
            words = first + tl.arange(0, META.MASK_BLOCK)
            inside = words < META.MASK_WORDS
            tl.store(mask_of_row + words, tl.load(from_line + words, mask=inside, other=0), mask=inside)
        if (ends & K.ACCEPTS) != 0:
            tl.debug_barrier()  # all words are written before bits are set
            is_stop = (stops >= 0) & (stops < META.MASK_WORDS * K.MASK_BITS)
            tl.atomic_or(mask_of_row + stops // K.MASK_BITS, 1 << (stops % K.MASK_BITS), mask=is_stop, sem="relaxed")
    else:
        tl.store(finished + row, 1)
    return continues


@operator(is_compiled=True, constants=CONSTANTS._asdict())
def follow_automata(
    guides: Guides, finished: Written[Int32], running: Written[Int32], sampled: Int64, live_rows: Int32, stop_ids: Int32
) -> None:
    """Advance the automata of running rows by the sampled tokens, after `advance`.

    A row whose token leads to no state, or to one that nothing can follow, ends with this token. Others get their new
    state and its mask, with their stop ids if the text may end. Rows that are dead, finished, without a choice or
    without an automaton are left unchanged.

    Args:
        guides: the rows' automata.
        finished: int32 [b], see `AdvanceState`.
        running: int32 [1], see `AdvanceState`.
        sampled: int64 [b], from `sample`.
        live_rows: int32 [1].
        stop_ids: int32 [b, stop ids], see `SamplingSlots`.
    """
    states, masks, which, classes, following, of_lines, of_ends = (tensor.numpy() for tensor in guides)
    ended, tokens = finished.numpy(), sampled.numpy()
    for row in range(int(live_rows.item())):
        state, token = int(states[row]), int(tokens[row])
        if state < 0 or ended[row] or not 0 <= token < classes.shape[1]:
            continue
        line = int(following[state, classes[which[row], token]])
        ends = 0 if line < 0 else int(of_ends[line])
        if line < 0 or ends & COMPLETES:
            ended[row] = 1
            running.sub_(1)
            continue
        states[row] = line
        masks[row] = of_lines[line]
        if ends & ACCEPTS:
            for stop_id in stop_ids.numpy()[row].tolist():
                if stop_id < 0:
                    break
                masks[row].view("u4")[stop_id // MASK_BITS] |= 1 << stop_id % MASK_BITS
