"""What FlashInfer's arguments may be: heads, sizes, options and dtypes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphdecode.cache import require_integers, require_numbers
from graphdecode.kernels.attention.decode_attention import POSITION_MODES

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*OUT_DTYPES, *FP8_DTYPES)
Q_DTYPE_LEFT_OUT = str(b"float16", "ascii")  # made anew: equal to what a caller may give, and never the same object
BACKENDS = ("auto", "fa2", "fa3", "trtllm-gen", "cudnn", "cute-dsl")
_MAX_HEADS, _MAX_WINDOW = 1 << 16, 1 << 30  # places of keys are int32
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 512


def check_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError for heads that do not divide."""
    require_integers(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads)
    for name, count in (("num_qo_heads", num_qo_heads), ("num_kv_heads", num_kv_heads)):
        if not 1 <= count <= _MAX_HEADS:
            raise ValueError(f"{name} must be in 1..{_MAX_HEADS}, got {count}")
    if num_qo_heads % num_kv_heads:
        raise ValueError(f"num_qo_heads={num_qo_heads} must be a multiple of num_kv_heads={num_kv_heads}")


def check_head_dim(head_dim: int, position_mode: str) -> None:
    """Raise ValueError for a head_dim that the kernels do not take, or a position mode that there is not."""
    require_integers(head_dim=head_dim)
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}, got {head_dim}")
    if position_mode not in POSITION_MODES:
        raise ValueError(f"pos_encoding_mode must be one of {', '.join(POSITION_MODES)}, got {position_mode!r}")
    if position_mode == "ROPE_LLAMA" and head_dim % 2:
        raise ValueError(f"ROPE_LLAMA rotates pairs and needs an even head_dim, got {head_dim}")


def check_backend(backend: str, jit_args: object) -> None:
    """Raise ValueError for a backend that FlashInfer does not have either, or for a kernel of the caller's own."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} (all mean the same here), got {backend!r}")
    if jit_args is not None:
        raise ValueError(f"jit_args must be None: kernels of one's own are not taken, got {jit_args!r}")


def check_options(window_left: int, soft_cap: float, rope_scale: float, rope_theta: float) -> None:
    """Raise ValueError for options outside their ranges."""
    require_integers(window_left=window_left)
    require_numbers(logits_soft_cap=soft_cap, rope_scale=rope_scale, rope_theta=rope_theta)
    if not -1 <= window_left <= _MAX_WINDOW:
        raise ValueError(f"window_left must be in -1..{_MAX_WINDOW} (-1: no window), got {window_left}")
    if soft_cap < 0:
        raise ValueError(f"logits_soft_cap must be >= 0 (0: no cap), got {soft_cap}")
    if rope_scale <= 0 or rope_theta <= 0:
        raise ValueError(f"rope_scale and rope_theta must be > 0, got {rope_scale} and {rope_theta}")


def dtype_of(name: str, value: str | torch.dtype, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return the dtype that a name or a dtype stands for.

    Raises:
        ValueError: it is not one of those allowed.
    """
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or found not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(str(dtype)[6:] for dtype in allowed)}, got {value!r}")
    return found


def planned_dtypes(
    q_data_type: str | torch.dtype | None,
    kv_data_type: str | torch.dtype | None,
    data_type: str | torch.dtype | None,
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of queries and of keys and values; what each argument means says `plan`.

    Raises:
        ValueError: one of them is not taken.
    """
    if data_type is not None:
        both = dtype_of("data_type", data_type, DTYPES)
        kv_data_type = kv_data_type or both
        if q_data_type is None or (q_data_type is Q_DTYPE_LEFT_OUT and both not in FP8_DTYPES):
            q_data_type = both
    q_dtype = dtype_of("q_data_type", q_data_type or "float16", DTYPES)
    return q_dtype, dtype_of("kv_data_type", kv_data_type or q_dtype, DTYPES)


def exact_queries(q: Tensor) -> Tensor:
    """Return queries in a dtype that the kernels take: fp8 ones in fp16, which holds all their values."""
    return q.to(torch.float16) if q.dtype in FP8_DTYPES else q


def scale_of(**scales: float | None) -> float:
    """Return the product of some scales, None being 1.

    Raises:
        ValueError: one is no finite number.
    """
    given = {name: 1.0 if each is None else each for name, each in scales.items()}
    for name, each in given.items():
        if isinstance(each, Tensor) and each.numel() == 1:
            given[name] = each.item()
    require_numbers(**given)
    return math.prod(map(float, given.values()))
