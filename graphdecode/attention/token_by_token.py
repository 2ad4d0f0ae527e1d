"""Attention of prompt chunks with the bits of decode steps: each token is done as a row of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.attention.paged_decode import PagedDecodeAttention
from graphdecode.cache import LayerCache
from graphdecode.kernels.attention.attention_records import AttentionOptions


class TokenByTokenAttention:
    """Attention of many tokens of some rows, in slices that a decode attention takes as its batch.

    A token's result does not depend on how its prompt was cut in chunks, and is that of the decode step that the token
    would have been fed to: with a batch-invariant `attention`, the same bits. Slower than `extend_attention`, which
    reads a row's keys once for many queries.

    Args:
        attention: planned and run for each slice; its workspaces are written.
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
            out: [t, num_qo_heads, head_dim], contiguous.
            q: [t, num_qo_heads, head_dim].
            cache: of the layer, these tokens' keys and values included.
            rows: int32 [t], the page-table row of each token.
            positions: int32 [t], its position in its sequence.
            live: int32 [1]; tokens from there on are padding and get 0.
            page_table: int32 [b, pages of a row].
            options: of this layer.
        """
        size = self._attention.max_batch_size
        for begin in range(0, q.shape[0], size):
            part = slice(begin, begin + size)
            alive = (live - begin).clamp_(0, size)
            known = torch.arange(begin, begin + rows[part].shape[0], device=live.device) < live
            tables = page_table.index_select(0, torch.where(known, rows[part], 0))
            self._attention.plan(positions[part], alive)
            self._attention.run(out[part], q[part], cache.keys, cache.values, tables, options, cache.scales)
