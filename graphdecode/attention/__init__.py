"""Attention over the cache: decode inside a step, prefill, and the FlashInfer surface."""

from graphdecode.attention.cached import cached_attention
from graphdecode.attention.extend import extend_attention
from graphdecode.attention.paged_decode import PagedDecodeAttention

__all__ = ["PagedDecodeAttention", "cached_attention", "extend_attention"]
