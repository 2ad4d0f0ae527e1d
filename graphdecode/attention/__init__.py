"""Decode attention over a cache: planned, then run."""

from graphdecode.attention.extend import extend_attention
from graphdecode.attention.paged_decode import PagedDecodeAttention

__all__ = ["PagedDecodeAttention", "extend_attention"]
