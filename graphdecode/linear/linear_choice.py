"""The fastest product of a weight on a GPU, measured once per shape and machine, and cached on disk."""

import hashlib
import json
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from graphdecode.extensions import version_of
from graphdecode.kernels import native
from graphdecode.kernels.cuda.nvrtc import unavailable_reason, version
from graphdecode.kernels.linear.small_linear import KINDS, MOST_ROWS, SmallLinearConfig
from graphdecode.kernels.linear.wide_linear import MOST_ROWS as WIDE_ROWS
from graphdecode.kernels.native.instructions import instructions
from graphdecode.kernels.native.private_folder import cache_folder
from graphdecode.linear.layer_timing import fastest_layer
from graphdecode.linear.small_linear_timing import (
    FusedForm,
    GraphClock,
    LayerProduct,
    TiledOperand,
    fastest_product,
    fastest_tiled,
)

_FILE = "choices.json"


def processor_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with instruction set and number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {instructions().name}, {torch.get_num_threads()} threads"


def software() -> str:
    """Return the software that measurements depend on: versions of torch, Triton and NVRTC, a hash of the sources."""
    source = hashlib.sha256()
    kernels = Path(native.__file__).parents[1]
    for folder in (Path(__file__).parent, *(kernels / name for name in ("cuda", "linear", "moe", "native"))):
        for file in sorted(folder.glob("*.[pch]*")):
            source.update(file.read_bytes())
    nvrtc = "no NVRTC" if unavailable_reason() else f"NVRTC {'.'.join(map(str, version()))}"
    return f"torch {torch.__version__}, triton {version_of('triton')}, {nvrtc}, source {source.hexdigest()[:12]}"


class ChoiceCache:
    """A JSON file of measured choices by key, in `folder` (None: `cache_folder()`); file errors are ignored."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._written: dict[str, Any] = {}

    @cached_property
    def _file(self) -> Path:
        return (self._folder or cache_folder()) / _FILE

    @cached_property
    def _choices(self) -> dict[str, Any]:
        return self._read()

    def get(self, key: str) -> Any | None:
        """Return the value of a key, or None."""
        return self._choices.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store a JSON value; entries of other processes are kept."""
        self._written[key] = value
        self._choices = self._read() | self._written  # these again: a concurrent write may have dropped them
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, suffix=".tmp", delete=False) as file:
                json.dump(self._choices, file, indent=1, sort_keys=True)
            Path(file.name).replace(self._file)  # readers see the old file or the new one, whole

    def _read(self) -> dict[str, Any]:
        try:
            choices = json.loads(self._file.read_text())
        except (OSError, ValueError, RecursionError):  # missing, not JSON, or nested too deeply
            return {}
        return choices if isinstance(choices, dict) else {}


DEQUANTIZED = "dequantized"  # the path of products that dequantize their weight first
_COUNTERS = 1 << 16
_LEAST_BYTES = 1 << 20
SCRATCH_VALUES = 1 << 26  # of a dequantized weight, or a part of it
_MANY_ROWS = (128, 256, 512)  # always measured; more have the choice of the last


@dataclass(frozen=True)
class LinearChoice:
    """The path of one layer shape at one number of rows, with its measurements."""

    path: str  # the form's path; for an unquantized weight on a GPU "plain" or "small", for tiles also DEQUANTIZED
    config: SmallLinearConfig | None = None  # of the small path, and of tiles
    us: float | None = None  # microseconds of one product; None: not measured
    gb_per_s: float | None = None  # bytes of the weight over that time
    runner_up: str | None = None  # the second fastest path
    runner_up_us: float | None = None

    @classmethod
    def among(cls, path: str, config: SmallLinearConfig | None, times: Mapping[str, float], nbytes: int) -> Self:
        """Return a choice with its measurements.

        `times` are seconds by path, or by the configuration's text for the small path; `nbytes` is the weight's size.
        """
        name = path if config is None else str(config)
        others = {other: seconds for other, seconds in times.items() if other != name}
        second = min(others, key=others.__getitem__, default=None)
        second_us = None if second is None else round(others[second] * 1e6, 2)
        return cls(path, config, round(times[name] * 1e6, 2), round(nbytes / times[name] / 1e9, 1), second, second_us)

    @classmethod
    def from_dict(cls, stored: Any) -> Self | None:
        """Inverse of `dataclasses.asdict`; None for anything else, such as a damaged file's."""
        try:
            config = None if stored["config"] is None else SmallLinearConfig(*stored["config"])
            choice = cls(**stored | {"config": config})
            kind, *sizes = config or ("dot",)
        except (KeyError, TypeError):
            return None
        numbers = (choice.us, choice.gb_per_s, choice.runner_up_us)
        is_possible = (
            choice.path in (("small", "tiles") if config else ("plain", DEQUANTIZED))
            and kind in KINDS
            and all(isinstance(size, int) for size in sizes)
            and all(isinstance(number, float | int | None) for number in numbers)
        )
        return choice if is_possible else None

    def as_report(self) -> dict[str, Any]:
        """Return the fields that are not None, for the capture report."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        return fields | ({} if self.config is None else {"config": str(self.config)})


class Choices(Mapping[int, LinearChoice]):
    """The choices of a weight by number of rows, as they are now: the contest of a layer may change them.

    Args:
        known: choices by key.
        keys: by number of rows.
    """

    def __init__(self, known: Mapping[str, LinearChoice], keys: Mapping[int, str]) -> None:
        self._known, self._keys = known, keys

    def __getitem__(self, rows: int) -> LinearChoice:
        return self._known[self._keys[rows]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __or__(self, other: "Choices") -> "Choices":
        """Return both weights' choices, of the same tuner."""
        return Choices(self._known, {**self._keys, **other._keys})


class _Measured(NamedTuple):
    """A product that was measured by itself, and waits for the contest of its layer."""

    key: str
    product: LayerProduct
    path: str  # if it is not left to cuBLAS
    times: Mapping[str, float]  # see `LinearChoice.among`


class LinearTuner:
    """Times the products of a weight on a GPU, once per device, shape, dtype and batch size; then each layer whole.

    A layer ends where a product comes again. `cache`: the cache on disk; None: choices are kept only in this object.
    """

    def __init__(self, cache: ChoiceCache | None = None) -> None:
        self._choices: dict[str, LinearChoice] = {}  # by device, shape, dtype, bias, rows and versions
        self._cache = cache
        self._counters: dict[torch.device, Tensor] = {}
        self._scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._clock: GraphClock | None = None
        self._layers: dict[int, list[_Measured]] = {}  # by rows, in the order of their contests

    @cached_property
    def _software(self) -> str:
        return software()

    def counters(self, device: torch.device) -> Tensor:
        """Return the counters that all small products on a GPU share; the products run one after another."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        return self._counters[device]

    def scratch(self, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Return the memory that all weights on a GPU are dequantized into; None for floats of 32 bits.

        The products run one after another. It never grows: captured steps have its address.
        """
        if device.type != "cuda" or dtype.itemsize != 2:
            return None
        if (device, dtype) not in self._scratch:
            self._scratch[device, dtype] = torch.empty(SCRATCH_VALUES, dtype=dtype, device=device)
        return self._scratch[device, dtype]

    def choose_small(
        self,
        weight: Tensor,
        bias: Tensor | None,
        batch_sizes: tuple[int, ...],
        fused: FusedForm = FusedForm(),  # noqa: B008 (immutable)
    ) -> Choices:
        """Return the fastest product on a GPU for each batch size: cuBLAS, or a configuration of `small_linear`.

        More than 64 rows, and weights below 1 MiB (read faster than launched), are left to cuBLAS. `fused`: what the
        step fuses with the product.
        """
        few = [rows for rows in batch_sizes if rows <= MOST_ROWS] if weight.nbytes >= _LEAST_BYTES else []
        return Choices(self._choices, {rows: self._key_of(weight, bias, rows, fused) for rows in few})

    def choose_tiled(
        self,
        weight: TiledOperand,
        bias: Tensor | None,
        batch_sizes: tuple[int, ...],
        fused: FusedForm,
        triton_config: Callable[[int], SmallLinearConfig],
    ) -> Choices:
        """Return the faster product of a quantized weight on a GPU for each batch size: Triton's, or CUDA C++.

        For batch sizes that CUDA C++ has no kernel for, or without NVRTC, there is no choice. `triton_config`: Triton's
        configuration by rows.
        """
        if unavailable_reason() is not None or weight.device.type != "cuda" or weight.nbytes < _LEAST_BYTES:
            return Choices(self._choices, {})
        few = [rows for rows in batch_sizes if rows <= WIDE_ROWS]
        keys = {rows: self._key_of(weight, bias, rows, fused, triton_config(rows)) for rows in few}
        return Choices(self._choices, keys)

    def choose_dequantized(
        self,
        weight: TiledOperand,
        batch_sizes: tuple[int, ...],
        fused: FusedForm,
        triton_config: Callable[[int], SmallLinearConfig],
    ) -> Choices:
        """Return the faster product of a quantized weight and many rows: over tiles, or dequantized first.

        Measured are the batch sizes above 64, up to 512, and some numbers of rows of prompts. `weight` has scratch.
        """
        if weight.nbytes < _LEAST_BYTES:
            return Choices(self._choices, {})
        rows_of_steps = {rows for rows in batch_sizes if MOST_ROWS < rows <= max(_MANY_ROWS)}
        row_counts = sorted(rows_of_steps.union(_MANY_ROWS))
        keys = {rows: self._key_of(weight, None, rows, fused, triton_config(rows)) for rows in row_counts}
        return Choices(self._choices, keys)

    def _key_of(
        self,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        rows: int,
        fused: FusedForm,
        triton_config: SmallLinearConfig | None = None,
    ) -> str:
        """Return the key of the choice for a number of rows: known, from the cache on disk, or measured."""
        shape = "x".join(map(str, weight.shape))
        layer = f"linear {shape} {str(weight.dtype)[6:]} {'no ' if bias is None else ''}bias, rows {rows}"
        if isinstance(weight, TiledOperand):
            layer = f"{layer}, {' '.join(map(str, weight.tiles.layout))}"
        step = f"{'norm, ' * fused.is_normed}{fused.epilogue}"
        key = f"{layer} | {step} | {processor_name(weight.device)} | {self._software}"
        if key in self._choices:
            self._end_layer(rows)
            return key
        choice = None if self._cache is None else LinearChoice.from_dict(self._cache.get(key))
        if choice is None:
            self._keep(key, self._measured(key, weight, bias, rows, fused, triton_config))
        else:
            self._choices[key] = choice
        return key

    def _keep(self, key: str, choice: LinearChoice) -> None:
        self._choices[key] = choice
        if self._cache is not None and choice.us is not None:
            self._cache.put(key, asdict(choice))

    def _end_layer(self, rows: int) -> None:
        """Let the products that were measured for these rows compete as a layer, and keep what is fastest there."""
        measured = self._layers.pop(rows, [])
        if len(measured) < 2 or self._clock is None:
            return
        try:
            configs, _ = fastest_layer([each.product for each in measured], self._clock)
        except Exception as error:  # such as out of memory: each has its own choice already
            message = f"a layer of {rows} rows could not be timed: {type(error).__name__}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        for each, config in zip(measured, configs, strict=True):
            if config != each.product.config:
                nbytes = each.product.contest.weight.nbytes
                self._keep(each.key, LinearChoice.among(each.path, config, each.times, nbytes))

    def _measured(
        self,
        key: str,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        rows: int,
        fused: FusedForm,
        triton_config: SmallLinearConfig | None,
    ) -> LinearChoice:
        try:
            if self._clock is None:  # one stream: cuBLAS keeps a workspace for each
                self._clock = GraphClock(weight.device)
            if isinstance(weight, Tensor):
                config, times = fastest_product(weight, bias, rows, self._clock, fused)
            else:
                assert triton_config is not None
                config, times = fastest_tiled(weight, bias, rows, self._clock, fused, triton_config)
        except Exception as error:  # such as out of memory: use cuBLAS, or Triton's
            message = f"linear paths for {rows} rows could not be timed: {type(error).__name__}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return LinearChoice("plain" if triton_config is None else "tiles", triton_config)
        path, without = ("small", "plain") if isinstance(weight, Tensor) else ("tiles", DEQUANTIZED)
        product = None if self._clock is None else self._clock.last.pop(rows, None)
        if product is not None and rows <= MOST_ROWS:
            self._layers.setdefault(rows, []).append(_Measured(key, product, path, times))
        return LinearChoice.among(without if config is None else path, config, times, weight.nbytes)
