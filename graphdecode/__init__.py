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
from graphdecode.engine import LLM, CompletionOutput, RequestOutput, SamplingParams
from graphdecode.graphs import CaptureError, GraphManager
from graphdecode.surfaces.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from graphdecode.surfaces.optimum_neuron import SlotKVCacheManager
from graphdecode.surfaces.transformer_engine import (
    DotProductAttention,
    InferenceParams,
    KVCacheManager,
    MultiheadAttention,
    NonPagedKVCacheManager,
    PagedKVCacheManager,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
)

__all__ = [
    "LLM",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BucketConfig",
    "BucketLadder",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "CacheFullError",
    "CaptureError",
    "CompletionOutput",
    "ConfigError",
    "DotProductAttention",
    "FrozenError",
    "GraphManager",
    "InferenceParams",
    "KVCacheManager",
    "MultiheadAttention",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
    "RequestOutput",
    "RotaryPositionEmbedding",
    "SamplingParams",
    "Slot",
    "SlotKVCacheManager",
    "StepBuffers",
    "TransformerLayer",
    "append_paged_kv_cache",
    "apply_rotary_pos_emb",
    "decode",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
]
