"""Requests in, scheduled batches through the graphs, tokens out."""

from graphdecode.engine.llm import LLM
from graphdecode.engine.loop import EngineStats
from graphdecode.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from graphdecode.engine.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineStats",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]
