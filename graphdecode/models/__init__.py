"""Decoder models, and the loading of checkpoints."""

from graphdecode.models.checkpoint import generation_defaults
from graphdecode.models.config import ModelConfig, ModelShape, UnsupportedModelError
from graphdecode.models.decoder import Decoder
from graphdecode.models.family import Family, config_of, register_family
from graphdecode.models.load import (
    adapter_bytes,
    check_model,
    describe_model,
    load_model,
    num_parameters,
    register_source,
    resolve_device,
    resolve_dtype,
    weight_bytes,
)
from graphdecode.models.model import Chunks, Model
from graphdecode.models.source import ModelSourceError, resolve_model_path
from graphdecode.models.weight_map import CheckpointError

__all__ = [
    "CheckpointError",
    "Chunks",
    "Decoder",
    "Family",
    "Model",
    "ModelConfig",
    "ModelShape",
    "ModelSourceError",
    "UnsupportedModelError",
    "adapter_bytes",
    "check_model",
    "config_of",
    "describe_model",
    "generation_defaults",
    "load_model",
    "num_parameters",
    "register_family",
    "register_source",
    "resolve_device",
    "resolve_dtype",
    "resolve_model_path",
    "weight_bytes",
]
