"""FlashInfer's surface: decode attention over a paged cache, planned once a step and run once a layer."""

from typing import Any

from graphdecode.errors import flashinfer_hint

from .batch_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from .cascade import MultiLevelCascadeAttentionWrapper
from .shared_prefix import BatchDecodeWithSharedPrefixPagedKVCacheWrapper
from .single_decode import single_decode_with_kv_cache
from .table_decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{flashinfer_hint(name)}")
