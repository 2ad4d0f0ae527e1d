"""Records the launches of a decode step on a GPU without one: the real step over tensors without memory.

The step's own code runs on tensors of torch's meta device that report a GPU as their device. Our operators run their
Triton versions, whose launches are recorded instead of made; any other operator that computes counts as one launch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from graphdecode.buckets import StepShape
from graphdecode.cache import PagedKVCache
from graphdecode.config import BucketConfig
from graphdecode.engine.steps import DecodeBatch, DecodeStep, StepSetting
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, candidates, small_linear_triton
from graphdecode.kernels.native import optional_triton
from graphdecode.kernels.native.registration import NAMESPACE, versions
from graphdecode.linear import linear_choice
from graphdecode.linear.small_linear_timing import FusedForm
from graphdecode.models import Decoder, compute, load_model
from graphdecode.models.shapes import RandomWeights

_NORM_US = 1.5  # a launch of `rms_norm` that starts early, with its gap
DEVICE = torch.device("cuda:0")
_OPTIONS = (
    "num_warps",
    "num_stages",
    "launch_pdl",
    "num_ctas",
    "maxnreg",
    "launch_cooperative_grid",
    "enable_fp_fusion",
)
_WITHOUT_WORK = {  # torch's operators without a kernel
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "view", "_unsafe_view", "slice", "select",
    "split", "split_with_sizes", "unbind", "reshape", "_reshape_alias", "alias", "detach", "t", "transpose", "permute",
    "expand", "unsqueeze", "squeeze", "narrow", "as_strided", "lift_fresh", "view_as", "resolve_conj", "resolve_neg",
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU.

    Attributes:
        arch: compute capability as one number, such as 90.
        processors: multiprocessors.
        processor_shared_bytes: shared memory of a multiprocessor.
    """

    arch: int = 90
    processors: int = 132
    memory_bytes: int = 141 * 10**9
    processor_shared_bytes: int = 228 * 1024


def spread(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a launch's arguments, fields of records separately as `record.field`."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if hasattr(value, "_fields"):
            found |= spread({f"{name}.{field}": part for field, part in value._asdict().items()})
        else:
            found[name] = value
    return found


@dataclass(frozen=True)
class Launch:
    """One kernel of a step.

    Attributes:
        name: the kernel's function, or torch's operator.
        operator: of ours that launched it, or "".
        grid: programs on each axis; empty for torch's operators.
        arguments: by name; tensors have no memory.
        options: warps, stages, early start.
        kernel: None for torch's operators.
    """

    name: str
    operator: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    kernel: Any = None

    @property
    def starts_early(self) -> bool:
        """Whether it may start while the previous kernel still runs."""
        return bool(self.options.get("launch_pdl"))


@dataclass(frozen=True)
class RecordedStep:
    """A step's launches and tensors.

    Attributes:
        launches: in order.
        model: over tensors without memory.
        constants: storages that the step only reads.
        token_bytes: of a token's keys and values in all layers.
        state_bytes: of a row's recurrent states in all layers.
        adapter_bytes: that all adapters of the step have in its products; of the embedding's A a row is read.
        made_bytes: of all tensors that the step allocates.
    """

    launches: list[Launch]
    model: Decoder
    constants: frozenset[int]
    token_bytes: int
    state_bytes: int
    adapter_bytes: int
    made_bytes: int


class _OnMeta(TorchFunctionMode):
    """Puts tensors of the GPU on the meta device, and reports the GPU as their device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "__get__" and isinstance(args[0], Tensor) and _is_meta(args[0]):
            if func == Tensor.device.__get__:  # type: ignore[attr-defined]
                return DEVICE
            if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
                return True
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "meta"
        if func is Tensor.to:
            args = tuple("meta" if _is_the_device(value) else value for value in args)
        if func is Tensor.is_pinned:
            return True
        return func(*args, **kwargs)


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def _is_meta(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.device.type == "meta"


def _is_the_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


class _Noting(TorchDispatchMode):
    """Records each launch and allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.made: dict[int, Tensor] = {}
        self._operator = ""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, name = func._schema.name.split("::")
        kwargs = kwargs or {}
        if namespace == NAMESPACE:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            outer, self._operator = self._operator, name
            try:
                with self, _OnMeta():
                    versions(name).triton(*(given[argument] for argument in names))
            finally:
                self._operator = outer
            return None
        to_host = name == "copy_" and args[1].is_meta and not args[0].is_meta
        result = args[0] if to_host else func(*args, **kwargs)  # a tensor without memory cannot be copied out
        if isinstance(result, Tensor) and name.startswith(("empty", "new_empty")):
            self.made[storage_of(result)] = result
        if name not in _WITHOUT_WORK and any(isinstance(each, Tensor) and each.is_meta for each in (*args, result)):
            self.launches.append(Launch(name, self._operator, (), {f"arg{i}": value for i, value in enumerate(args)}))
        return result

    def note(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Record a kernel's launch."""
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        arguments = dict(inspect.signature(kernel.fn).bind(*args, **kwargs).arguments)
        programs = grid(arguments) if callable(grid) else grid
        self.launches.append(
            Launch(
                kernel.fn.__name__.strip("_"),
                self._operator,
                tuple(int(size) for size in programs),
                arguments,
                options,
                kernel,
            )
        )

    @contextmanager
    def in_place_of_launches(self) -> Iterator[None]:
        """Record launches instead of making them."""

        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self.note(kernel, *args, **kwargs)

        with ExitStack() as held:
            for kind in (JITFunction, InterpretedFunction):
                held.enter_context(mock.patch.object(kind, "run", run))
            yield


def launches_of(call: Callable[[], None]) -> list[Launch]:
    """Return the launches of a call; its tensors need no memory."""
    noting = _Noting()
    with noting.in_place_of_launches():
        call()
    return noting.launches


def product_of(
    weight: Tensor,
    bias: Tensor | None,
    rows: int,
    config: SmallLinearConfig,
    fused: FusedForm = FusedForm(),  # noqa: B008 (immutable)
) -> Launch:
    """Return the launch of a product, as timed on a GPU."""

    def made(*shape: int, dtype: torch.dtype = weight.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=weight.device)

    out_features, in_features = weight.shape
    partial = counters = None
    if config.splits > 1:
        columns = -(-out_features // config.block_n) * (config.block_n + 1)
        partial = made(config.splits, rows, columns, dtype=torch.float32)
        counters = made(config.counters(rows, out_features), dtype=torch.int32)
    width = out_features // 2 if fused.is_gated else out_features
    out, x = made(rows, width), made(rows, in_features)
    gain = made(in_features, dtype=torch.float32) if fused.is_normed and not config.separate_norm else None
    given = (out, x, weight, bias, gain, partial, counters, 0.0, fused.epilogue, 1.0)
    (launch,) = launches_of(lambda: small_linear_triton(*given, config))
    return launch


def programs_apart(launch: Launch, gpu: Gpu = Gpu()) -> float:
    """Return the factor between a product's programs and two per multiprocessor; needs no compiler."""
    share = math.prod(launch.grid) / (2 * gpu.processors)
    return max(share, 1 / share)


@contextmanager
def _pretended(gpu: Gpu, product_us: Callable[[Launch], float]) -> Iterator[None]:
    """Simulate a GPU for the code that builds a model and a step; nothing can be computed on it."""
    capability = (gpu.arch // 10, gpu.arch % 10)
    properties = SimpleNamespace(
        major=capability[0],
        multi_processor_count=gpu.processors,
        total_memory=gpu.memory_bytes,
        shared_memory_per_multiprocessor=gpu.processor_shared_bytes,
        name="modelled",
    )

    def fastest(
        weight: Tensor, bias: Tensor | None, rows: int, clock: Any, fused: FusedForm
    ) -> tuple[Any, dict[str, float]]:
        """Choose by the model instead of by timing."""
        out_features, in_features = weight.shape
        found = candidates(out_features, in_features, weight.element_size(), rows, gpu.processors, fused.is_normed)
        if not found:
            return None, {"plain": 1.0}
        configs = [config._replace(pdl=gpu.arch >= 90 and fused.starts_early(rows)) for config in found]
        configs += [config._replace(separate_norm=False) for config in configs if config.separate_norm]
        apart_us = {True: _NORM_US, False: 0.0}
        times = {
            str(config): product_us(product_of(weight, bias, rows, config, fused)) + apart_us[config.separate_norm]
            for config in configs
        }
        return min(configs, key=lambda config: times[str(config)]), {"plain": math.inf, **times}

    def over_tiles(weight: Any, bias: Any, rows: int, clock: Any, fused: FusedForm, first: Any) -> tuple[Any, dict]:
        """Model no other product of a quantized weight than that over tiles."""
        return first, {str(first): 1.0}

    def nothing(*_: Any) -> None:
        """No clock, and no cache of choices."""

    def untouched(self: RandomWeights, name: str, out: Tensor, shard: Any = None) -> None:
        """Read nothing: there is no memory."""

    cuda = {
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: properties.name,
        "mem_get_info": lambda *_: (gpu.memory_bytes, gpu.memory_bytes),
        "Event": lambda **_: SimpleNamespace(synchronize=lambda: None, record=lambda *_: None),
        "empty_cache": lambda: None,
    }
    optional_triton.has_early_start.cache_clear()
    with ExitStack() as held:
        for name, replacement in cuda.items():
            held.enter_context(mock.patch.object(torch.cuda, name, replacement))
        held.enter_context(mock.patch.object(linear_choice, "fastest_product", fastest))
        held.enter_context(mock.patch.object(linear_choice, "fastest_tiled", over_tiles))
        held.enter_context(mock.patch.object(linear_choice, "GraphClock", nothing))
        held.enter_context(mock.patch.object(linear_choice, "unavailable_reason", return_value="is not modelled"))
        held.enter_context(mock.patch.object(compute, "ChoiceCache", nothing))
        held.enter_context(mock.patch.object(RandomWeights, "read", untouched))
        held.callback(optional_triton.has_early_start.cache_clear)
        held.enter_context(_OnMeta())
        yield


def recorded_step(
    model: str | Path,
    rows: int,
    *,
    gpu: Gpu = Gpu(),
    product_us: Callable[[Launch], float] = programs_apart,
    max_batch_size: int = 64,
    max_sequence_length: int = 4352,
    quantize: str | None = None,
    adapters: int = 0,
) -> RecordedStep:
    """Return the launches of one step.

    Args:
        model: the name of a shape, such as `"shape:llama-3.1-8b"`.
        rows: of the bucket.
        product_us: returns a product's time; the fastest candidate is chosen.
        max_batch_size: rows of the largest bucket.
        max_sequence_length: tokens of a row at most.
        quantize: as the engine's option.
        adapters: that the rows have, of rank 16.
    """
    config = BucketConfig(
        max_batch_size=max(max_batch_size, rows),
        max_sequence_length=max_sequence_length,
        batch_sizes=sorted({rows, max(max_batch_size, rows)}),
    )
    noting = _Noting()
    with _pretended(gpu, product_us), torch.no_grad():
        decoder = load_model(
            model,
            device=DEVICE,
            dtype="bfloat16",
            max_sequence_length=max_sequence_length,
            batch_sizes=config.ladder.sizes,
            quantize=quantize,
            model_impl="native",
            max_adapters=adapters,
        )
        assert isinstance(decoder, Decoder)
        shape = decoder.config
        pages = -(-max_sequence_length // config.page_size)
        cache = PagedKVCache(
            num_layers=decoder.num_layers,
            total_num_pages=pages * config.max_batch_size,
            page_size=config.page_size,
            max_pages_per_row=pages,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            dtype=decoder.dtype,
            device=DEVICE,
            recurrent=shape.recurrent,
            layer_keys=shape.layer_keys,
            state_rows=config.max_batch_size if shape.recurrent else 0,
        )
        places = (cache.layers, cache.null_page, cache.dtype, config.page_size, pages)
        setting = StepSetting(decoder, *places, config, False, null_state_row=cache.null_state_row)
        step: DecodeStep[DecodeBatch] = DecodeStep(setting)
        batch = step.buffers.narrow(rows)
        with noting.in_place_of_launches(), noting:
            step.run(StepShape(rows, has_adapters=adapters > 0), batch)
    states = sum(state.nbytes for state in shape.recurrent if state is not None)
    of_states = (cache.null_state_row + 1) * states
    products = {} if decoder.adapters is None else decoder.adapters.products
    of_keys = sum(layer.nbytes for layer in cache.layers) - of_states
    return RecordedStep(
        noting.launches,
        decoder,
        frozenset(storage_of(tensor) for tensor in decoder.constants),
        of_keys // (cache.total_num_pages + 1) // cache.page_size,
        states,
        sum(each.nbytes for place, own in products.items() for each in (own.down, own.up)[place == "embedding" :]),
        sum(tensor.untyped_storage().nbytes() for tensor in noting.made.values()),
    )
