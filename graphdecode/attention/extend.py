"""Attention of prompt chunks over the cache: many tokens of a row together, or token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.attention.paged_decode import PagedDecodeAttention
from graphdecode.cache import LayerCache
from graphdecode.kernels.attention.attention_records import AttentionOptions
from graphdecode.kernels.attention.extend_attention import extend_attention


def extend_over(
    cache: LayerCache,
    out: Tensor,
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor,
    options: AttentionOptions,
) -> None:
    """Write the causal attention of each row's newest tokens over a layer's cache into `out`.

    The tokens are in the cache already. See `extend_attention` for the tensors; queries are packed.
    """
    key, value, pages = cache.scales
    options = options.scaled(q.shape[-1], key)
    lengths = (cu_seqlens_q, cu_seqlens_kv)
    extend_attention(
        out, None, q, cache.keys, cache.values, *lengths, page_table, options=options, v_scale=value, scales=pages
    )


class TokenByTokenAttention:
    """Attention of prompt chunks that computes each token as a row of a decode step, with the same bits.

    A token's result does not depend on how its prompt was cut into chunks. It is slower than `extend_over`, which reads
    a row's keys once for many queries. `attention` is planned and run for slices of its batch size.
    """

    def __init__(self, attention: PagedDecodeAttention) -> None:
        self._attention = attention

    def run(
        self,
        out: Tensor,
        q: Tensor,
        cache: LayerCache,
        rows: Tensor,
        positions: Tensor,
        live: Tensor,
        page_table: Tensor,
        options: AttentionOptions,
    ) -> None:
        """Write the attention of each token over its row's tokens up to itself.

        Args:
            out: [t, num_qo_heads, head_dim], contiguous, as q; `cache` has these tokens' keys and values.
            rows: int32 [t], the page-table row of each token; `positions`: its position in its sequence.
            live: int32 [1]; later tokens are padding and get 0.
        """
        size = self._attention.max_batch_size
        for begin in range(0, q.shape[0], size):
            part = slice(begin, begin + size)
            alive = (live - begin).clamp_(0, size)
            is_live = torch.arange(begin, begin + rows[part].shape[0], device=live.device) < live
            tables = page_table.index_select(0, torch.where(is_live, rows[part], 0))
            self._attention.plan(positions[part], alive)
            self._attention.run(out[part], q[part], cache.keys, cache.values, tables, options, cache.scales)
