"""What a configuration means for a model: how long sequences can be, and how many pages there are."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from graphdecode.cache import entry_bytes
from graphdecode.config import BucketConfig
from graphdecode.errors import ArgumentError
from graphdecode.models import ModelShape

_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_ASSUMED_FREE_BYTES = 4 * 2**30  # on a system that does not tell


@dataclass(frozen=True)
class Capacity:
    """The sizes that follow from a configuration, a model and the memory that is free.

    Attributes:
        max_sequence_length: tokens of one sequence, prompt and answer.
        pages_per_row: pages that such a sequence takes.
        total_num_pages: of the pool, without its trash page.
        token_bytes: keys and values of one token in all layers.
        page_bytes: of one page in all layers, keys and values.
        token_limit: tokens that one sequence can have when it owns the whole pool.
    """

    max_sequence_length: int
    pages_per_row: int
    total_num_pages: int
    token_bytes: int
    page_bytes: int
    token_limit: int


def plan_capacity(
    config: BucketConfig,
    model: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    available_bytes: int | None = None,
) -> Capacity:
    """Work out the capacity, with `total_num_pages = "auto"` from the memory that is free.

    `"auto"` never takes more pages than all rows at full length need.

    Args:
        config: rows, lengths and pages.
        model: layers and heads.
        dtype: of the cache.
        device: where the cache goes.
        available_bytes: memory that is free there; None: what is free now.

    Raises:
        ValueError: not even one page fits.
    """
    max_sequence_length = min(config.max_sequence_length, model.max_position_embeddings)
    pages_per_row = -(-max_sequence_length // config.page_size)
    token_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * entry_bytes(dtype, model.head_dim)
    page_bytes = token_bytes * config.page_size
    total = config.total_num_pages
    if isinstance(total, str):
        free = free_bytes(device) if available_bytes is None else available_bytes
        affordable = int(free * config.memory_fraction) // page_bytes - 1
        if affordable < 1:
            raise ArgumentError(
                f"no memory is left on {device} for a key-value cache: one page takes {page_bytes} bytes"
            )
        total = min(affordable, config.max_batch_size * pages_per_row)
    token_limit = min(max_sequence_length, total * config.page_size)
    return Capacity(max_sequence_length, pages_per_row, total, token_bytes, page_bytes, token_limit)


def resolve_cache_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Return what keys and values are kept in.

    Args:
        kv_cache_dtype: as in `EngineConfig`.
        dtype: of the model.
    """
    return _CACHE_DTYPES.get(kv_cache_dtype, dtype)


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _ASSUMED_FREE_BYTES
