"""The inner loop that the attention kernels share: one tile of queries over one span of a row's cached keys.

Online softmax over key tiles (Dao et al., FlashAttention-2, 2023), base 2 throughout. The key tile is independent of
the page size; page numbers are loaded one tile ahead of the keys that they lead to.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.kv_format import format_of
from ..model.cap_logits import tanh
from ..native.optional_triton import tl, triton

LOG2_E = 1.4426950408889634
PLAN_HEADER = 4  # int32: the number of items of a plan, and what aligns them to 16 bytes
PLAN_TILE = 64  # tokens: rows are split between whole ones, whatever the tile of the kernel
_TILE_BYTES = 32 * 1024  # keys and values of one 16-bit tile; two or three tiles are in flight
_OTHER_BYTES = 8 * 1024  # of shared memory: queries, page numbers, what reductions exchange
PROGRAM_REGISTERS = 168  # of a thread, at most, for three programs of four warps; the tests' budgets
PAIR_REGISTERS = 128  # the same for two programs of eight warps
_MOST_REGISTERS = 255  # of a thread
_PROCESSOR_REGISTERS = 65536  # of every NVIDIA GPU from 2012 on
_TRITON_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@triton.jit
def dequantize(x, KV_BITS: tl.constexpr, COMPUTE: tl.constexpr):
    """Convert cached values to the compute type; what comes as bytes is decoded by its bits, on any architecture."""
    if KV_BITS == "int8" and tl.float16 == COMPUTE:  # integers of fp16 from 1024 on; conversions are four times as slow
        return ((x.to(tl.uint16) ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    if KV_BITS == "int8":
        return x.to(tl.int8, bitcast=True).to(COMPUTE)
    if KV_BITS == "e4m3":
        # fp16 has the same layout with a bias of 15 in place of 7: right but for a factor of 2^8, subnormals too
        wide = x.to(tl.uint16)
        half = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)
        value = half * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(COMPUTE)
    if KV_BITS == "e5m2":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(COMPUTE)
    return x.to(COMPUTE)


@triton.jit
def quantize(x, KV_BITS: tl.constexpr, element):
    """Convert fp32 values to those of a cache, the inverse of `dequantize`; fp8 e4m3 takes what is too large as 448."""
    if KV_BITS == "e4m3":
        bits = x.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        most = tl.where(size > 0x43E00000, 0x43E00000, size)  # 448
        code = ((most + 0x7FFFF + ((most >> 20) & 1)) >> 20) - (120 << 3)
        # below the smallest normal value, 2^-6, steps are of 2^-9: those of floats from 2^14 on
        small = (most.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(most < 0x3C800000, small, code)
        code = tl.where(size > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    if KV_BITS == "e5m2":
        return (x.to(tl.float16).to(tl.uint16, bitcast=True) >> 8).to(tl.uint8)
    if element == tl.float8e4nv:
        x = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(element)


@triton.jit
def int8_scale(x, axis: tl.constexpr):
    """Return the scale of int8 codes: the largest size over 127 in bf16, NaN if one is not finite."""
    size = tl.abs(x)
    most = tl.max(tl.where(size < float("inf"), size, 0.0), axis=axis)
    non_finite = tl.sum(tl.where(size < float("inf"), 0, 1), axis=axis)
    return tl.where(non_finite > 0, float("nan"), most / 127.0).to(tl.bfloat16)


@triton.jit
def int8_codes(x, unit):
    """Return values divided by their scale as bytes, to nearest, ties to even."""
    steps = tl.where(unit > 0.0, x / tl.where(unit > 0.0, unit, 1.0), 0.0)
    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    return ((steps + 12582912.0) - 12582912.0).to(tl.int8).to(tl.uint8, bitcast=True)  # 1.5 * 2^23


@triton.jit
def mixed_tile(x, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return heads [HEADS, BLOCK_D] mixed as `mixed` does; channels past HEAD_DIM are 0, and stay so."""
    COUNT: tl.constexpr = HEAD_DIM & -HEAD_DIM
    wide = x
    for stage in tl.static_range(10):
        if 1 << stage < COUNT:
            even, odd = tl.split(tl.reshape(wide, [HEADS, BLOCK_D // COUNT, COUNT // 2, 2]))
            wide = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 1, 3, 2]), [HEADS, BLOCK_D])
    return wide * (COUNT**-0.5)


@triton.jit
def to_compute(x, COMPUTE: tl.constexpr):
    """Turn queries into the compute type; what does not fit into fp16 becomes its largest value, not infinity."""
    if tl.float16 == COMPUTE and x.dtype != tl.float16:
        wide = x.to(tl.float32)
        wide = tl.minimum(wide, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.maximum(wide, -65504.0, propagate_nan=tl.PropagateNan.ALL).to(COMPUTE)
    return x.to(COMPUTE)


@triton.jit
def alibi_slope(head, POWER: tl.constexpr):
    """The slope of a query head (Press et al., 2022); POWER is the largest power of two up to the number of heads."""
    geometric = -8.0 * (head + 1).to(tl.float32) / POWER
    interleaved = -4.0 * (2 * (head - POWER) + 1).to(tl.float32) / POWER
    return tl.exp2(tl.where(head < POWER, geometric, interleaved))


@triton.jit
def rotate(low, high, at, pairs, rope_step, rope_scale):
    """Rotate the halves of heads half-split by `at * 2^(pair * rope_step) / rope_scale`."""
    angle = at.to(tl.float32) * (tl.exp2(pairs.to(tl.float32) * rope_step) / rope_scale)
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def pages_of(pages, begin, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the pages [BLOCK_N] of the keys from `begin` on; what lies behind `end` is not looked up."""
    at = begin + tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 0:
        return tl.load(pages).to(tl.int64) + tl.zeros([BLOCK_N], tl.int64)
    return tl.load(pages + at // PAGE_SIZE, mask=at < end, other=0, eviction_policy="evict_last").to(tl.int64)


@triton.jit
def altered(scores, logits, META: tl.constexpr):
    """Apply a layer's options to scaled logits, which include log2(e).

    Capped ones are cap * log2(e) * tanh(s / (cap * log2(e))).
    """
    if META.HAS_CAP:
        scores = logits.options.logits_soft_cap * tanh(scores * logits.cap_step)
    return scores


class HeadPages(NamedTuple):
    """The cache of one row and one kv head, as pointers."""

    k_at: Any
    v_at: Any
    k_scales: Any
    v_scales: Any
    pages: Any


@triton.jit
def head_pages(cache, pages, kv_head, META: tl.constexpr):
    """Return the arguments of `attend_span` for a kv head of the row whose pages are listed at `pages`."""
    wide_head = kv_head.to(tl.int64)
    keys = cache.k_cache + wide_head * cache.k_head_stride
    values = cache.v_cache + wide_head * cache.v_head_stride
    k_scales = keys
    v_scales = values
    if META.KV_BITS == "int8":
        k_scales = cache.k_scales + wide_head * cache.scales_head_stride
        v_scales = cache.v_scales + wide_head * cache.scales_head_stride
    return HeadPages(keys, values, k_scales, v_scales, pages)


@triton.jit
def _load_entries(at, inside, active, IS_WHOLE: tl.constexpr, IS_RAGGED: tl.constexpr):
    """Load a tile of keys or values; channels are masked by `active` unless IS_WHOLE, and tokens by `inside`."""
    if not IS_WHOLE:
        return tl.load(at, mask=inside & active, other=0.0)
    if IS_RAGGED:
        return tl.load(at, mask=inside, other=0.0)
    return tl.load(at)


@triton.jit
def _dot(a, b, acc=None):
    """Multiply matrices; fp32 takes three tensor-core products, which keep its accuracy."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def load_queries(q_from, dim_stride, active, META: tl.constexpr):
    """Return queries [BLOCK_M, BLOCK_D] in the compute type, and those of the channels before latent values, if any."""
    dims = tl.arange(0, META.BLOCK_D)
    in_bounds = active[:, None] & (dims < META.HEAD_DIM - META.ROPE_DIM)[None, :]
    queries = tl.load(q_from[:, None] + (dims + META.ROPE_DIM)[None, :] * dim_stride, mask=in_bounds, other=0.0)
    queries = to_compute(queries, META.COMPUTE)
    rotated = queries
    if META.ROPE_DIM > 0:
        dims = tl.arange(0, META.BLOCK_R)
        in_bounds = active[:, None] & (dims < META.ROPE_DIM)[None, :]
        rotated = tl.load(q_from[:, None] + dims[None, :] * dim_stride, mask=in_bounds, other=0.0)
        rotated = to_compute(rotated, META.COMPUTE)
    return queries, rotated


@triton.jit
def _latent_products(q, q_rotated, latent, k_at, inside, cache, META: tl.constexpr, IS_RAGGED: tl.constexpr):
    """Return the products [BLOCK_M, BLOCK_N] of queries and latent keys, of which all but `k_at` are loaded."""
    KV_BITS: tl.constexpr = META.KV_BITS
    dims = tl.arange(0, META.BLOCK_R)
    at_channels = k_at[None, :] + dims[:, None] * cache.k_dim_stride
    active = (dims < META.ROPE_DIM)[:, None]
    k = _load_entries(at_channels, inside[None, :], active, META.BLOCK_R == META.ROPE_DIM, IS_RAGGED)
    return _dot(q, tl.trans(latent), _dot(q_rotated, dequantize(k, KV_BITS, META.COMPUTE)))


@triton.jit
def _load_values(v_at, inside, cache, META: tl.constexpr, IS_RAGGED: tl.constexpr):
    """Return a tile of values [BLOCK_N, BLOCK_V]."""
    KV_BITS: tl.constexpr = META.KV_BITS
    values = tl.arange(0, META.BLOCK_V)
    at_channels = v_at[:, None] + values[None, :] * cache.v_dim_stride
    active = (values < META.VALUE_DIM)[None, :]
    v = _load_entries(at_channels, inside[:, None], active, META.BLOCK_V == META.VALUE_DIM, IS_RAGGED)
    return dequantize(v, KV_BITS, META.COMPUTE)


@triton.jit
def _products(q, q_high, k_at, at, inside, cache, logits, META: tl.constexpr, IS_RAGGED: tl.constexpr):
    """Return the products [BLOCK_M, BLOCK_N] of queries and a tile of keys `at` these positions, rotated with rope."""
    KV_BITS: tl.constexpr = META.KV_BITS
    HALF: tl.constexpr = META.HEAD_DIM // 2
    dims = tl.arange(0, META.BLOCK_D)
    if META.MODE == "ROPE_LLAMA":
        half = inside[None, :] & (dims < HALF)[:, None]
        k_low = tl.load(k_at[None, :] + dims[:, None] * cache.k_dim_stride, mask=half, other=0.0)
        k_high = tl.load(k_at[None, :] + (dims + HALF)[:, None] * cache.k_dim_stride, mask=half, other=0.0)
        k_low, k_high = rotate(
            dequantize(k_low, KV_BITS, tl.float32),
            dequantize(k_high, KV_BITS, tl.float32),
            at[None, :],
            dims[:, None],
            logits.rope_step,
            logits.rope_scale,
        )
        return _dot(q_high, k_high.to(META.COMPUTE), _dot(q, k_low.to(META.COMPUTE)))
    at_channels = k_at[None, :] + dims[:, None] * cache.k_dim_stride
    active = (dims < META.HEAD_DIM)[:, None]
    k = _load_entries(at_channels, inside[None, :], active, META.BLOCK_D == META.HEAD_DIM, IS_RAGGED)
    return _dot(q, dequantize(k, KV_BITS, META.COMPUTE))


@triton.jit
def window_begin(q_at, window_left, IS_CHUNKED: tl.constexpr):
    """Return where the window of queries begins, which may be before the first key."""
    if IS_CHUNKED:
        return q_at - q_at % (window_left + 1)
    return q_at - window_left


@triton.jit
def _masked(
    scores, at, inside, q_at, options, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr
):
    """Return -inf where a query does not see a key."""
    visible = inside[None, :]
    if CAUSAL:
        visible = visible & (at[None, :] <= q_at[:, None])
    if HAS_WINDOW:
        visible = visible & (at[None, :] >= window_begin(q_at, options.window_left, IS_CHUNKED)[:, None])
    return tl.where(visible, scores, -float("inf"))


# One call reads (HEAD_DIM + VALUE_DIM) * itemsize bytes for each key of the span, once for all BLOCK_M queries; latent
# keys are HEAD_DIM * itemsize with their values.
@triton.jit
def attend_span(
    acc,
    total,
    top,
    page,
    q,
    q_high,
    q_at,
    slopes,
    head,
    begin,
    end,
    last,
    cache,
    logits,
    META: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Add the keys [begin, end) to (acc [BLOCK_M, BLOCK_V], total [BLOCK_M], top [BLOCK_M]), unnormalized, base 2.

    Returns the three, and the pages of the keys behind `end`, as `page` [BLOCK_N] holds those from `begin` on. `q`
    [BLOCK_M, BLOCK_D] is all of the queries, or with rope their low halves, with the high ones in `q_high`, both
    rotated; or with latent keys the channels of values, with the others in `q_high`. `q_at` are their positions. `head`
    is of `head_pages`; the row's page table is read up to the key `last`. Without IS_RAGGED the span is of whole tiles,
    and seen by every query.
    """
    KV_BITS: tl.constexpr = META.KV_BITS
    keys = tl.arange(0, META.BLOCK_N)
    # of int8, sums are in units of the largest scale so far: weights stay within what the compute type has, however
    # small the values are
    unit = tl.full([1], 1e-20, tl.float32)
    if KV_BITS == "int8":
        acc = acc / unit
    for start in range(begin, end, META.BLOCK_N):
        at = start + keys
        inside = at < end
        page_offset = at
        next_page = page
        if META.PAGE_SIZE > 0:
            page_offset = at % META.PAGE_SIZE
            next_page = pages_of(head.pages, start + META.BLOCK_N, last, META.PAGE_SIZE, META.BLOCK_N)
        k_at = head.k_at + page * cache.k_page_stride + page_offset.to(tl.int64) * cache.k_token_stride
        v_at = head.v_at + page * cache.v_page_stride + page_offset.to(tl.int64) * cache.v_token_stride
        if META.ROPE_DIM > 0:
            v = _load_values(v_at, inside, cache, META, IS_RAGGED)
            scores = _latent_products(q, q_high, v, k_at, inside, cache, META, IS_RAGGED) * logits.options.sm_scale
        else:
            scores = _products(q, q_high, k_at, at, inside, cache, logits, META, IS_RAGGED) * logits.options.sm_scale
        if KV_BITS == "int8":
            scales_at = page * cache.scales_page_stride + page_offset
            k_unit = tl.load(head.k_scales + scales_at, mask=inside, other=0.0).to(tl.float32)
            v_unit = tl.load(head.v_scales + scales_at, mask=inside, other=0.0).to(tl.float32)
            scores = scores * k_unit[None, :]
        scores = altered(scores, logits, META)
        if META.MODE == "ALIBI":
            scores += slopes[:, None] * (at[None, :] - q_at[:, None]).to(tl.float32) * 1.4426950408889634
        if IS_RAGGED:
            scores = _masked(scores, at, inside, q_at, logits.options, CAUSAL, HAS_WINDOW, META.IS_CHUNKED)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, axis=1)
        if META.ROPE_DIM == 0:
            v = _load_values(v_at, inside, cache, META, IS_RAGGED)
        if KV_BITS == "int8":
            larger = tl.maximum(unit, tl.max(v_unit))
            weights = weights * (v_unit / larger)[None, :]
            shrink = shrink * (unit / larger)
            unit = larger
        acc = _dot(weights.to(META.COMPUTE), v, acc * shrink[:, None])
        top = new_top
        page = next_page
    if KV_BITS == "int8":
        acc = acc * unit
    return acc, total, top, page


@triton.jit
def with_sinks(acc, total, top, sinks, head, has_sink):
    """Add the sinks of heads to what `attend_span` returned, where they are taken: weight without a value."""
    sink = tl.load(sinks + head, mask=has_sink, other=-float("inf")) * 1.4426950408889634
    new_top = tl.maximum(top, sink)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    return acc * shrink[:, None], total * shrink + tl.exp2(sink - base), new_top


def compute_dtype(q: torch.dtype, cache: torch.dtype) -> Any:
    """Return the Triton type of the matrix products: q's where the cache's values fit into it exactly, else fp32.

    8 bits become fp16, which holds them exactly and to which hardware converts fp8 two at a time; bf16 takes
    five instructions for each value.
    """
    if cache.itemsize == 1:
        return tl.float32 if q == torch.float32 else tl.float16
    return getattr(tl, _TRITON_DTYPES[q if cache == q else torch.float32])


def cache_bytes(cache: Tensor) -> tuple[Tensor, str]:
    """Return the tensor that kernels load, and its code; int8, and fp8 that hardware does not convert, are bytes."""
    kv_format = format_of(cache.dtype)
    is_converted = kv_format.is_converted and cache.is_cuda and torch.cuda.get_device_capability(cache.device) >= (8, 9)
    return (cache, "") if not kv_format.code or is_converted else (cache.view(torch.uint8), kv_format.code)


def tile_sizes(rows: int, head_dim: int, value_dim: int, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of an attention kernel: BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, num_warps and num_stages.

    `rows`: queries times heads of the group that one program could take.
    """
    kv_itemsize, compute_itemsize = kv_dtype.itemsize, compute_dtype(q_dtype, kv_dtype).primitive_bitwidth // 8
    has_scales = format_of(kv_dtype).scale_dtype is not None  # they take registers for every tile in flight
    block_d = max(triton.next_power_of_2(head_dim), 16)
    block_v = max(triton.next_power_of_2(value_dim), 16)
    most = 128 if block_v <= 128 and compute_itemsize == 2 else 32 if block_v * compute_itemsize <= 512 else 16
    block_m = min(max(triton.next_power_of_2(rows), 16), most)
    block_n = _TILE_BYTES // ((block_d + block_v) * compute_itemsize)
    block_n = min(max(1 << (block_n.bit_length() - 1) if block_n else 16, 16), 64 if block_m >= 64 else 128)
    wide = compute_itemsize == 4
    # more warps where the accumulator would not fit their registers; compiled for each architecture by the tests
    room = 8192 if kv_itemsize == 1 and block_v >= 256 and not wide else 2048 if wide or has_scales else 4096
    # few queries: decoding fp8 takes the registers
    spread = kv_itemsize == 1 and block_v >= 256 and block_m == 16 and not has_scales
    stages = (1 if block_d >= 256 else 2) if wide else 4 if kv_itemsize == 1 else 3  # one tile fewer is in flight
    if has_scales:
        stages = min(stages, 3)
        block_n = max(block_n // 2, 16) if block_m >= 64 or block_v >= 256 else block_n
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "num_warps": 4 if block_m * max(block_v, block_n) <= room and not spread else 8,
        "num_stages": stages,
    }


def decode_tile(queries: int, head_dim: int, value_dim: int, q: torch.dtype, cache: torch.dtype) -> dict[str, int]:
    """Return the tile of decode attention over so many queries times heads of a group."""
    return tile_sizes(min(queries, 64), head_dim, value_dim, q, cache)


def registers(most: int = _MOST_REGISTERS) -> dict[str, int]:
    """Return the launch option that lets a kernel take so many registers of a thread, for few programs a processor.

    The compiler saves registers for more of them otherwise, and spills.
    """
    return {"maxnreg": most} if torch.version.hip is None else {}


def programs_per_processor(device: torch.device, tile: dict[str, int], kv_itemsize: int) -> int:
    """Return how many programs with a tile of `tile_sizes` one multiprocessor of a GPU holds at a time."""
    properties = torch.cuda.get_device_properties(device)
    in_flight = max(tile["num_stages"] - 1, 1) * tile["BLOCK_N"] * (tile["BLOCK_D"] + tile["BLOCK_V"]) * kv_itemsize
    by_memory = properties.shared_memory_per_multiprocessor // (in_flight + _OTHER_BYTES)
    by_registers = _PROCESSOR_REGISTERS // (PROGRAM_REGISTERS * 32 * tile["num_warps"])
    return max(min(by_memory, by_registers), 1)
