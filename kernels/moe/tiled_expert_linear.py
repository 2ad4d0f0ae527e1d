"""The products of experts with their rows on a GPU, over weights of few bits in tiles, which are undone in registers.

What it computes is that of `expert_linear`; codes are undone and sums scaled as `tiled_linear` does. The rows of all
experts are those of one weight in tiles, one expert after another, with a gate its rows before those of `up`.

The kernel has been run in Triton's interpreter and compiled ahead of time by the tests.
"""

from typing import Annotated, NamedTuple

from torch import Tensor

from ..linear.small_linear_config import SmallLinearConfig
from ..linear.small_linear_kernels import block_rows
from ..linear.tiled_linear import TileForm, Words
from ..linear.tiled_linear_kernels import tiled_sums
from ..linear.weight_tiles import WeightTiles, columns_of, dequantised
from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, Written
from .expert_linear import GATES, expert_of_program, gate_times_up, write_products


class _Sizes(NamedTuple):
    """Of a product: features, columns with and without padding, stride, and what the gate takes."""

    width: int
    depth: int
    columns: int
    x_stride: int
    alpha: float
    limit: float


class _Form(NamedTuple):
    """How a product is dealt out, and its gate."""

    GATE: str
    BLOCK_E: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    EVEN_K: bool


# One program multiplies BLOCK_M pairs of one expert with BLOCK_N rows of its weight, with a gate half of them the
# gate's. It reads their words and scales once, and its pairs' rows of x, which the L2 cache holds. The grid is that of
# `expert_linear`.
@triton.jit
def tiled_expert_linear_kernel(
    out,
    x,
    weight,
    bias,
    order,
    offsets,
    experts,
    slots,
    sizes,
    WEIGHT: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply on the tensor cores."""
    if PDL:
        wait_and_trigger()
    BLOCK_M: tl.constexpr = FORM.BLOCK_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    GATE: tl.constexpr = FORM.GATE
    width = sizes.width
    HALVES: tl.constexpr = 1 if GATE == "none" else 2
    expert, tile = expert_of_program(offsets, experts, FORM.BLOCK_E, BLOCK_M)
    if expert >= experts:
        return
    m = tl.load(offsets + expert) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = m < tl.load(offsets + expert + 1)
    pair = tl.load(order + m, mask=there, other=0)
    block = tl.program_id(1)
    row = expert * width * HALVES + block_rows(block, width, BLOCK_N, GATE != "none")
    x_rows = x + (pair // slots).to(tl.int64)[:, None] * sizes.x_stride + tl.arange(0, WEIGHT.SPAN)[None, :]
    acc, _ = tiled_sums(
        x_rows, None, there[:, None], weight, row, experts * width * HALVES, 0, sizes.columns, sizes.depth, WEIGHT,
        BLOCK_M, BLOCK_N, FORM.STAGES, 1.0, FORM.EVEN_K,
    )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    n = block * (BLOCK_N // HALVES) + tl.arange(0, BLOCK_N // HALVES)
    if GATE != "none":
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N // 2, BLOCK_M)), (1, 2, 0)))
        acc = gate_times_up(gate, up, sizes.alpha, sizes.limit, GATE)
    place = out + pair.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=there[None, :] & (n < width)[:, None])


def tiled_expert_linear_triton(
    out: Tensor,
    x: Tensor,
    tiles: WeightTiles,
    bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    slots: int,
    gate: str,
    alpha: float,
    limit: float,
    config: SmallLinearConfig,
) -> None:
    """Launch the kernel; see `tiled_expert_linear` for the arguments."""
    (pairs, width), depth = out.shape, x.shape[1]
    experts = offsets.shape[0] - 1
    block_m, block_n = config.block_m, config.block_n
    columns, weight = columns_of(tiles), Words.of(tiles)
    most_tiles = pairs // block_m + min(pairs, experts)
    blocks = triton.cdiv(width, block_n if gate == "none" else block_n // 2)
    tiled_expert_linear_kernel[(most_tiles, blocks)](
        out, x, weight, bias, order, offsets, experts, slots,
        _Sizes(width, depth, columns, x.stride(0), alpha, limit),
        WEIGHT=TileForm.of(tiles, weight, x),
        FORM=_Form(gate, triton.next_power_of_2(experts), block_m, block_n, config.num_stages, depth == columns),
        num_warps=config.num_warps,
        **early_start_options(out.device),
    )  # fmt: skip


@operator(triton_version=tiled_expert_linear_triton)
def _tiled_expert_linear(
    out: Written[Tensor],
    x: Tensor,
    tiles: WeightTiles,
    bias: Tensor | None,
    order: Int32,
    offsets: Int32,
    slots: int,
    gate: Annotated[str, GATES],
    alpha: float,
    limit: float,
    config: SmallLinearConfig,
) -> None:
    """Compute with torch's own operators, which need none of the configuration; see `tiled_expert_linear`."""
    weight = dequantised(tiles)[:, : x.shape[1]]
    own = weight.unflatten(0, (len(offsets) - 1, -1)).__getitem__
    write_products(out, x, own, bias, order, offsets, slots=slots, gate=gate, alpha=alpha, limit=limit)


def tiled_expert_linear(
    out: Tensor,
    x: Tensor,
    tiles: WeightTiles,
    bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    config: SmallLinearConfig,
    *,
    slots: int,
    gate: str = "none",
    alpha: float = 1.0,
    limit: float = 0.0,
) -> None:
    """Write each listed pair's product with the weights of its expert into `out`.

    Args:
        out: [pairs, width], contiguous; pairs that are not listed are left alone.
        x: [pairs / slots, in_features], fp32, fp16 or bf16; rows may be strided.
        tiles: the rows of all experts' weights, as `joined_tiles` joins them.
        bias: [experts, out_features] or None.
        order: int32 [pairs], the pairs by expert, as `moe_route` wrote them.
        offsets: int32 [experts + 1], where each expert's pairs begin.
        config: the sizes of a program's tile; columns are not split.
        slots: pairs that share a row of x.
        gate: one of `GATES`; "none": the plain product.
        alpha: of `swiglu_clamped`.
        limit: of `swiglu_clamped`.

    Raises:
        ValueError: the gate is not known.
    """
    _tiled_expert_linear(out, x, tiles, bias, order, offsets, slots, gate, alpha, limit, config)
