"""The products of experts with the rows that were routed to them, each expert's weights read once for all its rows.

`out[pair] = x[pair // slots] @ weight[expert of the pair].T + bias[expert]`, for the pairs that `moe_route` listed; of
an expert without a pair nothing is read. With a gate the product is that of a gated MLP (Shazeer, 2020), its halves
`activation(gate) * up` (`act_mul` has the activations); `swiglu_clamped` is gpt-oss's (OpenAI, 2025): with the gate at
most `limit`, and `up` within +-`limit`, it is `gate * sigmoid(alpha * gate) * (up + 1)`.

On a CPU with compiled kernels the weights are in panels (see `native_linear`), those of the gate and of `up` by turns.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from ..linear.native_linear import PANEL, to_panels
from ..model.act_mul import ACTIVATIONS
from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, OneOf, Wide, Written

GATES = OneOf(("none", *ACTIVATIONS, "swiglu_clamped"))
_FEW_ROWS = {2: (16, 32, 128, 4, 4), 4: (16, 32, 64, 4, 3)}  # by itemsize: block_m, block_n, block_k, warps, stages
_MANY_ROWS = {2: (64, 64, 64, 4, 3)}
_MANY = 32  # pairs of an expert, on average, from which on the larger tile is worth while


@triton.jit
def gate_times_up(gate, up, alpha, limit, GATE: tl.constexpr):
    """Return `activation(gate) * up`, in fp32."""
    if GATE == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    if GATE == "gelu_tanh":  # see `act_mul`
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    if GATE == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit
def expert_of_program(offsets, experts, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return whose pairs a program multiplies, and which BLOCK_M of these; what is left over has no expert."""
    index = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets + index, mask=index < experts, other=0)
    stops = tl.load(offsets + index + 1, mask=index < experts, other=0)
    tiles = tl.cdiv(stops - starts, BLOCK_M)
    program = tl.program_id(0)
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= program).to(tl.int32))
    return expert, program - tl.sum(tl.where(index < expert, tiles, 0))


# One program multiplies BLOCK_M pairs of one expert with BLOCK_N of its outputs, twice as many where there is a gate.
# It reads (1 or 2) * BLOCK_N * depth values of the weights once, and its pairs' rows of x, which the L2 cache holds.
# Which expert and which pairs is found in the offsets, so the grid needs nothing but the number of pairs; surplus
# programs exit.
@triton.jit
def _expert_linear_kernel(
    out,
    x,
    weight,
    bias,
    order,
    offsets,
    experts,
    slots,
    width,
    depth,
    x_stride,
    alpha,
    limit,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_and_trigger()
    HALVES: tl.constexpr = 1 if GATE == "none" else 2
    expert, tile = expert_of_program(offsets, experts, BLOCK_E, BLOCK_M)
    if expert >= experts:
        return
    m = tl.load(offsets + expert) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = m < tl.load(offsets + expert + 1)
    pair = tl.load(order + m, mask=there, other=0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + (pair // slots).to(tl.int64)[:, None] * x_stride + k[None, :]
    # past the last row of the weight the last one is read again, which needs no mask
    first = expert.to(tl.int64) * width * HALVES
    w_rows = weight + (first + tl.minimum(n, width - 1))[:, None] * depth + k[None, :]
    up_rows = w_rows + tl.cast(width, tl.int64) * depth
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, depth, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_rows + at, mask=there[:, None], other=0.0)
            w = tl.load(w_rows + at)
        else:
            inside = (at + k < depth)[None, :]
            a = tl.load(x_rows + at, mask=there[:, None] & inside, other=0.0)
            w = tl.load(w_rows + at, mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        if GATE != "none":
            u = tl.load(up_rows + at) if EVEN_K else tl.load(up_rows + at, mask=inside, other=0.0)
            acc_up = tl.dot(a, tl.trans(u), acc_up, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + first + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    if GATE != "none":
        if HAS_BIAS:
            acc_up += tl.load(bias + first + width + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
        acc = gate_times_up(acc, acc_up, alpha, limit, GATE)
    place = out + pair.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=there[:, None] & (n < width)[None, :])


def expert_linear_triton(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    slots: int,
    gate: str,
    alpha: float,
    limit: float,
    batch_invariant: bool,
) -> None:
    """Launch the kernel; see `expert_linear`. It has run in Triton's interpreter and been compiled ahead of time."""
    (pairs, width), depth = out.shape, x.shape[1]
    experts = weight.shape[0]
    tile = _FEW_ROWS[x.element_size()]
    if pairs >= experts * _MANY and not batch_invariant:
        tile = _MANY_ROWS.get(x.element_size(), tile)
    block_m, block_n, block_k, num_warps, num_stages = tile
    most_tiles = pairs // block_m + min(pairs, experts)
    _expert_linear_kernel[(most_tiles, triton.cdiv(width, block_n))](
        out,
        x,
        weight,
        bias,
        order,
        offsets,
        experts,
        slots,
        width,
        depth,
        x.stride(0),
        alpha,
        limit,
        GATE=gate,
        HAS_BIAS=bias is not None,
        EVEN_K=depth % block_k == 0,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        **early_start_options(out.device),
    )


def expert_panels(weight: Tensor, is_gated: bool) -> Tensor:
    """Return one expert's weight [out_features, in_features] in panels, with a gate one of it and one of `up` by turns.

    The experts' panels are joined along the first dimension.
    """
    if not is_gated:
        return to_panels(weight)
    gate, up = (to_panels(half) for half in weight.chunk(2))
    return torch.stack([gate, up], dim=1).flatten(0, 1)


def _plain(weight: Tensor, expert: int, experts: int, width: int, depth: int, is_gated: bool) -> Tensor:
    """Return one expert's weight [out_features, in_features], whatever it is stored as."""
    if weight.dim() == 3:
        return weight[expert]
    own = weight.view(experts, -1, 1 + is_gated, *weight.shape[1:])[expert]  # [panels, halves, steps, PANEL, step]
    flat = own.permute(1, 0, 3, 2, 4).reshape(1 + is_gated, own.shape[0] * PANEL, -1)
    return flat[:, :width, :depth].flatten(0, 1)


def gated(product: Tensor, gate: str, alpha: float, limit: float) -> Tensor:
    """Return `activation(gate) * up` of a product [rows, 2 * width], computed with torch operators."""
    left, up = product.chunk(2, dim=1)
    if gate == "swiglu_clamped":
        left, up = left.clamp(max=limit), up.clamp(-limit, limit)
        return left * torch.sigmoid(alpha * left) * (up + 1.0)
    if gate == "silu":
        return torch.nn.functional.silu(left) * up
    return torch.nn.functional.gelu(left, approximate="tanh" if gate == "gelu_tanh" else "none") * up


def write_products(
    out: Tensor,
    x: Tensor,
    weight_of: Callable[[int], Tensor],
    bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    *,
    slots: int,
    gate: str,
    alpha: float,
    limit: float,
) -> None:
    """Compute the products with torch operators; see `expert_linear`.

    Args:
        out: as there, and so the others.
        x: likewise.
        weight_of: returns an expert's weight, float32 [out_features, in_features]; asked for those that have pairs.
        bias: likewise.
        order: likewise.
        offsets: likewise.
        slots: likewise.
        gate: likewise.
        alpha: likewise.
        limit: likewise.
    """
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if begin == end:
            continue
        pairs = order[begin:end].long()
        product = x.index_select(0, pairs // slots).float() @ weight_of(expert).T
        if bias is not None:
            product += bias[expert].float()
        result = product if gate == "none" else gated(product, gate, alpha, limit)
        out.index_copy_(0, pairs, result.to(out.dtype))


def _is_served(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, offsets: Tensor, **_others: object
) -> bool:
    return weight.dim() == 4 and x.stride(1) == 1


@operator(triton_version=expert_linear_triton, is_compiled=_is_served)
def expert_linear(
    out: Written[Wide],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Int32,
    offsets: Int32,
    *,
    slots: int,
    gate: Annotated[str, GATES] = "none",
    alpha: float = 1.0,
    limit: float = 0.0,
    batch_invariant: bool = False,
) -> None:
    """Write each listed pair's product with the weights of its expert into `out`.

    Args:
        out: [pairs, width], contiguous, of x's dtype, or fp32; pairs that are not listed are left alone.
        x: [pairs / slots, in_features], rows may be strided.
        weight: [experts, out_features, in_features], contiguous, out_features being width, or twice that with a gate,
            the gate first; or on a CPU what `expert_panels` made of each, joined.
        bias: [experts, out_features] or None.
        order: int32 [pairs], the pairs by expert, as `moe_route` wrote them.
        offsets: int32 [experts + 1], where each expert's pairs begin.
        slots: pairs that share a row of x.
        gate: one of `GATES`; "none": the plain product.
        alpha: of `swiglu_clamped`.
        limit: of `swiglu_clamped`.
        batch_invariant: on a GPU, take one tile for any number of pairs, so that a pair's bits do not depend on it; a
            CPU's do not anyway.

    Raises:
        ValueError: the gate is not known.
    """
    count, is_gated = len(offsets) - 1, gate != "none"

    def plain(expert: int) -> Tensor:
        return _plain(weight, expert, count, out.shape[1], x.shape[1], is_gated).float()

    write_products(out, x, plain, bias, order, offsets, slots=slots, gate=gate, alpha=alpha, limit=limit)
