"""What cached keys and values of 8 bits are multiplied with: numbers of a layer, or of each token and head."""

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
