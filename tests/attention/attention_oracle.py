"""Attention in float64, written from the definition alone: one query at a time, over the whole sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """Options of attention."""

    sm_scale: float
    v_scale: float = 1.0
    window_left: int = -1
    soft_cap: float = 0.0
    mode: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    sinks: Tensor | None = None
    is_chunked: bool = False


def slope(head: int, heads: int) -> float:
    power = 2 ** int(math.log2(heads))
    if head < power:
        return 2.0 ** (-8.0 * (head + 1) / power)
    return 2.0 ** (-4.0 * (2 * (head - power) + 1) / power)


def rope(x: Tensor, positions: list[int], options: Options) -> Tensor:
    """Rotate [tokens, heads, d] to the tokens' positions: pair i is (x[i], x[i + d/2]), as a complex number."""
    half = x.shape[-1] // 2
    angles = [[p * options.rope_theta ** (-i / half) / options.rope_scale for i in range(half)] for p in positions]
    angle = torch.tensor(angles, dtype=torch.float64).view(-1, 1, half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def attend(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Attend from the newest tokens of one sequence.

    Args:
        q: [n, hq, d], queries of the last n positions.
        keys: [length, hkv, d].
        values: [length, hkv, dv].
        options: scale and the rest.

    Returns:
        Output [n, hq, dv] and base-2 log-sum-exp [n, hq], both float64.
    """
    q, keys, values = q.double().cpu(), keys.double().cpu(), values.double().cpu()
    n, heads, _ = q.shape
    length, kv_heads = keys.shape[0], keys.shape[1]
    if options.mode == "ROPE_LLAMA" and length:
        q = rope(q, list(range(length - n, length)), options)
        keys = rope(keys, list(range(length)), options)
    owner = torch.tensor([h // (heads // kv_heads) for h in range(heads)])
    out = torch.zeros(n, heads, values.shape[-1], dtype=torch.float64)
    lse = torch.full((n, heads), -math.inf, dtype=torch.float64)
    for i in range(n):
        at = length - n + i
        if at < 0:
            if length and options.sinks is not None:  # it sees no key, but the sink
                lse[i] = options.sinks / math.log(2.0)
            continue
        before = at % (options.window_left + 1) if options.is_chunked else options.window_left
        visible = [j for j in range(at + 1) if before < 0 or j >= at - before]
        logits = (keys[visible][:, owner] * q[i]).sum(-1) * options.sm_scale  # [seen, heads]
        if options.soft_cap > 0:
            logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
        if options.mode == "ALIBI":
            slopes = torch.tensor([slope(h, heads) for h in range(heads)], dtype=torch.float64)
            logits = logits + slopes * torch.tensor([[float(j - at)] for j in visible], dtype=torch.float64)
        visible_values = values[visible][:, owner]
        if options.sinks is not None:  # one more key, whose value is 0
            logits = torch.cat([logits, options.sinks.double().cpu()[None]])
            visible_values = torch.cat([visible_values, torch.zeros_like(out[:1])])
        lse[i] = torch.logsumexp(logits, 0) / math.log(2.0)
        out[i] = (torch.softmax(logits, 0).unsqueeze(-1) * visible_values).sum(0) * options.v_scale
    return out, lse
