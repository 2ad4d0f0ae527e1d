"""A CUDA-graph-first decode runtime for large language models."""

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
from graphdecode.engine import LLM, CompletionOutput, RequestOutput, SamplingParams
from graphdecode.graphs import CaptureError, GraphManager

__all__ = [
    "LLM",
    "BucketConfig",
    "BucketLadder",
    "CacheFullError",
    "CaptureError",
    "CompletionOutput",
    "ConfigError",
    "FrozenError",
    "GraphManager",
    "InferenceParams",
    "KVCacheManager",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
    "RequestOutput",
    "SamplingParams",
    "Slot",
    "SlotKVCacheManager",
    "StepBuffers",
]
