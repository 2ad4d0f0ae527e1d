"""A CUDA-graph-first decode runtime for large language models."""

from graphdecode.attention import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    merge_state,
    merge_state_in_place,
    merge_states,
    single_decode_with_kv_cache,
)
from graphdecode.buckets import BucketLadder
from graphdecode.buffers import FrozenError, Slot, StepBuffers
from graphdecode.cache import (
    CacheFullError,
    InferenceParams,
    KVCacheManager,
    NonPagedKVCacheManager,
    PagedKVCacheManager,
    SlotKVCacheManager,
)
from graphdecode.config import BucketConfig, ConfigError
from graphdecode.engine import Engine, EngineStats, Event, Request, RequestMetrics, SamplingParams
from graphdecode.graphs import CaptureError, GraphManager
from graphdecode.text import LLM, AsyncLLM, CompletionOutput, Logprob, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BucketConfig",
    "BucketLadder",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "CacheFullError",
    "CaptureError",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineStats",
    "Event",
    "FrozenError",
    "GraphManager",
    "InferenceParams",
    "KVCacheManager",
    "Logprob",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Slot",
    "SlotKVCacheManager",
    "StepBuffers",
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
]
