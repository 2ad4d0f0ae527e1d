"""Decode attention inside a captured step: fixed workspaces, one plan a step, one run a layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphdecode.attention.options import AttentionOptions
from graphdecode.kernels.attention.attention_plan import attention_plan, plan_size, work_items
from graphdecode.kernels.attention.decode_attention import decode_attention

PROGRAMS_PER_PROCESSOR = 2  # decode programs that one multiprocessor holds at a time
FIXED_SPLIT = 1024  # tokens of a split in batch-invariant plans at least, whatever the capacity


def wave_items_for(device: torch.device, num_kv_heads: int) -> int:
    """Return how many work items (times kv heads: programs) run on the device at the same time."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(processors * PROGRAMS_PER_PROCESSOR // num_kv_heads, 1)


class PagedDecodeAttention:
    """Attention of one new token a row over a paged cache, for every layer of one step.

    The workspaces are allocated here and never again, so `plan` and `run` can be captured. The CUDA path has been
    compiled ahead of time and run in Triton's interpreter by the tests.

    Args:
        max_batch_size: rows of the largest bucket.
        num_qo_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: key and value heads.
        head_dim: of queries and keys.
        head_dim_v: of values and outputs; None: head_dim.
        page_size: tokens a page.
        max_pages_per_row: width of the page table.
        dtype: of queries and outputs.
        options: the default of `run`; the plan is balanced for its window.
        batch_invariant: split at fixed places, so that a row's bits do not depend on the rest of the batch.
        device: where the cache is.

    Raises:
        ValueError: a size is less than 1, or the heads do not divide.
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
        options: AttentionOptions = AttentionOptions(),  # noqa: B008 (immutable)
        batch_invariant: bool = False,
        device: torch.device | str,
    ) -> None:
        sizes = {
            "max_batch_size": max_batch_size,
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "max_pages_per_row": max_pages_per_row,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be >= 1, got {size!r}")
        if num_qo_heads % num_kv_heads:
            raise ValueError(f"num_qo_heads={num_qo_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        self.max_batch_size = max_batch_size
        self.dtype = dtype
        self.options = options
        self.device = torch.device(device)
        max_kv_len = page_size * max_pages_per_row
        self._wave_items = wave_items_for(self.device, num_kv_heads)
        self._fixed_split = FIXED_SPLIT if batch_invariant else 0
        self._max_splits = -(-max_kv_len // FIXED_SPLIT) if batch_invariant else 0
        items = self._items(max_batch_size)
        held = items if self.device.type == "cuda" else 1  # the CPU path splits nothing
        value_dim = head_dim if head_dim_v is None else head_dim_v
        self._kv_lens = torch.zeros(max_batch_size, dtype=torch.int32, device=self.device)
        self._plan = torch.zeros(plan_size(max_batch_size, items), dtype=torch.int32, device=self.device)
        self._partial = torch.zeros(held, 1, num_qo_heads, value_dim, dtype=torch.float32, device=self.device)
        self._partial_lse = torch.zeros(held, 1, num_qo_heads, dtype=torch.float32, device=self.device)

    def _items(self, rows: int) -> int:
        return work_items(rows, self._wave_items, self._max_splits)

    @property
    def workspace(self) -> list[Tensor]:
        """The tensors that a captured step reads and writes here."""
        return [self._kv_lens, self._plan, self._partial, self._partial_lse]

    def plan(self, pre_step_seqlens: Tensor, live_rows: Tensor) -> None:
        """Plan one step on the device: row i attends to `pre_step_seqlens[i] + 1` tokens, padding to none.

        Args:
            pre_step_seqlens: int32 [rows], tokens in the cache before the step.
            live_rows: int32 [1]; rows past it are padding.
        """
        attention_plan(
            self._kv_lens,
            self._plan,
            pre_step_seqlens,
            live_rows,
            wave_items=self._wave_items,
            fixed_split=self._fixed_split,
            window_left=self.options.window_left,
        )

    def run(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        options: AttentionOptions | None = None,
    ) -> None:
        """Write one layer's attention into `out`; padding rows get 0.

        Args:
            out: [rows, num_qo_heads, head_dim_v], contiguous.
            q: [rows, num_qo_heads, head_dim]; as many rows as were planned.
            k_cache: [pages, page_size, num_kv_heads, head_dim].
            v_cache: [pages, page_size, num_kv_heads, head_dim_v].
            page_table: int32 [rows, max_pages_per_row].
            options: of this layer, where they are not the default ones.
        """
        options = self.options if options is None else options
        decode_attention(
            out,
            None,
            q,
            k_cache,
            v_cache,
            page_table,
            None,
            self._kv_lens,
            self._plan,
            self._partial,
            self._partial_lse,
            max_items=self._items(q.shape[0]),
            sm_scale=1.0 / math.sqrt(q.shape[-1]) if options.sm_scale is None else options.sm_scale,
            window_left=options.window_left,
            soft_cap=options.logits_soft_cap,
            sinks=options.sinks,
        )
