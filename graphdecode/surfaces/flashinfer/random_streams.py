"""Streams of noise, one an output, from FlashInfer's seeds and offsets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.cache.errors import require_fit, require_tensors
from graphdecode.errors import shown

_WEYL = 0x9E3779B97F4A7C15 - 2**64  # steps of SplitMix64 (Steele et al., 2014), and the multipliers of its mix
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_POSITION_BITS = 31


class NoiseStream(NamedTuple):
    """The noise of each output: a function of both, and of the token."""

    seeds: Tensor  # int64 [b]
    positions: Tensor  # int32 [b], >= 0


def stream_of(
    count: int,
    device: torch.device,
    generator: torch.Generator | None,
    seed: int | Tensor | None,
    offset: int | Tensor | None,
) -> NoiseStream:
    """Return the noise of so many outputs; each has its own, at the same seed and offset as well.

    Raises:
        ValueError: seed or offset does not fit.
    """
    if seed is None or offset is None:
        seed = torch.empty(1, dtype=torch.int64, device=device).random_(generator=generator)
        offset = torch.zeros_like(seed)
    if isinstance(seed, Tensor) != isinstance(offset, Tensor):
        raise ValueError(f"seed and offset must both be tensors or numbers, got {shown(seed)} and {shown(offset)}")
    seeds, offsets = (_words(name, each, count, device) for name, each in (("seed", seed), ("offset", offset)))
    numbers = torch.arange(1, count + 1, device=device)
    high = _shifted(offsets, _POSITION_BITS)  # of offsets that are too large for a position
    mixed = _mixed(_mixed(seeds + high * _FIRST) + numbers * _WEYL)
    positions = (offsets & (2**_POSITION_BITS - 1)).int().expand(count).contiguous()
    return NoiseStream(mixed, positions)


def uniforms(stream: NoiseStream, count: int) -> Tensor:
    """Return numbers in (0, 1), float64 [b, count], that are no part of the outputs' noise."""
    numbers = torch.arange(1, count + 1, device=stream.seeds.device)
    starts = _mixed(stream.seeds + stream.positions * _SECOND + 1).unsqueeze(1)
    return (_shifted(_mixed(starts + numbers * _WEYL), 11).double() + 0.5) * 2.0**-53


def _words(name: str, value: int | Tensor, count: int, device: torch.device) -> Tensor:
    """Return 64 bits of each output, or of all of them, as int64."""
    if isinstance(value, Tensor):
        require_tensors(device, **{name: value})
        require_fit(name, value, ("entries",), torch.int64, torch.uint64)
        if value.shape[0] not in (1, count):
            raise ValueError(f"{name} must have 1 or {count} entries, one for each output, got {value.shape[0]}")
        return value.view(torch.int64)
    if not isinstance(value, int) or not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} must be an integer of 64 bits, or a tensor, got {shown(value)}")
    return torch.full((1,), value - 2**64 if value >= 2**63 else value, dtype=torch.int64, device=device)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Return unsigned words shifted right."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(words: Tensor) -> Tensor:
    """Return SplitMix64's mix of the words: a permutation of them."""
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)
