"""Linear layers of a few rows on a GPU, `out = x @ weight.T + bias`, at the full bandwidth of the weight.

Two Triton kernels: one multiplies tiles of 16 to 64 rows on the tensor cores, the other one or two rows on the CUDA
cores; configurations may name a third, in CUDA C++ (`skinny_linear`). Both distribute blocks of the weight's rows, and
`splits` parts of its columns, over programs that fill the GPU. The last program of a block to arrive adds the parts in
order: the same inputs give the same bits. The tensor-core kernel
adds in the same order for any number of rows, so that one configuration is batch-invariant. Its sums are [weight rows,
activation rows]: the weight is the tensor cores' first operand (64 rows at a time on sm_90), the activations are the
second, which may be narrow.

The launch can include RMSNorm of the activations, and after the product the gate of an MLP or the sum with the
residual. With an early start (`optional_triton`) a program prefetches its part of the weight before it waits for the
activations.

RMSNorm needs no further pass over the activations. Its factor, 1 / rms(x), is the same for a whole row and is applied
to the sum, `sum(x g w) / rms(x)`; squares and products are summed together. For more than 16 rows a separate launch
may be better, since each program does the arithmetic of all rows. The gain multiplies the activations: folded into the
weight on load, it would round the weights again. It costs 4 bytes per column from the L2 cache.
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from ..cuda.nvrtc import say, unavailable_reason, unknown_reason
from ..model.act_mul import ACTIVATIONS, activated, gated
from ..native.optional_triton import prefetch, tl, triton, wait_and_trigger
from ..native.registration import Float32, OneOf, Written, operator
from ..norm.rms_norm import normed, rms_norm
from .linear import torch_product
from .skinny_linear import MOST_ROWS as SKINNY_ROWS
from .skinny_linear import ProductArguments, SkinnyConfig, skinny_configs, step_of, unsupported_reason
from .weight_tiles import TileLayout, WeightTiles
from .wide_linear import MOST_ROWS as WIDE_ROWS
from .wide_linear import WARP_ROWS as WIDE_WARP_ROWS
from .wide_linear import GpuLimits, WideConfig, launch_product, most_rows, wide_configs
from .wide_linear import unsupported_reason as wide_unsupported_reason

MOST_ROWS = 64  # with more rows, cuBLAS is faster
TILE_ROWS = 16  # activation rows of the smallest tensor-core tile
GEMV_ROWS = 2  # most rows of the CUDA-core kernel: with more, arithmetic takes longer than reading
# (block_n, block_k, num_warps, num_stages) by the bytes of a weight and the rows of an activation tile: they fit all
# GPUs from sm_80 on, and do not spill. The tensor cores of sm_90 take 64 weight rows at a time
DOT_TILES: dict[int, dict[int, tuple[tuple[int, int, int, int], ...]]] = {
    2: {
        16: ((64, 64, 4, 6), (128, 64, 4, 4), (32, 128, 4, 5)),
        32: ((64, 64, 4, 5), (128, 64, 4, 4)),
        64: ((128, 64, 8, 3), (64, 64, 8, 4)),
    },
    4: {16: ((32, 32, 4, 4), (64, 32, 8, 3))},
}
GEMV_TILES = {
    2: ((8, 512, 4, 3), (16, 256, 8, 4)),
    4: ((4, 512, 8, 3), (16, 128, 8, 3)),
}
_LEAST_NORMED_ROWS = 16  # of the weight: each program reads x and the gain, 6 bytes per 2 bytes of a weight row
# (block_n, num_warps) for quantized weights by the rows of an activation tile, without and with a norm before the
# product, which each block computes; the columns follow from the weight's kind
TILED_TILES = {8: ((32, 2), (128, 8)), 16: ((64, 4), (128, 8)), 32: ((128, 8),) * 2, 64: ((128, 8),) * 2}
_ROWS_UNDER_PRESSURE = 32  # rows of a tile if sums of activations, or scales of many groups, also need registers
_SMALL_GROUP = 32
_SUM_COLUMNS = 512  # columns of tensor memory (compute capability 10), 128 lanes wide
TILED_STAGES = 3  # steps in flight; two if registers are short
_FIXED_PROGRAMS = 256  # two for each multiprocessor of a large GPU
_WARPS_AT_WORK = 12  # warps per multiprocessor that splits of a quantized weight aim at
_WAVES = (1, 2, 4)  # programs per multiprocessor that splits aim at


class SmallLinearConfig(NamedTuple):
    """Launch configuration of one product shape."""

    # "dot" (tensor cores, any number of rows in tiles), "gemv" (CUDA cores, one or two rows), or "skinny" (CUDA C++)
    kind: str
    block_n: int  # weight rows per program
    block_k: int  # weight columns read at a time
    splits: int  # parts of the columns
    num_warps: int  # warps per program
    num_stages: int  # weight tiles in flight
    pdl: bool = False  # whether it starts before the previous kernel ends (sm_90 and later)
    block_m: int = TILE_ROWS  # activation rows of a tensor-core tile
    prefetch: bool = True  # with pdl, whether it prefetches some of the weight before it waits
    separate_norm: bool = False  # whether a norm before it is a separate launch

    def __str__(self) -> str:
        rows = f" of {self.block_m} rows" if self.block_m > TILE_ROWS else ""
        tail = (", early start" if self.prefetch else ", early start without prefetch") if self.pdl else ""
        tail += ", normed apart" if self.separate_norm else ""
        return (
            f"{self.kind} {self.block_n}x{self.block_k}{rows}, {self.splits} splits, {self.num_warps} warps, "
            f"{self.num_stages} stages{tail}"
        )

    def counters(self, rows: int, out_features: int) -> int:
        """Return the number of counters of a product: one per row tile and weight block, none without a split."""
        return -(-rows // self.block_m) * -(-out_features // self.block_n) if self.has_parts else 0

    @property
    def has_parts(self) -> bool:
        """Whether splits write partial sums to memory; in CUDA C++ they are blocks of a cluster."""
        return self.splits > 1 and self.kind != "skinny"

    @property
    def skinny(self) -> SkinnyConfig | WideConfig:
        """The configuration of the CUDA C++ kernel: that of up to 8 rows, or of more."""
        if self.block_m <= SKINNY_ROWS:
            return SkinnyConfig(self.num_warps, self.block_n // SKINNY_ROWS, self.num_stages, self.pdl)
        row_warps = self.block_n // WIDE_WARP_ROWS
        return WideConfig(row_warps, self.num_warps // row_warps, self.splits, self.num_stages, self.block_k, self.pdl)


def skinny_candidates(x: Tensor, weight: Tensor | WeightTiles, pdl: bool) -> list[SmallLinearConfig]:
    """Return the configurations of the CUDA C++ kernels, the likeliest first; none if they do not take the operands."""
    if not x.is_cuda:
        return []
    if missing := unavailable_reason() or unknown_reason(torch.cuda.get_device_capability(x.device)):
        say(f"Triton's kernels serve without those in CUDA C++: {missing}")
        return []
    rows = x.shape[0]
    if (unsupported_reason if rows <= SKINNY_ROWS else wide_unsupported_reason)(x, weight) is not None:
        return []
    if rows > SKINNY_ROWS:
        return [
            SmallLinearConfig(
                "skinny", WIDE_WARP_ROWS * each.row_warps, each.chunk, each.splits, each.row_warps * each.column_warps,
                each.ahead, pdl, most_rows(rows),
            )
            for each in wide_configs(weight, rows, pdl, GpuLimits.of(x.device))
        ]  # fmt: skip
    return [
        SmallLinearConfig("skinny", SKINNY_ROWS * tiles, step_of(weight), 1, warps, ahead, early, SKINNY_ROWS)
        for warps, tiles, ahead, early in skinny_configs(weight, rows, pdl)
    ]


def _split(in_features: int, block_k: int, blocks: int, programs: int) -> int:
    return min(max(round(programs / blocks), 1), -(-in_features // block_k))


def candidates(
    out_features: int, in_features: int, itemsize: int, rows: int, units: int, is_normed: bool = False
) -> list[SmallLinearConfig]:
    """Return the configurations that may be fastest; none for more activation rows than the tiles have.

    Each has programs for at least seven of eight multiprocessors (`units`), if any does. `itemsize`: of the weight;
    `is_normed`: whether a norm comes before the product.
    """
    of_rows = DOT_TILES[itemsize]
    if rows > max(of_rows):
        return []
    # tiles with fewer rows than needed read the weight several times, from the L2 cache, and make more programs
    widest = next(most for most in of_rows if rows <= most)
    tiles = [("dot", most, *tile) for most in sorted(of_rows, reverse=True) if most <= widest for tile in of_rows[most]]
    if rows <= GEMV_ROWS:
        least = _LEAST_NORMED_ROWS if is_normed else 1
        tiles += [("gemv", TILE_ROWS, *tile) for tile in GEMV_TILES[itemsize] if tile[0] >= least]
    programs_of: dict[SmallLinearConfig, int] = {}  # -> programs
    for kind, block_m, block_n, block_k, num_warps, num_stages in tiles:
        blocks = -(-out_features // block_n) * -(-rows // block_m)
        for splits in (1, *(_split(in_features, block_k, blocks, waves * units) for waves in _WAVES)):
            config = SmallLinearConfig(kind, block_n, block_k, splits, num_warps, num_stages, block_m=block_m)
            programs_of[config._replace(separate_norm=is_normed and block_m > TILE_ROWS)] = blocks * splits
    return [config for config, programs in programs_of.items() if 8 * programs >= 7 * units] or list(programs_of)


def fixed_config(out_features: int, in_features: int, itemsize: int, pdl: bool = False) -> SmallLinearConfig:
    """Return one configuration for any number of rows, from the weight's shape and itemsize alone.

    A row's result then has the same bits in any batch, on any GPU of the same kind. See `candidates`.
    """
    block_n, block_k, num_warps, num_stages = DOT_TILES[itemsize][TILE_ROWS][0]
    splits = _split(in_features, block_k, -(-out_features // block_n), _FIXED_PROGRAMS)
    return SmallLinearConfig("dot", block_n, block_k, splits, num_warps, num_stages, pdl)


def tiled_config(
    rows: int | None,
    out_features: int,
    columns: int,
    layout: TileLayout,
    units: int,
    pdl: bool = False,
    is_normed: bool = False,
    major: int = 9,
) -> SmallLinearConfig:
    """Return the configuration of a product with a quantized weight; see `tiled_linear`.

    Args:
        rows: activation rows; None: one configuration for any number of rows, on any GPU of the same kind.
        out_features, layout, is_normed: of the weight and the product, as for `candidates`.
        columns: weight columns, in whole steps.
        units: multiprocessors of the GPU.
        pdl: whether the GPU lets kernels begin early.
        major: major compute capability. On 10, tensor memory holds the sums of all groups of a step; a kernel that
            needs more cannot be launched. On 12 the compiler spills if groups are small and rows many.
    """
    is_tight = layout.has_totals or (major == 12 and layout.group == _SMALL_GROUP)
    most_rows = _ROWS_UNDER_PRESSURE if is_tight else max(TILED_TILES)
    if major == 10:
        groups = layout.step // layout.group if layout.group else 1
        columns_of_row = groups * (1 + layout.has_totals) + 2  # and those of the previous step, scaled and unscaled
        most_rows = max(most for most in TILED_TILES if most <= min(most_rows, _SUM_COLUMNS // columns_of_row))
    block_m = TILE_ROWS if rows is None else next((most for most in TILED_TILES if rows <= most), most_rows)
    block_m = min(block_m, most_rows)
    block_n, num_warps = TILED_TILES[block_m][is_normed]
    blocks = -(-out_features // block_n) * (1 if rows is None else -(-rows // block_m))
    programs = _FIXED_PROGRAMS if rows is None else units * _WARPS_AT_WORK // num_warps
    splits = _split(columns, layout.step, blocks, programs)
    has_five_parts = layout.has_totals and layout.code == "u5"  # words, high bits, a scale, a least value, a sum
    num_stages = TILED_STAGES - (block_m == 64 or (block_m == 8 and has_five_parts))
    return SmallLinearConfig("dot", block_n, layout.step, splits, num_warps, num_stages, pdl, block_m)


class ProductSizes(NamedTuple):
    """Features, columns of x, its stride, columns of a part, factors, and the number of programs that prefetch.

    For quantized weights also rows, columns with padding, and the stride of the result.
    """

    width: int
    depth: int
    x_stride: int
    part: int
    eps: float
    factor: float
    prefetchers: int = 0
    weight_rows: int = 0
    columns: int = 0
    out_stride: int = 0


class ProductMeta(NamedTuple):
    """Constants of a product's kernel; see `small_linear`.

    AHEAD: what a program prefetches: cache lines per row, or tiles.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    EVEN_K: bool
    SPLIT: bool
    IN_FLIGHT: int
    EPILOGUE: str
    RANGE: float
    STAGES: int = 1
    AHEAD: int = 0


@triton.jit
def block_rows(block, width, BLOCK_N: tl.constexpr, IS_GATED: tl.constexpr, STEP: tl.constexpr = 1):
    """Return the weight rows of a block; a gated one has rows of the gate, then the corresponding rows of `up`.

    Only the first of each STEP adjacent rows. Past the weight, its last row is read again, which needs no mask.
    """
    lane = tl.arange(0, BLOCK_N // STEP) * STEP
    if IS_GATED:
        half = BLOCK_N // 2
        return tl.minimum(block * half + lane % half, width - 1) + lane // half * width
    return tl.minimum(block * BLOCK_N + lane, width - 1)


@triton.jit
def should_prefetch(prefetchers):
    """Whether a tensor-core program prefetches its part of the weight: the first programs, once for all of x."""
    return (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1) < prefetchers) & (tl.program_id(0) == 0)


@triton.jit
def _prefetch_rows(rows, begin, end, LINES: tl.constexpr):
    """Prefetch the first cache lines of columns [begin, end) of weight rows."""
    at = begin + tl.arange(0, LINES) * (1024 // rows.dtype.element_ty.primitive_bitwidth)
    prefetch(rows[:, None] + at[None, :], (at < end)[None, :])


@triton.jit
def _write(out, acc, old, m, rows, block, out_stride, sizes, META: tl.constexpr):
    """Write a block's sums [BLOCK_N, BLOCK_M] to the result."""
    BLOCK_N: tl.constexpr = META.BLOCK_N
    EPILOGUE: tl.constexpr = META.EPILOGUE
    if EPILOGUE == "store" or EPILOGUE == "add":
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if EPILOGUE == "add":
            acc = old + sizes.factor * acc
    else:
        pairs = tl.permute(tl.reshape(acc, (2, BLOCK_N // 2, META.BLOCK_M)), (1, 2, 0))
        gate, up = tl.split(pairs)
        acc = activated(gate, EPILOGUE) * up
        n = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    mask = (n < sizes.width)[:, None] & (m < rows)[None, :]
    offsets = m[None, :] * out_stride + n[:, None]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def old_values(out, m, rows, block, width, out_stride, BLOCK_N: tl.constexpr):
    """Return the values that a block's result is added to."""
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = m[None, :] * out_stride + n[:, None]
    return tl.load(out + offsets, mask=(n < width)[:, None] & (m < rows)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _sums(acc, squares, offsets, sizes, META: tl.constexpr, IS_NORMED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the final products [BLOCK_N, BLOCK_M] of whole sums."""
    if IS_NORMED:
        acc *= (1.0 / META.RANGE / tl.sqrt(squares / sizes.depth + sizes.eps))[None, :]
    if HAS_BIAS:
        acc += offsets[:, None]
    return acc


@triton.jit
def finish(
    out,
    partial,
    counters,
    acc,
    squares,
    offsets,
    old,
    m,
    rows,
    block,
    blocks,
    out_stride,
    splits,
    sizes,
    META: tl.constexpr,
    IS_NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Write a program's sums; if the columns are split, the last program to arrive adds the parts."""
    BLOCK_N: tl.constexpr = META.BLOCK_N
    IN_FLIGHT: tl.constexpr = META.IN_FLIGHT
    if META.SPLIT:
        across = blocks * (BLOCK_N + 1)
        plane = tl.cast(rows, tl.int64) * across
        m_rows = m * across
        element_offsets = m_rows[None, :] + (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        program_partial = partial + tl.program_id(2) * plane
        tl.store(program_partial + element_offsets, acc, mask=(m < rows)[None, :], cache_modifier=".cg")
        if IS_NORMED:
            tl.store(program_partial + m_rows + blocks * BLOCK_N + block, squares, mask=m < rows, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have stored before the counter is incremented
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            if META.EPILOGUE == "add":
                old = old_values(out, m, rows, block, sizes.width, out_stride, BLOCK_N)
            total = tl.zeros_like(acc)
            total_squares = tl.zeros_like(squares)
            for first in range(0, splits, IN_FLIGHT):
                for near in tl.static_range(IN_FLIGHT):  # all loads are in flight before the first is added
                    split = first + near
                    row_mask = m < tl.where(split < splits, rows, 0)
                    part = partial + split * plane
                    total += tl.load(part + element_offsets, mask=row_mask[None, :], other=0.0, cache_modifier=".cg")
                    if IS_NORMED:
                        at = part + m_rows + blocks * BLOCK_N + block
                        total_squares += tl.load(at, mask=row_mask, other=0.0, cache_modifier=".cg")
            total = _sums(total, total_squares, offsets, sizes, META, IS_NORMED, HAS_BIAS)
            _write(out, total, old, m, rows, block, out_stride, sizes, META)
            tl.store(counter, 0)  # ready for the next product
    else:
        acc = _sums(acc, squares, offsets, sizes, META, IS_NORMED, HAS_BIAS)
        _write(out, acc, old, m, rows, block, out_stride, sizes, META)


@triton.jit
def _load_row(x, row, x_stride, k, end, EVEN_K: tl.constexpr):
    """Return columns k of one row of x, fp32 [columns]."""
    at = x + row * x_stride + k
    if EVEN_K:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=k < end, other=0.0).to(tl.float32)


@triton.jit
def activations(x_rows, gain, squares, row_mask, k, depth, RANGE: tl.constexpr, EVEN_K: tl.constexpr):
    """Return columns k of rows of x, times the gain if any, and the updated sums of squares."""
    if EVEN_K:
        a = tl.load(x_rows, mask=row_mask, other=0.0)
    else:
        a = tl.load(x_rows, mask=row_mask & (k < depth)[None, :], other=0.0)
    if gain is not None:
        wide = a.to(tl.float32)
        squares += wide * wide
        g = _load_row(gain, 0, 0, k, depth, EVEN_K)
        a = (wide * (g * RANGE)[None, :]).to(a.dtype)
    return a, squares


# One program multiplies block_m rows with block_n rows of the weight, over one part of the columns: it reads
# block_n * depth / splits values of the weight once, and as many columns of x, which the L2 cache holds.
@triton.jit(do_not_specialize=["rows", "splits"])  # one code for any rows: bits must not depend on their number
def dot_linear_kernel(
    out, x, weight, bias, gain, partial, counters, rows, splits, sizes,
    META: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply on the tensor cores."""
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    BLOCK_K: tl.constexpr = META.BLOCK_K
    width, depth = sizes.width, sizes.depth
    block = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.program_id(2) * sizes.part
    end = tl.minimum(begin + sizes.part, depth)
    k = tl.arange(0, BLOCK_K)
    row = block_rows(block, width, BLOCK_N, META.EPILOGUE != "store" and META.EPILOGUE != "add")
    w_begin = weight + row.to(tl.int64) * depth
    if META.AHEAD > 0 and should_prefetch(sizes.prefetchers):
        _prefetch_rows(w_begin, begin, end, META.AHEAD)
    offsets = tl.zeros([BLOCK_N], tl.float32)
    if bias is not None:
        offsets += tl.load(bias + row).to(tl.float32)
    if PDL:
        wait_and_trigger()
    row_mask = (m < rows)[:, None]
    x_rows = x + m.to(tl.int64)[:, None] * sizes.x_stride + k[None, :]
    w_rows = w_begin[:, None] + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    old = acc
    if META.EPILOGUE == "add" and not META.SPLIT:  # in flight while the weight is read
        old = old_values(out, m, rows, block, width, width, BLOCK_N)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for at in range(begin, end, BLOCK_K):
        if META.EVEN_K:
            w = tl.load(w_rows + at, eviction_policy="evict_first")
        else:
            w = tl.load(w_rows + at, mask=(at + k < end)[None, :], other=0.0, eviction_policy="evict_first")
        a, squares = activations(x_rows + at, gain, squares, row_mask, at + k, end, META.RANGE, META.EVEN_K)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    finish(
        out, partial, counters, acc, tl.sum(squares, axis=1), offsets, old, m, rows, block, tl.num_programs(1), width,
        splits, sizes, META, gain is not None, bias is not None,
    )  # fmt: skip


# One program multiplies one or two rows with block_n rows of the weight, over one part of the columns. Each thread
# keeps its own sums until the end. It reads block_n * depth / splits values of the weight once.
@triton.jit(do_not_specialize=["splits"])
def gemv_linear_kernel(
    out, x, weight, bias, gain, partial, counters, splits, sizes,
    META: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply on the CUDA cores."""
    ROWS: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    BLOCK_K: tl.constexpr = META.BLOCK_K
    width, depth, x_stride = sizes.width, sizes.depth, sizes.x_stride
    block = tl.program_id(0)
    begin = tl.program_id(2) * sizes.part
    end = tl.minimum(begin + sizes.part, depth)
    k = tl.arange(0, BLOCK_K)
    row = block_rows(block, width, BLOCK_N, META.EPILOGUE != "store" and META.EPILOGUE != "add")
    w_begin = weight + row.to(tl.int64) * depth
    if META.AHEAD > 0 and block + tl.program_id(2) * tl.num_programs(0) < sizes.prefetchers:
        _prefetch_rows(w_begin, begin, end, META.AHEAD)
    offsets = tl.zeros([BLOCK_N], tl.float32)
    if bias is not None:
        offsets += tl.load(bias + row).to(tl.float32)
    if PDL:
        wait_and_trigger()
    m = tl.arange(0, ROWS)
    old = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if META.EPILOGUE == "add" and not META.SPLIT:  # in flight while the weight is read
        old = old_values(out, m, ROWS, block, width, width, BLOCK_N)
    w_rows = w_begin[:, None] + k[None, :]
    sums_0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sums_1 = sums_0
    squares_0 = tl.zeros([BLOCK_K], tl.float32)
    squares_1 = squares_0
    for at in tl.range(begin, end, BLOCK_K, num_stages=META.STAGES):
        if META.EVEN_K:
            w = tl.load(w_rows + at, eviction_policy="evict_first").to(tl.float32)
        else:
            inside = (at + k < end)[None, :]
            w = tl.load(w_rows + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x_0 = _load_row(x, 0, x_stride, at + k, end, META.EVEN_K)
        if ROWS > 1:
            x_1 = _load_row(x, 1, x_stride, at + k, end, META.EVEN_K)
        if gain is not None:
            g = _load_row(gain, 0, 0, at + k, end, META.EVEN_K)
            squares_0 += x_0 * x_0
            x_0 *= g
            if ROWS > 1:
                squares_1 += x_1 * x_1
                x_1 *= g
        sums_0 += w * x_0[None, :]
        if ROWS > 1:
            sums_1 += w * x_1[None, :]
    acc = tl.sum(sums_0, axis=1)[:, None]
    squares = tl.sum(squares_0, axis=0) + tl.zeros([ROWS], tl.float32)
    if ROWS > 1:
        acc = tl.where((m == 0)[None, :], acc, tl.sum(sums_1, axis=1)[:, None])
        squares = tl.where(m == 0, squares, tl.sum(squares_1, axis=0))
    finish(
        out, partial, counters, acc, squares, offsets, old, m, ROWS, block, tl.num_programs(0), width, splits, sizes,
        META, gain is not None, bias is not None,
    )  # fmt: skip


KINDS = ("dot", "gemv", "skinny")
EPILOGUES = OneOf(("store", "add", *ACTIVATIONS))
PREFETCH_BYTES = 64 << 10  # per program: two per multiprocessor then prefetch 4 us of reading at 4 TB/s
PREFETCH_BYTES_IN_ALL = 24 << 20  # per launch: half of an L2 cache of 50 MB
LINE_BYTES = 128
_PARTS_IN_FLIGHT = 8  # partial sums in flight, limited by registers:
_PART_REGISTERS = 32  # per thread
FP16_RANGE = 1 / 16  # multiplies gains whose products could leave the range of fp16


def parts_in_flight(sums: int, num_warps: int) -> int:
    """Return how many partial sums are loaded at a time if columns are split."""
    return min(max(32 * num_warps * _PART_REGISTERS // sums, 1), _PARTS_IN_FLIGHT)


def lines_ahead(block_n: int, row_bytes: int, num_warps: int) -> tuple[int, int]:
    """Return how many cache lines of each row a program prefetches, and how many programs do.

    A program reads `row_bytes` of each of `block_n` weight rows. One with fewer lines than threads prefetches none:
    several threads would request each.
    """
    lines = min(row_bytes, PREFETCH_BYTES // block_n) // LINE_BYTES
    lines = 1 << lines.bit_length() - 1 if lines else 0
    if block_n * lines < 32 * num_warps:
        return 0, 0
    return lines, PREFETCH_BYTES_IN_ALL // (block_n * lines * LINE_BYTES)


def small_linear_triton(out, x, weight, bias, gain, partial, counters, eps, epilogue, scale, config) -> None:
    """Launch the kernel; see `small_linear` for the arguments."""
    if config.kind == "skinny":
        launch_product(out, x, weight, ProductArguments(bias, gain, eps, epilogue, scale), config.skinny)
        return
    rows, depth = x.shape
    kind, block_n, block_k, splits, num_warps, num_stages, pdl, block_m, *_ = config
    width = out.shape[1]
    part = triton.cdiv(triton.cdiv(depth, block_k), splits) * block_k
    splits = triton.cdiv(depth, part)  # no part is empty
    is_even, is_dot = depth % block_k == 0, kind == "dot"
    tile_rows = block_m if is_dot else rows
    prefetches = pdl and is_even and config.prefetch
    ahead, prefetchers = lines_ahead(block_n, part * weight.element_size(), num_warps) if prefetches else (0, 0)
    sizes = ProductSizes(width, depth, x.stride(0), part, eps, scale, prefetchers)
    meta = ProductMeta(
        BLOCK_M=tile_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=is_even,
        SPLIT=splits > 1,
        IN_FLIGHT=parts_in_flight(block_n * tile_rows, num_warps),
        EPILOGUE=epilogue,
        RANGE=FP16_RANGE if is_dot and x.dtype == torch.float16 else 1.0,
        STAGES=1 if is_dot else num_stages,
        AHEAD=ahead,
    )
    options: dict[str, Any] = {"PDL": pdl, "num_warps": num_warps}
    if pdl:
        options["launch_pdl"] = True
    operands = (out, x, weight, bias, gain, partial, counters)
    blocks = triton.cdiv(weight.shape[0], block_n)
    if is_dot:
        dot_linear_kernel[(triton.cdiv(rows, block_m), blocks, splits)](
            *operands, rows, splits, sizes, META=meta, num_stages=num_stages, **options
        )
    else:  # a vocabulary has more than 65,535 narrow blocks
        gemv_linear_kernel[(blocks, 1, splits)](*operands, splits, sizes, META=meta, **options)


@operator(triton_version=small_linear_triton)
def _small_linear(
    out: Written[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Float32 | None,
    partial: Written[Tensor] | None,
    counters: Written[Tensor] | None,
    eps: float,
    epilogue: Annotated[str, EPILOGUES],
    scale: float,
    config: SmallLinearConfig,
) -> None:
    """Compute with torch operators; the configuration is not used. See `small_linear`."""
    normed_x = x if gain is None else normed(x, gain, eps).to(x.dtype)
    if epilogue == "store":
        torch_product(out, normed_x, weight, bias)
        return
    product = torch.empty((x.shape[0], weight.shape[0]), dtype=out.dtype, device=out.device)
    torch_product(product, normed_x, weight, bias)
    write_epilogue(out, product, epilogue, scale)


def write_epilogue(out: Tensor, product: Tensor, epilogue: str, scale: float) -> None:
    """Apply an epilogue to a product and write it to `out`, with torch operators."""
    if epilogue == "add":
        out.copy_(out.float().add_(product, alpha=scale))
    else:
        gated(out, product, epilogue)


def small_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor | None,
    config: SmallLinearConfig,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    epilogue: str = "store",
    scale: float = 1.0,
) -> None:
    """Write `x @ weight.T + bias`, with an epilogue, into `out`; sums are fp32.

    Args:
        out: [rows, out_features], contiguous; half as many columns for a gate.
        x: [rows, in_features], fp32, fp16 or bf16; rows may be strided.
        weight: [out_features, in_features], of the same dtype, contiguous; no kernel in flight may write it.
        bias: [out_features] or None, like the weight.
        counters: int32, at least `config.counters(rows, out_features)`, all 0, and 0 again afterwards; consecutive
            products share them. None if the configuration has one split.
        config: the launch configuration.
        gain: fp32 [in_features], of RMSNorm before the product; None: no norm.
        eps: added to the mean square.
        epilogue: "store"; "add": `out += scale * product`; or an activation of `act_mul`: `activation(gate) * up`, the
            gate being the first half of the product.
        scale: factor of "add".

    Raises:
        ValueError: too many rows for the kind, too few counters, or an unknown epilogue.
    """
    rows, out_features = out.shape[0], weight.shape[0]
    if config.kind not in KINDS:
        raise ValueError(f"config.kind is {config.kind!r}; it must be one of {', '.join(KINDS)}")
    if config.kind == "gemv" and rows > GEMV_ROWS:
        raise ValueError(f"x has {rows} rows; the gemv kernel takes 1..{GEMV_ROWS}")
    skinny_rows = SKINNY_ROWS if config.block_m <= SKINNY_ROWS else WIDE_ROWS
    if config.kind == "skinny" and rows > skinny_rows:
        raise ValueError(f"x has {rows} rows; the skinny kernel takes 1..{skinny_rows}")
    if gain is not None and config.separate_norm:
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rms_norm(normed, x, gain, eps)
        x, gain = normed, None
    partial = partial_sums(config, x, out_features, counters)
    _small_linear(out, x, weight, bias, gain, partial, counters, eps, epilogue, scale, config)


def partial_sums(config: SmallLinearConfig, x: Tensor, out_features: int, counters: Tensor | None) -> Tensor | None:
    """Return memory for the splits' partial sums, fp32 [splits, rows, columns]; None for one split.

    Raises:
        ValueError: too few counters.
    """
    needed = config.counters(x.shape[0], out_features)
    if needed > (0 if counters is None else counters.numel()):
        raise ValueError(f"counters holds {0 if counters is None else counters.numel()}; {needed} are needed")
    if not config.has_parts:
        return None
    columns = -(-out_features // config.block_n) * (config.block_n + 1)  # plus one per block: the sum of squares
    return torch.empty((config.splits, x.shape[0], columns), dtype=torch.float32, device=x.device)
