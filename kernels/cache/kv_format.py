"""Dtypes of cached keys and values: one record per dtype.

A record gives sizes and scales to the cache, stores and loads entries in torch versions, and names the code by which
Triton kernels decode bytes. A new dtype is a record here, a name in the settings, and support in kernels.

Keys that become int8, and the queries over them, are multiplied with a Hadamard matrix: their products do not change,
and a channel that is always large is spread over all channels, so that it does not determine the head's scale (Ashkboos
et al., QuaRot, 2024, section 4.2).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..native.registration import Bfloat16

MOST_INT8 = 127  # symmetric codes


class PageScales(NamedTuple):
    """Scales of int8 entries, by page; those of a head are adjacent."""

    k_scales: Bfloat16  # bf16 [pages, num_kv_heads, page_size], contiguous
    v_scales: Bfloat16  # the same for values


def as_bytes(x: Tensor) -> Tensor:
    """Return 8-bit values as bytes, which can be indexed and copied (torch has few operators of fp8); others as is."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


class KVFormat(NamedTuple):
    """One dtype of cached keys and values."""

    dtype: torch.dtype  # of the entries
    names: tuple[str, ...] = ()  # values of `kv_cache_dtype`; none for model dtypes
    code: str = ""  # how kernels decode bytes; "": they convert the dtype
    is_converted: bool = False  # newer GPUs convert the dtype instead of bytes
    # dtype of `PageScales`, per token and head; None: no such scales
    scale_dtype: torch.dtype | None = None
    has_layer_scales: bool = False  # entries are divided by a scale of the layer
    is_mixed: bool = False  # keys, and queries over them, are `mixed`
    most: float | None = None  # values are clamped to it: torch converts larger ones to NaN
    load: Callable[[Tensor], Tensor] = Tensor.float  # returns entries in fp32

    def entry_bytes(self, head_dim: int) -> int:
        """Return the bytes of one head's key or value of one token, with its scale."""
        return head_dim * self.dtype.itemsize + (0 if self.scale_dtype is None else self.scale_dtype.itemsize)

    def page_scales(self, shape: tuple[int, int, int, int], new: Callable[..., Tensor]) -> PageScales | None:
        """Return scales for pages [pages, page_size, heads, dim], allocated by `new(shape, dtype)`."""
        if self.scale_dtype is None:
            return None
        pages, page_size, heads, _ = shape
        k_scales, v_scales = (new((pages, heads, page_size), self.scale_dtype) for _ in range(2))
        return PageScales(k_scales, v_scales)

    def write(self, cache: Tensor, at: tuple[Tensor, Tensor], new: Tensor, unit: float, scales: Tensor | None) -> None:
        """Write heads into a cache.

        Args:
            cache: [pages, page_size, heads, dim].
            at: pages and slots of the tokens, integers [tokens].
            new: [tokens, heads, dim], fp32.
            unit: the layer's scale, which divides them.
            scales: the pages' scales, if the dtype has them.
        """
        if scales is not None:
            cache[at], scales[at[0], :, at[1]] = encoded(new)
            return
        new = new / unit if unit != 1.0 else new
        new = new if self.most is None else new.clamp(-self.most, self.most)
        as_bytes(cache)[at] = as_bytes(new.to(self.dtype))

    def fill(self, tensor: Tensor, pages: Tensor) -> None:
        """Fill pages of a cache [pages, ...] with random entries."""
        shape = (len(pages), *tensor.shape[1:])
        if not self.dtype.is_floating_point:
            tensor[pages] = torch.randint(-MOST_INT8, MOST_INT8 + 1, shape, dtype=self.dtype, device=tensor.device)
            return
        as_bytes(tensor)[pages] = as_bytes(torch.rand(shape, device=tensor.device).to(self.dtype))


def format_of(dtype: torch.dtype) -> KVFormat:
    """Return the format of a cache dtype."""
    return KV_FORMATS.get(dtype) or KVFormat(dtype)


def format_named(name: str, dtype: torch.dtype) -> KVFormat:
    """Return the format of a name; for others, such as "auto", that of the model's dtype."""
    return next((each for each in KV_FORMATS.values() if name in each.names), format_of(dtype))


def mixed(x: Tensor) -> Tensor:
    """Return heads [..., dim] in fp32, times an orthonormal Hadamard matrix over adjacent channels.

    Its size is the largest power of two that divides `dim`.
    """
    count = x.shape[-1] & -x.shape[-1]
    wide = x.float().unflatten(-1, (-1, count))
    for _ in range(count.bit_length() - 1):
        even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
        wide = torch.cat((even + odd, even - odd), dim=-1)
    return wide.flatten(-2) * (1 / math.sqrt(count))


def within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return mixed queries in a model's dtype, clamped to its range."""
    most = torch.finfo(torch.float16).max
    return x.clamp(-most, most).to(dtype) if dtype == torch.float16 else x.to(dtype)


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return heads [..., dim] as int8, and their scales, bf16 [...]: the largest magnitude over 127, rounded.

    The scale of a head with values that are not finite is NaN.
    """
    wide = x.float()
    most = wide.abs().amax(-1)
    most = torch.where(torch.isfinite(wide).all(-1), most, torch.nan)
    scales = (most / MOST_INT8).to(torch.bfloat16)
    unit = scales.float().unsqueeze(-1)
    steps = torch.where(unit > 0, wide / unit, 0.0).round().clamp(-MOST_INT8, MOST_INT8)
    return steps.to(torch.int8), scales


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes [pages, page_size, heads, dim] in fp32, given their scales [pages, heads, page_size]."""
    return codes.float() * scales.float().transpose(1, 2).unsqueeze(-1)


def _e4m3(x: Tensor) -> Tensor:
    """Decode the bits through fp16, faster than a cast."""
    bits = x.view(torch.uint8).to(torch.int16)
    magnitude = bits & 0x7F
    half = (magnitude << 7) | ((bits & 0x80) << 8)  # fp16 has the same layout, except for a factor of 2^8
    half |= ((magnitude + 1) & 0x80) * 0xF8  # all ones is NaN: fill fp16's exponent, 0x7C00
    return half.view(torch.float16).float().mul_(256.0)


def _e5m2(x: Tensor) -> Tensor:
    return (x.view(torch.uint8).to(torch.int16) << 8).view(torch.float16).float()


KV_FORMATS = {  # filled on import
    each.dtype: each
    for each in (
        KVFormat(
            torch.float8_e4m3fn, ("fp8", "fp8_e4m3"), "e4m3", True,
            has_layer_scales=True, most=448.0, load=_e4m3,
        ),
        KVFormat(torch.float8_e5m2, (), "e5m2", True, load=_e5m2),
        KVFormat(torch.int8, ("int8",), "int8", scale_dtype=torch.bfloat16, is_mixed=True),
    )
}  # fmt: skip
