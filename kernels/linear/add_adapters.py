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
_DOWN_TILE, _UP_BLOCK = 8192, 256  # values of `down` that a program holds at once; outputs of a program


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
def _slot_of(token, tokens):
    """Return the slot of a token's adapter, and its rank; rank 0 where there is none."""
    slot = tl.load(tokens.adapters + tl.load(tokens.rows + token))
    rank = tl.load(tokens.ranks + tl.maximum(slot, 0), mask=slot >= 0, other=0)
    return slot.to(tl.int64), rank


# One program takes one token and one part: it reads rank rows of `down`, and writes rank sums.
@triton.jit
def _down_kernel(
    inner, x, down, tokens, in_features, x_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_and_trigger()
    token, part = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(tokens.live):
        return
    slot, rank = _slot_of(token, tokens)
    if rank == 0:
        return
    places = tl.arange(0, RANK_BLOCK)
    total = tl.zeros((RANK_BLOCK,), tl.float32)
    rows = down + ((slot * PARTS + part) * RANK + places[:, None]) * in_features
    for begin in range(0, in_features, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < in_features
        values = tl.load(x + token.to(tl.int64) * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(rows + columns[None, :], mask=(places < rank)[:, None] & inside[None, :], other=0.0)
        total += tl.sum(weights.to(tl.float32) * values[None, :], axis=1)
    tl.store(inner + (token * PARTS + part) * RANK + places, total, mask=places < rank)


# One program takes one token and a block of outputs: it reads rank rows of `up` there, and adds to each output.
@triton.jit
def _up_kernel(
    out, inner, up, ends, tokens, out_features, out_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_and_trigger()
    token = tl.program_id(0)
    if token >= tl.load(tokens.live):
        return
    slot, rank = _slot_of(token, tokens)
    if rank == 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < out_features
    at = out + token.to(tl.int64) * out_stride + columns
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    begin = 0
    for part in tl.static_range(PARTS):
        end = tl.load(ends + part)
        here = inside & (columns >= begin) & (columns < end)
        for place in range(rank):
            weights = tl.load(up + (slot * RANK + place) * out_features + columns, mask=here, other=0.0)
            total += tl.load(inner + (token * PARTS + part) * RANK + place) * weights.to(tl.float32)
        begin = end
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def add_adapters_triton(
    out: Tensor, x: Tensor, down: Tensor, up: Tensor, inner: Tensor, ends: Tensor, tokens: AdapterTokens
) -> None:
    """Launch the two kernels; see `add_adapters`. They have run in Triton's interpreter and been compiled."""
    _, parts, rank, in_features = down.shape
    count, out_features = out.shape
    rank_block, options = triton.next_power_of_2(rank), early_start_options(out.device)
    _down_kernel[(count, parts)](
        inner, x, down, tokens, in_features, x.stride(0),
        PARTS=parts, RANK=rank, RANK_BLOCK=rank_block, BLOCK=max(_DOWN_TILE // rank_block, 16), num_warps=4, **options,
    )  # fmt: skip
    _up_kernel[(count, triton.cdiv(out_features, _UP_BLOCK))](
        out, inner, up, ends, tokens, out_features, out.stride(0),
        PARTS=parts, RANK=rank, BLOCK=_UP_BLOCK, num_warps=4, **options,
    )  # fmt: skip


def _is_served(out: Tensor, x: Tensor, down: Tensor, up: Tensor, inner: Tensor) -> bool:
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


# One program takes one token and a block of outputs: it reads a row of the table, and rank rows of `up` there.
@triton.jit
def _embedding_kernel(
    out, ids, table, up, tokens, scale, vocab, out_features, out_stride,
    RANK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_and_trigger()
    token = tl.program_id(0)
    if token >= tl.load(tokens.live):
        return
    slot, rank = _slot_of(token, tokens)
    if rank == 0:
        return
    row = tl.load(ids + token)
    row = tl.where((row >= 0) & (row < vocab), row, 0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < out_features
    at = out + token.to(tl.int64) * out_stride + columns
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for place in range(rank):
        weights = tl.load(up + (slot * RANK + place) * out_features + columns, mask=inside, other=0.0)
        total += scale * tl.load(table + (slot * vocab + row) * RANK + place).to(tl.float32) * weights.to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def add_embedding_adapters_triton(
    out: Tensor, ids: Tensor, table: Tensor, up: Tensor, tokens: AdapterTokens, scale: float
) -> None:
    """Launch the kernel; see `add_embedding_adapters`. It has run in Triton's interpreter and been compiled."""
    _, vocab, rank = table.shape
    count, out_features = out.shape
    _embedding_kernel[(count, triton.cdiv(out_features, _UP_BLOCK))](
        out, ids, table, up, tokens, scale, vocab, out_features, out.stride(0),
        RANK=rank, BLOCK=_UP_BLOCK, num_warps=4, **early_start_options(out.device),
    )  # fmt: skip


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
