"""Decode attention as a captured step uses it: planned once a step on the device, run once a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.kernels.attention_plan import plan_decode
from graphdecode.kernels.decode_attention import decode_attention


class PagedDecodeAttention:
    """Fixed workspaces and settings of one model's decode attention.

    Args:
        max_batch_size: rows.
        num_qo_heads: query heads, a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads.
        head_dim: of queries and keys.
        head_dim_v: of values; None means the same.
        page_size: tokens of a page.
        max_pages_per_row: width of the page table.
        dtype: of queries.
        sm_scale: factor of the logits; None means `1 / sqrt(head_dim)`.
        window_left: keys before the last one that are seen; -1 is all.
        logits_soft_cap: 0 is off.
        batch_invariant: a row's bits do not depend on the rest of the batch.
        device: of the workspaces.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        page_size: int,
        max_pages_per_row: int,
        dtype: torch.dtype,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        batch_invariant: bool = False,
        device: torch.device | str,
    ) -> None:
        if num_qo_heads % num_kv_heads:
            raise ValueError(f"num_qo_heads must be a multiple of num_kv_heads={num_kv_heads}, got {num_qo_heads}")
        self.sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self.window_left = window_left
        self.logits_soft_cap = logits_soft_cap
        self._kv_lens = torch.zeros(max_batch_size, dtype=torch.int32, device=device)

    @property
    def workspace(self) -> list[Tensor]:
        """The tensors that `plan` and `run` write, to be declared with the step's buffers."""
        return [self._kv_lens]

    def plan(self, pre_step_seqlens: Tensor, live_rows: Tensor) -> None:
        """Work out the rows' lengths, on the device; once a step, for all layers.

        Args:
            pre_step_seqlens: int32 [b], the position of the token that each row feeds.
            live_rows: int32 [1].
        """
        plan_decode(self._kv_lens[: pre_step_seqlens.shape[0]], pre_step_seqlens, live_rows)

    def run(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        window_left: int | None = None,
    ) -> None:
        """Write one layer's attention into `out`; see `kernels.decode_attention` for shapes."""
        decode_attention(
            out,
            q,
            k_cache,
            v_cache,
            page_table,
            self._kv_lens[: q.shape[0]],
            sm_scale=self.sm_scale,
            window_left=self.window_left if window_left is None else window_left,
            logits_soft_cap=self.logits_soft_cap,
        )
