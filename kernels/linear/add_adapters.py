"""Low-rank adapters of a product: `out += up(down(x))`, for each token those of its row (Hu et al., 2021, "LoRA").

Adapters stand in slots of fixed tensors, and a batch row names a slot: one captured step serves every mixture of them.
A product of several weights side by side, such as queries, keys and values, has a `down` for each part. The embedding
is a product of one-hot vectors: its `down` is a table, of which a token reads one row.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..native.optional_triton import early_start_options, tl, triton, wait_and_trigger
from ..native.registration import Float32, Int32, Int64, Wide, Written, operator

NO_ADAPTER = -1  # the slot of a row without one
_TOKENS = 16  # tokens of a block; the same for any number of tokens, as a row's bits depend on it
_FEW_TOKENS = 64  # up to which each adapter of a block has a program of its own
_DOWN_BYTES = 8192  # of `down` that a program loads at once
_UP_BLOCK = 128  # outputs of a program


class AdapterTokens(NamedTuple):
    """The tokens of a pass, and the adapters of their rows."""

    rows: Int32  # [t], the batch row of each token
    live: Int32  # [1]; tokens from there on are padding: nothing is read or written for them
    adapters: Int32  # [b], the slot of each batch row's adapter; below 0: none
    ranks: Int32  # [slots], 0 where a slot is empty

    def by_slot(self, most: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield slot, rank and tokens of each adapter among the first `most` tokens; reads on the host."""
        slots = self.adapters[self.rows[: min(int(self.live), most)].long()]
        for slot in slots.unique().tolist():
            rank = int(self.ranks[slot]) if slot >= 0 else 0
            if rank:
                yield slot, rank, (slots == slot).nonzero().flatten()


@triton.jit
def _block_of(tokens, count, TOKENS: tl.constexpr):
    """Return a program's block of tokens, and the slots of their adapters; below 0: none."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_live = token < tl.minimum(tl.load(tokens.live), count)
    slots = tl.load(tokens.adapters + tl.load(tokens.rows + token, mask=is_live, other=0), mask=is_live, other=-1)
    ranks = tl.load(tokens.ranks + tl.maximum(slots, 0), mask=slots >= 0, other=0)
    return token.to(tl.int64), tl.where(ranks > 0, slots, -1)


@triton.jit
def _adapter_of(first, slots, tokens, TOKENS: tl.constexpr):
    """Return the slot and rank of a token's adapter; rank 0 if it has none, or an earlier token of the block has it."""
    index = tl.arange(0, TOKENS)
    slot = tl.sum(tl.where(index == first, slots, 0))
    is_earlier = tl.sum(((slots == slot) & (index < first)).to(tl.int32)) > 0
    rank = tl.load(tokens.ranks + tl.maximum(slot, 0), mask=(slot >= 0) & (not is_earlier), other=0)
    return slot.to(tl.int64), rank


# One program takes a block of tokens and one part: for each adapter in the block it reads rank rows of `down`, and
# writes rank sums of its tokens. Several programs share a block's adapters where tokens are few.
@triton.jit(do_not_specialize=["count"])
def _down_kernel(
    inner, x, down, tokens, count, in_features, x_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_and_trigger()
    part = tl.program_id(1)
    token, slots = _block_of(tokens, count, TOKENS)
    ranks = tl.arange(0, RANK_BLOCK)
    for first in range(tl.program_id(2), TOKENS, tl.num_programs(2)):
        slot, rank = _adapter_of(first, slots, tokens, TOKENS)
        if rank > 0:
            is_slot, used = (slots == slot)[:, None], (ranks < rank)[None, :]
            rows = down + ((slot * PARTS + part) * RANK + ranks[None, :]) * in_features
            total = tl.zeros((TOKENS, RANK_BLOCK), tl.float32)
            for begin in range(0, in_features, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                inside = columns < in_features
                values = tl.load(
                    x + token[:, None] * x_stride + columns[None, :], mask=is_slot & inside[None, :], other=0.0
                )
                weights = tl.load(rows + columns[:, None], mask=used & inside[:, None], other=0.0)
                total = tl.dot(values, weights, total, input_precision="ieee")
            tl.store(inner + (token[:, None] * PARTS + part) * RANK + ranks[None, :], total, mask=is_slot & used)


# One program takes a block of tokens and a block of outputs: for each adapter in the block it reads rank rows of `up`
# there, and adds to the outputs of its tokens. With ids, `inner` is the embedding's table.
@triton.jit(do_not_specialize=["count"])
def _up_kernel(
    out, inner, up, ends, ids, tokens, count, scale, vocab, out_features, out_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_and_trigger()
    RANKS: tl.constexpr = 16  # rows of `up` that are loaded at once
    token, slots = _block_of(tokens, count, TOKENS)
    block = tl.program_id(1) * BLOCK
    columns = block + tl.arange(0, BLOCK)
    for first in range(tl.program_id(2), TOKENS, tl.num_programs(2)):
        slot, rank = _adapter_of(first, slots, tokens, TOKENS)
        if rank > 0:
            is_slot = slots == slot
            mask = is_slot[:, None] & (columns < out_features)[None, :]
            at = out + token[:, None] * out_stride + columns[None, :]
            total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            begin = 0
            for part in tl.static_range(PARTS):
                if ids is None:
                    end = tl.load(ends + part)
                    rows = token * PARTS + part
                else:
                    end = out_features
                    rows = tl.load(ids + token, mask=is_slot, other=0)
                    rows = slot * vocab + tl.where((rows >= 0) & (rows < vocab), rows, 0)
                in_range = (columns >= begin) & (columns < end)
                for start in range(0, tl.where((block < end) & (block + BLOCK > begin), rank, 0), RANKS):
                    ranks = start + tl.arange(0, RANKS)
                    used = ranks < rank
                    values = tl.load(
                        inner + rows[:, None] * RANK + ranks[None, :], mask=is_slot[:, None] & used[None, :], other=0.0
                    ).to(tl.float32)
                    weights = tl.load(
                        up + (slot * RANK + ranks[:, None]) * out_features + columns[None, :],
                        mask=used[:, None] & in_range[None, :],
                        other=0.0,
                    )
                    total = tl.dot(values * scale, weights.to(tl.float32), total, input_precision="ieee")
                begin = end
            tl.store(at, total.to(out.dtype.element_ty), mask=mask)


def _add_up(
    out: Tensor, inner: Tensor, up: Tensor, tokens: AdapterTokens, *, parts: int = 1, ends: Tensor | None = None,
    ids: Tensor | None = None, scale: float = 1.0, vocab: int = 0,
) -> None:  # fmt: skip
    """Launch the kernel of `up`."""
    count, out_features = out.shape
    _up_kernel[(triton.cdiv(count, _TOKENS), triton.cdiv(out_features, _UP_BLOCK), _sharing(count))](
        out, inner, up, ends, ids, tokens, count, scale, vocab, out_features, out.stride(0),
        PARTS=parts, RANK=up.shape[1], TOKENS=_TOKENS, BLOCK=_UP_BLOCK, num_warps=4, **early_start_options(out.device),
    )  # fmt: skip


def _sharing(count: int) -> int:
    """Return the programs that share the adapters of a block."""
    return min(count, _TOKENS) if count <= _FEW_TOKENS else 1


def add_adapters_triton(out, x, down, up, inner, ends, tokens) -> None:
    """Launch the two kernels; see `add_adapters`."""
    _, parts, rank, in_features = down.shape
    count, rank_block = len(x), max(triton.next_power_of_2(rank), 16)
    _down_kernel[(triton.cdiv(count, _TOKENS), parts, _sharing(count))](
        inner, x, down, tokens, count, in_features, x.stride(0), PARTS=parts, RANK=rank, RANK_BLOCK=rank_block,
        TOKENS=_TOKENS, BLOCK=max(_DOWN_BYTES // rank_block // x.element_size(), 16), num_warps=4, num_stages=4,
        **early_start_options(out.device),
    )  # fmt: skip
    _add_up(out, inner, up, tokens, parts=parts, ends=ends)


def _is_served(out, x, down, up, inner) -> bool:
    return out.stride(1) == 1 and x.stride(1) == 1 and all(each.is_contiguous() for each in (down, up, inner))


@operator(triton_version=add_adapters_triton, is_compiled=_is_served)
def add_adapters(
    out: Written[Wide],
    x: Tensor,
    down: Tensor,
    up: Tensor,
    inner: Written[Float32],
    ends: Int32,
    tokens: AdapterTokens,
) -> None:
    """Add to a product what the adapters of its tokens' rows give; sums are float32. Other rows are not touched.

    Args:
        out: [t, out_features], the product, of x's dtype or float32; rows may be strided.
        x: [t, in_features], its input; rows may be strided.
        down: [slots, parts, rank, in_features], contiguous, of x's dtype; of an adapter the first rows, as many as its
            rank, are read.
        up: [slots, rank, out_features], contiguous, with the adapter's scale in it.
        inner: float32 [t, parts, rank], workspace.
        ends: int32 [parts], the output feature behind each part.
        tokens: which tokens use which adapter.
    """
    for slot, rank, at in tokens.by_slot(len(x)):
        mid = torch.einsum("ti,pri->tpr", x[at].float(), down[slot, :, :rank].float())
        bounds = [0, *ends.tolist()]
        for part, (begin, end) in enumerate(pairwise(bounds)):
            out[at, begin:end] = (out[at, begin:end] + mid[:, part] @ up[slot, :rank, begin:end].float()).to(out.dtype)


def add_embedding_adapters_triton(out, ids, table, up, tokens, scale) -> None:
    """Launch the kernel; see `add_embedding_adapters`."""
    _add_up(out, table, up, tokens, ids=ids, scale=scale, vocab=table.shape[1])


@operator(
    triton_version=add_embedding_adapters_triton,
    is_compiled=lambda out, table, up: out.stride(1) == 1 and table.is_contiguous() and up.is_contiguous(),
)
def add_embedding_adapters(
    out: Written[Wide], ids: Int64, table: Tensor, up: Tensor, tokens: AdapterTokens, scale: float
) -> None:
    """Add to embedded tokens what the adapters of their rows give, `scale * up(table[id])`; sums are float32.

    Args:
        out: [t, hidden], the embedded tokens, of the table's dtype or float32; rows may be strided.
        ids: int64 [t]; ids that no row has read row 0, as in `embedding`.
        table: [slots, vocab, rank], contiguous; of a row the first values, as many as the adapter's rank, are read.
        up: [slots, rank, hidden], contiguous, with the adapter's scale in it.
        tokens: which tokens use which adapter.
        scale: of the embedding.
    """
    rows = torch.where((ids >= 0) & (ids < table.shape[1]), ids, 0)
    for slot, rank, at in tokens.by_slot(len(out)):
        inner = scale * table[slot, rows[at], :rank].float()
        out[at] = (out[at] + inner @ up[slot, :rank].float()).to(out.dtype)
