"""A description of a model and its memory, without reading its weights."""

import math
from pathlib import Path

import torch

from graphdecode.kernels.native import library as native
from graphdecode.linear.quantization.registry import weight_type
from graphdecode.models.config import ModelConfig, ModelShape
from graphdecode.models.family import family_of
from graphdecode.models.fit import checked_weight_map, fitted_config
from graphdecode.models.quantize_on_load import DEQUANTIZE
from graphdecode.models.source import adopted_folder, open_source
from graphdecode.models.transformers_backend import AdoptedConfig
from graphdecode.models.weight_map import Part, parts
from graphdecode.models.weights import can_adapt, is_of_experts


def describe_model(
    model: str | Path, *, model_impl: str = "auto", trust_remote_code: bool = False
) -> ModelConfig | AdoptedConfig:
    """Return a model's configuration, without reading weights; see `load_model` for arguments and errors."""
    source = open_source(model)
    by_transformers = adopted_folder(source, model_impl, trust_remote_code=trust_remote_code)
    return source.config() if by_transformers is None else by_transformers.config


def check_model(
    model: str | Path, *, model_impl: str = "auto", trust_remote_code: bool = False
) -> ModelConfig | AdoptedConfig:
    """Return a model's configuration, and check that the expected tensors are there, with their shapes."""
    source = open_source(model)
    by_transformers = adopted_folder(source, model_impl, trust_remote_code=trust_remote_code)
    if by_transformers is None:
        checked_weight_map(source, source.name, source.config())
        return source.config()
    by_transformers.check_files(source)
    return by_transformers.config


def adapter_bytes(
    config: ModelShape, slots: int, max_rank: int, dtype: torch.dtype, *, adapt_experts: bool = False
) -> int:
    """Return an upper bound of the bytes of adapter slots."""
    if isinstance(config, AdoptedConfig):
        return slots * max_rank * config.adapted_features * dtype.itemsize
    if not slots or not isinstance(config, ModelConfig):
        return 0
    family = family_of(config.architecture)
    weight_map = family.weights(config)
    adapted = [
        param_name for param_name, weights in weight_map.items() if can_adapt(param_name) and len(weights[0].shape) == 2
    ]
    adapted += ["embedding"] * 2  # a tied output layer has its own adapters
    of_experts = (
        param_name for param_name in weight_map if is_of_experts(param_name) and not param_name.endswith(".bias")
    )
    adapted += of_experts if adapt_experts else []
    features = sum(family.adapted_features(config, param_name, weight_map[param_name]) for param_name in adapted)
    return slots * max_rank * features * dtype.itemsize


def weight_bytes(
    model: str | Path,
    config: ModelConfig | AdoptedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantize: str | None = None,
) -> int:
    """Return the bytes of all weights; quantized ones count as stored, without the scales of groups.

    `model` and `quantize` are as for `load_model`; `dtype` is that of weights that are not kept quantized.
    """
    source = open_source(model)
    if isinstance(config, AdoptedConfig):
        return config.num_parameters * dtype.itemsize
    config = fitted_config(source, config)
    has_kernels = device.type != "cpu" or bool(native.is_expected(None))

    def size(part: Part) -> int:
        values, stored = math.prod(part.shape), source.tensors[part.name].dtype
        quantized = None if quantize == DEQUANTIZE or not has_kernels else weight_type(stored)
        if quantized is None or device.type not in quantized.devices:
            return values * dtype.itemsize
        return int(values * quantized.bits) // 8

    return sum(map(size, parts(family_of(config.architecture).weights_in(config, source.tensors))))
