"""Tokens in, tokens out: requests, scheduled into batches, through captured steps."""

from graphdecode.config.sampling_params import SamplingParams, StructuredOutputsParams
from graphdecode.engine.engine import Engine
from graphdecode.engine.metrics import EngineStats, RequestMetrics
from graphdecode.engine.request import Event, Request, RequestError, TokenLogprobs

__all__ = [
    "Engine",
    "EngineStats",
    "Event",
    "Request",
    "RequestError",
    "RequestMetrics",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenLogprobs",
]
