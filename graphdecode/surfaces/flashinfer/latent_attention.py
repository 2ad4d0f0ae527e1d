"""Attention over latent keys in two parts, as FlashInfer has them: sizes and dtypes checked once, and one launch.

A key is a latent vector ("ckv"), which is its value, too, and rotated channels ("kpe"), once for all heads. The parts
are tensors of their own or views of one; no cache is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.attention.paged_decode import wave_items_for
from graphdecode.cache.errors import require_fit, require_numbers, require_range, require_tensors
from graphdecode.kernels.attention.attention_records import AttentionOptions
from graphdecode.kernels.attention.decode_attention import decode_attention
from graphdecode.kernels.attention.work_item import SplitPlan

from .decode_problem import FP8_DTYPES, MAX_TOKENS, OUT_DTYPES, exact_queries

LN_2 = math.log(2.0)
_MOST_HEADS, _MOST_PAGE_SIZE = 1 << 16, 1 << 20
_LATENT_DIMS, _MOST_ROTATED = (16, 512), 256


@dataclass(frozen=True)
class LatentProblem:
    """The arguments of a plan that do not depend on the batch.

    Raises:
        ValueError: a size is outside its range.
    """

    num_heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    def __post_init__(self) -> None:
        require_range(1, _MOST_HEADS, num_heads=self.num_heads)
        require_range(*_LATENT_DIMS, head_dim_ckv=self.head_dim_ckv)
        require_range(0, _MOST_ROTATED, head_dim_kpe=self.head_dim_kpe)
        require_range(1, _MOST_PAGE_SIZE, page_size=self.page_size)

    def check_queries(self, device: torch.device, q_nope: Tensor, q_pe: Tensor) -> None:
        """Raise a ValueError if queries do not fit the plan."""
        require_tensors(device, q_nope=q_nope, q_pe=q_pe)
        require_fit("q_nope", q_nope, ("tokens", self.num_heads, self.head_dim_ckv), self.q_dtype)
        require_fit("q_pe", q_pe, (len(q_nope), self.num_heads, self.head_dim_kpe), self.q_dtype)

    def check_caches(self, device: torch.device, ckv_cache: Tensor, kpe_cache: Tensor) -> None:
        """Raise a ValueError if the parts of keys do not fit the plan."""
        require_tensors(device, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        require_fit("ckv_cache", ckv_cache, ("pages", self.page_size, self.head_dim_ckv), self.kv_dtype)
        require_fit("kpe_cache", kpe_cache, (len(ckv_cache), self.page_size, self.head_dim_kpe), self.kv_dtype)

    def wave_items(self, device: torch.device, q_len: int = 1) -> int:
        """Return how many work items run on a device at the same time."""
        return wave_items_for(
            device, num_qo_heads=self.num_heads, num_kv_heads=1, head_dim=self.head_dim_ckv,
            head_dim_v=self.head_dim_ckv, dtype=torch.float16 if self.q_dtype in FP8_DTYPES else self.q_dtype,
            kv_dtype=self.kv_dtype, q_len=q_len,
        )  # fmt: skip

    @property
    def floats_of_query(self) -> int:
        """Partial results of a work item, for each query of a row."""
        return self.num_heads * (self.head_dim_ckv + 2)


def attend_to_latents(
    out: Tensor,
    lse: Tensor | None,
    queries: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    table: Tensor,
    starts: Tensor | None,
    work: SplitPlan,
    *,
    q_len: int = 1,
    max_items: int,
    sm_scale: float,
    sinks: Tensor | None = None,
    ckv_scale: float = 1.0,
    kpe_scale: float = 1.0,
    out_scale: float = 1.0,
) -> None:
    """Write attention over latent keys into `out`, and base-2 log-sum-exps into `lse`.

    Args:
        out: [tokens, heads, ckv], contiguous.
        lse: fp32 [tokens, heads], contiguous, or None.
        queries: those of latent vectors [tokens, heads, ckv], and of rotated channels [tokens, heads, kpe].
        caches: [pages, page_size, ckv] and [pages, page_size, kpe], any strides.
        table, starts, work, q_len, max_items: as `decode_attention` takes them.
        sm_scale: multiplies the logits.
        sinks: float32 [heads], or None.
        ckv_scale, kpe_scale: multiply the cache's parts.
        out_scale: multiplies the output.
    """
    latent, rotated = (exact_queries(each, out.dtype) for each in queries)
    ckv, kpe = (each.unsqueeze(2) for each in caches)
    if not rotated.shape[-1]:
        kpe = ckv
    elif kpe_scale != ckv_scale:
        rotated = (rotated.float() * (kpe_scale / ckv_scale)).to(rotated.dtype)
    q = torch.cat((rotated, latent), dim=-1)  # the kernel's order
    result = out if out.dtype in OUT_DTYPES else torch.empty(out.shape, dtype=q.dtype, device=q.device)
    decode_attention(
        result, lse, q, kpe, ckv, table, starts, work, q_len=q_len, max_items=max_items,
        options=AttentionOptions(sm_scale * ckv_scale, sinks=sinks), v_scale=ckv_scale * out_scale,
    )  # fmt: skip
    if result is not out:
        out.copy_(result)


def number_of(name: str, value: float | Tensor | None, default: float = 1.0) -> float:
    """Return a number, or `default` for None; raises ValueError for anything else, and for tensors on a device."""
    if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
        value = value.item()
    require_numbers(**{name: value})
    return default if value is None else float(value)


__all__ = ["LN_2", "MAX_TOKENS", "LatentProblem", "attend_to_latents", "number_of"]
