"""Where the states of a pass's tokens are: the record that all recurrent operators take."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Int32


class StateTokens(NamedTuple):
    """The tokens of a pass and their states; tokens of one row stand together, in order.

    A state is a row of a tensor [states + 1, ...], whose last row belongs to nobody. A row whose token has position 0
    begins with a state of zeros, so that nobody has to clear states between two sequences.

    Where drafts are verified, the state behind each token is kept at a place of its own, and that of its row is not
    advanced.
    """

    rows: Int32  # [t], the batch row of each token
    positions: Int32  # [t]
    live: Int32  # [1]; tokens from there on are padding: nothing is read or written for them
    state_rows: Int32  # [b], the state of each batch row
    kept_states: Int32 | None = None  # [t], where the state behind each token goes; None: the last one to its row's

    def runs(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield begin, end, state and whether it is new, of the tokens of each row; reads on the host."""
        count = min(int(self.live), self.rows.shape[0])
        rows, positions, states = (each.tolist() for each in (self.rows[:count], self.positions, self.state_rows))
        begin = 0
        for end in range(1, count + 1):
            if end == count or rows[end] != rows[begin]:
                yield begin, end, states[rows[begin]], positions[begin] == 0
                begin = end


@triton.jit
def run_length(rows, begin, live, BLOCK: tl.constexpr = 128):
    """Return how many tokens from `begin` on have its row; they stand together."""
    row = tl.load(rows + begin)
    length = 0
    found = BLOCK
    while found == BLOCK:
        at = begin + length + tl.arange(0, BLOCK)
        found = tl.sum(((tl.load(rows + at, mask=at < live, other=-1) == row) & (at < live)).to(tl.int32))
        length += found
    return length


@triton.jit
def own_token(tokens):
    """Return a program's token, the live count, the token's row, and whether it is live and its row's first."""
    token = tl.program_id(0)
    live = tl.load(tokens.live)
    row = tl.load(tokens.rows + token)
    before = tl.load(tokens.rows + token - 1, mask=token > 0, other=-1)
    return token, live, row, (token < live) & (before != row)


@triton.jit
def state_at(state, place, head, heads, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the places of block [i, j] of a head's state [ROWS, COLUMNS]."""
    return state + (place.to(tl.int64) * heads + head) * ROWS * COLUMNS + i[:, None] * COLUMNS + j[None, :]


@triton.jit
def head_state(state, tokens, first, row, head, heads, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return block [i, j] of a head's state [ROWS, COLUMNS] before its row's first token: places, mask and values."""
    own = state_at(state, tl.load(tokens.state_rows + row), head, heads, i, j, ROWS, COLUMNS)
    inside = (i < ROWS)[:, None] & (j < COLUMNS)[None, :]
    s = tl.zeros(inside.shape, tl.float32)
    if tl.load(tokens.positions + first) > 0:
        s = tl.load(own, mask=inside, other=0.0)
    return own, inside, s


def without_none(tokens: StateTokens) -> StateTokens:
    """Return tokens of which a Triton kernel takes each field; it is told whether states are kept."""
    return tokens if tokens.kept_states is not None else tokens._replace(kept_states=tokens.rows)


def is_contiguous(*tensors: Tensor) -> bool:
    """Whether the compiled kernels can take these: all contiguous."""
    return all(tensor.is_contiguous() for tensor in tensors)
