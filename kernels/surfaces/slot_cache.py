"""Write into a cache of sequence slots `[slots, heads, length, head_dim]`: scatter by position, or shift left.

Slots, positions and owners are read on the device. A slot or position that the cache does not have is skipped.
"""

import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Written, operator

_SHIFT_BLOCK = 64


# One program copies one token of one row and head: it reads and writes d * itemsize bytes.
@triton.jit
def _slot_scatter_kernel(
    cache,
    new,
    slots,
    positions,
    owned,
    num_slots,
    length,
    heads,
    tokens,
    dim,
    shards,
    offset,
    slot_stride,
    head_stride,
    place_stride,
    new_row_stride,
    new_head_stride,
    new_token_stride,
    HAS_SLOTS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_OWNED: tl.constexpr,
    DIM: tl.constexpr,
):
    row = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64) if HAS_SLOTS else row
    position = tl.load(positions + row * tokens + token).to(tl.int64) if HAS_POSITIONS else token + offset
    alive = (slot >= 0) & (slot < num_slots) & (position >= 0)
    place = position
    if HAS_OWNED:
        is_owned = tl.load(owned + row * tokens + token) != 0
        place = tl.where(is_owned, position // shards, length - 1)
        alive = alive & ((place < length - 1) | (is_owned == 0))
    alive = alive & (place < length)
    d = tl.arange(0, DIM)
    source = row * new_row_stride + head * new_head_stride + token * new_token_stride
    target = slot * slot_stride + head * head_stride + place * place_stride
    inside = d < tl.where(alive, dim, 0)
    tl.store(cache + target + d, tl.load(new + source + d, mask=inside), mask=inside)


# One program moves one slot and head to the left by the new tokens, block by block, and writes those behind: it reads
# and writes length * d * itemsize bytes. A block is read whole before it is written; the barriers are what says so.
@triton.jit
def _slot_shift_kernel(
    cache,
    new,
    slots,
    num_slots,
    length,
    heads,
    tokens,
    dim,
    slot_stride,
    head_stride,
    place_stride,
    new_row_stride,
    new_head_stride,
    new_token_stride,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64) if HAS_SLOTS else row
    if (slot >= 0) & (slot < num_slots):
        base = cache + slot * slot_stride + head * head_stride
        source = new + row * new_row_stride + head * new_head_stride
        d = tl.arange(0, DIM)[None, :]
        kept = length - tokens
        for first in range(0, length, BLOCK):
            place = first + tl.arange(0, BLOCK)[:, None]
            old = (place < kept) & (d < dim)
            fresh = (place >= kept) & (place < length) & (d < dim)
            values = tl.load(base + (place + tokens) * place_stride + d, mask=old, other=0)
            values += tl.load(source + (place - kept) * new_token_stride + d, mask=fresh, other=0)
            tl.debug_barrier()
            tl.store(base + place * place_stride + d, values, mask=old | fresh)
            tl.debug_barrier()


_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def slot_scatter_triton(
    cache: Tensor,
    new: Tensor,
    slots: Tensor | None,
    positions: Tensor | None,
    owned: Tensor | None,
    shards: int,
    offset: int,
) -> None:
    """Launch the kernel; see `slot_scatter`."""
    if not new.numel():
        return
    new = new if new.stride(-1) == 1 else new.contiguous()
    rows, heads, tokens, dim = new.shape
    _slot_scatter_kernel[(rows * tokens, heads)](
        cache,
        new,
        slots,
        positions if positions is None else positions.contiguous(),
        owned if owned is None else owned.to(torch.int32).contiguous(),
        cache.shape[0],
        cache.shape[2],
        heads,
        tokens,
        dim,
        shards,
        offset,
        *cache.stride()[:3],
        *new.stride()[:3],
        HAS_SLOTS=slots is not None,
        HAS_POSITIONS=positions is not None,
        HAS_OWNED=owned is not None,
        DIM=triton.next_power_of_2(dim),
        num_warps=1,
    )


def slot_shift_triton(cache: Tensor, new: Tensor, slots: Tensor | None) -> None:
    """Launch the kernel; see `slot_shift`."""
    if not new.numel():
        return
    new = new if new.stride(-1) == 1 else new.contiguous()
    as_int = _INT_OF_SIZE[cache.element_size()]
    rows, heads, tokens, dim = new.shape
    _slot_shift_kernel[(rows, heads)](
        cache.view(as_int),
        new.view(as_int),
        slots,
        cache.shape[0],
        cache.shape[2],
        heads,
        tokens,
        dim,
        *cache.stride()[:3],
        *new.stride()[:3],
        HAS_SLOTS=slots is not None,
        BLOCK=_SHIFT_BLOCK,
        DIM=triton.next_power_of_2(dim),
        num_warps=4,
    )


@operator(triton_version=slot_scatter_triton)
def slot_scatter(
    cache: Written[Tensor],
    new: Tensor,
    slots: Tensor | None = None,
    positions: Tensor | None = None,
    owned: Tensor | None = None,
    shards: int = 1,
    offset: int = 0,
) -> None:
    """Write each row's new tokens at their positions in its slot.

    Args:
        cache: [slots, h, length, d], the last dimension dense.
        new: [rows, h, n, d], any strides.
        slots: int [rows], unique; None means row i is slot i.
        positions: int [rows, n]; None means `offset`, `offset + 1`, ... in every row.
        owned: [rows, n], nonzero where this shard owns the position: it goes to place `position // shards`, and
            every other one to the last place, which is garbage; None means that positions are places.
        shards: over how many shards positions are dealt.
        offset: the first position where `positions` is None.
    """
    rows, _, tokens, _ = new.shape
    length = cache.shape[2]
    slot = torch.arange(rows) if slots is None else slots.long()
    slot = slot[:, None].expand(rows, tokens)
    position = torch.arange(tokens) + offset if positions is None else positions.long()
    place = position.expand(rows, tokens)
    alive = (slot >= 0) & (slot < cache.shape[0]) & (place >= 0)
    if owned is not None:
        mine = owned.bool()
        place = torch.where(mine, place // shards, length - 1)
        alive = alive & ((place < length - 1) | ~mine)
    alive = alive & (place < length)
    cache[slot[alive], :, place[alive]] = new.transpose(1, 2)[alive]


@operator(triton_version=slot_shift_triton)
def slot_shift(cache: Written[Tensor], new: Tensor, slots: Tensor | None = None) -> None:
    """Drop the oldest tokens of each named slot at the left, and append the new ones at the right.

    Args:
        cache: [slots, h, length, d], the last dimension dense.
        new: [rows, h, n, d] with n <= length, any strides.
        slots: int [rows], unique; None means row i is slot i.
    """
    kept = cache.shape[2] - new.shape[2]
    named = range(new.shape[0]) if slots is None else slots.tolist()
    for row, slot in enumerate(named):
        if 0 <= slot < cache.shape[0]:
            cache[slot, :, :kept] = cache[slot, :, new.shape[2] :].clone()
            cache[slot, :, kept:] = new[row]
