"""A CUDA-graph-first decode runtime for large language models."""

from graphdecode.buckets import BucketLadder
from graphdecode.buffers import FrozenError, Slot, StepBuffers
from graphdecode.config import BucketConfig, ConfigError
from graphdecode.engine import LLM, CompletionOutput, RequestOutput, SamplingParams
from graphdecode.graphs import CaptureError, GraphManager

__all__ = [
    "LLM",
    "BucketConfig",
    "BucketLadder",
    "CaptureError",
    "CompletionOutput",
    "ConfigError",
    "FrozenError",
    "GraphManager",
    "RequestOutput",
    "SamplingParams",
    "Slot",
    "StepBuffers",
]
