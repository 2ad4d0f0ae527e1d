"""Merging attention states: outputs over disjoint parts of the keys, with their base-2 log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.cache.errors import require_tensors
from graphdecode.kernels.surfaces import merge_states as kernel


def _check(v: Tensor, s: Tensor, name: str, dims: int) -> None:
    require_tensors(v=v)
    require_tensors(v.device, s=s)
    if not (v.is_floating_point() and s.is_floating_point()):
        raise ValueError(f"{name}: v and s must be floating-point tensors, got {v.dtype} and {s.dtype}")
    if v.dim() != dims or s.shape != v.shape[:-1]:
        raise ValueError(
            f"{name}: v must have {dims} dimensions and s all of them but the last, "
            f"got {tuple(v.shape)} and {tuple(s.shape)}"
        )


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the merge of two attention states, in v_a's dtype and fp32; see `merge_states`.

    Args:
        v_a: [n, heads, dim], output over one part of the keys.
        s_a: fp32 [n, heads], its log-sum-exp, base 2.
        v_b: [n, heads, dim], output over the other part.
        s_b: fp32 [n, heads].

    Raises:
        ValueError: the shapes do not fit.
    """
    require_tensors(v_a=v_a, s_a=s_a)
    v = v_a.clone(memory_format=torch.contiguous_format)
    s = s_a.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    merge_state_in_place(v, s, v_b, s_b)
    return v, s


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merge an attention state into another.

    Args:
        v: [n, heads, dim], contiguous; becomes the merged output.
        s: fp32 [n, heads], contiguous; becomes the merged log-sum-exp, base 2.
        v_other: [n, heads, dim].
        s_other: fp32 [n, heads].
        mask: bool or uint8 [n]; rows where it is false are unchanged.

    Raises:
        ValueError: the shapes do not fit, or v or s is not contiguous.
    """
    _check(v, s, "the state", 3)
    _check(v_other, s_other, "the other state", 3)
    if v.shape != v_other.shape:
        raise ValueError(f"the states must have one shape, got {tuple(v.shape)} and {tuple(v_other.shape)}")
    if not (v.is_contiguous() and s.is_contiguous()):
        raise ValueError("v and s are written in place and must be contiguous")
    if mask is not None and mask.shape != v.shape[:1]:
        raise ValueError(f"mask must have the shape {tuple(v.shape[:1])}, got {tuple(mask.shape)}")
    kernel.merge_state_in_place(v, s, v_other.contiguous(), s_other.contiguous(), mask)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge any number of attention states.

    Args:
        v: [n, states, heads, dim], outputs over parts of the keys.
        s: fp32 [n, states, heads], their log-sum-exps, base 2.

    Returns:
        The output over all keys, [n, heads, dim] in v's dtype, and its log-sum-exp, fp32 [n, heads].

    Raises:
        ValueError: the shapes do not fit.
    """
    _check(v, s, "the states", 4)
    rows, _, heads, dim = v.shape
    merged = torch.empty(rows, heads, dim, dtype=v.dtype, device=v.device)
    log_sum = torch.empty(rows, heads, dtype=torch.float32, device=v.device)
    kernel.merge_states(merged, log_sum, v, s)
    return merged, log_sum
