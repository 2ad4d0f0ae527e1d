"""Merging of attention over disjoint sets of keys: outputs weighted by their base-2 log-sum-exps.

`v = sum_i 2^(s_i - s) v_i` with `s = log2 sum_i 2^s_i` (Ye et al., Cascade Inference, 2024; the recursion of online
softmax). A state with s = -inf has no weight, whatever its v; only such states give v = 0, s = -inf. NaNs stay NaN.
"""

import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Written, operator


# One program merges one head of one row: it reads states * (dim * itemsize + 4) bytes and writes one state.
@triton.jit
def _merge_states_kernel(
    v_out,
    s_out,
    v,
    s,
    states,
    heads,
    dim,
    v_row_stride,
    v_state_stride,
    v_head_stride,
    s_row_stride,
    s_state_stride,
    s_head_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    total = 0.0
    top = -float("inf")
    for state in range(states):
        log_sum = tl.load(s + row * s_row_stride + state * s_state_stride + head * s_head_stride).to(tl.float32)
        part = tl.load(
            v + row * v_row_stride + state * v_state_stride + head * v_head_stride + dims, mask=dims < dim, other=0.0
        ).to(tl.float32)
        new_top = tl.maximum(top, log_sum)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp2(log_sum - base)
        shrink = tl.exp2(top - base)
        acc = acc * shrink + tl.where(weight == 0.0, 0.0, part * weight)
        total = total * shrink + weight
        top = new_top
    norm = tl.where(total == 0.0, 1.0, total)
    tl.store(v_out + (row * heads + head) * dim + dims, (acc / norm).to(v_out.dtype.element_ty), mask=dims < dim)
    tl.store(s_out + row * heads + head, top + tl.log2(norm))


# One program merges one head of one row into its first state, unless masked.
@triton.jit
def _merge_state_kernel(v, s, v_other, s_other, mask, heads, dim, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if HAS_MASK:  # noqa: SIM102 (the mask may only be read where there is one)
        if tl.load(mask + row) == 0:
            return
    flat_row = row * heads + tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    sum_a = tl.load(s + flat_row).to(tl.float32)
    sum_b = tl.load(s_other + flat_row).to(tl.float32)
    top = tl.maximum(sum_a, sum_b)
    base = tl.where(top == -float("inf"), 0.0, top)
    weight_a = tl.exp2(sum_a - base)
    weight_b = tl.exp2(sum_b - base)
    total = weight_a + weight_b
    norm = tl.where(total == 0.0, 1.0, total)
    part_a = tl.load(v + flat_row * dim + dims, mask=dims < dim, other=0.0).to(tl.float32)
    part_b = tl.load(v_other + flat_row * dim + dims, mask=dims < dim, other=0.0).to(tl.float32)
    merged = tl.where(weight_a == 0.0, 0.0, part_a * weight_a)
    merged += tl.where(weight_b == 0.0, 0.0, part_b * weight_b)
    tl.store(v + flat_row * dim + dims, (merged / norm).to(v.dtype.element_ty), mask=dims < dim)
    tl.store(s + flat_row, top + tl.log2(norm))


def merge_states_triton(v_out, s_out, v, s) -> None:
    """Launch the kernel; see `merge_states`."""
    rows, states, heads, dim = v.shape
    if v.stride(-1) != 1:
        v = v.contiguous()
    block = triton.next_power_of_2(dim)
    _merge_states_kernel[(rows, heads)](
        v_out, s_out, v, s, states, heads, dim, *v.stride()[:3], *s.stride(), BLOCK=block, num_warps=1
    )


def merge_state_in_place_triton(v, s, v_other, s_other, mask) -> None:
    """Launch the kernel; see `merge_state_in_place`."""
    rows, heads, dim = v.shape
    block = triton.next_power_of_2(dim)
    _merge_state_kernel[(rows, heads)](
        v, s, v_other, s_other, mask, heads, dim, HAS_MASK=mask is not None, BLOCK=block, num_warps=1
    )


@operator(triton_version=merge_states_triton)
def merge_states(v_out: Written[Tensor], s_out: Written[Tensor], v: Tensor, s: Tensor) -> None:
    """Merge any number of states into one.

    Args:
        v_out: [rows, heads, dim], contiguous.
        s_out: fp32 [rows, heads], contiguous, base 2.
        v: [rows, states, heads, dim].
        s: fp32 [rows, states, heads].
    """
    if v.shape[1] == 0:
        v_out.zero_()
        s_out.fill_(-float("inf"))
        return
    wide = s.float()
    top = wide.amax(1, keepdim=True)
    weights = torch.exp2(wide - torch.where(top == -float("inf"), 0.0, top)).unsqueeze(-1)  # [rows, states, heads, 1]
    total = weights.sum(1)
    norm = torch.where(total == 0, 1.0, total)
    v_out.copy_(torch.where(weights == 0, 0.0, v.float() * weights).sum(1) / norm)
    s_out.copy_(top.squeeze(1) + torch.log2(norm.squeeze(-1)))


@operator(triton_version=merge_state_in_place_triton)
def merge_state_in_place(
    v: Written[Tensor], s: Written[Tensor], v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """Merge a state into the first.

    Args:
        v: [rows, heads, dim], contiguous, written.
        s: fp32 [rows, heads], contiguous, written.
        v_other: [rows, heads, dim], contiguous.
        s_other: fp32 [rows, heads], contiguous.
        mask: bool or int [rows]; rows with 0 are unchanged. None: all are merged.
    """
    merged, log_sum = torch.empty_like(v), torch.empty_like(s)
    merge_states.__wrapped__(  # type: ignore[attr-defined]
        merged, log_sum, torch.stack([v, v_other], dim=1), torch.stack([s, s_other], dim=1)
    )
    v.copy_(merged if mask is None else torch.where(mask.bool().view(-1, 1, 1), merged, v))
    s.copy_(log_sum if mask is None else torch.where(mask.bool().view(-1, 1), log_sum, s))
