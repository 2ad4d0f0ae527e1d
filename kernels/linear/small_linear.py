"""Linear layers of a few rows on a GPU, `out = x @ weight.T + bias`, made to read the weight at full bandwidth.

Two kernels: one multiplies tiles of 16 to 64 rows on the tensor cores, the other one or two
rows on the CUDA cores. Both deal the weight's rows to programs in blocks, and its columns in `splits` parts, so that
there is work for the whole chip; the last program of a block to arrive adds the parts up, in their order. Nothing
depends on who that is: the same inputs give the same bits. The tensor-core kernel adds up a row in the same order
whatever stands in the other rows and however many there are, so that one configuration is batch-invariant.

What stands before and behind the product in a layer can be part of the same launch: RMSNorm of the activations, and
behind the product the gate of an MLP, or the sum with the residual.

With an early start (`optional_triton`) a program asks for its part of the weight before it waits for the activations.

The kernels have been run in Triton's interpreter and compiled ahead of time by the tests.

A program multiplies a tile of the activations' rows with a block of the weight's rows over one part of its columns. It
keeps its sums as [rows of the weight, rows of the activations]: the weight is the tensor cores' first operand, of which
they take 64 rows at a time on sm_90, and a few activations are the second, which may be as narrow as they are.

RMSNorm before the product costs no launch and no second look at the activations. Its factor, 1 / rms(x), is the same
for a whole row and leaves the sum: `sum(x g w) / rms(x)`, so squares and products are added up side by side. More than
16 rows may better be normed once, by a launch of their own: each program does the arithmetic of all rows.

The gain multiplies the activations, and is not folded into the weight at load: rounded again, weights are the same only
where all gains are powers of two, which trained ones are not. It costs 4 bytes a column from the L2 cache, an eighth of
the 16-bit weights of a block of 16 rows, and nothing where rows are normed once.
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from ..model.act_mul import ACTIVATIONS, activated, gated
from ..native.optional_triton import prefetch, tl, triton, wait_and_trigger
from ..native.registration import Float32, OneOf, Written, operator
from ..norm.rms_norm import normed, rms_norm
from .linear import plain_product
from .weight_tiles import TileLayout

MOST_ROWS = 64  # of which a small product may be faster than cuBLAS's
TILE_ROWS = 16  # of the activations in the smallest tensor-core tile
GEMV_ROWS = 2  # rows that the CUDA-core kernel takes at most: with more, its arithmetic takes longer than the reading
# (block_n, block_k, num_warps, num_stages) by the bytes of a weight, and by the rows of a tile of activations: they fit
# all GPUs from sm_80 on, and never spill. The tensor cores of sm_90 take 64 rows of the weight at a time
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
_LEAST_NORMED_ROWS = 16  # of the weight: each program reads x and the gain, 6 bytes for 2 of a row of the weight
# (block_n, num_warps) for quantized weights by the rows of a tile of activations, without a norm before the product
# and with one, which is made anew in each block; the columns follow from the weight's kind
TILED_TILES = {8: ((32, 2), (128, 8)), 16: ((64, 4), (128, 8)), 32: ((128, 8),) * 2, 64: ((128, 8),) * 2}
_ROWS_WHERE_TIGHT = 32  # of a tile where sums of activations, or scales of many groups, take registers, too
_SMALL_GROUP = 32
_SUM_COLUMNS = 512  # of the memory that tensor cores of compute capability 10 write sums into: 128 lanes wide
TILED_STAGES = 3  # of steps that are on their way at a time; two where that many registers are not there
_FIXED_PROGRAMS = 256  # two for each multiprocessor of a large GPU
_WARPS_AT_WORK = 12  # of a multiprocessor, that a split of a quantized weight aims at
_WAVES = (1, 2, 4)  # programs for each multiprocessor that a split aims at


class SmallLinearConfig(NamedTuple):
    """How the product of one shape is dealt out.

    Attributes:
        kind: "dot" (tensor cores, any number of rows in tiles) or "gemv" (CUDA cores, one or two rows).
        block_n: rows of the weight that one program takes.
        block_k: columns of the weight that are read at a time.
        splits: parts that the columns are dealt in.
        num_warps: of one program.
        num_stages: tiles of the weight that are on the way at a time.
        pdl: whether it begins while the kernel before it still runs; sm_90 and later.
        block_m: rows of the activations in one tile of the tensor cores.
        prefetch: whether it asks for some of its part of the weight before it waits; of one that begins early.
        norms_apart: whether a norm before it is a launch of its own, and not computed by each program.
    """

    kind: str
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    pdl: bool = False
    block_m: int = TILE_ROWS
    prefetch: bool = True
    norms_apart: bool = False

    def __str__(self) -> str:
        rows = f" of {self.block_m} rows" if self.block_m > TILE_ROWS else ""
        tail = (", early start" if self.prefetch else ", early start without prefetch") if self.pdl else ""
        tail += ", normed apart" if self.norms_apart else ""
        return (
            f"{self.kind} {self.block_n}x{self.block_k}{rows}, {self.splits} splits, {self.num_warps} warps, "
            f"{self.num_stages} stages{tail}"
        )

    def counters(self, rows: int, out_features: int) -> int:
        """How many counters a product uses: one for each tile of rows and block of the weight, none without a split."""
        return 0 if self.splits == 1 else -(-rows // self.block_m) * -(-out_features // self.block_n)


def _split(in_features: int, block_k: int, blocks: int, programs: int) -> int:
    return min(max(round(programs / blocks), 1), -(-in_features // block_k))


def candidates(
    out_features: int, in_features: int, itemsize: int, rows: int, units: int, is_normed: bool = False
) -> list[SmallLinearConfig]:
    """Return the configurations that may be fastest; none for more rows than the tiles of such weights have.

    Each gives seven of eight multiprocessors a program at least, if any does.

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        itemsize: bytes of a weight.
        rows: of the activations.
        units: multiprocessors of the GPU.
        is_normed: the product is that of a norm.
    """
    of_rows = DOT_TILES[itemsize]
    if rows > max(of_rows):
        return []
    # a narrower tile than the rows need reads the weight more than once, from the L2 cache, and makes more programs
    widest = next(most for most in of_rows if rows <= most)
    tiles = [("dot", most, *tile) for most in sorted(of_rows, reverse=True) if most <= widest for tile in of_rows[most]]
    if rows <= GEMV_ROWS:
        least = _LEAST_NORMED_ROWS if is_normed else 1
        tiles += [("gemv", TILE_ROWS, *tile) for tile in GEMV_TILES[itemsize] if tile[0] >= least]
    found: dict[SmallLinearConfig, int] = {}  # and the programs of each
    for kind, block_m, block_n, block_k, num_warps, num_stages in tiles:
        blocks = -(-out_features // block_n) * -(-rows // block_m)
        for splits in (1, *(_split(in_features, block_k, blocks, waves * units) for waves in _WAVES)):
            config = SmallLinearConfig(kind, block_n, block_k, splits, num_warps, num_stages, block_m=block_m)
            found[config._replace(norms_apart=is_normed and block_m > TILE_ROWS)] = blocks * splits
    return [config for config, programs in found.items() if 8 * programs >= 7 * units] or list(found)


def fixed_config(out_features: int, in_features: int, itemsize: int, pdl: bool = False) -> SmallLinearConfig:
    """Return one configuration for any number of rows, which follows from the shape alone: no GPU, no clock.

    A row's result then has the same bits in any company, on any GPU of the same kind.

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        itemsize: bytes of a weight.
        pdl: whether the GPU lets kernels begin early.
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
    """Return how the product with a quantized weight is dealt out; see `tiled_linear`.

    Args:
        rows: of the activations; None: one configuration for any number of rows, on any GPU of the same kind.
        out_features: rows of the weight.
        columns: of it, in whole steps.
        layout: of the weight.
        units: multiprocessors of the GPU.
        pdl: whether the GPU lets kernels begin early.
        is_normed: the product is that of a norm.
        major: of the GPU's compute capability. The tensor cores of 10 write into a memory of their own, where the sums
            of all groups of a step stand at a time; a kernel that asks for more than there is cannot be launched. For
            12 the compiler spills where groups are small and rows many.
    """
    is_tight = layout.has_totals or (major == 12 and layout.group == _SMALL_GROUP)
    most_rows = _ROWS_WHERE_TIGHT if is_tight else max(TILED_TILES)
    if major == 10:
        groups = layout.step // layout.group if layout.group else 1
        columns_of_row = groups * (1 + layout.has_totals) + 2  # and those of the step before, scaled and not
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
    """Of a product: features, columns of x, its stride, columns of a part, its factors, and programs that ask ahead.

    If the weight is quantized, also its rows, its columns with padding, and the stride of the result.
    """

    width: int
    depth: int
    x_stride: int
    part: int
    eps: float
    factor: float
    asking: int = 0
    weight_rows: int = 0
    columns: int = 0
    out_stride: int = 0


class ProductForm(NamedTuple):
    """How a product is dealt out, and what is done with it; see `small_linear`.

    AHEAD counts what a program asks for before it waits: lines of memory of each row, or tiles.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    EVEN_K: bool
    SPLIT: bool
    AT_ONCE: int
    EPILOGUE: str
    RANGE: float
    STAGES: int = 1
    AHEAD: int = 0


@triton.jit
def block_rows(block, width, BLOCK_N: tl.constexpr, IS_GATED: tl.constexpr, STEP: tl.constexpr = 1):
    """Return the weight's rows of a block; a gated one has rows of the gate, and then those of the same places above.

    Of each STEP rows side by side only the first.

    Past the last row of the weight the last one is read again, which needs no mask.
    """
    lane = tl.arange(0, BLOCK_N // STEP) * STEP
    if IS_GATED:
        half = BLOCK_N // 2
        return tl.minimum(block * half + lane % half, width - 1) + lane // half * width
    return tl.minimum(block * BLOCK_N + lane, width - 1)


@triton.jit
def asks_ahead(asking):
    """Whether a tensor-core program asks for its part of the weight before it waits: the first, and once for all x."""
    return (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1) < asking) & (tl.program_id(0) == 0)


@triton.jit
def _prefetch_rows(rows, begin, end, LINES: tl.constexpr):
    """Ask for the first lines of columns [begin, end) of rows of the weight."""
    at = begin + tl.arange(0, LINES) * (1024 // rows.dtype.element_ty.primitive_bitwidth)
    prefetch(rows[:, None] + at[None, :], (at < end)[None, :])


@triton.jit
def _write(out, acc, held, m, rows, block, out_stride, sizes, FORM: tl.constexpr):
    """Write a block's sums [BLOCK_N, BLOCK_M] as the layer's result."""
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    EPILOGUE: tl.constexpr = FORM.EPILOGUE
    if EPILOGUE == "store" or EPILOGUE == "add":
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if EPILOGUE == "add":
            acc = held + sizes.factor * acc
    else:
        pairs = tl.permute(tl.reshape(acc, (2, BLOCK_N // 2, FORM.BLOCK_M)), (1, 2, 0))
        gate, up = tl.split(pairs)
        acc = activated(gate, EPILOGUE) * up
        n = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    kept = (n < sizes.width)[:, None] & (m < rows)[None, :]
    place = m[None, :] * out_stride + n[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def held_sums(out, m, rows, block, width, out_stride, BLOCK_N: tl.constexpr):
    """Return what a block's result is added to."""
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    place = m[None, :] * out_stride + n[:, None]
    return tl.load(out + place, mask=(n < width)[:, None] & (m < rows)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _sums(acc, squares, offsets, sizes, FORM: tl.constexpr, IS_NORMED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the products [BLOCK_N, BLOCK_M] that whole sums are."""
    if IS_NORMED:
        acc *= (1.0 / FORM.RANGE / tl.sqrt(squares / sizes.depth + sizes.eps))[None, :]
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
    held,
    m,
    rows,
    block,
    blocks,
    out_stride,
    splits,
    sizes,
    FORM: tl.constexpr,
    IS_NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Write a program's sums: straight out where the columns were not split; else the last to arrive adds the parts."""
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    AT_ONCE: tl.constexpr = FORM.AT_ONCE
    if FORM.SPLIT:
        across = blocks * (BLOCK_N + 1)
        plane = tl.cast(rows, tl.int64) * across
        m_rows = m * across
        place = m_rows[None, :] + (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        own = partial + tl.program_id(2) * plane
        tl.store(own + place, acc, mask=(m < rows)[None, :], cache_modifier=".cg")
        if IS_NORMED:
            tl.store(own + m_rows + blocks * BLOCK_N + block, squares, mask=m < rows, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have stored before one of them says so
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            if FORM.EPILOGUE == "add":
                held = held_sums(out, m, rows, block, sizes.width, out_stride, BLOCK_N)
            total = tl.zeros_like(acc)
            total_squares = tl.zeros_like(squares)
            for first in range(0, splits, AT_ONCE):
                for near in tl.static_range(AT_ONCE):  # all are on their way before the first is added
                    split = first + near
                    there = m < tl.where(split < splits, rows, 0)
                    part = partial + split * plane
                    total += tl.load(part + place, mask=there[None, :], other=0.0, cache_modifier=".cg")
                    if IS_NORMED:
                        at = part + m_rows + blocks * BLOCK_N + block
                        total_squares += tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
            total = _sums(total, total_squares, offsets, sizes, FORM, IS_NORMED, HAS_BIAS)
            _write(out, total, held, m, rows, block, out_stride, sizes, FORM)
            tl.store(counter, 0)  # ready for the next product
    else:
        acc = _sums(acc, squares, offsets, sizes, FORM, IS_NORMED, HAS_BIAS)
        _write(out, acc, held, m, rows, block, out_stride, sizes, FORM)


@triton.jit
def _load_row(x, row, x_stride, k, end, EVEN_K: tl.constexpr):
    """Return columns k of one row of x, as fp32 [columns]."""
    at = x + row * x_stride + k
    if EVEN_K:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=k < end, other=0.0).to(tl.float32)


@triton.jit
def activations(x_rows, gain, squares, there, k, depth, RANGE: tl.constexpr, EVEN_K: tl.constexpr):
    """Return columns k of some rows of x, times the gain where there is one, and the sums of squares with theirs."""
    if EVEN_K:
        a = tl.load(x_rows, mask=there, other=0.0)
    else:
        a = tl.load(x_rows, mask=there & (k < depth)[None, :], other=0.0)
    if gain is not None:
        wide = a.to(tl.float32)
        squares += wide * wide
        g = _load_row(gain, 0, 0, k, depth, EVEN_K)
        a = (wide * (g * RANGE)[None, :]).to(a.dtype)
    return a, squares


# One program multiplies block_m rows with block_n rows of the weight, over one part of the columns: it reads
# block_n * depth / splits values of the weight once, and as many columns of x, which the L2 cache holds.
@triton.jit(do_not_specialize=["rows", "splits"])  # one code for any rows: a row's bits must not depend on their number
def dot_linear_kernel(
    out, x, weight, bias, gain, partial, counters, rows, splits, sizes,
    FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply on the tensor cores."""
    BLOCK_M: tl.constexpr = FORM.BLOCK_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    BLOCK_K: tl.constexpr = FORM.BLOCK_K
    EVEN_K: tl.constexpr = FORM.EVEN_K
    EPILOGUE: tl.constexpr = FORM.EPILOGUE
    width, depth = sizes.width, sizes.depth
    block = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.program_id(2) * sizes.part
    end = tl.minimum(begin + sizes.part, depth)
    k = tl.arange(0, BLOCK_K)
    row = block_rows(block, width, BLOCK_N, EPILOGUE != "store" and EPILOGUE != "add")
    w_begin = weight + row.to(tl.int64) * depth
    if FORM.AHEAD > 0 and asks_ahead(sizes.asking):
        _prefetch_rows(w_begin, begin, end, FORM.AHEAD)
    offsets = tl.zeros([BLOCK_N], tl.float32)
    if bias is not None:
        offsets += tl.load(bias + row).to(tl.float32)
    if PDL:
        wait_and_trigger()
    there = (m < rows)[:, None]
    x_rows = x + m.to(tl.int64)[:, None] * sizes.x_stride + k[None, :]
    w_rows = w_begin[:, None] + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    held = acc
    if EPILOGUE == "add" and not FORM.SPLIT:  # on its way while the weight is read
        held = held_sums(out, m, rows, block, width, width, BLOCK_N)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for at in range(begin, end, BLOCK_K):
        if EVEN_K:
            w = tl.load(w_rows + at, eviction_policy="evict_first")
        else:
            w = tl.load(w_rows + at, mask=(at + k < end)[None, :], other=0.0, eviction_policy="evict_first")
        a, squares = activations(x_rows + at, gain, squares, there, at + k, end, FORM.RANGE, EVEN_K)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    finish(
        out, partial, counters, acc, tl.sum(squares, axis=1), offsets, held, m, rows, block, tl.num_programs(1), width,
        splits, sizes, FORM, gain is not None, bias is not None,
    )  # fmt: skip


# One program multiplies one or two rows with block_n rows of the weight, over one part of the columns. Each thread
# keeps its own sums until the end. It reads block_n * depth / splits values of the weight once.
@triton.jit(do_not_specialize=["splits"])
def gemv_linear_kernel(
    out, x, weight, bias, gain, partial, counters, splits, sizes,
    FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply on the CUDA cores."""
    ROWS: tl.constexpr = FORM.BLOCK_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    BLOCK_K: tl.constexpr = FORM.BLOCK_K
    EVEN_K: tl.constexpr = FORM.EVEN_K
    EPILOGUE: tl.constexpr = FORM.EPILOGUE
    width, depth, x_stride = sizes.width, sizes.depth, sizes.x_stride
    block = tl.program_id(0)
    begin = tl.program_id(2) * sizes.part
    end = tl.minimum(begin + sizes.part, depth)
    k = tl.arange(0, BLOCK_K)
    row = block_rows(block, width, BLOCK_N, EPILOGUE != "store" and EPILOGUE != "add")
    w_begin = weight + row.to(tl.int64) * depth
    if FORM.AHEAD > 0 and block + tl.program_id(2) * tl.num_programs(0) < sizes.asking:
        _prefetch_rows(w_begin, begin, end, FORM.AHEAD)
    offsets = tl.zeros([BLOCK_N], tl.float32)
    if bias is not None:
        offsets += tl.load(bias + row).to(tl.float32)
    if PDL:
        wait_and_trigger()
    m = tl.arange(0, ROWS)
    held = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if EPILOGUE == "add" and not FORM.SPLIT:  # on its way while the weight is read
        held = held_sums(out, m, ROWS, block, width, width, BLOCK_N)
    w_rows = w_begin[:, None] + k[None, :]
    sums_0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sums_1 = sums_0
    squares_0 = tl.zeros([BLOCK_K], tl.float32)
    squares_1 = squares_0
    for at in tl.range(begin, end, BLOCK_K, num_stages=FORM.STAGES):
        if EVEN_K:
            w = tl.load(w_rows + at, eviction_policy="evict_first").to(tl.float32)
        else:
            inside = (at + k < end)[None, :]
            w = tl.load(w_rows + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x_0 = _load_row(x, 0, x_stride, at + k, end, EVEN_K)
        if ROWS > 1:
            x_1 = _load_row(x, 1, x_stride, at + k, end, EVEN_K)
        if gain is not None:
            g = _load_row(gain, 0, 0, at + k, end, EVEN_K)
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
        out, partial, counters, acc, squares, offsets, held, m, ROWS, block, tl.num_programs(0), width, splits, sizes,
        FORM, gain is not None, bias is not None,
    )  # fmt: skip


KINDS = ("dot", "gemv")
EPILOGUES = OneOf(("store", "add", *ACTIVATIONS))
PREFETCH_BYTES = 64 << 10  # of one program: two on each multiprocessor then ask for 4 us of reading at 4 TB/s
PREFETCH_BYTES_IN_ALL = 24 << 20  # of a launch: an L2 cache of 50 MB has other things to hold
LINE_BYTES = 128
_PARTS_AT_ONCE = 8  # partial sums of each place that are on their way at a time, as far as registers reach:
_PART_REGISTERS = 32  # of a thread
FP16_RANGE = 1 / 16  # gains are multiplied by this where products with them could leave the range of fp16


def parts_at_once(sums: int, num_warps: int) -> int:
    """Return how many parts of a program's sums are asked for at a time where columns are split."""
    return min(max(32 * num_warps * _PART_REGISTERS // sums, 1), _PARTS_AT_ONCE)


def lines_ahead(block_n: int, row_bytes: int, num_warps: int) -> tuple[int, int]:
    """Return how many lines of each row a program asks for before it waits, and how many programs do.

    Where a program has fewer lines than threads it asks for none: each would be asked for several times.

    Args:
        block_n: rows of the weight that a program takes.
        row_bytes: of each, that it reads.
        num_warps: of a program.
    """
    lines = min(row_bytes, PREFETCH_BYTES // block_n) // LINE_BYTES
    lines = 1 << lines.bit_length() - 1 if lines else 0
    if block_n * lines < 32 * num_warps:
        return 0, 0
    return lines, PREFETCH_BYTES_IN_ALL // (block_n * lines * LINE_BYTES)


def small_linear_triton(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    partial: Tensor | None,
    counters: Tensor | None,
    eps: float,
    epilogue: str,
    scale: float,
    config: SmallLinearConfig,
) -> None:
    """Launch the kernel; see `small_linear` for the arguments."""
    rows, depth = x.shape
    kind, block_n, block_k, splits, num_warps, num_stages, pdl, block_m, *_ = config
    width = out.shape[1]
    part = triton.cdiv(triton.cdiv(depth, block_k), splits) * block_k
    splits = triton.cdiv(depth, part)  # none is empty
    is_even, is_dot = depth % block_k == 0, kind == "dot"
    tile_rows = block_m if is_dot else rows
    asks = pdl and is_even and config.prefetch
    ahead, asking = lines_ahead(block_n, part * weight.element_size(), num_warps) if asks else (0, 0)
    sizes = ProductSizes(width, depth, x.stride(0), part, eps, scale, asking)
    form = ProductForm(
        BLOCK_M=tile_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=is_even,
        SPLIT=splits > 1,
        AT_ONCE=parts_at_once(block_n * tile_rows, num_warps),
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
            *operands, rows, splits, sizes, FORM=form, num_stages=num_stages, **options
        )
    else:  # of narrow blocks a vocabulary has more than 65,535
        gemv_linear_kernel[(blocks, 1, splits)](*operands, splits, sizes, FORM=form, **options)


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
    """Compute with torch's own operators, which need none of the configuration; see `small_linear`."""
    given = x if gain is None else normed(x, gain, eps).to(x.dtype)
    if epilogue == "store":
        plain_product(out, given, weight, bias)
        return
    product = torch.empty((x.shape[0], weight.shape[0]), dtype=out.dtype, device=out.device)
    plain_product(product, given, weight, bias)
    write_epilogue(out, product, epilogue, scale)


def write_epilogue(out: Tensor, product: Tensor, epilogue: str, scale: float) -> None:
    """Add a product to `out`, or write its gate times its other half, with torch operators."""
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
    """Write `x @ weight.T + bias` into `out`, or do more with it; sums are fp32.

    Args:
        out: [rows, out_features], contiguous; half as many columns for a gate.
        x: [rows, in_features], fp32, fp16 or bf16; rows may be strided.
        weight: [out_features, in_features], of the same dtype, contiguous; no kernel that still runs may write it.
        bias: [out_features] or None, like the weight.
        counters: int32, at least `config.counters(rows, out_features)`, all 0, and 0 again afterwards; products that
            run one after another share them. None where the configuration has one split.
        config: how the work is dealt out.
        gain: fp32 [in_features]: the product is that of the RMSNorm of `x`; None: of `x` itself.
        eps: of the norm, added to the mean square.
        epilogue: "store"; "add": `out += scale * product`; or an activation of `act_mul`: `activation(gate) * up`, the
            gate being the first half of the product.
        scale: of the sum.

    Raises:
        ValueError: more rows than the kind takes, too few counters, or an epilogue that is not known.
    """
    rows, out_features = out.shape[0], weight.shape[0]
    if config.kind not in KINDS:
        raise ValueError(f"config.kind is {config.kind!r}; it must be one of {', '.join(KINDS)}")
    if config.kind == "gemv" and rows > GEMV_ROWS:
        raise ValueError(f"x has {rows} rows; the gemv kernel takes 1..{GEMV_ROWS}")
    if gain is not None and config.norms_apart:
        once = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rms_norm(once, x, gain, eps)
        x, gain = once, None
    partial = partial_sums(config, x, out_features, counters)
    _small_linear(out, x, weight, bias, gain, partial, counters, eps, epilogue, scale, config)


def partial_sums(config: SmallLinearConfig, x: Tensor, out_features: int, counters: Tensor | None) -> Tensor | None:
    """Return the memory for what splits have summed up, fp32 [splits, rows, columns]; None where there is one split.

    Raises:
        ValueError: too few counters.
    """
    needed = config.counters(x.shape[0], out_features)
    if needed > (0 if counters is None else counters.numel()):
        raise ValueError(f"counters holds {0 if counters is None else counters.numel()}; {needed} are needed")
    if config.splits == 1:
        return None
    columns = -(-out_features // config.block_n) * (config.block_n + 1)  # one more of a block: the sum of squares
    return torch.empty((config.splits, x.shape[0], columns), dtype=torch.float32, device=x.device)
