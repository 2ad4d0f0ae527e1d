"""The Triton kernels of `small_linear`: what one program computes, from the weight's rows to the layer's result.

A program multiplies a tile of the activations' rows with a block of the weight's rows over one part of its columns. It
keeps its sums as [rows of the weight, rows of the activations]: the weight is the tensor cores' first operand, of which
they take 64 rows at a time on sm_90, and a few activations are the second, which may be as narrow as they are.

RMSNorm before the product costs no launch and no second look at the activations. Its factor, 1 / rms(x), is the same
for a whole row and leaves the sum: `sum(x g w) / rms(x)`, so squares and products are added up side by side.
"""

from ..model.act_mul import activated
from ..native.early_start import prefetch_l2, wait_and_trigger
from ..native.optional_triton import tl, triton


@triton.jit
def block_rows(block, width, BLOCK_N: tl.constexpr, IS_GATED: tl.constexpr):
    """Return the weight's rows of a block; a gated one has rows of the gate, and then those of the same places above.

    Past the last row of the weight the last one is read again, which needs no mask.
    """
    lane = tl.arange(0, BLOCK_N)
    if IS_GATED:
        half = BLOCK_N // 2
        return tl.minimum(block * half + lane % half, width - 1) + lane // half * width
    return tl.minimum(block * BLOCK_N + lane, width - 1)


@triton.jit
def _write(
    out, acc, held, m, rows, block, width, out_stride, factor, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Write a block's sums [BLOCK_N, BLOCK_M] as the layer's result."""
    if EPILOGUE == "store" or EPILOGUE == "add":
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if EPILOGUE == "add":
            acc = held + factor * acc
    else:
        pairs = tl.permute(tl.reshape(acc, (2, BLOCK_N // 2, BLOCK_M)), (1, 2, 0))
        gate, up = tl.split(pairs)
        acc = activated(gate, EPILOGUE) * up
        n = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    kept = (n < width)[:, None] & (m < rows)[None, :]
    place = m[None, :] * out_stride + n[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def held_sums(out, m, rows, block, width, out_stride, BLOCK_N: tl.constexpr):
    """Return what a block's result is added to."""
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    place = m[None, :] * out_stride + n[:, None]
    return tl.load(out + place, mask=(n < width)[:, None] & (m < rows)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _sums(acc, squares, offsets, depth, eps, RANGE: tl.constexpr, IS_NORMED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the products [BLOCK_N, BLOCK_M] that whole sums are."""
    if IS_NORMED:
        acc *= (1.0 / RANGE / tl.sqrt(squares / depth + eps))[None, :]
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
    width,
    out_stride,
    depth,
    splits,
    eps,
    factor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    RANGE: tl.constexpr,
    IS_NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Write a program's sums: straight out where the columns were not split; else the last to arrive adds the parts."""
    if SPLIT:
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
            if EPILOGUE == "add":
                held = held_sums(out, m, rows, block, width, out_stride, BLOCK_N)
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
            total = _sums(total, total_squares, offsets, depth, eps, RANGE, IS_NORMED, HAS_BIAS)
            _write(out, total, held, m, rows, block, width, out_stride, factor, BLOCK_N, BLOCK_M, EPILOGUE)
            tl.store(counter, 0)  # ready for the next product
    else:
        acc = _sums(acc, squares, offsets, depth, eps, RANGE, IS_NORMED, HAS_BIAS)
        _write(out, acc, held, m, rows, block, width, out_stride, factor, BLOCK_N, BLOCK_M, EPILOGUE)


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
    out,
    x,
    weight,
    bias,
    gain,
    partial,
    counters,
    rows,
    width,
    depth,
    x_stride,
    splits,
    part,
    ahead,
    eps,
    factor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    RANGE: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Multiply on the tensor cores."""
    block = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, depth)
    k = tl.arange(0, BLOCK_K)
    row = block_rows(block, width, BLOCK_N, EPILOGUE != "store" and EPILOGUE != "add")
    w_begin = weight + row.to(tl.int64) * depth
    if PREFETCH:
        prefetch_l2(w_begin + begin, tl.minimum(end - begin, ahead) * (weight.dtype.element_ty.primitive_bitwidth // 8))
    offsets = tl.zeros([BLOCK_N], tl.float32)
    if bias is not None:
        offsets += tl.load(bias + row).to(tl.float32)
    if PDL:
        wait_and_trigger()
    there = (m < rows)[:, None]
    x_rows = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_rows = w_begin[:, None] + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    held = acc
    if EPILOGUE == "add" and not SPLIT:  # on its way while the weight is read
        held = held_sums(out, m, rows, block, width, width, BLOCK_N)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for at in range(begin, end, BLOCK_K):
        if EVEN_K:
            w = tl.load(w_rows + at, eviction_policy="evict_first")
        else:
            w = tl.load(w_rows + at, mask=(at + k < end)[None, :], other=0.0, eviction_policy="evict_first")
        a, squares = activations(x_rows + at, gain, squares, there, at + k, end, RANGE, EVEN_K)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    finish(
        out, partial, counters, acc, tl.sum(squares, axis=1), offsets, held, m, rows, block, tl.num_programs(1), width,
        width, depth, splits, eps, factor, BLOCK_M, BLOCK_N, SPLIT, AT_ONCE, EPILOGUE, RANGE, gain is not None,
        bias is not None,
    )  # fmt: skip


# One program multiplies one or two rows with block_n rows of the weight, over one part of the columns. Each thread
# keeps its own sums until the end. It reads block_n * depth / splits values of the weight once.
@triton.jit(do_not_specialize=["splits"])
def gemv_linear_kernel(
    out,
    x,
    weight,
    bias,
    gain,
    partial,
    counters,
    width,
    depth,
    x_stride,
    splits,
    part,
    ahead,
    eps,
    factor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Multiply on the CUDA cores."""
    block = tl.program_id(0)
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, depth)
    k = tl.arange(0, BLOCK_K)
    row = block_rows(block, width, BLOCK_N, EPILOGUE != "store" and EPILOGUE != "add")
    w_begin = weight + row.to(tl.int64) * depth
    if PREFETCH:
        prefetch_l2(w_begin + begin, tl.minimum(end - begin, ahead) * (weight.dtype.element_ty.primitive_bitwidth // 8))
    offsets = tl.zeros([BLOCK_N], tl.float32)
    if bias is not None:
        offsets += tl.load(bias + row).to(tl.float32)
    if PDL:
        wait_and_trigger()
    m = tl.arange(0, ROWS)
    held = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if EPILOGUE == "add" and not SPLIT:  # on its way while the weight is read
        held = held_sums(out, m, ROWS, block, width, width, BLOCK_N)
    w_rows = w_begin[:, None] + k[None, :]
    sums_0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sums_1 = sums_0
    squares_0 = tl.zeros([BLOCK_K], tl.float32)
    squares_1 = squares_0
    for at in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
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
        out, partial, counters, acc, squares, offsets, held, m, ROWS, block, tl.num_programs(0), width, width, depth,
        splits, eps, factor, ROWS, BLOCK_N, SPLIT, AT_ONCE, EPILOGUE, 1.0, gain is not None, bias is not None,
    )  # fmt: skip
