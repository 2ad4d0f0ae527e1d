"""Decoders written as a step over fixed memory, and the loading of checkpoints."""

from graphdecode.models.checkpoint import CheckpointError
from graphdecode.models.config import ModelConfig, UnsupportedModelError
from graphdecode.models.decoder import Decoder
from graphdecode.models.load import describe_model, load_model, resolve_dtype, weight_bytes
from graphdecode.models.source import ModelSourceError, load_tokenizer, resolve_model_path

__all__ = [
    "CheckpointError",
    "Decoder",
    "ModelConfig",
    "ModelSourceError",
    "UnsupportedModelError",
    "describe_model",
    "load_model",
    "load_tokenizer",
    "resolve_dtype",
    "resolve_model_path",
    "weight_bytes",
]
