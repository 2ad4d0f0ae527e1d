"""The products of experts with their rows; each expert's weights are read once for all its rows.

`out[pair] = x[pair // slots] @ weight[expert of the pair].T + bias[expert]`, for the pairs listed by `moe_route`;
experts without pairs are not read. With a gate the product is that of a gated MLP (Shazeer, 2020), its halves
`activation(gate) * up` (`act_mul` has the activations); `swiglu_clamped` is gpt-oss's (OpenAI, 2025): with the gate at
most `limit`, and `up` within +-`limit`, it is `gate * sigmoid(alpha * gate) * (up + 1)`.

On a CPU with compiled kernels, plain weights are in panels (see `linear`), gate and `up` interleaved. Quantized weights
are in panels (see `quantized_linear`), or on a GPU in tiles (see `tiled_linear`). Panels and tiles are those of one
weight with all experts in turn; in tiles, the gate's rows come before those of `up`. A row's result depends neither on
other rows nor on the number of threads.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from ..linear.linear import to_panels
from ..linear.pack_codes import PANEL
from ..linear.quantized_linear import QuantizedPanels, are_blocks_of, by_panel, dequantized_panels
from ..linear.small_linear import SmallLinearConfig, block_rows
from ..linear.tiled_linear import TileMeta, Words, tiled_sums
from ..linear.weight_tiles import WeightTiles, columns_of, dequantized
from ..model.act_mul import ACTIVATIONS, activated, gated
from ..native.optional_triton import early_start_options, tl, triton, wait_and_trigger
from ..native.registration import Float32, Int32, OneOf, Wide, Written, operator

GATES = OneOf(("none", *ACTIVATIONS, "swiglu_clamped"))
_FEW_ROWS = {2: (16, 32, 128, 4, 4), 4: (16, 32, 64, 4, 3)}  # by itemsize: block_m, block_n, block_k, warps, stages
_LARGE_TILES = {2: (64, 64, 64, 4, 3)}
_LARGE_TILE_PAIRS = 32  # average pairs per expert from which the larger tile is faster
# without and with a gate, whose tile has two products: an H200's L2 cache feeds a tile of 64 x 64 for some 180 TFLOP/s,
# and one of 128 x 128 for twice as many. sm_120 has no room for more stages
_LARGEST_TILES = {2: ((128, 128, 64, 8, 3), (128, 64, 64, 8, 3))}
_LARGEST_TILE_PAIRS = 128  # a tile is then two thirds full on average


class Routed(NamedTuple):
    """The pairs to compute, and the activation of their products."""

    order: Int32  # int32 [pairs], the pairs by expert, from `moe_route`
    offsets: Int32  # int32 [experts + 1], offset of each expert's pairs
    slots: int  # pairs that share a row of x
    gate: Annotated[str, GATES] = "none"  # one of `GATES`; "none": the plain product
    alpha: float = 1.0  # see `swiglu_clamped` above
    limit: float = 0.0  # see `swiglu_clamped` above
    # float32 [pairs, out_features], contiguous, added to the products before the gate; None: nothing
    added: Float32 | None = None


class _Sizes(NamedTuple):
    """Pairs that share a row of x, features, columns, stride, and parameters of the gate."""

    slots: int
    width: int
    depth: int
    columns: int
    x_stride: int
    alpha: float
    limit: float


class _Meta(NamedTuple):
    """Constants of a product's kernel, and its gate."""

    GATE: str
    BLOCK_E: int
    BLOCK_M: int
    BLOCK_N: int
    EVEN_K: bool
    STAGES: int = 1
    BLOCK_K: int = 0


@triton.jit
def gate_times_up(gate, up, alpha, limit, GATE: tl.constexpr):
    """Return `activation(gate) * up`, in fp32."""
    if GATE != "swiglu_clamped":
        return activated(gate, GATE) * up
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit
def expert_of_program(offsets, experts, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a program's expert, and which BLOCK_M of its pairs it multiplies; surplus programs have no expert."""
    index = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets + index, mask=index < experts, other=0)
    stops = tl.load(offsets + index + 1, mask=index < experts, other=0)
    tiles = tl.cdiv(stops - starts, BLOCK_M)
    program = tl.program_id(0)
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= program).to(tl.int32))
    return expert, program - tl.sum(tl.where(index < expert, tiles, 0))


# One program computes BLOCK_N outputs, with a gate twice as many, of BLOCK_M pairs of one expert. It reads
# (1 or 2) * BLOCK_N * depth values of the weights once, and its pairs' rows of x, which the L2 cache holds. Expert and
# pairs follow from the offsets, so the grid depends only on the number of pairs; surplus programs exit.
@triton.jit
def _expert_linear_kernel(
    out, x, weight, bias, order, offsets, added, experts, sizes, META: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        wait_and_trigger()
    GATE: tl.constexpr = META.GATE
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    HALVES: tl.constexpr = 1 if GATE == "none" else 2
    width, depth = sizes.width, sizes.depth
    expert, tile = expert_of_program(offsets, experts, META.BLOCK_E, BLOCK_M)
    if expert >= experts:
        return
    m = tl.load(offsets + expert) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = m < tl.load(offsets + expert + 1)
    pair = tl.load(order + m, mask=row_mask, other=0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, META.BLOCK_K)
    x_rows = x + (pair // sizes.slots).to(tl.int64)[:, None] * sizes.x_stride + k[None, :]
    # past the weight, its last row is read again, which needs no mask
    first = expert.to(tl.int64) * width * HALVES
    w_rows = weight + (first + tl.minimum(n, width - 1))[:, None] * depth + k[None, :]
    up_rows = w_rows + tl.cast(width, tl.int64) * depth
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, depth, META.BLOCK_K):
        if META.EVEN_K:
            a = tl.load(x_rows + at, mask=row_mask[:, None], other=0.0)
            w = tl.load(w_rows + at)
        else:
            inside = (at + k < depth)[None, :]
            a = tl.load(x_rows + at, mask=row_mask[:, None] & inside, other=0.0)
            w = tl.load(w_rows + at, mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        if GATE != "none":
            u = tl.load(up_rows + at) if META.EVEN_K else tl.load(up_rows + at, mask=inside, other=0.0)
            acc_up = tl.dot(a, tl.trans(u), acc_up, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + first + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    inside_rows = row_mask[:, None] & (n < width)[None, :]
    beside = pair.to(tl.int64)[:, None] * (width * HALVES) + n[None, :]
    if added is not None:
        acc += tl.load(added + beside, mask=inside_rows, other=0.0)
    if GATE != "none":
        if bias is not None:
            acc_up += tl.load(bias + first + width + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
        if added is not None:
            acc_up += tl.load(added + beside + width, mask=inside_rows, other=0.0)
        acc = gate_times_up(acc, acc_up, sizes.alpha, sizes.limit, GATE)
    out_ptrs = out + pair.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=inside_rows)


def expert_linear_triton(out, x, weight, bias, pairs, batch_invariant) -> None:
    """Launch the kernel; see `expert_linear`."""
    (count, width), depth = out.shape, x.shape[1]
    experts = weight.shape[0]
    tile = _FEW_ROWS[x.element_size()]
    if count >= experts * _LARGE_TILE_PAIRS and not batch_invariant:
        tile = _LARGE_TILES.get(x.element_size(), tile)
        if count >= experts * _LARGEST_TILE_PAIRS and x.element_size() in _LARGEST_TILES:
            tile = _LARGEST_TILES[x.element_size()][pairs.gate != "none"]
    block_m, block_n, block_k, num_warps, num_stages = tile
    block_e, is_even = triton.next_power_of_2(experts), depth % block_k == 0
    most_tiles = count // block_m + min(count, experts)
    _expert_linear_kernel[(most_tiles, triton.cdiv(width, block_n))](
        out, x, weight, bias, pairs.order, pairs.offsets, pairs.added, experts,
        _Sizes(pairs.slots, width, depth, depth, x.stride(0), pairs.alpha, pairs.limit),
        META=_Meta(pairs.gate, block_e, block_m, block_n, is_even, BLOCK_K=block_k),
        num_warps=num_warps,
        num_stages=num_stages,
        **early_start_options(out.device),
    )  # fmt: skip


def expert_panels(weight: Tensor, is_gated: bool) -> Tensor:
    """Return one expert's weight [out_features, in_features] in panels; if gated, those of both halves interleaved.

    Experts' panels are concatenated along the first dimension.
    """
    if not is_gated:
        return to_panels(weight)
    gate, up = (to_panels(half) for half in weight.chunk(2))
    return torch.stack([gate, up], dim=1).flatten(0, 1)


def _row_major(weight: Tensor, expert: int, experts: int, width: int, depth: int, is_gated: bool) -> Tensor:
    """Return one expert's weight [out_features, in_features], row-major."""
    if weight.dim() == 3:
        return weight[expert]
    tiles = weight.view(experts, -1, 1 + is_gated, *weight.shape[1:])[expert]  # [panels, halves, steps, PANEL, step]
    flat = tiles.permute(1, 0, 3, 2, 4).reshape(1 + is_gated, tiles.shape[0] * PANEL, -1)
    return flat[:, :width, :depth].flatten(0, 1)


def _gated(product: Tensor, pairs: Routed) -> Tensor:
    """Return `activation(gate) * up` of a product [rows, 2 * width], computed with torch operators."""
    gate, up = product.chunk(2, dim=1)
    if pairs.gate == "swiglu_clamped":
        gate, up = gate.clamp(max=pairs.limit), up.clamp(-pairs.limit, pairs.limit)
        return gate * torch.sigmoid(pairs.alpha * gate) * (up + 1.0)
    result = torch.empty_like(gate)
    gated(result, product, pairs.gate)
    return result


def write_products(
    out: Tensor, x: Tensor, weight_of: Callable[[int], Tensor], bias: Tensor | None, pairs: Routed
) -> None:
    """Compute the products with torch operators; see `expert_linear`.

    `weight_of` returns an expert's weight, float32 [out_features, in_features]; called only for experts with pairs.
    """
    for expert, (begin, end) in enumerate(pairwise(pairs.offsets.tolist())):
        if begin == end:
            continue
        expert_pairs = pairs.order[begin:end].long()
        product = x.index_select(0, expert_pairs // pairs.slots).float() @ weight_of(expert).T
        if bias is not None:
            product += bias[expert].float()
        if pairs.added is not None:
            product += pairs.added[expert_pairs]
        result = product if pairs.gate == "none" else _gated(product, pairs)
        out.index_copy_(0, expert_pairs, result.to(out.dtype))


@operator(triton_version=expert_linear_triton, is_compiled=lambda x, weight: weight.dim() == 4 and x.stride(1) == 1)
def expert_linear(
    out: Written[Wide],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pairs: Routed,
    *,
    batch_invariant: bool = False,
) -> None:
    """Write each listed pair's product with the weights of its expert into `out`.

    Args:
        out: [pairs, width], contiguous, of x's dtype, or fp32; pairs that are not listed are not written.
        x: [pairs / slots, in_features], rows may be strided.
        weight: [experts, out_features, in_features], contiguous, out_features being width, or twice that with a gate,
            gate first; or on a CPU the concatenated `expert_panels`.
        bias: [experts, out_features] or None.
        pairs: the pairs to compute.
        batch_invariant: on a GPU, use one tile size, so that a pair's bits do not depend on the number of pairs; on a
            CPU they never do.

    Raises:
        ValueError: unknown gate.
    """
    count, is_gated = len(pairs.offsets) - 1, pairs.gate != "none"

    def expert_weight(expert: int) -> Tensor:
        return _row_major(weight, expert, count, out.shape[1], x.shape[1], is_gated).float()

    write_products(out, x, expert_weight, bias, pairs)


def stacked_panels(panels_of_experts: Iterable[QuantizedPanels | None], count: int) -> QuantizedPanels | None:
    """Join the panels of all experts to those of one weight; None if one has none, or they differ in kind.

    Args:
        panels_of_experts: each expert's panels; dropped before the next are made.
        count: number of experts.
    """
    whole: QuantizedPanels | None = None
    kind = None
    for expert, panels in enumerate(panels_of_experts):
        if panels is None or kind not in (None, _kind(panels)):
            return None
        if whole is None:
            kind = _kind(panels)
            memory: dict[str, Any] = {
                name: tensor.new_empty((count * len(tensor), *tensor.shape[1:]))
                for name, tensor in by_panel(panels).items()
            }
            whole = panels._replace(**memory)
        for name, tensor in by_panel(panels).items():
            getattr(whole, name)[expert * len(tensor) : (expert + 1) * len(tensor)] = tensor
    return whole


def _kind(weight: QuantizedPanels) -> tuple[object, ...]:
    """Return the properties that a product's experts share."""
    table = None if weight.table is None else tuple(weight.table.tolist())
    shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in by_panel(weight).items())
    return (shapes, table, weight.scale_dtype, weight.code)


def _dequantized_expert(weight: QuantizedPanels, expert: int, experts: int, width: int, is_gated: bool) -> Tensor:
    """Return one expert's weight, float32 [out_features, in_features], gate first."""
    parts: dict[str, Any] = {name: tensor.chunk(experts)[expert] for name, tensor in by_panel(weight).items()}
    rows = dequantized_panels(weight._replace(**parts)).unflatten(0, (-1, 1 + is_gated, PANEL))
    return rows.transpose(0, 1).flatten(1, 2)[:, :width].flatten(0, 1)


@operator(is_compiled=lambda x, weight: are_blocks_of(weight, x.shape[1]) and x.stride(1) == 1)
def quantized_expert_linear(
    out: Written[Wide],
    x: Tensor,
    weight: QuantizedPanels,
    columns: Int32 | None,
    bias: Tensor | None,
    pairs: Routed,
    *,
    batch_invariant: bool = False,
) -> None:
    """Write each listed pair's product with the weights of its expert into `out`. Only on a CPU.

    x, bias, pairs and errors are as in `expert_linear`.

    Args:
        out: as in `expert_linear`, too.
        weight: the panels of all experts, from `stacked_panels`.
        columns: [experts, in_features], the input feature of each column of an expert's weight; None: in order.
        batch_invariant: see `quantized_linear`.
    """
    experts, is_gated = len(pairs.offsets) - 1, pairs.gate != "none"

    def expert_weight(expert: int) -> Tensor:
        rows = _dequantized_expert(weight, expert, experts, out.shape[1], is_gated)
        return rows if columns is None else torch.empty_like(rows).index_copy_(1, columns[expert].long(), rows)

    write_products(out, x, expert_weight, bias, pairs)


# One program multiplies BLOCK_M pairs of one expert with BLOCK_N rows of its weight; if gated, half of them are the
# gate's. It reads words and scales once, and its pairs' rows of x, which the L2 cache holds. The grid is that of
# `expert_linear`.
@triton.jit
def tiled_expert_linear_kernel(
    out,
    x,
    weight,
    bias,
    order,
    offsets,
    added,
    experts,
    sizes,
    WEIGHT: tl.constexpr,
    META: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply on the tensor cores."""
    if PDL:
        wait_and_trigger()
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    GATE: tl.constexpr = META.GATE
    width = sizes.width
    HALVES: tl.constexpr = 1 if GATE == "none" else 2
    expert, tile = expert_of_program(offsets, experts, META.BLOCK_E, BLOCK_M)
    if expert >= experts:
        return
    m = tl.load(offsets + expert) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = m < tl.load(offsets + expert + 1)
    pair = tl.load(order + m, mask=row_mask, other=0)
    block = tl.program_id(1)
    row = expert * width * HALVES + block_rows(block, width, BLOCK_N, GATE != "none")
    x_rows = x + (pair // sizes.slots).to(tl.int64)[:, None] * sizes.x_stride + tl.arange(0, WEIGHT.SPAN)[None, :]
    acc, _ = tiled_sums(
        x_rows, None, row_mask[:, None], weight, row, experts * width * HALVES, 0, sizes.columns, sizes.depth, WEIGHT,
        BLOCK_M, BLOCK_N, META.STAGES, 1.0, META.EVEN_K,
    )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    if added is not None:
        beside = (pair.to(tl.int64) - expert)[None, :] * (width * HALVES) + row[:, None]
        acc += tl.load(added + beside, mask=row_mask[None, :], other=0.0)
    n = block * (BLOCK_N // HALVES) + tl.arange(0, BLOCK_N // HALVES)
    if GATE != "none":
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N // 2, BLOCK_M)), (1, 2, 0)))
        acc = gate_times_up(gate, up, sizes.alpha, sizes.limit, GATE)
    out_ptrs = out + pair.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=row_mask[None, :] & (n < width)[:, None])


def tiled_expert_linear_triton(out, x, tiles, bias, pairs, config) -> None:
    """Launch the kernel; see `tiled_expert_linear` for the arguments."""
    (count, width), depth = out.shape, x.shape[1]
    experts = pairs.offsets.shape[0] - 1
    block_m, block_n = config.block_m, config.block_n
    columns, weight = columns_of(tiles), Words.of(tiles)
    most_tiles = count // block_m + min(count, experts)
    blocks = triton.cdiv(width, block_n if pairs.gate == "none" else block_n // 2)
    block_e, is_even = triton.next_power_of_2(experts), depth == columns
    tiled_expert_linear_kernel[(most_tiles, blocks)](
        out, x, weight, bias, pairs.order, pairs.offsets, pairs.added, experts,
        _Sizes(pairs.slots, width, depth, columns, x.stride(0), pairs.alpha, pairs.limit),
        WEIGHT=TileMeta.of(tiles, weight, x),
        META=_Meta(pairs.gate, block_e, block_m, block_n, is_even, config.num_stages),
        num_warps=config.num_warps,
        **early_start_options(out.device),
    )  # fmt: skip


@operator(triton_version=tiled_expert_linear_triton)
def tiled_expert_linear(
    out: Written[Tensor], x: Tensor, tiles: WeightTiles, bias: Tensor | None, pairs: Routed, config: SmallLinearConfig
) -> None:
    """Write each listed pair's product with the weights of its expert into `out`.

    Args:
        out: of x's dtype; otherwise as in `expert_linear`, like x, bias, pairs and errors.
        tiles: all experts' weights, joined by `joined_tiles`.
        config: the sizes of a program's tile; columns are not split.
    """
    weight = dequantized(tiles)[:, : x.shape[1]]
    write_products(out, x, weight.unflatten(0, (len(pairs.offsets) - 1, -1)).__getitem__, bias, pairs)
