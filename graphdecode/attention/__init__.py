"""Attention over the cache: decode inside a step, prefill, appending to pages, and merging partial results."""

from graphdecode.attention.append import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from graphdecode.attention.cached import cached_attention
from graphdecode.attention.extend import TokenByTokenAttention, extend_over
from graphdecode.attention.merge import merge_state, merge_state_in_place, merge_states
from graphdecode.attention.paged_decode import PagedDecodeAttention
from graphdecode.kernels.attention.attention_records import AttentionOptions, QKNormRope

__all__ = [
    "AttentionOptions",
    "PagedDecodeAttention",
    "QKNormRope",
    "TokenByTokenAttention",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "cached_attention",
    "extend_over",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
