"""Rows of random lengths over a pool of pages whose unused places hold NaN, with the answer that they should give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from attention_oracle import Options, attend
from torch import Tensor

from graphdecode.kernels.cache.kv_format import PageScales

DTYPES = {  # of queries, and of keys and values
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16-e4m3": (torch.float16, torch.float8_e4m3fn),
    "bf16-e4m3": (torch.bfloat16, torch.float8_e4m3fn),
    "fp16-int8": (torch.float16, torch.int8),
    "bf16-int8": (torch.bfloat16, torch.int8),
    "fp32-int8": (torch.float32, torch.int8),
    "fp32-e4m3": (torch.float32, torch.float8_e4m3fn),
}
TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-3, torch.bfloat16: 1e-2}


def int8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Heads [..., d] as integers of at most 127, and what they are multiplied with, in float64."""
    wide = x.double()
    unit = (wide.abs().amax(-1, keepdim=True) / 127).to(torch.bfloat16).double()
    return (wide / unit.clamp(min=1e-300)).round().clamp(-127, 127), unit


@dataclass
class PagedRows:
    """Caches [pages, page_size, hkv, d], strided as the layout says, and each row's own keys and values, widened."""

    k_cache: Tensor
    v_cache: Tensor
    table: Tensor  # int32 [rows, max_pages]; unused entries name a page of NaN
    indices: Tensor  # int32, the rows' pages one after another
    indptr: Tensor  # int32 [rows + 1]
    last_page_len: Tensor  # int32 [rows]
    lens: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    scales: PageScales | None = None  # of an int8 cache

    @classmethod
    def random(
        cls,
        lens: list[int],
        *,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
        is_latent: bool = False,
        is_in_parts: bool = False,
        layout: str = "NHD",
        device: str = "cpu",
        seed: int = 0,
    ) -> PagedRows:
        """Return rows whose values are their own, or with `is_latent` the last `value_dim` channels of the keys.

        With `is_in_parts` these are a tensor apart, and `k_cache` has the other channels alone.
        """
        draw = torch.Generator().manual_seed(seed)
        counts = [-(-n // page_size) for n in lens]
        pool = sum(counts) + 3
        order = torch.randperm(pool, generator=draw).tolist()
        unused = order[-1]
        value_dim = head_dim if value_dim is None else value_dim
        scale = 0.1 if dtype.itemsize == 1 else 1.0
        caches, rows, scales = [], [], []
        for dim in (head_dim, value_dim):
            is_int8 = dtype == torch.int8
            cache = torch.full((pool, page_size, kv_heads, dim), -127.0 if is_int8 else math.nan)
            units = torch.full((pool, kv_heads, page_size), math.nan)
            drawn = [(1.0 if is_int8 else scale) * torch.randn(n, kv_heads, dim, generator=draw) for n in lens]
            position = 0
            rows.append([])
            for tokens, count in zip(drawn, counts, strict=True):
                stored, unit = int8_codes(tokens) if is_int8 else (tokens.to(dtype).float(), torch.ones(1))
                rows[-1].append(stored * unit)
                for page in range(count):
                    entries = slice(page * page_size, (page + 1) * page_size)
                    part = stored[entries]
                    cache[order[position], : len(part)] = part.float()
                    if is_int8:
                        units[order[position], :, : len(part)] = unit[entries, :, 0].T.float()
                    position += 1
            caches.append(cache.to(dtype).to(device))
            scales.append(units.to(torch.bfloat16).to(device))
        if layout == "HND":
            caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
        elif layout == "joined" and value_dim == head_dim:
            as_bytes = [cache.view(torch.uint8) for cache in caches]
            joined = torch.stack(as_bytes, dim=1).view(dtype)
            caches = [joined[:, 0], joined[:, 1]]
        if is_latent:
            caches[1], rows[1] = caches[0][..., -value_dim:], [keys[..., -value_dim:] for keys in rows[0]]
        if is_in_parts:
            caches = [caches[0][..., :-value_dim].clone(), caches[1].clone()]
        table = torch.full((len(lens), max([*counts, 1])), unused, dtype=torch.int32)
        indices = torch.tensor(order[: sum(counts)], dtype=torch.int32)
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = indices[starts[row] : starts[row] + count]
        last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in lens], dtype=torch.int32)
        return cls(
            *caches, table.to(device), indices.to(device), starts.to(device), last.to(device), lens, rows[0], rows[1],
            PageScales(*scales) if dtype == torch.int8 else None,
        )  # fmt: skip

    def expected(self, q: Tensor, q_len: int, options: Options) -> tuple[Tensor, Tensor]:
        """Return the oracle's output and log-sum-exp for queries [rows * q_len, hq, d]."""
        parts = [
            attend(q[row * q_len : (row + 1) * q_len], self.keys[row], self.values[row], options)
            for row in range(len(self.lens))
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def tolerance(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> float:
    """The largest difference from the oracle; fp8 caches get no more, for the oracle reads the same rounded values."""
    return max(TOLERANCE[q_dtype], TOLERANCE.get(kv_dtype, 0.0))
