"""Times products of a few rows on this GPU: each candidate is captured in a graph, timed and checked.

A graph holds several products over copies of the weight, so that caches do not help. Before each runs what is before it
in a layer: the product that was chosen for it, or a norm. Fused operators are timed with it. Tests replace the clock.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from graphdecode.kernels.linear.dequantize_tiles import dequantized_linear
from graphdecode.kernels.linear.linear import linear
from graphdecode.kernels.linear.small_linear import (
    TILE_ROWS,
    SmallLinearConfig,
    candidates,
    skinny_candidates,
    small_linear,
)
from graphdecode.kernels.linear.tiled_linear import tiled_linear
from graphdecode.kernels.linear.weight_tiles import WeightTiles
from graphdecode.kernels.model.act_mul import act_mul
from graphdecode.kernels.native.optional_triton import has_early_start
from graphdecode.kernels.norm.rms_norm import add_rms_norm, rms_norm

_COLD_BYTES = 256 << 20  # more than any L2 cache
_CALLS = 8  # fewest products in one graph
_COPIES = 64  # most copies of a weight: a model of smaller weights fits the cache
_EPS = 1e-5
_VARIED = 2  # best candidates, also timed without prefetch, without early start and with the norm inside
_LEAST_SECONDS = 1e-7  # the clock's resolution is coarser
_ROUNDS = 9
_CUBLAS_MARGIN = 1.02  # by which a candidate must be faster than cuBLAS
# largest difference of two products, relative to the largest result: cuBLAS may reduce in 16 bits or use TF32
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class PrecedingProduct(NamedTuple):
    """A product that was chosen, before the next one of its layer."""

    call: Callable[[], None]
    width: int  # columns of its result
    is_input: bool  # the next product reads it; attention reads the result of a product without an epilogue

    def feeds(self, in_features: int) -> bool:
        """Whether a product with these columns follows it directly."""
        return self.is_input and self.width == in_features


class GraphClock:
    """Times calls in a captured graph on a CUDA device.

    Attributes:
        units: multiprocessors of the device.
        has_pdl: whether kernels support programmatic dependent launch.
        before: by rows, the product that was chosen last.
        last: by rows, the same with the kernels that may take its place in a layer.
    """

    def __init__(self, device: torch.device) -> None:
        self.before: dict[int, PrecedingProduct] = {}
        self.last: dict[int, LayerProduct] = {}
        self.units = torch.cuda.get_device_properties(device).multi_processor_count
        self.has_pdl = has_early_start(device)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def seconds(self, calls: list[Callable[[], None]]) -> float:
        """Return the median time of one call, all captured in one graph."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        times = []
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for call in calls[:2]:  # compile and load
                call()
            torch.cuda.synchronize(self._device)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(_ROUNDS + 2):
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1000 / len(calls))
        graph.reset()
        return sorted(times[2:])[_ROUNDS // 2]


class FusedForm(NamedTuple):
    """Operators that a step fuses with a product: the norm before it, and an epilogue of `small_linear`."""

    is_normed: bool = False
    epilogue: str = "store"

    @property
    def is_gated(self) -> bool:
        """Whether the epilogue is an activation, of one half of the product, which multiplies the other."""
        return self.epilogue not in ("store", "add")

    def starts_early(self, rows: int) -> bool:
        """Whether a product of so many rows may start before the previous kernel ends.

        A gated one of few rows may not: behind the short product of an attention's output its programs probably come to
        lie unevenly. On an H200 the best one that starts early made steps of one row 3 to 7% longer in 16 bits, and 22%
        in int8, and the best tile 26%; of 8 rows 1 to 3%, and 25%. Products timed by themselves do not show it.
        """
        return not self.is_gated or rows > TILE_ROWS


FUSED_FORMS = {  # by the last part of a weight's name in the model
    "qkv": FusedForm(is_normed=True),
    "in_proj": FusedForm(is_normed=True),
    "gate_up": FusedForm(is_normed=True, epilogue="silu"),  # all activations take the same time
    "o": FusedForm(epilogue="add"),
    "down": FusedForm(epilogue="add"),
    "lm_head": FusedForm(is_normed=True),
}


class TiledOperand(NamedTuple):
    """A quantized weight as a contest reads it."""

    tiles: WeightTiles
    in_features: int
    dtype: torch.dtype  # of the activations
    scratch: Tensor | None = None  # into which it may be dequantized; None: it may not

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.tiles.words.shape[1], self.in_features

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.tiles.words.device

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return sum(part.nbytes for part in self.tiles if isinstance(part, Tensor))

    def clone(self) -> Self:
        """Return a copy."""
        copied: list[Any] = [part.clone() if isinstance(part, Tensor) else part for part in self.tiles]
        return self._replace(tiles=WeightTiles(*copied))


class Contest:
    """One layer shape at one number of rows, and the candidates' products over copies of its weight.

    cuBLAS is timed with extra launches for norm, activation and sum.

    Args:
        cold_bytes: least size of all copies.
        before: the product that was chosen last; if it feeds this one, it runs before each, as in a step: a product
            that starts early may cost more behind it than by itself.
        first: the candidate whose result the others' are compared with; None: cuBLAS.
    """

    def __init__(
        self,
        weight: Tensor | TiledOperand,
        bias: Tensor | None,
        rows: int,
        fused: FusedForm = FusedForm(),  # noqa: B008 (immutable)
        cold_bytes: int = _COLD_BYTES,
        before: PrecedingProduct | None = None,
        first: SmallLinearConfig | None = None,
    ) -> None:
        copies = min(-(-cold_bytes // weight.nbytes), _COPIES)
        self._weights = [weight]
        with contextlib.suppress(torch.OutOfMemoryError):  # fewer copies: warmer caches for all candidates
            self._weights += [weight.clone() for _ in range(copies - 1)]
        self._bias, self._fused = bias, fused
        generator = torch.Generator(weight.device).manual_seed(rows)  # leaves the user's random state alone
        out_features, in_features = weight.shape
        width = out_features // 2 if fused.is_gated else out_features
        self._before = before.call if before is not None and before.feeds(in_features) else None

        def drawn(columns: int) -> Tensor:
            return torch.randn(rows, columns, device=weight.device, generator=generator).to(weight.dtype)

        self._source, self._residual = drawn(in_features), drawn(width)
        self._x, self._hidden = (torch.empty_like(self._source) for _ in range(2))
        self._product = self._source.new_empty(rows, out_features)
        self._summed = torch.empty_like(self._residual)
        self._gain = torch.ones(in_features, dtype=torch.float32, device=weight.device)
        rms_norm(self._x, self._source, self._gain, _EPS)
        self._outs = [torch.empty_like(self._residual) for _ in range(max(copies, _CALLS))]
        self._run(self.calls(first)[:1])
        self._expected = self._outs[0].clone()

    @property
    def weight(self) -> Tensor | TiledOperand:
        """The weight itself, not a copy."""
        return self._weights[0]

    def write_norm(self) -> None:
        """Launch a norm of the activations."""
        rms_norm(self._x, self._source, self._gain, _EPS)

    def _write_activations(self) -> None:
        """Launch what comes before the product: the product that feeds it, or a norm in the place of attention."""
        if self._before is None:
            self.write_norm()
        else:
            self._before()

    def activations_alone(self) -> list[Callable[[], None]]:
        """Return calls without a product; their time is subtracted."""
        return [self._write_activations] * len(self._outs)

    def calls(self, config: SmallLinearConfig | None) -> list[Callable[[], None]]:
        """Return the calls of one candidate; None: cuBLAS."""
        counters = self._counters(config)
        return [
            self._call(out, self._weights[index % len(self._weights)], config, counters)
            for index, out in enumerate(self._outs)
        ]

    def _counters(self, config: SmallLinearConfig | None) -> Tensor | None:
        needed = 0 if config is None else config.counters(*self._product.shape)
        return torch.zeros(needed, dtype=torch.int32, device=self._x.device) if needed else None

    def _call(
        self, out: Tensor, weight: Tensor | TiledOperand, config: SmallLinearConfig | None, counters: Tensor | None
    ) -> Callable[[], None]:
        def call() -> None:
            self._write_activations()
            self._launch(out, weight, config, counters)

        return call

    def _launch(
        self, out: Tensor, weight: Tensor | TiledOperand, config: SmallLinearConfig | None, counters: Tensor | None
    ) -> None:
        gain, epilogue = self._gain if self._fused.is_normed else None, self._fused.epilogue
        fused: dict[str, Any] = {"gain": gain, "eps": _EPS, "epilogue": epilogue}
        if config is None:
            self._write_with_cublas(out, weight)
        elif isinstance(weight, TiledOperand):
            tiled_linear(out, self._x, weight.tiles, self._bias, counters, config, **fused)
        else:
            small_linear(out, self._x, weight, self._bias, counters, config, **fused)

    def chosen(self, config: SmallLinearConfig | None) -> PrecedingProduct:
        """Return the product as what comes before the next one in a layer, which ends the contest.

        Copies of the weight, and what came before, are released: else each product would keep those of all before it.
        """
        del self._weights[1:], self._outs[1:]
        self._before = None
        return self.preceding(config)

    def call_of(self, weight: Tensor | TiledOperand, config: SmallLinearConfig | None) -> Callable[[], None]:
        """Return the launch of the product with a weight of the same shape, without what comes before it."""
        return partial(self._launch, self._outs[0], weight, config, self._counters(config))

    def preceding(self, config: SmallLinearConfig | None) -> PrecedingProduct:
        """Return the product as what comes before another one."""
        call, is_input = self.call_of(self.weight, config), self._fused.epilogue != "store"
        return PrecedingProduct(call, self._residual.shape[1], is_input)

    def _write_with_cublas(self, out: Tensor, weight: Tensor | TiledOperand) -> None:
        x, epilogue = self._x, self._fused.epilogue
        if self._fused.is_normed:
            rms_norm(self._hidden, x, self._gain, _EPS)
            x = self._hidden
        product = out if epilogue == "store" else self._product
        if isinstance(weight, Tensor):
            linear(product, x, weight, self._bias)
        else:
            assert weight.scratch is not None
            dequantized_linear(product, x, weight.tiles, self._bias, weight.scratch)
        if epilogue == "add":
            add_rms_norm(self._summed, out, self._product, None, 0.0)
        elif epilogue != "store":
            act_mul(out, self._product, epilogue)

    def skinny_candidates(self, pdl: bool) -> list[SmallLinearConfig]:
        """Return the configurations of the CUDA C++ kernel."""
        weight = self._weights[0]
        return skinny_candidates(self._x, weight if isinstance(weight, Tensor) else weight.tiles, pdl)

    def _run(self, calls: Iterable[Callable[[], None]]) -> None:
        """Reset the results to NaN, or the residual, and run calls once."""
        for out in self._outs:
            out.copy_(self._residual) if self._fused.epilogue == "add" else out.fill_(torch.nan)
        for call in calls:
            call()

    def problem(self, config: SmallLinearConfig) -> str | None:
        """Return what is wrong with a candidate's results; None if nothing is."""
        self._run(self.calls(config))
        wide, expected = self._outs[0].float(), self._expected.float()
        error, largest = (wide - expected).abs().max().item(), expected.abs().max().item()
        if not error <= _TOLERANCE[self._expected.dtype] * largest:
            return f"is off by {error:.3g} where the largest result is {largest:.3g}"
        if not all(torch.equal(out, self._outs[0]) for out in self._outs):
            return "does not give the same bits every time"
        return None


class LayerProduct(NamedTuple):
    """A product whose contest is over, as a part of its layer."""

    contest: Contest
    config: SmallLinearConfig | None  # the fastest by itself; None: cuBLAS
    kinds: tuple[SmallLinearConfig, ...]  # the fastest of each kernel, with and without an early start


class Race:
    """Times candidates of a contest; one that fails or gives a wrong result is left out with a warning.

    Attributes:
        seconds: by configuration.
    """

    def __init__(self, contest: Contest, clock: GraphClock) -> None:
        self.seconds: dict[SmallLinearConfig, float] = {}
        self._contest, self._clock = contest, clock
        self._nothing_s = clock.seconds(contest.activations_alone())

    def product_seconds(self, config: SmallLinearConfig | None) -> float:
        """Return the time of one product behind what comes before it."""
        return max(self._clock.seconds(self._contest.calls(config)) - self._nothing_s, _LEAST_SECONDS)

    def run(self, configs: Iterable[SmallLinearConfig]) -> None:
        """Time candidates."""
        for config in configs:
            try:
                problem, product_s = self._contest.problem(config), self.product_seconds(config)
            except Exception as error:  # such as too little shared memory: try the others
                problem = f"failed: {type(error).__name__}: {error}".splitlines()[0]
            if problem is None:
                self.seconds[config] = product_s
            else:
                warnings.warn(f"small linear {config} {problem}; not used", RuntimeWarning, stacklevel=3)

    def run_skinny(self) -> None:
        """Time the CUDA C++ kernel with an early start, and its best configurations without."""
        self.run(self._contest.skinny_candidates(self._clock.has_pdl))
        skinny = [config for config in self.best() if config.kind == "skinny" and config.pdl]
        self.run([config._replace(pdl=False) for config in skinny[:_VARIED]])

    def best(self) -> list[SmallLinearConfig]:
        """Return the candidates, the fastest first."""
        return sorted(self.seconds, key=self.seconds.__getitem__)

    def end(self, rows: int, winner: SmallLinearConfig | None) -> None:
        """Leave the winner to the contests of the next products, and of the layer."""
        kinds: dict[tuple[str, bool], SmallLinearConfig] = {}
        for config in self.best():
            kinds.setdefault((config.kind, config.pdl), config)
        self._clock.before[rows] = self._contest.chosen(winner)
        self._clock.last[rows] = LayerProduct(self._contest, winner, tuple(kinds.values()))


def fastest_product(
    weight: Tensor,
    bias: Tensor | None,
    rows: int,
    clock: GraphClock,
    fused: FusedForm = FusedForm(),  # noqa: B008 (immutable)
) -> tuple[SmallLinearConfig | None, dict[str, float]]:
    """Time cuBLAS and every candidate; return the fastest (None: cuBLAS) and all times in seconds by name.

    A candidate that fails or gives a wrong result is left out with a warning. `rows` is in 1..64.
    """
    contest = Contest(weight, bias, rows, fused, before=clock.before.get(rows))
    race = Race(contest, clock)
    cublas_s = race.product_seconds(None)
    out_features, in_features = weight.shape
    configs = candidates(out_features, in_features, weight.element_size(), rows, clock.units, fused.is_normed)
    is_early = clock.has_pdl and fused.starts_early(rows)
    race.run([config._replace(pdl=is_early) for config in configs])
    best = race.best()[:_VARIED]
    if is_early:  # which may cost more than it brings
        race.run([varied for each in best for varied in (each._replace(prefetch=False), each._replace(pdl=False))])
    race.run([each._replace(separate_norm=False) for each in best if each.separate_norm])
    race.run_skinny()
    times = {"plain": cublas_s} | {str(config): product_s for config, product_s in race.seconds.items()}
    winner = next(iter(race.best()), None)
    if winner is not None and race.seconds[winner] * _CUBLAS_MARGIN > cublas_s:
        winner = None
    race.end(rows, winner)
    return winner, times


def fastest_tiled(
    weight: TiledOperand, bias: Tensor | None, rows: int, clock: GraphClock, fused: FusedForm, first: SmallLinearConfig
) -> tuple[SmallLinearConfig | None, dict[str, float]]:
    """Time the products of a quantized weight: Triton's kernel in its configuration `first`, and the CUDA C++ kernel.

    If there is scratch for it, also cuBLAS over the dequantized weight. Returns the fastest (None: cuBLAS), and all
    times in seconds by name.
    """
    contest = Contest(weight, bias, rows, fused, before=clock.before.get(rows), first=first)
    race = Race(contest, clock)
    race.run([first])
    race.run_skinny()
    times = {str(config): product_s for config, product_s in race.seconds.items()}
    winner: SmallLinearConfig | None = next(iter(race.best()), first)
    if weight.scratch is not None:
        times["dequantized"] = race.product_seconds(None)
        if winner not in race.seconds or race.seconds[winner] > times["dequantized"] * _CUBLAS_MARGIN:
            winner = None
    race.end(rows, winner)
    return winner, times
