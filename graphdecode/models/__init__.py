"""Decoder models, and the loading of checkpoints."""

from graphdecode.hub.model_path import ModelSourceError, resolve_model_path
from graphdecode.models.checkpoint import generation_defaults
from graphdecode.models.compute import num_parameters, resolve_device, resolve_dtype
from graphdecode.models.config import ModelConfig, ModelShape, UnsupportedModelError
from graphdecode.models.decoder import Decoder
from graphdecode.models.describe import adapter_bytes, check_model, describe_model, weight_bytes
from graphdecode.models.family import Family, config_of, register_family
from graphdecode.models.load import load_model
from graphdecode.models.model import Chunks, DecodeInputs, Model
from graphdecode.models.source import register_source
from graphdecode.models.weight_map import CheckpointError

__all__ = [
    "CheckpointError",
    "Chunks",
    "DecodeInputs",
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
