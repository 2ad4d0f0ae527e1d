"""What cached keys and values of 8 bits are multiplied with: numbers of a layer, or of each token and head.

Keys that become int8 are mixed before, and so are the queries that they meet: a Hadamard rotation leaves their products
as they are, and spreads a channel that is always large over all, so that the scale of a head is not made by one channel
(Ashkboos et al., QuaRot, 2024, section 4.2).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..native.signature import Bfloat16

MOST_INT8 = 127  # codes are as many on both sides of 0


class PageScales(NamedTuple):
    """Scales of int8 entries, which stand by page as the entries do; a head's are neighbours.

    Attributes:
        k_scales: bf16 [pages, num_kv_heads, page_size], contiguous, of keys.
        v_scales: the same of values.
    """

    k_scales: Bfloat16
    v_scales: Bfloat16


def is_mixed(cache: Tensor) -> bool:
    """Whether keys in this cache, and queries over it, are `mixed`."""
    return cache.dtype == torch.int8


def mixed_channels(head_dim: int) -> int:
    """Return how many neighbouring channels are mixed: the largest power of two that divides a head's."""
    return head_dim & -head_dim


def mixed(x: Tensor) -> Tensor:
    """Return heads [..., dim] in fp32, times an orthonormal Hadamard matrix of `mixed_channels(dim)` rows."""
    count = mixed_channels(x.shape[-1])
    wide = x.float().unflatten(-1, (-1, count))
    for _ in range(count.bit_length() - 1):
        even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
        wide = torch.cat((even + odd, even - odd), dim=-1)
    return wide.flatten(-2) * (1 / math.sqrt(count))


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return heads [..., dim] as int8, and their scales, bf16 [...]: the largest value over 127, rounded.

    The scale of a head in which something is not finite is NaN.
    """
    wide = x.float()
    most = wide.abs().amax(-1)
    most = torch.where(torch.isfinite(wide).all(-1), most, torch.nan)
    scales = (most / MOST_INT8).to(torch.bfloat16)
    unit = scales.float().unsqueeze(-1)
    steps = torch.where(unit > 0, wide / unit, 0.0).round().clamp(-MOST_INT8, MOST_INT8)
    return steps.to(torch.int8), scales


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes [pages, page_size, heads, dim] in fp32, given their scales [pages, heads, page_size]."""
    return codes.float() * scales.float().transpose(1, 2).unsqueeze(-1)
