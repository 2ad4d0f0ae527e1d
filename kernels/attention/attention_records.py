"""What the attention kernels are given, and what they are compiled for, each stated once for all of them.

A variant of attention is a field of `AttentionOptions`, and of `AttentionForm` where kernels are compiled for it. A
model's configuration makes the record, and the torch version, Triton's `altered` and C's `logits_from` take it.
"""

import math
from typing import Any, NamedTuple, Self

from torch import Tensor

from ..cache.kv_format import PageScales
from ..native.registration import Float32
from .attention_tile import LOG2_E, PLAN_TILE, cache_bytes, compute_dtype

_HEADS_AT_ONCE = 4  # of one program that appends


class Pages(NamedTuple):
    """Keys and values in pages, as kernels are given them; strides are in elements.

    Attributes:
        k_cache: the keys, see `cache_bytes`.
        v_cache: the values.
        k_scales: of int8, or None.
        v_scales: of int8, or None.
        table: the pages of each row.
        table_stride: from row to row.
        k_page_stride: from page to page, and so on.
        k_unit: what keys of 8-bit floats are multiplied with.
        v_unit: what values are multiplied with.
    """

    k_cache: Tensor
    v_cache: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    table: Tensor
    table_stride: int
    k_page_stride: int
    k_token_stride: int
    k_head_stride: int
    k_dim_stride: int
    v_page_stride: int
    v_token_stride: int
    v_head_stride: int
    v_dim_stride: int
    scales_page_stride: int
    scales_head_stride: int
    k_unit: float
    v_unit: float

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
    """Options that may differ from layer to layer; the same for prompts and for decode steps.

    Attributes:
        sm_scale: multiplies the logits; None: 1 / sqrt(head_dim). Compiled kernels take a number, see `scaled`.
        window_left: keeps the newest window_left + 1 keys of each query where it is >= 0.
        logits_soft_cap: caps the logits, `cap * tanh(logit / cap)`, where it is > 0.
        sinks: float32 [num_qo_heads], contiguous, a logit of each head that takes weight and has no value (Xiao et al.,
            2024, StreamingLLM, section 3.3; here each head's own, as in gpt-oss); None: no sinks.
    """

    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sinks: Float32 | None = None

    def scale_of(self, head_dim: int) -> float:
        """Return what multiplies the logits of heads of so many channels."""
        return 1.0 / math.sqrt(head_dim) if self.sm_scale is None else self.sm_scale

    def scaled(self, head_dim: int, k_scale: float = 1.0) -> "AttentionOptions":
        """Return the options with a number for the scale, that of a cache's keys included."""
        return self._replace(sm_scale=self.scale_of(head_dim) * k_scale)


class HeadTurn(NamedTuple):
    """What is done to the heads of queries and keys before they meet.

    Attributes:
        cos_sin: float32 [max positions, 2, rot/2], cosines and sines by position.
        q_norm: fp32 [head_dim], weight of each query head's RMSNorm, or [num_qo_heads * head_dim], of all of them
            together; None: no norm.
        k_norm: the same of the keys.
        eps: of these norms.
    """

    cos_sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


class TurnForm(NamedTuple):
    """What an append to the cache is compiled for.

    Attributes:
        HALF: pairs of channels that are rotated.
        HEADS: that a program takes, or norms, at once.
        HAS_NORM: whether heads are normed.
        NORMS_ALL: whether all of them are together.
        IS_FP8: whether the cache has floats of 8 bits.
        LINES: of memory, of a head's entry.
        VALUES_OF_LINE: of the cache.
    """

    HALF: int
    HEADS: int
    HAS_NORM: bool
    NORMS_ALL: bool
    IS_FP8: bool
    LINES: int = 1
    VALUES_OF_LINE: int = 1

    @classmethod
    def of(cls, cos_sin: Tensor, q_norm: Tensor | None, k_cache: Tensor, **of_lines: int) -> Self:
        """Return the form for a layer and its cache."""
        norms_all = q_norm is not None and q_norm.shape[0] > k_cache.shape[-1]
        is_fp8 = k_cache.dtype.is_floating_point and k_cache.itemsize == 1
        return cls(cos_sin.shape[-1], _HEADS_AT_ONCE, q_norm is not None, norms_all, is_fp8, **of_lines)


class Logits(NamedTuple):
    """What becomes of products of queries and keys, as kernels are given it.

    Attributes:
        options: their scale holds log2(e).
        rope_step: of the exponent of angles from channel to channel, see `rotate`.
        rope_scale: divides the angles.
    """

    options: AttentionOptions
    rope_step: float = 0.0
    rope_scale: float = 1.0


class AttentionForm(NamedTuple):
    """What an attention kernel is compiled for.

    Attributes:
        HEAD_DIM: channels of keys.
        VALUE_DIM: channels of values.
        PAGE_SIZE: tokens; 0: a row is all in one page.
        BLOCK_M: queries times heads of a group that a program takes.
        BLOCK_N: keys at once.
        BLOCK_D: channels of keys, padded; with rope those of a half.
        BLOCK_V: channels of values, padded.
        COMPUTE: type of the matrix products.
        KV_BITS: how cached values are decoded, see `cache_bytes`.
        HAS_SINKS: whether heads have sinks.
        HAS_WINDOW: whether there is a window.
        HAS_CAP: whether there is a cap.
        HAS_LSE: whether log-sum-exps are written.
        HAS_INDPTR: whether the rows' pages are listed one row after another.
        CAUSAL: whether a row has queries that see less than its last one.
        MODE: of positions: NONE, ROPE_LLAMA or ALIBI.
        ALIBI_POWER: see `alibi_slope`.
        MERGE_M: see `merge_sizes`.
        MERGE_S: see `merge_sizes`.
        TILE: tokens, see `PLAN_TILE`.
    """

    HEAD_DIM: int
    VALUE_DIM: int
    PAGE_SIZE: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_V: int
    COMPUTE: Any
    KV_BITS: str
    HAS_SINKS: bool
    HAS_WINDOW: bool
    HAS_CAP: bool
    HAS_LSE: bool = False
    HAS_INDPTR: bool = False
    CAUSAL: bool = False
    MODE: str = "NONE"
    ALIBI_POWER: int = 1
    MERGE_M: int = 1
    MERGE_S: int = 1
    TILE: int = PLAN_TILE


def logits_of(
    head_dim: int, options: AttentionOptions, k_scale: float = 1.0, rope_scale: float = 1.0, rope_theta: float = 1e4
) -> Logits:
    """Return the record of some options; what a mode of positions does not use is of no matter."""
    scale = options.scale_of(head_dim) * k_scale * LOG2_E
    return Logits(options._replace(sm_scale=scale), -2.0 / head_dim * math.log2(rope_theta), rope_scale)


def kv_bits(cache: Tensor) -> str:
    """Return how a kernel decodes cached values; "": they have a type of the GPU's."""
    return cache_bytes(cache)[1]


def launch_options(tile: dict[str, int]) -> dict[str, int]:
    """Return what of a tile is none of the kernel's own constants."""
    return {name: value for name, value in tile.items() if name.islower()}


def form_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tile: dict[str, int],
    options: AttentionOptions,
    **others: Any,
) -> AttentionForm:
    """Return the form of a kernel over such tensors; `others` are fields of it."""
    return AttentionForm(
        HEAD_DIM=k_cache.shape[-1],
        VALUE_DIM=v_cache.shape[-1],
        COMPUTE=compute_dtype(q.dtype, k_cache.dtype),
        KV_BITS=kv_bits(k_cache),
        HAS_SINKS=options.sinks is not None,
        HAS_WINDOW=options.window_left >= 0,
        HAS_CAP=options.logits_soft_cap > 0.0,
        **{"PAGE_SIZE": k_cache.shape[1]} | {name: value for name, value in tile.items() if name.isupper()} | others,
    )
