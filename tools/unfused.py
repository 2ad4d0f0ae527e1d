"""The fused operators taken apart into torch's own, to measure what fusing them is worth."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from graphdecode.models.blocks import StepOperators


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Write RMSNorm of `x` [rows, hidden] into `out`; see `graphdecode.kernels.norm.rms_norm`."""
    wide = x.float()
    out.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float())


def add_rms_norm(
    out: Tensor,
    residual: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    post_weight: Tensor | None = None,
    post_eps: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Add `scale * x` to `residual`, or of RMSNorm of `x`, and write RMSNorm of the sum into `out`."""
    given = x
    if post_weight is not None:
        given = torch.empty_like(x)
        rms_norm(given, x, post_weight, post_eps)
    residual.add_(given, alpha=scale)
    if weight is None:
        out.copy_(residual)
    else:
        rms_norm(out, residual, weight, eps)


def act_mul(out: Tensor, gate_up: Tensor, activation: str) -> None:
    """Write `activation(gate) * up` into `out` [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        active = silu(gate)
    else:
        active = gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    torch.mul(active, up, out=out)


def rope_append(
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    rows: Tensor,
    positions: Tensor,
    live: Tensor,
    page_table: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    **_scales: object,
) -> None:
    """Write rotated queries into `q_out`, and rotated keys and values into the cache; padding goes to the trash page.

    The arguments are those of `graphdecode.kernels.cache.rope_append`; the cache has no scales.
    """
    tokens, qo_heads, head_dim = q_out.shape
    pages, page_size, kv_heads = k_cache.shape[:3]
    q, k, v = qkv.view(tokens, -1, head_dim).split([qo_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = _normed_heads(q, q_norm, eps), _normed_heads(k, k_norm, eps)
    alive = torch.arange(tokens, device=qkv.device) < live
    at = torch.where(alive, positions, 0)
    angles = cos_sin.index_select(0, at)
    page = page_table.index_select(0, torch.where(alive, rows, 0)).gather(1, (at // page_size).long()[:, None])[:, 0]
    place = (torch.where(alive, page, pages - 1) * page_size + at % page_size).long()
    q_out.copy_(_rotated(q, angles))
    k_cache.view(-1, kv_heads, head_dim).index_copy_(0, place, _rotated(k, angles).to(k_cache.dtype))
    v_cache.view(-1, kv_heads, head_dim).index_copy_(0, place, v.to(v_cache.dtype))


def _normed_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [t, heads, head_dim]: of each head, or of all where the weight is as long as they are."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    is_together = weight.shape[0] > x.shape[2]
    rms_norm(normed.flatten(1) if is_together else normed, x.flatten(1) if is_together else x, weight, eps)
    return normed


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return x [t, heads, head_dim] rotated by angles [t, 2, rot / 2], in float32 (Su et al., 2021, half-split)."""
    half = angles.shape[-1]
    cos, sin = angles[:, :1], angles[:, 1:]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


UNFUSED = StepOperators(
    rms_norm, add_rms_norm, rope_append, act_mul, fuses_products=False, fuses_append=False, embedding_norm=None
)
