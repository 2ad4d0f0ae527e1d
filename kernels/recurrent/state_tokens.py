"""The states of a pass's tokens: the record that all recurrent operators take."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Int32


class StateTokens(NamedTuple):
    """The tokens of a pass and their states; tokens of one row are adjacent, in order.

    A state is a row of a tensor [states + 1, ...]; the last is the null row. A token at position 0 starts from a state
    of zeros, so that states need not be cleared between sequences. When drafts are verified, the state after each token
    is kept in its own row, and that of the batch row is not advanced.
    """

    rows: Int32  # [t], the batch row of each token
    positions: Int32  # [t]
    live: Int32  # [1]; tokens from there on are padding: nothing is read or written for them
    state_rows: Int32  # [b], the state of each batch row
    output_state_rows: Int32 | None = None  # [t], state row for the state after each token; None: only the row's last

    def runs(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield begin, end, state row and whether it is new, for each row's tokens; reads on the host."""
        count = min(int(self.live), self.rows.shape[0])
        rows, positions, states = (each.tolist() for each in (self.rows[:count], self.positions, self.state_rows))
        begin = 0
        for end in range(1, count + 1):
            if end == count or rows[end] != rows[begin]:
                yield begin, end, states[rows[begin]], positions[begin] == 0
                begin = end


@triton.jit
def run_length(rows, begin, live, BLOCK: tl.constexpr = 128):
    """Return the number of adjacent tokens of the row at `begin`."""
    row = tl.load(rows + begin)
    length = 0
    matches = BLOCK
    while matches == BLOCK:
        at = begin + length + tl.arange(0, BLOCK)
        matches = tl.sum(((tl.load(rows + at, mask=at < live, other=-1) == row) & (at < live)).to(tl.int32))
        length += matches
    return length


@triton.jit
def program_token(tokens):
    """Return a program's token, the live count, the token's row, and whether it is live and its row's first."""
    token = tl.program_id(0)
    live = tl.load(tokens.live)
    row = tl.load(tokens.rows + token)
    before = tl.load(tokens.rows + token - 1, mask=token > 0, other=-1)
    return token, live, row, (token < live) & (before != row)


@triton.jit
def state_at(state, state_row, head, heads, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return pointers to block [i, j] of a head's state [ROWS, COLUMNS]."""
    return state + (state_row.to(tl.int64) * heads + head) * ROWS * COLUMNS + i[:, None] * COLUMNS + j[None, :]


@triton.jit
def head_state(state, tokens, first, row, head, heads, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return block [i, j] of a head's state [ROWS, COLUMNS] before its row's first token: pointers, mask and values."""
    pointers = state_at(state, tl.load(tokens.state_rows + row), head, heads, i, j, ROWS, COLUMNS)
    inside = (i < ROWS)[:, None] & (j < COLUMNS)[None, :]
    s = tl.zeros(inside.shape, tl.float32)
    if tl.load(tokens.positions + first) > 0:
        s = tl.load(pointers, mask=inside, other=0.0)
    return pointers, inside, s


def without_none(tokens: StateTokens) -> StateTokens:
    """Return tokens without None fields, for Triton kernels, which get whether states are kept separately."""
    return tokens if tokens.output_state_rows is not None else tokens._replace(output_state_rows=tokens.rows)


def is_contiguous(*tensors: Tensor) -> bool:
    """Whether compiled kernels support these: all are contiguous."""
    return all(tensor.is_contiguous() for tensor in tensors)
