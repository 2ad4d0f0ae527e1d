"""Write into a cache of sequence slots `[slots, heads, length, head_dim]`: scatter by position, or shift left.

Slots, positions and owners are read on the device. A slot or position that the cache does not have is skipped.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.kv_format import as_bytes
from ..native.optional_triton import tl, triton
from ..native.registration import Written, operator


class Strides(NamedTuple):
    """Strides of the cache (slot, head, position) and the new tokens (row, head, token), in elements."""

    slot: int
    head: int
    position: int
    new_row: int
    new_head: int
    new_token: int


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
    tokens,
    dim,
    shards,
    offset,
    strides,
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
    index = position
    if HAS_OWNED:
        is_owned = tl.load(owned + row * tokens + token) != 0
        index = tl.where(is_owned, position // shards, length - 1)
        alive = alive & ((index < length - 1) | (is_owned == 0))
    alive = alive & (index < length)
    d = tl.arange(0, DIM)
    source = row * strides.new_row + head * strides.new_head + token * strides.new_token
    target = slot * strides.slot + head * strides.head + index * strides.position
    inside = d < tl.where(alive, dim, 0)
    tl.store(cache + target + d, tl.load(new + source + d, mask=inside), mask=inside)


def slot_scatter_triton(cache, new, slots, positions, owned, shards, offset) -> None:
    """Launch the kernel; see `slot_scatter`."""
    if not new.numel():
        return
    new = new if new.stride(-1) == 1 else new.contiguous()
    rows, heads, tokens, dim = new.shape
    positions = positions if positions is None else positions.contiguous()
    owned = owned if owned is None else owned.to(torch.int32).contiguous()
    _slot_scatter_kernel[(rows * tokens, heads)](
        cache, new, slots, positions, owned, cache.shape[0], cache.shape[2], tokens, dim, shards, offset,
        Strides(*cache.stride()[:3], *new.stride()[:3]),
        HAS_SLOTS=slots is not None, HAS_POSITIONS=positions is not None, HAS_OWNED=owned is not None,
        DIM=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


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
        owned: [rows, n], nonzero if this shard owns the position: it goes to index `position // shards`, others to the
            last index, which is garbage; None: positions are indices.
        shards: number of shards that positions are distributed over.
        offset: the first position if `positions` is None.
    """
    rows, _, tokens, _ = new.shape
    length = cache.shape[2]
    slot = torch.arange(rows) if slots is None else slots.long()
    slot = slot[:, None].expand(rows, tokens)
    position = torch.arange(tokens) + offset if positions is None else positions.long()
    index = position.expand(rows, tokens)
    alive = (slot >= 0) & (slot < cache.shape[0]) & (index >= 0)
    if owned is not None:
        mine = owned.bool()
        index = torch.where(mine, index // shards, length - 1)
        alive = alive & ((index < length - 1) | ~mine)
    alive = alive & (index < length)
    cache[slot[alive], :, index[alive]] = new.transpose(1, 2)[alive]


@operator()
def slot_shift(cache: Written[Tensor], new: Tensor, slots: Tensor | None = None) -> None:
    """Shift the tokens of each named slot to the left, and append the new ones at the right.

    Args:
        cache: [slots, h, length, d].
        new: [rows, h, n, d] with n <= length, any strides.
        slots: int [rows], unique; None means row i is slot i.
    """
    count, rows, tokens = cache.shape[0], new.shape[0], new.shape[2]
    if not new.numel():
        return
    index = torch.arange(rows, device=cache.device)
    slot = index if slots is None else slots.long()
    row_of = torch.full((count + 1,), -1, device=cache.device)  # by slot; the last entry is for invalid slots
    row_of[torch.where((slot >= 0) & (slot < count), slot, count)] = index
    row_of = row_of[:count]
    cache, new = as_bytes(cache), as_bytes(new)
    shifted = torch.cat([cache[:, :, tokens:], new[row_of.clamp(min=0)]], dim=2)
    cache.copy_(torch.where((row_of >= 0).view(-1, 1, 1, 1), shifted, cache))
