"""Arguments and constants that the attention kernels share.

A variant of attention is a field of `AttentionOptions`, and of `AttentionMeta` where kernels are compiled for it. A
model's configuration makes the record, and the torch version, Triton's `altered` and C's `logits_from` take it.
"""

import math
from typing import Any, NamedTuple, Self

from torch import Tensor

from ..cache.kv_format import PageScales
from ..native.library import CODES, LANES
from ..native.optional_triton import triton
from ..native.registration import Float32
from .attention_tile import LOG2_E, PLAN_HEADER, PLAN_TILE, cache_bytes, compute_dtype

_CHUNK_HEADS = 4  # of one program that appends


class Pages(NamedTuple):
    """Keys and values in pages, as arguments of kernels; strides are in elements."""

    k_cache: Tensor  # the keys, see `cache_bytes`
    v_cache: Tensor  # the values
    k_scales: Tensor | None  # of int8, or None
    v_scales: Tensor | None  # of int8, or None
    table: Tensor  # the pages of each row
    table_stride: int  # from row to row
    k_page_stride: int  # from page to page, and so on
    k_token_stride: int
    k_head_stride: int
    k_dim_stride: int
    v_page_stride: int
    v_token_stride: int
    v_head_stride: int
    v_dim_stride: int
    scales_page_stride: int
    scales_head_stride: int
    k_unit: float  # multiplies keys of 8-bit floats
    v_unit: float  # multiplies values

    @classmethod
    def of(
        cls,
        k_cache: Tensor,
        v_cache: Tensor,
        scales: PageScales | None,
        table: Tensor,
        *,
        table_stride: int | None = None,
        k_unit: float = 1.0,
        v_unit: float = 1.0,
    ) -> Self:
        """Return the record of a cache, [pages, page_size, kv_heads, channels]; None for the table's own stride."""
        keys, values = cache_bytes(k_cache)[0], cache_bytes(v_cache)[0]
        stride = table.stride(0) if table_stride is None else table_stride
        k_scales, v_scales = scales or (None, None)
        of_scales = (0, 0) if k_scales is None else k_scales.stride()[:2]
        strides = (*keys.stride(), *values.stride(), *of_scales)
        return cls._make((keys, values, k_scales, v_scales, table, stride, *strides, k_unit, v_unit))


class AttentionOptions(NamedTuple):
    """Options that may differ from layer to layer; the same for prompts and for decode steps."""

    # multiplies the logits; None: 1 / sqrt(head_dim). Compiled kernels take a number, see `scaled`
    sm_scale: float | None = None
    window_left: int = -1  # keeps the newest window_left + 1 keys of each query where it is >= 0
    logits_soft_cap: float = 0.0  # caps the logits, `cap * tanh(logit / cap)`, where it is > 0
    # float32 [num_qo_heads], contiguous, a logit of each head that takes weight and has no value (Xiao et al., 2024,
    # StreamingLLM, section 3.3; here each head's own, as in gpt-oss); None: no sinks
    sinks: Float32 | None = None
    # the window begins at the last multiple of its window_left + 1 keys that a query does not precede: attention within
    # chunks of that many tokens (Llama 4)
    is_chunked: bool = False

    def scale_of(self, head_dim: int) -> float:
        """Return the scale of the logits of heads of so many channels."""
        return 1.0 / math.sqrt(head_dim) if self.sm_scale is None else self.sm_scale

    def scaled(self, head_dim: int, k_scale: float = 1.0) -> "AttentionOptions":
        """Return the options with a number for the scale, that of a cache's keys included."""
        return self._replace(sm_scale=self.scale_of(head_dim) * k_scale)


class QKNormRope(NamedTuple):
    """Norm and rotary embedding of the heads of queries and keys."""

    cos_sin: Float32  # float32 [max positions, 2, rot/2], cosines and sines by position
    # fp32 [head_dim], weight of each query head's RMSNorm, or [num_qo_heads * head_dim], of all of them together; None:
    # no norm
    q_norm: Float32 | None = None
    k_norm: Float32 | None = None  # the same of the keys
    eps: float = 0.0  # of these norms


class RopeMeta(NamedTuple):
    """Constants of an append to the cache."""

    HALF: int  # pairs of channels that are rotated
    HEADS: int  # that a program takes, or norms, at once
    HAS_NORM: bool  # whether heads are normed
    NORMS_ALL: bool  # whether all of them are together
    IS_FP8: bool  # whether the cache has floats of 8 bits
    LINES: int = 1  # of memory, of a head's entry
    VALUES_OF_LINE: int = 1  # of the cache

    @classmethod
    def of(cls, rope: QKNormRope, k_cache: Tensor, **of_lines: int) -> Self:
        """Return the constants for a layer and its cache."""
        norms_all = rope.q_norm is not None and rope.q_norm.shape[0] > k_cache.shape[-1]
        is_fp8 = k_cache.dtype.is_floating_point and k_cache.itemsize == 1
        return cls(rope.cos_sin.shape[-1], _CHUNK_HEADS, rope.q_norm is not None, norms_all, is_fp8, **of_lines)


class Logits(NamedTuple):
    """Options of the logits, as arguments of kernels."""

    options: AttentionOptions  # their scale and cap hold log2(e)
    cap_step: float = 0.0  # multiplies logits that are capped, see `altered`
    rope_step: float = 0.0  # of the exponent of angles from channel to channel, see `rotate`
    rope_scale: float = 1.0  # divides the angles


class AttentionMeta(NamedTuple):
    """Constants of an attention kernel."""

    HEAD_DIM: int  # channels of keys
    VALUE_DIM: int  # channels of values
    PAGE_SIZE: int  # tokens; 0: a row is all in one page
    BLOCK_M: int  # queries times heads of a group that a program takes
    BLOCK_N: int  # keys at once
    BLOCK_D: int  # channels of keys, padded; with rope those of a half
    BLOCK_V: int  # channels of values, padded
    COMPUTE: Any  # type of the matrix products
    KV_BITS: str  # how cached values are decoded, see `cache_bytes`
    HAS_SINKS: bool  # whether heads have sinks
    HAS_WINDOW: bool  # whether there is a window
    IS_CHUNKED: bool  # whether that is the query's chunk
    HAS_CAP: bool  # whether there is a cap
    HAS_LSE: bool = False  # whether log-sum-exps are written
    HAS_INDPTR: bool = False  # whether the rows' pages are listed one row after another
    CAUSAL: bool = False  # whether a row has queries that see less than its last one
    MODE: str = "NONE"  # of positions: NONE, ROPE_LLAMA or ALIBI
    ALIBI_POWER: int = 1  # see `alibi_slope`
    ROPE_DIM: int = 0  # see `rope_dim_of`; BLOCK_D is that of the other channels, which are loaded once
    BLOCK_R: int = 0  # the same, padded
    MERGE_M: int = 1  # see `merge_sizes`
    MERGE_S: int = 1  # see `merge_sizes`
    TILE: int = PLAN_TILE  # tokens, see `PLAN_TILE`
    HEADER: int = PLAN_HEADER  # see `PLAN_HEADER`


def logits_of(
    head_dim: int, options: AttentionOptions, k_scale: float = 1.0, rope_scale: float = 1.0, rope_theta: float = 1e4
) -> Logits:
    """Return the record of some options; the last two matter with rope alone."""
    scale, cap = options.scale_of(head_dim) * k_scale * LOG2_E, options.logits_soft_cap
    options = options._replace(sm_scale=scale, logits_soft_cap=cap * LOG2_E)
    cap_step = 1.0 / (cap * LOG2_E) if cap > 0.0 else 0.0
    return Logits(options, cap_step, -2.0 / head_dim * math.log2(rope_theta), rope_scale)


def is_in_parts(q: Tensor, k_cache: Tensor) -> bool:
    """Return whether the last channels of keys are the values, and `k_cache` has those before them alone."""
    return q.shape[-1] > k_cache.shape[-1]


def rope_dim_of(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> int:
    """Return how many channels of latent keys come before the values; 0 if the values are no part of the keys."""
    if is_in_parts(q, k_cache):
        return k_cache.shape[-1]
    skipped = k_cache.shape[-1] - v_cache.shape[-1]
    is_latent = v_cache.data_ptr() == k_cache.data_ptr() + skipped * k_cache.itemsize
    return skipped if is_latent and v_cache.stride() == k_cache.stride() else 0


def can_compile(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Tensor) -> bool:
    """Return whether the C kernel supports such queries and such a cache.

    All must be contiguous, but for latent values, and for keys in parts, whose tokens must be at equal distances.
    """
    is_supported = k_cache.dtype == v_cache.dtype and k_cache.dtype in (q.dtype, *CODES) and q.shape[-1] % LANES == 0
    if is_in_parts(q, k_cache):
        is_supported = is_supported and k_cache.shape[2] == 1 and all(map(_has_even_tokens, (k_cache, v_cache)))
    else:
        others = (k_cache, *others)
    if k_cache.shape == v_cache.shape and not is_in_parts(q, k_cache):
        others = (v_cache, *others)
    else:
        rope_dim = rope_dim_of(q, k_cache, v_cache)
        is_supported = is_supported and rope_dim > 0 and rope_dim % (2 * LANES) == 0
    return is_supported and all(tensor.is_contiguous() for tensor in (q, *others))


def _has_even_tokens(cache: Tensor) -> bool:
    """Return whether the next page's first token is as far from a page's last one as its other tokens are apart."""
    page, token, _, channel = cache.stride()
    return channel == 1 and (page == token * cache.shape[1] or cache.shape[0] == 1)


def launch_options(tile: dict[str, int]) -> dict[str, int]:
    """Return the launch options among a tile's sizes."""
    return {name: value for name, value in tile.items() if name.islower()}


def meta_of(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tile: dict[str, int], options: AttentionOptions, **others: Any
) -> AttentionMeta:
    """Return the constants of a kernel over such tensors; `others` are fields of it."""
    rope_dim = rope_dim_of(q, k_cache, v_cache)
    return AttentionMeta(
        HEAD_DIM=q.shape[-1],
        VALUE_DIM=v_cache.shape[-1],
        COMPUTE=compute_dtype(q.dtype, k_cache.dtype),
        KV_BITS=cache_bytes(k_cache)[1],
        HAS_SINKS=options.sinks is not None,
        HAS_WINDOW=options.window_left >= 0,
        IS_CHUNKED=options.is_chunked,
        HAS_CAP=options.logits_soft_cap > 0.0,
        ROPE_DIM=rope_dim,
        BLOCK_R=max(triton.next_power_of_2(rope_dim), 16) if rope_dim else 0,
        **{"PAGE_SIZE": k_cache.shape[1]} | {name: value for name, value in tile.items() if name.isupper()} | others,
    )
