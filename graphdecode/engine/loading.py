"""From the name of a model and a configuration to a runner that is ready to be captured."""

from __future__ import annotations

from pathlib import Path

import torch

from graphdecode.cache import PagedKVCache
from graphdecode.config import BucketConfig
from graphdecode.engine.capacity import plan_capacity
from graphdecode.engine.runner import Runner
from graphdecode.models import Decoder, load_model

PREFILL_TOKENS = {"cuda": 2048, "cpu": 512}  # of one engine step


def resolve_device(device: str | torch.device) -> torch.device:
    """Return a device that is there; `"auto"` means CUDA where there is one, else the CPU.

    Raises:
        ValueError: the device is unknown or absent.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu or cuda, got {device!r}") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {device!r}")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device here")
    return resolved


def load_runner(
    model: str | Path,
    config: BucketConfig,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    prefix_cache: bool = True,
    quantize: str | None = None,
    batch_invariant: bool = False,
    progress: bool = False,
) -> Runner:
    """Load a model, size its cache, and lay out its buffers; nothing is captured yet.

    Args:
        model: a checkpoint folder, a repository id, `"demo"`, or a shape such as `"shape:llama-3.1-8b"`.
        config: capacity, buckets and capture.
        device: see `resolve_device`.
        dtype: of weights and cache; `"auto"` takes the checkpoint's where the device can compute in it.
        prefix_cache: reuse the pages of prompts that begin alike.
        quantize: `"int8"` for 8-bit weights on a CPU.
        batch_invariant: give a request the same bits in any company; slower.
        progress: show a bar on standard error while loading.

    Raises:
        ValueError: something cannot be used; the message says what and why.
    """
    place = resolve_device(device)
    decoder = load_model(
        model,
        device=place,
        dtype=dtype,
        max_sequence_length=config.max_sequence_length,
        batch_sizes=config.ladder.sizes,
        quantize=quantize,
        batch_invariant=batch_invariant,
        progress=progress,
    )
    return make_runner(decoder, config, prefix_cache=prefix_cache, batch_invariant=batch_invariant)


def make_runner(
    decoder: Decoder, config: BucketConfig, *, prefix_cache: bool = True, batch_invariant: bool = False
) -> Runner:
    """Size a loaded model's cache and lay out its buffers; see `load_runner`."""
    device = decoder.device
    capacity = plan_capacity(config, decoder.config, decoder.dtype, device)
    cache = PagedKVCache(
        num_layers=decoder.num_layers,
        total_num_pages=capacity.total_num_pages,
        page_size=config.page_size,
        max_pages_per_row=capacity.pages_per_row,
        num_kv_heads=decoder.config.num_key_value_heads,
        head_dim=decoder.config.head_dim,
        dtype=decoder.dtype,
        device=device,
        prefix_caching=prefix_cache,
    )
    return Runner(
        decoder, cache, config, capacity, prefill_budget=PREFILL_TOKENS[device.type], batch_invariant=batch_invariant
    )
