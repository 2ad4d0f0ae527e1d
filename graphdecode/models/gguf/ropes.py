"""The rotary embedding of a GGUF file, from its metadata and tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from graphdecode.linear.quantization.gguf import dequantize
from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.gguf.container import GgufTensor, Metadata
from graphdecode.models.rope import RopeConfig, inverse_frequencies

_FACTORS, _LONG, _SHORT = (f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short"))
ROPE_TENSORS = (_FACTORS, _LONG, _SHORT)
_LLAMA3_CONTEXT = 8192
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": _LLAMA3_CONTEXT}
_LOCAL = {"gemma3": 1e4, "gemma4": 1e4, "olmo2": None}  # layers with a window have a rope of their own: default theta
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_KINDS = ("none", "linear", "yarn", "longrope")
_NOT_ROTATED = 1e30  # factor of a pair that is not


def rope_settings(metadata: Metadata, stored: Mapping[str, GgufTensor], head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` as a config.json has them."""
    theta = float(metadata.number("rope.freq_base", 10000.0))
    rotated = metadata.count("rope.dimension_count", head_dim)
    rope = {"rope_theta": theta, **_scaling(metadata, stored, theta, rotated)}
    if rotated != head_dim or "partial_rotary_factor" not in rope:  # some families rotate a part by default
        rope["partial_rotary_factor"] = rotated / head_dim
    if metadata.architecture in _LOCAL and metadata.number("attention.sliding_window", 0):
        default = _LOCAL[metadata.architecture] or theta
        local = {"rope_theta": float(metadata.number("rope.freq_base_swa", default)), "rope_type": "default"}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    if metadata.number("rope.freq_base_swa", theta) != theta and metadata.has("attention.sliding_window"):
        raise UnsupportedModelError(
            f"{metadata.architecture}.rope.freq_base_swa must be that of all layers, {theta}, got "
            f"{metadata.number('rope.freq_base_swa')}"
        )
    return {"rope_parameters": rope}


def _scaling(metadata: Metadata, stored: Mapping[str, GgufTensor], theta: float, rotated: int) -> dict[str, Any]:
    """Return type and numbers; without a type, a factor is linear, as in llama.cpp."""
    kind = metadata.whole(f"{metadata.architecture}.rope.scaling.type", str, "linear")
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"{metadata.architecture}.rope.scaling.type {kind!r} is not supported; supported are {', '.join(_KINDS)}"
        )
    factor = 1.0 if kind == "none" else _factor(metadata)
    scale = float(metadata.number("rope.scaling.attn_factor", 1.0))  # of cosines and sines
    long, short = (_values(stored[name]) if name in stored else None for name in (_LONG, _SHORT))
    if long is not None and short is not None:
        trained = metadata.count("rope.scaling.original_context_length", metadata.count("context_length"))
        return _by_pair(short * factor, long * factor, trained, scale)
    if long is not None or short is not None or kind == "longrope":
        raise UnsupportedModelError(f"a longrope needs the tensors {_LONG} and {_SHORT}")
    if _FACTORS in stored and metadata.architecture == "gemma4":
        is_rotated = _values(stored[_FACTORS]) < _NOT_ROTATED / 2
        return {"rope_type": "proportional", "partial_rotary_factor": float(is_rotated.mean()), "factor": factor}
    if _FACTORS in stored and kind == "yarn":
        raise UnsupportedModelError(f"{metadata.architecture}.rope.scaling.type 'yarn' does not go with {_FACTORS}")
    if _FACTORS in stored:
        return _of_factors(metadata, _values(stored[_FACTORS]) * factor, theta, rotated, scale)
    if kind == "yarn":
        return _yarn(metadata, factor, scale)
    if scale != 1.0:
        pairs = np.full(rotated // 2, factor)
        return _by_pair(pairs, pairs, metadata.count("context_length"), scale)
    return {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _factor(metadata: Metadata) -> float:
    """Return the scaling factor, which older files call `rope.scale_linear`; 0 or none: not scaled."""
    name = "rope.scaling.factor" if metadata.has("rope.scaling.factor") else "rope.scale_linear"
    return float(metadata.number(name, 0.0)) or 1.0


def _by_pair(short: np.ndarray, long: np.ndarray, trained: int, scale: float) -> dict[str, Any]:
    """Return a rope whose frequencies are divided by factors of each pair of channels."""
    factors = {"short_factor": short.tolist(), "long_factor": long.tolist()}
    return {"rope_type": "longrope", **factors, "original_max_position_embeddings": trained, "attention_factor": scale}


def _yarn(metadata: Metadata, factor: float, scale: float) -> dict[str, Any]:
    trained = metadata.count("rope.scaling.original_context_length", metadata.count("context_length"))
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    if metadata.architecture == "gpt-oss":
        rope["truncate"] = False
    if metadata.has(_LOG_MULTIPLIER):  # DeepSeek's
        multiplier = metadata.number(_LOG_MULTIPLIER) / 0.1
        rope |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
    rope |= _optional(metadata, {ours: f"rope.scaling.yarn_{theirs}" for ours, theirs in names.items()})
    if scale != 1.0:
        attention_factor = RopeConfig.from_dict({"rope_parameters": rope}, trained).attention_factor
        rope["attention_factor"] = scale * attention_factor
    return rope


def _optional(metadata: Metadata, names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: metadata.number(theirs) for ours, theirs in names.items() if metadata.has(theirs)}


def _of_factors(metadata: Metadata, factors: np.ndarray, theta: float, rotated: int, scale: float) -> dict[str, Any]:
    """Return the rope whose frequencies are divided by factors: "llama3" for those of Llama 3.1, else "longrope"."""
    llama3 = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    if 2 * len(factors) != rotated:
        raise UnsupportedModelError(f"{_FACTORS} has {len(factors)} factors; {rotated} channels are rotated in pairs")
    rope = RopeConfig.from_dict({"rope_parameters": {**llama3, "rope_theta": theta}}, _LLAMA3_CONTEXT)
    ours = inverse_frequencies(RopeConfig(theta=theta), rotated) / inverse_frequencies(rope, rotated)
    if scale == 1.0 and torch.allclose(ours, torch.from_numpy(factors), rtol=1e-5):
        return llama3
    return _by_pair(factors, factors, metadata.count("context_length"), scale)


def llama3_factors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the factors of Llama 3.1's rope, float32 [pairs]; a file cannot have other numbers than Llama 3.1's."""
    numbers = {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if numbers | {"original_max_position_embeddings": rope.original_max_positions} != _LLAMA3:
        raise UnsupportedModelError(
            f"a GGUF file cannot express that Llama 3.1's rope has other numbers than {_LLAMA3}"
        )
    unscaled = inverse_frequencies(RopeConfig(theta=rope.theta), head_dim)
    return (unscaled / inverse_frequencies(rope, head_dim)).numpy()


def _values(tensor: GgufTensor) -> np.ndarray:
    count = tensor.shape[-1]
    return dequantize(tensor.read(0, count)[None], tensor.block)[0].float().numpy()
