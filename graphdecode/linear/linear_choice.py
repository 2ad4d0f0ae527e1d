"""Which path reads the weight of a linear layer fastest: measured once for each shape, and kept on disk.

The next start on the same machine need not measure it again.
"""

import hashlib
import json
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Self

import torch
from torch import Tensor

from graphdecode.kernels import native
from graphdecode.kernels.linear.small_linear import MOST_ROWS, SmallLinearConfig
from graphdecode.kernels.native.instructions import instructions
from graphdecode.kernels.native.private_folder import cache_folder
from graphdecode.linear.small_linear_timing import FusedForm, GraphClock, fastest_product

_FILE = "choices.json"


def processor_name(device: torch.device) -> str:
    """Return the name of a GPU, or that of the CPU with the instructions and the number of threads that are used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {instructions().name}, {torch.get_num_threads()} threads"


def software() -> str:
    """Return what a measurement is valid for: versions of torch and Triton, and a hash of the products' sources."""
    try:
        triton_version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton_version = "none"
    source = hashlib.sha256()
    kernels = Path(native.__file__).parents[1]
    for folder in (Path(__file__).parent, *(kernels / name for name in ("linear", "moe", "native"))):
        for file in sorted(folder.glob("*.[pch]*")):
            source.update(file.read_bytes())
    return f"torch {torch.__version__}, triton {triton_version}, source {source.hexdigest()[:12]}"


class ChoiceCache:
    """A JSON file of measured choices by key. A file that cannot be read or written costs a measurement, never a run.

    Args:
        folder: where the file is; None means `cache_folder()`. It is made when something is first written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = (folder or cache_folder()) / _FILE
        self._choices = self._read()
        self._own: dict[str, Any] = {}

    def get(self, key: str) -> Any | None:
        """Return what was put for a key, by whichever process; None if nothing was."""
        return self._choices.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value that JSON can hold, beside what other processes have written meanwhile."""
        self._own[key] = value
        self._choices = self._read() | self._own  # an entry lost to a process that wrote at the same time comes back
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, suffix=".tmp", delete=False) as file:
                json.dump(self._choices, file, indent=1, sort_keys=True)
            Path(file.name).replace(self._file)  # readers see the old file or the new one, whole

    def _read(self) -> dict[str, Any]:
        try:
            choices = json.loads(self._file.read_text())
        except (OSError, ValueError, RecursionError):  # not there, no JSON, or nested too deeply
            return {}
        return choices if isinstance(choices, dict) else {}


Product = Callable[[Tensor, Tensor], None]  # writes the product of its second argument into its first
_REPETITIONS = 7
_MARGIN = 1.15  # by so much another path must be faster than the one before it: a busy machine may not turn the choice
_COUNTERS = 1 << 16
_LEAST_BYTES = 1 << 20
_EVICTION_BYTES = 64 * 2**20  # more than a last-level cache slice holds


@dataclass(frozen=True)
class LinearChoice:
    """The path of one layer shape at one number of rows, and what was measured when it was chosen.

    Attributes:
        path: the form's; of a plain weight on a GPU "plain" or "small".
        config: of the small path.
        us: microseconds of one product; None where nothing was measured.
        gb_per_s: bytes of the weight by that time.
        runner_up: the second fastest path.
        runner_up_us: its microseconds.
    """

    path: str
    config: SmallLinearConfig | None = None
    us: float | None = None
    gb_per_s: float | None = None
    runner_up: str | None = None
    runner_up_us: float | None = None

    @classmethod
    def among(cls, path: str, config: SmallLinearConfig | None, times: Mapping[str, float], nbytes: int) -> Self:
        """Return a choice with its figures.

        Args:
            path: that was chosen.
            config: of the small path.
            times: seconds of each path by its name, which is the configuration's text for the small one.
            nbytes: of the weight.
        """
        name = path if config is None else str(config)
        others = {other: seconds for other, seconds in times.items() if other != name}
        second = min(others, key=others.__getitem__, default=None)
        second_us = None if second is None else round(others[second] * 1e6, 2)
        return cls(path, config, round(times[name] * 1e6, 2), round(nbytes / times[name] / 1e9, 1), second, second_us)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Return the choice that `dataclasses.asdict` was given; TypeError where it is none."""
        config = plain.get("config")
        return cls(**{**plain, "config": None if config is None else SmallLinearConfig(*config)})

    def as_report(self) -> dict[str, Any]:
        """Return what is known, for the capture report."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return known | ({} if self.config is None else {"config": str(self.config)})


Choices = dict[int, LinearChoice]  # rows -> choice


class LinearTuner:
    """Times the paths of a linear layer on this machine, once per device, shape, dtype, threads and batch sizes.

    Args:
        model_bytes: the weights that one step reads in all. Beyond the size of a cache, each timed run
            finds the weight evicted, as it will be in the model.
        cache: remembers the choices for the next start; None remembers them for this tuner's life alone.
    """

    def __init__(self, model_bytes: int = 0, cache: ChoiceCache | None = None) -> None:
        self.choices: dict[str, Choices] = {}
        """What was chosen, by device, shape, dtype, bias, rows and versions."""
        self.is_cold = model_bytes > _EVICTION_BYTES // 2
        self._eviction: Tensor | None = None
        self._cache = cache
        self._software = software()
        self._counters: dict[torch.device, Tensor] = {}
        self._clock: GraphClock | None = None

    def counters(self, device: torch.device) -> Tensor:
        """Return the counters that all small products on a GPU share; they run one after another."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        return self._counters[device]

    def choose(
        self,
        weight: Tensor,
        bias: Tensor | None,
        batch_sizes: tuple[int, ...],
        paths: Mapping[str, Callable[[], Product]],
    ) -> Choices:
        """Return the path that takes the least time, one for all batch sizes: the geometric mean over them.

        Args:
            weight: the plain weight, on the CPU.
            bias: [out_features] or None.
            batch_sizes: how many rows a decode step may have.
            paths: name of each path -> what makes its product, the one that is to be preferred first.
        """

        def measure() -> Choices:
            best, best_s = "", float("inf")
            times: dict[int, dict[str, float]] = {rows: {} for rows in batch_sizes}
            for path, make in paths.items():
                product = make()
                for rows in batch_sizes:
                    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
                    out = torch.empty(rows, weight.shape[0], dtype=weight.dtype)
                    times[rows][path] = self.best_seconds(product, out, x)
                typical_s = geometric_mean(times[rows][path] for rows in batch_sizes)
                if typical_s * (_MARGIN if best else 1.0) < best_s:
                    best, best_s = path, typical_s
            return {rows: LinearChoice.among(best, None, times[rows], weight.nbytes) for rows in batch_sizes}

        key = self._key(weight, bias, batch_sizes, f"{', '.join(paths)} | ")
        return self._remembered(key, measure, batch_sizes, tuple(paths))

    def choose_small(
        self,
        weight: Tensor,
        bias: Tensor | None,
        batch_sizes: tuple[int, ...],
        fused: FusedForm = FusedForm(),  # noqa: B008 (immutable)
    ) -> Choices:
        """Return the fastest product on a GPU for each batch size: cuBLAS, or a configuration of `small_linear`.

        Args:
            weight: [out_features, in_features], on the GPU.
            bias: [out_features] or None.
            batch_sizes: rows of the decode steps; those above 64 are left to cuBLAS, and weights of less than 1 MiB
                too: reading them takes less time than starting a kernel.
            fused: what the step fuses with the product.
        """

        def measure(rows: int) -> Choices:
            try:
                if self._clock is None:  # one for all: cuBLAS keeps a workspace for every stream it has seen
                    self._clock = GraphClock(weight.device)
                config, times = fastest_product(weight, bias, rows, self._clock, fused)
            except Exception as error:  # no room for a graph, say: cuBLAS needs no measurement to be right
                message = f"linear paths for {rows} rows could not be timed: {type(error).__name__}: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
                return {rows: LinearChoice("plain")}
            path = "plain" if config is None else "small"
            return {rows: LinearChoice.among(path, config, times, weight.nbytes)}

        choices: Choices = {}
        for rows in (size for size in batch_sizes if size <= MOST_ROWS and weight.nbytes >= _LEAST_BYTES):
            key = self._key(weight, bias, (rows,), f"{'norm, ' * fused.is_normed}{fused.epilogue} | ")
            choices |= self._remembered(key, partial(measure, rows), (rows,), ("plain", "small"))
        return choices

    def _key(self, weight: Tensor, bias: Tensor | None, batch_sizes: tuple[int, ...], paths: str = "") -> str:
        shape = "x".join(map(str, weight.shape))
        where = processor_name(weight.device)
        if weight.device.type != "cuda":
            where += ", cold" if self.is_cold else ", cached"
        rows = ", ".join(map(str, batch_sizes))
        layer = f"linear {shape} {str(weight.dtype)[6:]} {'no ' if bias is None else ''}bias, rows {rows}"
        return f"{layer} | {paths}{where} | {self._software}"

    def _remembered(
        self, key: str, measure: Callable[[], Choices], batch_sizes: tuple[int, ...], paths: tuple[str, ...]
    ) -> Choices:
        if key not in self.choices:
            choices = _from_disk(None if self._cache is None else self._cache.get(key), batch_sizes, paths)
            if choices is None:
                choices = measure()
                if self._cache is not None and all(choice.us is not None for choice in choices.values()):
                    self._cache.put(key, {str(rows): asdict(choice) for rows, choice in choices.items()})
            self.choices[key] = choices
        return self.choices[key]

    def best_seconds(self, product: Product, out: Tensor, x: Tensor) -> float:
        """Return the shortest time of a product in seconds; its weight is not in a cache that the model overflows."""
        if self.is_cold and self._eviction is None:
            self._eviction = torch.zeros(_EVICTION_BYTES // 4)
        product(out, x)
        best = float("inf")
        for _ in range(_REPETITIONS):
            if self._eviction is not None:
                self._eviction.add_(1)
            start = time.perf_counter()
            product(out, x)
            best = min(best, time.perf_counter() - start)
        return best


def _from_disk(stored: Any, batch_sizes: tuple[int, ...], paths: tuple[str, ...]) -> Choices | None:
    """Return choices as they were written; None if they could not have been measured: a file may be damaged."""
    try:
        choices = {int(rows): LinearChoice.from_dict(plain) for rows, plain in stored.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    is_possible = set(choices) == set(batch_sizes) and all(
        choice.path in paths
        and (choice.path == "small") == (choice.config is not None)
        and (choice.config is None or _is_possible(choice.config))
        and all(isinstance(figure, float | int | None) for figure in (choice.us, choice.gb_per_s, choice.runner_up_us))
        for choice in choices.values()
    )
    return choices if is_possible else None


def _is_possible(config: SmallLinearConfig) -> bool:
    kind, *sizes = config
    return kind in ("dot", "gemv") and all(isinstance(size, int) for size in sizes)
