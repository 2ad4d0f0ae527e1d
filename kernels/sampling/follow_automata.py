"""Follow each row's automaton over tokens by the token that it sampled, and write the mask of its next one.

An automaton says for each of its states which tokens may come, and to which state each of them leads: structured
output is followed in tables, without the host. Tokens that lead to the same states from everywhere are one class, so
that a table is small whatever the vocabulary. Many automata share the tables; a state is a line of these.
"""

from typing import NamedTuple

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Int64, Written, operator
from .sampling_slots import ACCEPTS, COMPLETES, CONSTANTS, MASK_BITS

NO_AUTOMATON = -1  # the state of a row that follows none


class Guides(NamedTuple):
    """The automata of a batch's rows."""

    automaton_state: Written[Int32]  # int32 [b], the line of the row's state; NO_AUTOMATON: it follows none
    next_mask: Written[Int32]  # int32 [b, words], the rows' `token_mask` of the step after, see `SamplingSlots`
    automaton: Int32  # int32 [b], which of the automata the row follows
    automaton_classes: Int32  # int32 [automata, vocab], the class of each token
    # int32 [lines, classes], the line that a class leads to; -1: to none, so that it ends the row
    automaton_next: Int32
    automaton_masks: Int32  # int32 [lines, words], the tokens that may come, those that end a text among them
    automaton_ends: Int32  # int32 [lines], ACCEPTS and COMPLETES


@triton.jit
def follow_row(row, token, state, automaton, stops, guides, finished, vocab, FORM: tl.constexpr, K: tl.constexpr):
    """Take a token into the automaton of a row that goes on, and return whether it still does.

    It reads the token's class, its line and a mask of vocab / 8 bytes, and writes the mask.

    Args:
        stops: int32, the row's stop ids, -1 where there is none.
    """
    kind = tl.load(guides.automaton_classes + automaton.to(tl.int64) * vocab + token)
    line = tl.load(guides.automaton_next + state.to(tl.int64) * FORM.CLASSES + kind)
    from_line = guides.automaton_masks + tl.maximum(line, 0).to(tl.int64) * FORM.MASK_WORDS
    ends = tl.load(guides.automaton_ends + tl.maximum(line, 0))
    goes_on = (line >= 0) & ((ends & K.COMPLETES) == 0)
    if goes_on:
        tl.store(guides.automaton_state + row, line)
        mask_of_row = guides.next_mask + row.to(tl.int64) * FORM.MASK_WORDS
        for first in range(0, FORM.MASK_WORDS, FORM.MASK_BLOCK):
            words = first + tl.arange(0, FORM.MASK_BLOCK)
            inside = words < FORM.MASK_WORDS
            tl.store(mask_of_row + words, tl.load(from_line + words, mask=inside, other=0), mask=inside)
        if (ends & K.ACCEPTS) != 0:
            tl.debug_barrier()  # all words are there before bits of them are set
            is_stop = (stops >= 0) & (stops < FORM.MASK_WORDS * K.MASK_BITS)
            tl.atomic_or(mask_of_row + stops // K.MASK_BITS, 1 << (stops % K.MASK_BITS), mask=is_stop, sem="relaxed")
    else:
        tl.store(finished + row, 1)
    return goes_on


@operator(is_compiled=True, constants=CONSTANTS._asdict())
def follow_automata(
    guides: Guides, finished: Written[Int32], running: Written[Int32], sampled: Int64, live_rows: Int32, stop_ids: Int32
) -> None:
    """Take the sampled tokens into the automata of the rows that follow one and have not ended, behind `advance`.

    A row whose token leads to no state, or to one that nothing can follow, ends with this token. The others get their
    new state and its mask, with their stop ids where the text may end. Rows that are dead, finished, without a choice
    or without an automaton are left alone.

    Args:
        guides: of the rows.
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
