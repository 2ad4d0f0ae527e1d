"""Follow each row's automaton over tokens by the token that it sampled, and write the mask of its next one.

An automaton says of each of its states which tokens may come, and to which state each of them leads: what a form allows
is found in tables, and the host is not asked. Tokens that lead to the same states from everywhere are one class, so
that a table is small whatever the vocabulary. Many automata lie behind one another in the same tables; a state is a
line of these.
"""

from typing import NamedTuple

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Int64, Written, operator
from .sampling_slots import ACCEPTS, COMPLETES, CONSTANTS, MASK_BITS

NO_AUTOMATON = -1  # the state of a row that follows none


class AutomatonRows(NamedTuple):
    """What `follow_automata` changes, of rows that follow an automaton alone.

    Attributes:
        automaton_state: int32 [b], the line of the row's state; NO_AUTOMATON: it follows none.
        token_mask: int32 [b, words], see `SamplingSlots`.
        finished: int32 [b], see `AdvanceState`; rows that have ended are left alone.
        running: int32 [1], see `AdvanceState`.
    """

    automaton_state: Int32
    token_mask: Int32
    finished: Int32
    running: Int32


class AutomatonTables(NamedTuple):
    """The automata that rows may follow.

    Attributes:
        automaton_classes: int32 [automata, vocab], the class of each token.
        automaton_next: int32 [lines, classes], the line that a class leads to; -1: to none, so that it ends the row.
        automaton_masks: int32 [lines, words], the tokens that may come, those that end a text among them.
        automaton_ends: int32 [lines], ACCEPTS and COMPLETES.
    """

    automaton_classes: Int32
    automaton_next: Int32
    automaton_masks: Int32
    automaton_ends: Int32


class Guides(NamedTuple):
    """The automata of rows that an advance takes along; the names are those of `AutomatonRows` and `AutomatonTables`.

    Attributes:
        automaton_state: int32 [b].
        next_mask: int32 [b, words], the rows' `token_mask`, which the step after reads.
        automaton: int32 [b], which of the automata the row follows.
        automaton_classes: int32 [automata, vocab].
        automaton_next: int32 [lines, classes].
        automaton_masks: int32 [lines, words].
        automaton_ends: int32 [lines].
    """

    automaton_state: Written[Int32]
    next_mask: Written[Int32]
    automaton: Int32
    automaton_classes: Int32
    automaton_next: Int32
    automaton_masks: Int32
    automaton_ends: Int32

    @property
    def tables(self) -> AutomatonTables:
        """The automata themselves."""
        return AutomatonTables(*self[3:])


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


@operator(
    is_compiled=True,
    constants=CONSTANTS._asdict(),
)
def follow_automata(
    rows: Written[AutomatonRows],
    sampled: Int64,
    live_rows: Int32,
    automaton: Int32,
    stop_ids: Int32,
    tables: AutomatonTables,
) -> None:
    """Take the sampled tokens into the automata of the rows that follow one and have not ended, behind `advance`.

    A row whose token leads to no state, or to one that nothing can follow, ends with this token.
    The others get their new state, and its mask, with their stop ids where the answer may end.

    Args:
        rows: what is changed; rows that are dead, finished, without a choice or without an automaton are left alone.
        sampled: int64 [b], from `sample`.
        live_rows: int32 [1].
        automaton: int32 [b], which of the automata the row follows.
        stop_ids: int32 [b, stop ids], see `SamplingSlots`.
        tables: of the automata.
    """
    states, masks, tokens = rows.automaton_state.numpy(), rows.token_mask.numpy(), sampled.numpy()
    ended, which = rows.finished.numpy(), automaton.numpy()
    classes, following = tables.automaton_classes.numpy(), tables.automaton_next.numpy()
    for row in range(int(live_rows.item())):
        state, token = int(states[row]), int(tokens[row])
        if state < 0 or ended[row] or not 0 <= token < classes.shape[1]:
            continue
        line = int(following[state, classes[which[row], token]])
        ends = 0 if line < 0 else int(tables.automaton_ends[line])
        if line < 0 or ends & COMPLETES:
            ended[row] = 1
            rows.running.sub_(1)
            continue
        states[row] = line
        masks[row] = tables.automaton_masks.numpy()[line]
        if ends & ACCEPTS:
            for stop_id in stop_ids.numpy()[row].tolist():
                if stop_id < 0:
                    break
                masks[row].view("u4")[stop_id // MASK_BITS] |= 1 << stop_id % MASK_BITS
