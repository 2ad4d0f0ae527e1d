"""What a decode wrapper was planned for: checked once, and held against the tensors of every run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.attention.paged_decode import wave_items_for
from graphdecode.cache import require_integers, require_numbers, require_tensors

from .limits import FP8_DTYPES, check_head_dim, check_heads, check_options, planned_dtypes

_LARGEST = 1 << 20  # of tokens a page, and queries a row


@dataclass(frozen=True)
class DecodeProblem:
    """The arguments of a plan that do not depend on the batch, with their defaults filled in."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    position_mode: str
    window_left: int
    soft_cap: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    sm_scale: float
    rope_scale: float
    rope_theta: float
    q_len: int

    @classmethod
    def of(
        cls,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        position_mode: str,
        window_left: int,
        soft_cap: float | None,
        q_data_type: str | torch.dtype | None,
        kv_data_type: str | torch.dtype | None,
        data_type: str | torch.dtype | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
        q_len: int,
    ) -> DecodeProblem:
        """Check the arguments of a plan, whose meaning `BatchDecodeWithPagedKVCacheWrapper.plan` describes.

        Raises:
            ValueError: one is outside its range, or two do not fit.
        """
        check_heads(num_qo_heads, num_kv_heads)
        check_head_dim(head_dim, position_mode)
        cap = 0.0 if soft_cap is None else soft_cap
        scale = 1.0 if rope_scale is None else rope_scale
        theta = 1e4 if rope_theta is None else rope_theta
        check_options(window_left, cap, scale, theta)
        require_integers(page_size=page_size, q_len_per_req=q_len)
        require_numbers(sm_scale=sm_scale)
        for name, value in (("page_size", page_size), ("q_len_per_req", q_len)):
            if not 1 <= value <= _LARGEST:
                raise ValueError(f"{name} must be in 1..{_LARGEST}, got {value}")
        q_dtype, kv_dtype = planned_dtypes(q_data_type, kv_data_type, data_type)
        return cls(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            position_mode=position_mode,
            window_left=window_left,
            soft_cap=cap,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            sm_scale=1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale,
            rope_scale=scale,
            rope_theta=theta,
            q_len=q_len,
        )

    def check_tensors(self, q: Tensor, k_cache: Tensor, device: torch.device) -> None:
        """Hold a run's queries and keys (NHD) against the plan.

        Raises:
            ValueError: they do not fit it.
        """
        require_tensors(q=q)
        if q.dim() != 3 or tuple(q.shape[1:]) != (self.num_qo_heads, self.head_dim):
            raise ValueError(f"q must be [rows, {self.num_qo_heads}, {self.head_dim}] as planned, got {list(q.shape)}")
        if q.dtype != self.q_dtype or k_cache.dtype != self.kv_dtype:
            raise ValueError(
                f"planned were queries of {self.q_dtype} and a cache of {self.kv_dtype}, "
                f"got {q.dtype} and {k_cache.dtype}"
            )
        fits = (self.page_size, self.num_kv_heads, self.head_dim)
        if tuple(k_cache.shape[1:]) != fits:
            raise ValueError(
                f"planned were pages of (page_size, num_kv_heads, head_dim) = {fits}, got {tuple(k_cache.shape[1:])}"
            )
        if q.device != device or k_cache.device != device:
            raise ValueError(f"q and the cache must be on {device}, got {q.device} and {k_cache.device}")

    def wave_items(self, device: torch.device) -> int:
        """Return how many work items (times kv heads: programs) run on a device at the same time."""
        return wave_items_for(
            device,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            dtype=torch.float16 if self.q_dtype in FP8_DTYPES else self.q_dtype,
            kv_dtype=self.kv_dtype,
            q_len=self.q_len,
        )


def check_metadata(indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> int:
    """Return the number of rows; no values are read.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    require_tensors(indptr=indptr, indices=indices, last_page_len=last_page_len)
    for name, tensor in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        if tensor.is_meta:
            raise ValueError(f"{name} must hold numbers, and is on the meta device")
        if tensor.dim() != 1 or tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32 of 1 dimension, got {tensor.dtype} {list(tensor.shape)}")
    rows = last_page_len.shape[0]
    if indptr.shape[0] != rows + 1 or not rows:
        raise ValueError(
            f"indptr must have one entry more than last_page_len, and at least 2, got {indptr.shape[0]} and {rows}"
        )
    return rows
