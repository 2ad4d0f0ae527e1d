"""Linear layers of a few rows on a GPU, `out = x @ weight.T + bias`, made to read the weight at full bandwidth.

Two kernels: one multiplies tiles of 16 rows on the tensor cores, the other up to 4 rows on the CUDA cores. Both deal
the weight's rows to programs in blocks, and its columns in `splits` parts, so that there is work for the whole chip;
the last program of a block to arrive adds the parts up, in their order. Nothing depends on who that is: the same inputs
give the same bits. The tensor-core kernel adds up a row in the same order whatever stands in the other rows and however
many there are, so that one configuration is batch-invariant.

With an early start (see `early_start`) a kernel's first tile of the weight is on the way before it waits for the
activations.

The kernels have been run in Triton's interpreter and compiled ahead of time by the tests.
"""

import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Written
from .linear import plain_product
from .small_linear_config import GEMV_ROWS, TILE_ROWS, SmallLinearConfig

KINDS = ("dot", "gemv")


@triton.jit
def _write(out, bias, acc, place, kept, n, width, HAS_BIAS: tl.constexpr):
    """Write sums as the result."""
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _add_parts(
    out, bias, partial, counters, acc, rows, width, m, n, splits, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Write a program's sums: straight out where the columns were not split; else the last to arrive adds the parts."""
    kept = (m < rows)[:, None] & (n < width)[None, :]
    place = m.to(tl.int64)[:, None] * width + n[None, :]
    if SPLIT:
        plane = tl.cast(rows, tl.int64) * width
        tl.store(partial + tl.program_id(2) * plane + place, acc, mask=kept, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have stored before one of them says so
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros_like(acc)
            for split in range(splits):
                total += tl.load(partial + split * plane + place, mask=kept, other=0.0, cache_modifier=".cg")
            _write(out, bias, total, place, kept, n, width, HAS_BIAS)
            tl.store(counter, 0)  # ready for the next product
    else:
        _write(out, bias, acc, place, kept, n, width, HAS_BIAS)


# One program multiplies 16 rows with block_n rows of the weight, over one part of the columns: it reads
# block_n * depth / splits values of the weight once, and as many columns of x, which the L2 cache holds.
@triton.jit(do_not_specialize=["rows", "splits"])  # one code for any rows: a row's bits must not depend on their number
def _dot_linear_kernel(
    out,
    x,
    weight,
    bias,
    partial,
    counters,
    rows,
    width,
    depth,
    x_stride,
    splits,
    part,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, depth)
    k = tl.arange(0, BLOCK_K)
    there = (m < rows)[:, None]
    x_rows = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    # past the last row of the weight the last one is read again, which needs no mask
    w_rows = weight + tl.minimum(n, width - 1).to(tl.int64)[:, None] * depth + k[None, :]
    if EVEN_K:
        w = tl.load(w_rows + begin, eviction_policy="evict_first")
    else:
        w = tl.load(w_rows + begin, mask=(begin + k < end)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:  # weights are constant; what comes next the kernel before may still be writing
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if EVEN_K:
        a = tl.load(x_rows + begin, mask=there, other=0.0)
    else:
        a = tl.load(x_rows + begin, mask=there & (begin + k < end)[None, :], other=0.0)
    acc = tl.dot(a, tl.trans(w), input_precision="ieee")
    for at in range(begin + BLOCK_K, end, BLOCK_K):
        if EVEN_K:
            w = tl.load(w_rows + at, eviction_policy="evict_first")
            a = tl.load(x_rows + at, mask=there, other=0.0)
        else:
            inside = (at + k < end)[None, :]
            w = tl.load(w_rows + at, mask=inside, other=0.0, eviction_policy="evict_first")
            a = tl.load(x_rows + at, mask=there & inside, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    _add_parts(out, bias, partial, counters, acc, rows, width, m, n, splits, SPLIT, HAS_BIAS)


@triton.jit
def _load_row(x, row, x_stride, k, end, EVEN_K: tl.constexpr):
    """Return columns k of one row of x, as fp32 [1, columns]."""
    at = x + row * x_stride + k
    if EVEN_K:
        return tl.load(at).to(tl.float32)[None, :]
    return tl.load(at, mask=k < end, other=0.0).to(tl.float32)[None, :]


# One program multiplies up to 4 rows with block_n rows of the weight, over one part of the columns. Each thread keeps
# its own sums until the end. It reads block_n * depth / splits values of the weight once.
@triton.jit(do_not_specialize=["splits"])
def _gemv_linear_kernel(
    out,
    x,
    weight,
    bias,
    partial,
    counters,
    width,
    depth,
    x_stride,
    splits,
    part,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, depth)
    k = tl.arange(0, BLOCK_K)
    w_rows = weight + tl.minimum(n, width - 1).to(tl.int64)[:, None] * depth + k[None, :]
    if EVEN_K:
        w = tl.load(w_rows + begin, eviction_policy="evict_first")
    else:
        w = tl.load(w_rows + begin, mask=(begin + k < end)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:  # weights are constant; what comes next the kernel before may still be writing
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    w = w.to(tl.float32)
    sums_0 = w * _load_row(x, 0, x_stride, begin + k, end, EVEN_K)
    if ROWS > 1:
        sums_1 = w * _load_row(x, 1, x_stride, begin + k, end, EVEN_K)
    if ROWS > 2:
        sums_2 = w * _load_row(x, 2, x_stride, begin + k, end, EVEN_K)
    if ROWS > 3:
        sums_3 = w * _load_row(x, 3, x_stride, begin + k, end, EVEN_K)
    for at in tl.range(begin + BLOCK_K, end, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(w_rows + at, eviction_policy="evict_first").to(tl.float32)
        else:
            inside = (at + k < end)[None, :]
            w = tl.load(w_rows + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        sums_0 += w * _load_row(x, 0, x_stride, at + k, end, EVEN_K)
        if ROWS > 1:
            sums_1 += w * _load_row(x, 1, x_stride, at + k, end, EVEN_K)
        if ROWS > 2:
            sums_2 += w * _load_row(x, 2, x_stride, at + k, end, EVEN_K)
        if ROWS > 3:
            sums_3 += w * _load_row(x, 3, x_stride, at + k, end, EVEN_K)
    m = tl.arange(0, 4)
    acc = tl.where((m == 0)[:, None], tl.sum(sums_0, axis=1)[None, :], 0.0)
    if ROWS > 1:
        acc = tl.where((m == 1)[:, None], tl.sum(sums_1, axis=1)[None, :], acc)
    if ROWS > 2:
        acc = tl.where((m == 2)[:, None], tl.sum(sums_2, axis=1)[None, :], acc)
    if ROWS > 3:
        acc = tl.where((m == 3)[:, None], tl.sum(sums_3, axis=1)[None, :], acc)
    _add_parts(out, bias, partial, counters, acc, ROWS, width, m, n, splits, SPLIT, HAS_BIAS)


def small_linear_triton(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    partial: Tensor | None,
    counters: Tensor | None,
    kind: str,
    block_n: int,
    block_k: int,
    splits: int,
    num_warps: int,
    num_stages: int,
    pdl: bool,
) -> None:
    """Launch the kernel; see `small_linear` for the arguments."""
    rows, depth = x.shape
    width = weight.shape[0]
    part = triton.cdiv(triton.cdiv(depth, block_k), splits) * block_k
    splits = triton.cdiv(depth, part)  # none is empty
    sizes = {"BLOCK_N": block_n, "BLOCK_K": block_k, "EVEN_K": depth % block_k == 0}
    flags = {"SPLIT": splits > 1, "HAS_BIAS": bias is not None, "PDL": pdl}
    options: dict[str, int | bool] = {"num_warps": num_warps}
    if pdl:
        options["launch_pdl"] = True
    operands = (out, x, weight, bias, partial, counters)
    blocks = triton.cdiv(width, block_n)
    if kind == "dot":
        _dot_linear_kernel[(triton.cdiv(rows, TILE_ROWS), blocks, splits)](
            *operands, rows, width, depth, x.stride(0), splits, part,
            BLOCK_M=TILE_ROWS, num_stages=num_stages, **sizes, **flags, **options,
        )  # fmt: skip
    else:
        _gemv_linear_kernel[(blocks, 1, splits)](  # of narrow blocks a vocabulary has more than 65,535
            *operands, width, depth, x.stride(0), splits, part,
            ROWS=rows, STAGES=num_stages, **sizes, **flags, **options,
        )  # fmt: skip


@operator(triton_version=small_linear_triton)
def _small_linear(
    out: Written[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    partial: Written[Tensor] | None,
    counters: Written[Tensor] | None,
    kind: str,
    block_n: int,
    block_k: int,
    splits: int,
    num_warps: int,
    num_stages: int,
    pdl: bool,
) -> None:
    """Multiply with torch's own product, which needs none of the configuration; see `small_linear`."""
    plain_product(out, x, weight, bias)


def small_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor | None,
    config: SmallLinearConfig,
) -> None:
    """Write `x @ weight.T + bias` into `out`; sums are fp32.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], fp32, fp16 or bf16; rows may be strided.
        weight: [out_features, in_features], of the same dtype, contiguous.
        bias: [out_features] or None.
        counters: int32, at least `config.counters(rows, out_features)`, all 0, and 0 again afterwards; products that
            run one after another share them. None where the configuration has one split.
        config: how the work is dealt out.

    Raises:
        ValueError: more rows than the kind takes, or too few counters.
    """
    rows, out_features = out.shape
    if config.kind not in KINDS:
        raise ValueError(f"config.kind is {config.kind!r}; it must be one of {', '.join(KINDS)}")
    if config.kind == "gemv" and rows > GEMV_ROWS:
        raise ValueError(f"x has {rows} rows; the gemv kernel takes 1..{GEMV_ROWS}")
    needed = config.counters(rows, out_features)
    if needed > (0 if counters is None else counters.numel()):
        raise ValueError(f"counters holds {0 if counters is None else counters.numel()}; {needed} are needed")
    partial = None
    if config.splits > 1:
        partial = torch.empty((config.splits, rows, out_features), dtype=torch.float32, device=x.device)
    _small_linear(
        out, x, weight, bias, partial, counters, config.kind, config.block_n, config.block_k, config.splits,
        config.num_warps, config.num_stages, config.pdl,
    )  # fmt: skip
