"""torch's fused attention for CPUs: the one that returns the log-sum-exp too, for which torch has no public name."""

from typing import Any

import torch
from torch import Tensor


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


_fused = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
flash_attention: Any = plain_attention if _fused is None else _fused.default
