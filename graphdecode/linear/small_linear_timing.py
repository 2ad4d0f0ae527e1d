"""Which product of a few rows is fastest on this GPU: each candidate is timed in a captured graph, and checked.

A graph holds several products, each over another copy of the weight, so that no cache helps; before each product a
norm writes the activations, as in a step. Not yet run on a GPU: the tests put a stand-in in the clock's place.
"""

import contextlib
import statistics
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from graphdecode.kernels.linear.linear import linear
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, candidates, small_linear
from graphdecode.kernels.native.optional_triton import has_early_start
from graphdecode.kernels.norm.rms_norm import rms_norm

_COLD_BYTES = 256 << 20  # more than any L2 cache
_CALLS = 8  # products in one graph at least
_COPIES = 64  # of one weight at most: a model of such weights fits a cache whole
_LEAST_SECONDS = 1e-7  # what a product takes that no clock sees
_ROUNDS = 9
_PLAIN_MARGIN = 1.02  # another product must be so much faster than cuBLAS
# largest error that the products of one dtype may differ by, as a share of the largest result: cuBLAS may add up parts
# in 16 bits, or multiply in TF32
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class GraphClock:
    """Times calls in a captured graph.

    Args:
        device: a CUDA device.

    Attributes:
        units: multiprocessors of the device.
        has_pdl: whether a kernel can begin before the one before it ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.units = torch.cuda.get_device_properties(device).multi_processor_count
        self.has_pdl = has_early_start(device)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def seconds(self, calls: list[Callable[[], None]]) -> float:
        """Return the median time of one call, all of them captured one after another and replayed."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        times = []
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for call in calls[:2]:  # compiled, and loaded onto the device
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
        return statistics.median(times[2:])


class Contest:
    """One layer shape at one number of rows, and the candidates' products over rotated copies of its weight.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
        rows: of the activations.
        cold_bytes: what the copies hold together at least.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int, cold_bytes: int = _COLD_BYTES) -> None:
        copies = min(-(-cold_bytes // weight.nbytes), _COPIES)
        self._weights = [weight]
        with contextlib.suppress(torch.OutOfMemoryError):  # fewer copies are measured warmer, and still compared
            self._weights += [weight.clone() for _ in range(copies - 1)]
        self._bias = bias
        generator = torch.Generator(weight.device).manual_seed(rows)  # the user's own draws stay as they are
        source = torch.randn(rows, weight.shape[1], device=weight.device, generator=generator)
        self._source = source.to(weight.dtype)
        self._x = torch.empty_like(self._source)
        self._gain = torch.ones(weight.shape[1], dtype=torch.float32, device=weight.device)
        calls = max(copies, _CALLS)
        self._outs = [
            torch.empty(rows, weight.shape[0], dtype=weight.dtype, device=weight.device) for _ in range(calls)
        ]
        self._expected = torch.empty_like(self._outs[0])
        self._write_activations()
        linear(self._expected, self._x, weight, bias)

    def _write_activations(self) -> None:
        rms_norm(self._x, self._source, self._gain, 1e-5)

    def activations_alone(self) -> list[Callable[[], None]]:
        """Return calls with no product, whose time is not the candidates'."""
        return [self._write_activations] * len(self._outs)

    def calls(self, config: SmallLinearConfig | None) -> list[Callable[[], None]]:
        """Return calls of one candidate, None being cuBLAS."""
        rows, out_features = self._expected.shape
        counters = None
        if config is not None:
            needed = config.counters(rows, out_features)
            counters = torch.zeros(needed, dtype=torch.int32, device=self._x.device) if needed else None
        return [
            self._call(out, self._weights[index % len(self._weights)], config, counters)
            for index, out in enumerate(self._outs)
        ]

    def _call(
        self, out: Tensor, weight: Tensor, config: SmallLinearConfig | None, counters: Tensor | None
    ) -> Callable[[], None]:
        def call() -> None:
            self._write_activations()
            if config is None:
                linear(out, self._x, weight, self._bias)
            else:
                small_linear(out, self._x, weight, self._bias, counters, config)

        return call

    def forget(self) -> None:
        """Fill the results with NaN."""
        for out in self._outs:
            out.fill_(torch.nan)

    def problem(self) -> str | None:
        """Say what is wrong with the results of the calls that ran; None if nothing is."""
        wide, expected = self._outs[0].float(), self._expected.float()
        error, largest = (wide - expected).abs().max().item(), expected.abs().max().item()
        if not error <= _TOLERANCE[self._expected.dtype] * largest:
            return f"is off by {error:.3g} where the largest result is {largest:.3g}"
        if not all(torch.equal(out, self._outs[0]) for out in self._outs):
            return "does not give the same bits every time"
        return None


def fastest_product(
    weight: Tensor, bias: Tensor | None, rows: int, clock: GraphClock
) -> tuple[SmallLinearConfig | None, dict[str, float]]:
    """Time cuBLAS and every candidate, and return the winner, None being cuBLAS, and the seconds of all by name.

    A candidate that cannot be run, or whose result is not that of the plain product, is left out with a warning.

    Args:
        weight: [out_features, in_features], on a CUDA device.
        bias: [out_features] or None.
        rows: of the activations, 1..64.
        clock: of the weight's device.
    """
    contest = Contest(weight, bias, rows)
    nothing_s = clock.seconds(contest.activations_alone())

    def product_seconds(config: SmallLinearConfig | None) -> float:
        return max(clock.seconds(contest.calls(config)) - nothing_s, _LEAST_SECONDS)

    plain_s = product_seconds(None)
    seconds: dict[SmallLinearConfig, float] = {}

    def race(configs: Iterable[SmallLinearConfig]) -> None:
        for config in configs:
            contest.forget()
            try:
                taken = product_seconds(config)
                problem = contest.problem()
            except Exception as error:  # not enough shared memory, a compiler's error: the others may do
                problem = f"failed: {type(error).__name__}: {error}".splitlines()[0]
            if problem is None:
                seconds[config] = taken
            else:
                warnings.warn(f"small linear {config} {problem}; not used", RuntimeWarning, stacklevel=3)

    out_features, in_features = weight.shape
    configs = candidates(out_features, in_features, weight.element_size(), rows, clock.units)
    race([config._replace(pdl=clock.has_pdl) for config in configs])
    times = {"plain": plain_s} | {str(config): taken for config, taken in seconds.items()}
    winner = min(seconds, key=seconds.__getitem__, default=None)
    if winner is not None and seconds[winner] * _PLAIN_MARGIN > plain_s:
        winner = None
    return winner, times
