"""What FlashInfer's arguments may be, and what a decode wrapper was planned for: checked once, and at each run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.attention.paged_decode import wave_items_for
from graphdecode.cache import require_integers, require_numbers, require_tensors
from graphdecode.kernels.attention.attention_torch import POSITION_MODES

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*OUT_DTYPES, *FP8_DTYPES)
Q_DTYPE_LEFT_OUT = str(b"float16", "ascii")  # made anew: equal to what a caller may give, and never the same object
BACKENDS = ("auto", "fa2", "fa3", "trtllm-gen", "cudnn", "cute-dsl")
_MAX_HEADS, _MAX_WINDOW = 1 << 16, 1 << 30  # places of keys are int32
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 512
_LARGEST = 1 << 20  # of tokens a page, and queries a row


def check_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError for heads that do not divide."""
    require_integers(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads)
    for name, count in (("num_qo_heads", num_qo_heads), ("num_kv_heads", num_kv_heads)):
        if not 1 <= count <= _MAX_HEADS:
            raise ValueError(f"{name} must be in 1..{_MAX_HEADS}, got {count}")
    if num_qo_heads % num_kv_heads:
        raise ValueError(f"num_qo_heads={num_qo_heads} must be a multiple of num_kv_heads={num_kv_heads}")


def check_backend(backend: str, jit_args: object) -> None:
    """Raise ValueError for a backend that FlashInfer does not have either, or for a kernel of the caller's own."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} (all mean the same here), got {backend!r}")
    if jit_args is not None:
        raise ValueError(f"jit_args must be None: kernels of one's own are not taken, got {jit_args!r}")


def check_window(window_left: int) -> None:
    """Raise ValueError for a window outside its range."""
    require_integers(window_left=window_left)
    if not -1 <= window_left <= _MAX_WINDOW:
        raise ValueError(f"window_left must be in -1..{_MAX_WINDOW} (-1: no window), got {window_left}")


class DecodeOptions(NamedTuple):
    """Logit options, with FlashInfer's defaults filled in."""

    head_dim: int
    position_mode: str
    window_left: int
    soft_cap: float
    sm_scale: float
    rope_scale: float
    rope_theta: float

    @classmethod
    def of(
        cls,
        head_dim: int,
        position_mode: str,
        window_left: int,
        soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> DecodeOptions:
        """Check what a caller gave; None is the default.

        Raises:
            ValueError: an option is outside its range, or the kernels do not take the head_dim.
        """
        require_integers(head_dim=head_dim)
        if not _MIN_HEAD_DIM <= head_dim <= _MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be in {_MIN_HEAD_DIM}..{_MAX_HEAD_DIM}, got {head_dim}")
        if position_mode not in POSITION_MODES:
            raise ValueError(f"pos_encoding_mode must be one of {', '.join(POSITION_MODES)}, got {position_mode!r}")
        if position_mode == "ROPE_LLAMA" and head_dim % 2:
            raise ValueError(f"ROPE_LLAMA rotates pairs and needs an even head_dim, got {head_dim}")
        cap = 0.0 if soft_cap is None else soft_cap
        scale = 1.0 if rope_scale is None else rope_scale
        theta = 1e4 if rope_theta is None else rope_theta
        check_window(window_left)
        require_numbers(logits_soft_cap=cap, rope_scale=scale, rope_theta=theta, sm_scale=sm_scale)
        if cap < 0:
            raise ValueError(f"logits_soft_cap must be >= 0 (0: no cap), got {cap}")
        if scale <= 0 or theta <= 0:
            raise ValueError(f"rope_scale and rope_theta must be > 0, got {scale} and {theta}")
        own_scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale
        return cls(head_dim, position_mode, window_left, cap, own_scale, scale, theta)


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
    q_data_type: str | torch.dtype | None, kv_data_type: str | torch.dtype | None, data_type: str | torch.dtype | None
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


@dataclass(frozen=True)
class DecodeProblem:
    """The arguments of a plan that do not depend on the batch.

    Raises:
        ValueError: one is outside its range, or two do not fit.
    """

    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    q_len: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    logits: DecodeOptions

    def __post_init__(self) -> None:
        check_heads(self.num_qo_heads, self.num_kv_heads)
        for name, value in (("page_size", self.page_size), ("q_len_per_req", self.q_len)):
            require_integers(**{name: value})
            if not 1 <= value <= _LARGEST:
                raise ValueError(f"{name} must be in 1..{_LARGEST}, got {value}")

    def check_tensors(self, q: Tensor, k_cache: Tensor, device: torch.device) -> None:
        """Hold a run's queries and keys (NHD) against the plan.

        Raises:
            ValueError: they do not fit it.
        """
        require_tensors(q=q)
        if q.dim() != 3 or tuple(q.shape[1:]) != (self.num_qo_heads, self.logits.head_dim):
            raise ValueError(
                f"q must be [rows, {self.num_qo_heads}, {self.logits.head_dim}] as planned, got {list(q.shape)}"
            )
        if q.dtype != self.q_dtype or k_cache.dtype != self.kv_dtype:
            raise ValueError(
                f"planned were queries of {self.q_dtype} and a cache of {self.kv_dtype}, "
                f"got {q.dtype} and {k_cache.dtype}"
            )
        fits = (self.page_size, self.num_kv_heads, self.logits.head_dim)
        if tuple(k_cache.shape[1:]) != fits:
            raise ValueError(
                f"planned were pages of (page_size, num_kv_heads, head_dim) = {fits}, got {tuple(k_cache.shape[1:])}"
            )
        if q.device != device or k_cache.device != device:
            raise ValueError(f"q and the cache must be on {device}, got {q.device} and {k_cache.device}")

    def wave_items(self, device: torch.device) -> int:
        """Return how many work items (times kv heads: programs) run on a device at the same time."""
        return wave_items_for(
            device,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.logits.head_dim,
            head_dim_v=self.logits.head_dim,
            dtype=torch.float16 if self.q_dtype in FP8_DTYPES else self.q_dtype,
            kv_dtype=self.kv_dtype,
            q_len=self.q_len,
        )


def check_metadata(indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> int:
    """Return the number of rows; no values are read.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    require_tensors(indptr=indptr, indices=indices, last_page_len=last_page_len)
    for name, tensor in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        if tensor.is_meta:
            raise ValueError(f"{name} must hold numbers, and is on the meta device")
        if tensor.dim() != 1 or tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32 of 1 dimension, got {tensor.dtype} {list(tensor.shape)}")
    rows = last_page_len.shape[0]
    if indptr.shape[0] != rows + 1 or not rows:
        raise ValueError(
            f"indptr must have one entry more than last_page_len, and at least 2, got {indptr.shape[0]} and {rows}"
        )
    return rows
