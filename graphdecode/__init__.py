"""A CUDA-graph-first decode runtime for large language models."""

from graphdecode import decode
from graphdecode.attention import (
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from graphdecode.buckets import BucketLadder
from graphdecode.buffers import FrozenError, Slot, StepBuffers
from graphdecode.cache import CacheFullError
from graphdecode.config import BucketConfig, ConfigError
from graphdecode.engine import Engine, EngineStats, Event, Request, RequestMetrics, SamplingParams
from graphdecode.graphs import CaptureError, GraphManager
from graphdecode.surfaces.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from graphdecode.surfaces.optimum_neuron import SlotKVCacheManager
from graphdecode.surfaces.transformer_engine import (
    InferenceParams,
    KVCacheManager,
    NonPagedKVCacheManager,
    PagedKVCacheManager,
)
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
    "decode",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
]
