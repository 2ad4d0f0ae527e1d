"""The rotary embedding of a GGUF file, from its metadata and tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from graphdecode.linear.gguf_blocks import dequantize
from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.gguf.container import GgufTensor, Metadata
from graphdecode.models.rope import RopeConfig, inverse_frequencies

_FACTORS, _LONG, _SHORT = (f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short"))
ROPE_TENSORS = (_FACTORS, _LONG, _SHORT)
_LLAMA3_CONTEXT = 8192
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": _LLAMA3_CONTEXT}
_LOCAL = {"gemma3": 1e4, "gemma4": 1e4, "olmo2": None}  # layers with a window have a rope of their own: default theta
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_NOT_ROTATED = 1e30  # factor of a pair that is not


def rope_settings(metadata: Metadata, stored: Mapping[str, GgufTensor], head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` as a config.json has them."""
    theta = float(metadata.number("rope.freq_base", 10000.0))
    rotated = metadata.count("rope.dimension_count", head_dim)
    rope = {"rope_theta": theta, **_scaling(metadata, stored, theta, rotated)}
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if metadata.architecture in _LOCAL and metadata.number("attention.sliding_window", 0):
        default = _LOCAL[metadata.architecture] or theta
        local = {"rope_theta": float(metadata.number("rope.freq_base_swa", default)), "rope_type": "default"}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return {"rope_parameters": rope}


def _scaling(metadata: Metadata, stored: Mapping[str, GgufTensor], theta: float, rotated: int) -> dict[str, Any]:
    kind = metadata.whole(f"{metadata.architecture}.rope.scaling.type", str, "none")
    if _LONG in stored and _SHORT in stored:
        trained = metadata.count("context_length")
        return {
            "rope_type": "longrope",
            "short_factor": _values(stored[_SHORT]).tolist(),
            "long_factor": _values(stored[_LONG]).tolist(),
            "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length", trained),
            **_optional(metadata, {"attention_factor": "rope.scaling.attn_factor"}),
        }
    if _FACTORS in stored and metadata.architecture == "gemma4":
        is_rotated = _values(stored[_FACTORS]) < _NOT_ROTATED / 2
        return {"rope_type": "proportional", "partial_rotary_factor": float(is_rotated.mean())}
    if _FACTORS in stored:
        return _of_factors(metadata, _values(stored[_FACTORS]), theta, rotated)
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.architecture}.rope.scaling.type {kind!r} is not supported; supported are none, linear, yarn, "
            f"and longrope with the tensors {_LONG} and {_SHORT}"
        )
    found = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "linear":
        return found
    found["original_max_position_embeddings"] = metadata.count("rope.scaling.original_context_length")
    if metadata.architecture == "gpt-oss":
        found["truncate"] = False
    if metadata.has(_LOG_MULTIPLIER):  # DeepSeek's
        multiplier = metadata.number(_LOG_MULTIPLIER) / 0.1
        found |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
    return found | _optional(metadata, {ours: f"rope.scaling.yarn_{theirs}" for ours, theirs in names.items()})


def _optional(metadata: Metadata, names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: metadata.number(theirs) for ours, theirs in names.items() if metadata.has(theirs)}


def _of_factors(metadata: Metadata, factors: np.ndarray, theta: float, rotated: int) -> dict[str, Any]:
    """Return the rope whose frequencies are divided by factors: "llama3" for those of Llama 3.1, else "longrope"."""
    llama3 = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    if 2 * len(factors) != rotated:
        raise UnsupportedModelError(f"{_FACTORS} has {len(factors)} factors; {rotated} channels are rotated in pairs")
    rope = RopeConfig.from_dict({"rope_parameters": {**llama3, "rope_theta": theta}}, _LLAMA3_CONTEXT)
    ours = inverse_frequencies(RopeConfig(theta=theta), rotated) / inverse_frequencies(rope, rotated)
    if torch.allclose(ours, torch.from_numpy(factors), rtol=1e-5):
        return llama3
    trained = {"original_max_position_embeddings": metadata.count("context_length"), "attention_factor": 1.0}
    same = {"short_factor": factors.tolist(), "long_factor": factors.tolist()}
    return {"rope_type": "longrope", **same, **trained}


def llama3_factors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the factors of Llama 3.1's rope, float32 [pairs]; a file cannot have other numbers than Llama 3.1's."""
    numbers = {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if numbers | {"original_max_position_embeddings": rope.original_max_positions} != _LLAMA3:
        raise UnsupportedModelError(
            f"a GGUF file cannot express that Llama 3.1's rope has other numbers than {_LLAMA3}"
        )
    plain = inverse_frequencies(RopeConfig(theta=rope.theta), head_dim)
    return (plain / inverse_frequencies(rope, head_dim)).numpy()


def _values(tensor: GgufTensor) -> np.ndarray:
    count = tensor.shape[-1]
    return dequantize(tensor.read(0, count)[None], tensor.block)[0].float().numpy()
