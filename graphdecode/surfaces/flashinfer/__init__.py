"""FlashInfer's surface: decode attention over a paged cache, planned once a step and run once a layer."""

from typing import Any

from graphdecode.errors import flashinfer_hint

from .batch_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from .batch_mla import BatchMLAPagedAttentionWrapper
from .cascade import MultiLevelCascadeAttentionWrapper
from .mla_rows import MLAPlanMetadata
from .sampling import (
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from .shared_prefix import BatchDecodeWithSharedPrefixPagedKVCacheWrapper
from .single_decode import single_decode_with_kv_cache
from .table_decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from .table_mla import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MLAPlanMetadata",
    "MultiLevelCascadeAttentionWrapper",
    "chain_speculative_sampling",
    "fast_decode_plan",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "single_decode_with_kv_cache",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{flashinfer_hint(name)}")
