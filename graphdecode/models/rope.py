"""Rotary embedding (Su et al., 2021), and its scaling to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphdecode.errors import shown
from graphdecode.models.fields import MOST, UnsupportedModelError, flag, is_positive, number

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding."""

    rope_type: str = "default"  # one of `ROPE_TYPES`
    theta: float = 10000.0  # base of the frequencies
    factor: float = 1.0  # context scaling factor
    rotary_factor: float = 1.0  # share of a head's channels that are rotated
    original_max_positions: int = 0  # original training context
    # llama3: wavelengths above `original_max_positions / low_freq_factor` are stretched fully
    low_freq_factor: float = 1.0
    # llama3: wavelengths below `original_max_positions / high_freq_factor` are left alone
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn: channels with more rotations than this over the original context are left alone
    beta_slow: float = 1.0  # yarn: channels with fewer rotations than this are stretched fully
    attention_factor: float = 1.0  # yarn and longrope: scales cosines and sines
    truncate: bool = True  # yarn: round the borders between these channels
    # longrope: factor of each channel pair if sequences are at most `original_max_positions` long
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()  # longrope: the same for longer sequences

    @classmethod
    def from_dict(cls, settings: dict[str, Any], max_positions: int, *, may_be_partial: bool = False) -> RopeConfig:
        """Read the fields of config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

        Raises:
            UnsupportedModelError: the type is unknown, a field is missing, the family does not support partial
                rotation, or layers differ.
        """
        scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
        if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
            raise UnsupportedModelError(
                f"rope_parameters must be one object with numbers for all layers, got {shown(scaling)}; supported rope "
                f"types are {', '.join(ROPE_TYPES)}"
            )
        rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {shown(rope_type)} is not supported; supported are {', '.join(ROPE_TYPES)}"
            )
        partial = scaling.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0
        if partial != 1.0 and not may_be_partial and rope_type != "proportional":
            raise UnsupportedModelError(f"partial_rotary_factor {shown(partial)} is not supported; supported is 1.0")
        if not is_positive(partial) or partial > 1:
            raise UnsupportedModelError(f"partial_rotary_factor must be a number > 0 and <= 1, got {shown(partial)}")
        theta = number(scaling, "rope_theta", number(settings, "rope_theta", 10000.0))
        if theta <= 1:
            raise UnsupportedModelError(f"rope_theta must be above 1, got {theta}: periods grow with the channel")
        rope = cls(rope_type, theta, rotary_factor=float(partial))
        if rope_type == "default":
            return rope
        original = _positions(settings) or _positions(scaling) or max_positions
        # the default factor of these two types
        grown = max_positions / original if rope_type in ("yarn", "longrope") else None
        factor = number(scaling, "factor", 1.0 if rope_type == "proportional" else grown)
        if rope_type in ("linear", "proportional"):
            return replace(rope, factor=factor)
        rope = replace(rope, factor=factor, original_max_positions=original)
        if rope_type == "llama3":
            low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
            if low >= high:
                raise UnsupportedModelError(f"low_freq_factor {low} must be below high_freq_factor {high}")
            return replace(rope, low_freq_factor=low, high_freq_factor=high)
        if rope_type == "longrope":
            return replace(
                rope,
                attention_factor=_attention_factor(scaling, rope),
                short_factors=_factors(scaling, "short_factor"),
                long_factors=_factors(scaling, "long_factor"),
            )
        return replace(
            rope,
            beta_fast=number(scaling, "beta_fast", 32.0),
            beta_slow=number(scaling, "beta_slow", 1.0),
            attention_factor=_attention_factor(scaling, rope),
            truncate=flag(scaling, "truncate", True),
        )


def _positions(fields: dict[str, Any]) -> int:
    """Return the original training context; 0 if unknown."""
    name = "original_max_position_embeddings"
    value = number(fields, name, 0.0)
    if value and not 1 <= value <= MOST:
        raise UnsupportedModelError(f"{name} must be in 1..{MOST}, got {shown(value)}")
    return int(value)


def _factors(fields: dict[str, Any], name: str) -> tuple[float, ...]:
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        raise UnsupportedModelError(f"{name} must be a list of numbers > 0, got {shown(value)}")
    return tuple(number({name: factor}, name) for factor in value)


def _attention_factor(scaling: dict[str, Any], rope: RopeConfig) -> float:
    """Return the scale of cosines and sines: the checkpoint's, or by default that of the papers.

    LongRoPE: Ding et al., 2024, section 4.3. YaRN: Peng et al., 2023, equation 22.
    """
    if scaling.get("attention_factor") is not None:
        return number(scaling, "attention_factor")
    if rope.factor <= 1:
        return 1.0
    growth = math.log(rope.factor)
    if rope.rope_type == "longrope":
        if rope.original_max_positions == 1:
            raise UnsupportedModelError(
                "rope type 'longrope' needs original_max_position_embeddings to be above 1, got 1"
            )
        return math.sqrt(1 + growth / math.log(rope.original_max_positions))
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        over, under = (number(scaling, name) for name in ("mscale", "mscale_all_dim"))
        return (0.1 * over * growth + 1.0) / (0.1 * under * growth + 1.0)
    return 0.1 * growth + 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int, positions: int = 0) -> Tensor:
    """Return the angle by which each pair of channels is rotated per position, float32 [pairs].

    Operations and their order are those of transformers: an ulp of a frequency is a visible angle at position 1e5.
    LongRoPE's factors depend on `positions`, not on a sequence's length, since cached keys keep their angles.
    """
    if rope.rope_type == "proportional":  # frequencies of the whole head; the first are rotated
        whole = inverse_frequencies(RopeConfig(theta=rope.theta), head_dim)
        whole[int(rope.rotary_factor * head_dim // 2) :] = 0.0
        return whole / rope.factor
    dim = int(head_dim * rope.rotary_factor)
    periods = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    unscaled = 1.0 / periods
    if rope.rope_type == "linear":
        return unscaled / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, unscaled)
    if rope.rope_type == "yarn":
        return _yarn(rope, periods, dim)
    if rope.rope_type == "longrope":
        factors = rope.long_factors if positions > rope.original_max_positions else rope.short_factors
        if len(factors) != len(periods):
            raise UnsupportedModelError(f"rope type 'longrope' needs {len(periods)} factors, got {len(factors)}")
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)
    return unscaled


def _llama3(rope: RopeConfig, unscaled: Tensor) -> Tensor:
    """Scale long wavelengths, keep short ones, and blend in between (Llama 3.1)."""
    context = rope.original_max_positions
    wavelengths = 2 * math.pi / unscaled
    blend = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * unscaled / rope.factor + blend * unscaled
    scaled = torch.where(wavelengths > context / rope.low_freq_factor, unscaled / rope.factor, blended)
    return torch.where(wavelengths < context / rope.high_freq_factor, unscaled, scaled)


def _yarn(rope: RopeConfig, periods: Tensor, head_dim: int) -> Tensor:
    """Interpolate slow channels, keep fast ones, ramp in between (Peng et al., 2023, section 3.2)."""

    def channel_with(times: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel_with(rope.beta_fast), channel_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp_(0, 1)
    extrapolated = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - extrapolated) + 1.0 / periods * extrapolated


def cos_sin_table(rope: RopeConfig | None, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """Return cosines and sines by position, float32 [positions, 2, channel pairs]; None: no pairs."""
    if rope is None:
        return torch.empty(positions, 2, 0, device=device)
    frequencies = inverse_frequencies(rope, head_dim, positions)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=1).mul_(rope.attention_factor).to(device)


def ropes_by_layer_type(settings: dict[str, Any], theta: float, sliding_theta: float) -> dict[str, Any]:
    """Return fields of config.json: `rope_parameters` for layers without windows, `sliding_rope` for those with them.

    `sliding_rope` is like a config.json. In older files `rope_theta` and `rope_scaling` are for layers without windows.
    """
    parameters, scaling = settings.get("rope_parameters") or {}, settings.get("rope_scaling") or {}
    kinds = ("full_attention", "sliding_attention")
    is_nested = isinstance(parameters, dict) and any(kind in parameters for kind in kinds)
    full, sliding = (parameters.get(kind) or {} for kind in kinds) if is_nested else (parameters, {})
    if not all(isinstance(fields, dict) for fields in (full, sliding, scaling)):
        raise UnsupportedModelError(
            f"rope_parameters must be an object, or one for each type of layer, got {shown(parameters)}"
        )
    full = {"rope_theta": settings.get("rope_theta", theta)} | full | scaling
    sliding = {"rope_theta": sliding_theta} | sliding
    return {"rope_parameters": full, "rope_scaling": None, "sliding_rope": {"rope_parameters": sliding}}
