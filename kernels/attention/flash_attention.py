"""torch's fused attention for CPUs: the one that returns the log-sum-exp too, for which torch has no public name."""

from typing import Any

import torch
from torch import Tensor

_LANES = 16  # fp32 numbers of the widest vector


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float
) -> tuple[Tensor, Tensor]:
    """Return what the fused operator returns, for a torch that has taken its name away; slower.

    Args:
        q: [batch, heads, queries, head_dim].
        k: [batch, heads, keys, head_dim].
        v: the same shape.
        attn_mask: added to the logits; broadcast to [batch, heads, queries, keys].
        is_causal: query i sees the keys up to i.
        scale: multiplies the logits.

    Returns:
        The output, of q's shape and dtype, and the natural log-sum-exp of the logits, fp32 [batch, heads, queries].
    """
    logits = scale * (q.float() @ k.float().transpose(-1, -2))
    if attn_mask is not None:
        logits += attn_mask
    if is_causal:
        logits += torch.full(logits.shape[-2:], -torch.inf).triu(1)
    lse = logits.logsumexp(-1)
    return ((logits - lse.unsqueeze(-1)).exp() @ v.float()).to(q.dtype), lse


_operator = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_fused: Any = plain_attention if _operator is None else _operator.default


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention's output and log-sum-exp; see `plain_attention`."""
    # of fewer keys than a vector has lanes, the fused operator takes logits that are no numbers for keys not seen
    attend = plain_attention if k.shape[-2] < _LANES else _fused
    return attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
