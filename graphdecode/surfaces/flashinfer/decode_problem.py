"""FlashInfer's arguments of `plan`, checked once, and checks of `run` against them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from graphdecode.attention.paged_decode import wave_items_for
from graphdecode.cache.errors import require_choice, require_fit, require_numbers, require_range, require_tensors
from graphdecode.errors import shown
from graphdecode.kernels.attention.attention_plan import WAVES_WHEN_FULL
from graphdecode.kernels.attention.attention_records import AttentionOptions
from graphdecode.kernels.attention.attention_torch import POSITION_MODES, Positions

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*OUT_DTYPES, *FP8_DTYPES)
Q_DTYPE_LEFT_OUT = str(b"float16", "ascii")  # a new object: equal to a caller's "float16", but not identical
BACKENDS = ("auto", "fa2", "fa3", "trtllm-gen", "cudnn", "cute-dsl")  # all mean the same here
_MAX_HEADS, MAX_TOKENS = 1 << 16, 1 << 30  # positions are int32
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 512
_LARGEST = 1 << 20  # limit of tokens per page and queries per row


def _dtype_of(name: str, value: str | torch.dtype) -> torch.dtype:
    parsed = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(parsed, torch.dtype) or parsed not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(str(dtype)[6:] for dtype in DTYPES)}, got {value!r}")
    return parsed


def planned_dtypes(
    q_data_type: str | torch.dtype | None, kv_data_type: str | torch.dtype | None, data_type: str | torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of queries, and of keys and values; see `plan` for the arguments."""
    if data_type is not None:
        shared_dtype = _dtype_of("data_type", data_type)
        kv_data_type = kv_data_type or shared_dtype
        if q_data_type is None or (q_data_type is Q_DTYPE_LEFT_OUT and shared_dtype not in FP8_DTYPES):
            q_data_type = shared_dtype
    q_dtype = _dtype_of("q_data_type", q_data_type or "float16")
    return q_dtype, _dtype_of("kv_data_type", kv_data_type or q_dtype)


def exact_queries(q: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return queries in a dtype that the kernels take: fp8 ones in fp16, which holds all their values.

    On a CPU, where results have the queries' dtype until they are stored, others than `out_dtype` are in float32.
    """
    if q.is_cpu and out_dtype in OUT_DTYPES and q.dtype != out_dtype:
        return q.float()
    return q.to(torch.float16) if q.dtype in FP8_DTYPES else q


def _scale_of(**scales: float | None) -> float:
    numbers = {name: 1.0 if each is None else each for name, each in scales.items()}
    for name, each in numbers.items():
        if isinstance(each, Tensor) and each.numel() == 1:
            numbers[name] = each.item()
    require_numbers(**numbers)
    return math.prod(map(float, numbers.values()))


def device_scales(device: torch.device, **scales: float | Tensor | None) -> list[float | Tensor]:
    """Return each scale as a number, or as a float32 [] on the device, which is not read on the host."""
    converted: list[float | Tensor] = []
    for name, scale in scales.items():
        if isinstance(scale, Tensor):
            require_tensors(device, **{name: scale})
            require_fit(name, scale.reshape(-1), (1,), torch.float32)
            converted.append(scale.reshape(()))
        elif scale is None:
            raise ValueError(f"{name} must be a number or one float32, got None")
        else:
            require_numbers(**{name: scale})
            converted.append(float(scale))
    return converted


@dataclass(frozen=True)
class DecodeProblem:
    """The arguments of a plan that do not depend on the batch; None becomes FlashInfer's default.

    Raises:
        ValueError: one is outside its range, or two do not fit.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    pos_encoding_mode: str = "NONE"
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    rope_scale: float | None = None
    rope_theta: float | None = None
    page_size: int = 1
    q_len: int = 1
    o_data_type: str | torch.dtype | None = None  # None: the queries'

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> DecodeProblem:
        """Return the problem of a plan's arguments, by their published names; other names have no effect."""
        q_dtype, kv_dtype = planned_dtypes(arguments["q_data_type"], arguments["kv_data_type"], arguments["data_type"])
        named = {field.name: arguments[field.name] for field in fields(cls) if field.name in arguments}
        return cls(**named, q_dtype=q_dtype, kv_dtype=kv_dtype, q_len=arguments["q_len_per_req"])

    def __post_init__(self) -> None:
        require_range(1, _MAX_HEADS, num_qo_heads=self.num_qo_heads, num_kv_heads=self.num_kv_heads)
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(f"num_qo_heads={self.num_qo_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        require_range(1, _LARGEST, page_size=self.page_size, q_len_per_req=self.q_len)
        if self.o_data_type is not None:
            allowed = (self.q_dtype, *OUT_DTYPES)
            if (o_dtype := _dtype_of("o_data_type", self.o_data_type)) not in allowed:
                raise ValueError(
                    f"o_data_type must be one of {', '.join(str(each)[6:] for each in allowed)}, got {o_dtype}"
                )
            object.__setattr__(self, "o_data_type", o_dtype)
        require_range(_MIN_HEAD_DIM, _MAX_HEAD_DIM, head_dim=self.head_dim)
        require_range(-1, MAX_TOKENS, window_left=self.window_left)
        require_choice("pos_encoding_mode", self.pos_encoding_mode, POSITION_MODES)
        if self.pos_encoding_mode == "ROPE_LLAMA" and self.head_dim % 2:
            raise ValueError(f"ROPE_LLAMA rotates pairs and needs an even head_dim, got {self.head_dim}")
        defaults = {
            "logits_soft_cap": 0.0,
            "rope_scale": 1.0,
            "rope_theta": 1e4,
            "sm_scale": 1.0 / math.sqrt(self.head_dim),
        }
        for name, default in defaults.items():
            value = getattr(self, name)
            require_numbers(**{name: value})
            if value is None:
                object.__setattr__(self, name, default)
            elif name == "logits_soft_cap" and value < 0:
                raise ValueError(f"{name} must be >= 0 (0: no cap), got {value}")
            elif name.startswith("rope") and value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")

    def check_tensors(self, q: Tensor, k_cache: Tensor, device: torch.device) -> None:
        """Raise a ValueError if a run's queries and keys (NHD) do not fit the plan."""
        require_tensors(q=q)
        require_fit("q", q, ("rows", self.num_qo_heads, self.head_dim))
        if (dtypes := (q.dtype, k_cache.dtype)) != (self.q_dtype, self.kv_dtype):
            raise ValueError(f"queries and cache must be {self.q_dtype} and {self.kv_dtype} as planned, got {dtypes}")
        fits = (self.page_size, self.num_kv_heads, self.head_dim)
        if tuple(k_cache.shape[1:]) != fits:
            raise ValueError(
                f"pages must be (page_size, num_kv_heads, head_dim) = {fits} as planned, got {tuple(k_cache.shape[1:])}"
            )
        if q.device != device or k_cache.device != device:
            raise ValueError(f"q and the cache must be on {device}, got {q.device} and {k_cache.device}")

    @property
    def o_dtype(self) -> torch.dtype:
        """The dtype of results without an `out`."""
        return self.o_data_type if isinstance(self.o_data_type, torch.dtype) else self.q_dtype

    @property
    def out_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that `out` may have."""
        if self.o_data_type is None and self.q_dtype in FP8_DTYPES:
            return (self.q_dtype, *OUT_DTYPES)
        return (self.o_dtype,)

    @property
    def floats_of_item(self) -> int:
        """Partial results of a work item, whose values are as wide as keys."""
        return self.q_len * self.num_qo_heads * (self.head_dim + 2)

    def attention_kwargs(
        self, q_scale: float | None, k_scale: float | None, v_scale: float | None, window_left: int | None = None
    ) -> dict[str, Any]:
        """Return the arguments of `decode_attention` for logits, output scale and positions."""
        window = self.window_left if window_left is None else window_left
        require_range(-1, MAX_TOKENS, window_left=window)
        scale = self.sm_scale * _scale_of(q_scale=q_scale, k_scale=k_scale)  # type: ignore[operator]
        return {
            "options": AttentionOptions(scale, window, self.logits_soft_cap),  # type: ignore[arg-type]
            "v_scale": _scale_of(v_scale=v_scale),
            "positions": Positions(self.pos_encoding_mode, self.rope_scale, self.rope_theta),  # type: ignore[arg-type]
        }

    def window_of(self, options: AttentionOptions) -> int:
        """Return how many of a row's newest tokens its queries see; 0: all."""
        return options.window_left + self.q_len if options.window_left >= 0 else 0

    def wave_items(self, device: torch.device, head_dim_v: int) -> int:
        """Return how many work items (times kv heads: programs) run on a device at the same time."""
        return wave_items_for(
            device,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=head_dim_v,
            dtype=torch.float16 if self.q_dtype in FP8_DTYPES else self.q_dtype,
            kv_dtype=self.kv_dtype,
            q_len=self.q_len,
        )


def result_for(
    name: str, tensor: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Tensor:
    """Return the tensor to write into, or for None a new one of the first dtype.

    Raises:
        ValueError: the tensor does not fit.
    """
    if tensor is None:
        return torch.empty(shape, dtype=dtypes[0], device=device)
    require_tensors(device, **{name: tensor})
    require_fit(name, tensor, shape, *dict.fromkeys(dtypes))
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    return tensor


def lse_for(lse: Tensor | None, shape: tuple[int, ...], device: torch.device, *, return_lse: bool) -> Tensor | None:
    """Return the float32 tensor for log-sum-exps, or None if there are none to write; see `result_for`."""
    return result_for("lse", lse, shape, (torch.float32,), device) if return_lse or lse is not None else None


def floats_of(workspace: Tensor) -> Tensor:
    """Return a workspace of any dtype as float32."""
    as_bytes = workspace.view(-1).view(torch.uint8)
    return as_bytes[: as_bytes.shape[0] // 4 * 4].view(torch.float32)


def partials_of(floats: Tensor, shape: tuple[int, ...], value_dim: int) -> tuple[Tensor, Tensor]:
    """Return the workspace as partial results [*shape, value_dim] and their sums [*shape, 2], see `SplitPlan`.

    Raises:
        ValueError: it is too small.
    """
    heads = math.prod(shape)
    needed = heads * (value_dim + 2)
    if floats.shape[0] < needed:
        raise ValueError(f"float_workspace_buffer has {floats.nbytes} bytes, needed are {4 * needed}")
    partial, sums = floats[:needed].split((heads * value_dim, heads * 2))
    return partial.view(*shape, value_dim), sums.view(*shape, 2)


def wave_items_that_fit(rows: int, wave_items: int, most_items: int) -> int:
    """Return the most work items to split rows into, of which a workspace holds `most_items`; 0 or less: none fit."""
    wave_items = min(wave_items, most_items)
    return wave_items if rows <= wave_items else (most_items - rows) // WAVES_WHEN_FULL


def require_neutral(**arguments: tuple[Any, Any]) -> None:
    """Raise a ValueError for an argument whose value is not the one that changes nothing."""
    for name, (value, neutral) in arguments.items():
        if isinstance(value, Tensor) or value != neutral:
            raise ValueError(f"{name} is not supported: it must be {neutral}, got {shown(value)}")


def sinks_of(sinks: Tensor | list[Tensor] | None, heads: int, device: torch.device) -> Tensor | None:
    """Return the sinks as the kernels take them, float32 [heads]; a list has one tensor."""
    if isinstance(sinks, list | tuple) and len(sinks) == 1:
        (sinks,) = sinks
    if sinks is None:
        return None
    require_tensors(device, sinks=sinks)
    assert isinstance(sinks, Tensor)
    require_fit("sinks", sinks, (heads,), *OUT_DTYPES)
    return sinks.float().contiguous()
