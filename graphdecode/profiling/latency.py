"""The latency profile of a decode step: each bucket at each context, with the floor by memory bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from graphdecode.buckets import StepShape
from graphdecode.cache import LayerCache
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.engine.steps import RowInputs, RowSampling, SequenceMemory
from graphdecode.errors import ArgumentError
from graphdecode.kernels.cache.kv_format import format_of
from graphdecode.profiling.environment import describe_environment, read_bandwidth

NOISY = 0.1  # spread of rounds above which a difference of 10% cannot be detected
_QUEUE_CYCLES = 4_000_000  # some 2 ms, for the host to get ahead of the device
SCHEMA_VERSION = 2
STEPS_PER_STAGING = 16  # the graph advances rows; they are reset before they grow far past the context
ROUNDS = 5  # over all points, so that a slow phase of the machine affects all of them
TRACED_STEPS = 10
_EAGER_SHARE = 2  # replays for each eager step
_MIN_EAGER_STEPS = 3
_WIDE_STEPS = 15  # at most, of each bucket and number of queries
# host time of the launch, step on the device, launch to tokens on the host, the same step run eagerly
_KINDS = ("launch_us", "step_ms", "token_ms", "eager_ms")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99 and max of some values."""
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(max(values))}


def spread_of(round_ms: Sequence[float]) -> float:
    """Return half the range of the rounds' medians over their median, without the slowest of three or more."""
    ordered = sorted(round_ms)
    slowest = ordered[-2 if len(ordered) > 2 else -1]
    return (slowest - ordered[0]) / 2 / statistics.median(ordered)


def _row(
    point: tuple[int, int], rounds: Sequence[dict[str, list[float]]], moved: int, bandwidth: float, cache_bytes: int
) -> dict[str, Any]:
    """Return the figures of a point (bucket, context), as `profile.json` holds them; `moved`: see `step_bytes`."""
    times = {kind: percentiles([value for each in rounds for value in each[kind]]) for kind in _KINDS}
    step = times["step_ms"]["p50"]
    round_ms, eager_round_ms = ([statistics.median(each[kind]) for each in rounds] for kind in ("step_ms", "eager_ms"))
    noise = spread_of(round_ms)
    return {
        "bucket": point[0],
        "context": point[1],
        **times,
        "replay_speedup": times["eager_ms"]["p50"] / step,
        "bytes_moved": moved,
        "in_cache": moved <= cache_bytes,  # then memory bandwidth is not a floor
        "achieved_bytes_per_second": 1000 * moved / step,
        "bandwidth_share": 1000 * moved / step / bandwidth,
        "floor_ms": 1000 * moved / bandwidth,
        "times_floor": step * bandwidth / 1000 / moved,
        "round_ms": round_ms,
        "noise": noise,
        "noisy": noise > NOISY,
        "eager_round_ms": eager_round_ms,
        "eager_noise": spread_of(eager_round_ms),  # of `replay_speedup`
    }


def back_to_back_ms(launch: Callable[[], object], count: int, *, is_queued_first: bool = True) -> list[float]:
    """Return the time of each of `count` consecutive steps on a GPU in ms.

    `is_queued_first`: hold the device until the host has launched all, so that launches do not count.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    hold = getattr(torch.cuda, "_sleep", None)
    if is_queued_first and hold is not None:
        hold(_QUEUE_CYCLES)
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]


def step_bytes(runner: Runner, bucket: int, context: int) -> int:
    """Return the bytes that a step must move: weights, and keys and values of all rows, with the new ones, once.

    Recurrent states of all rows are read and written.
    """
    states = sum(state.nbytes for state in runner.model.config.recurrent if state is not None)
    row = (context + 1) * runner.capacity.token_bytes + 2 * states
    return runner.model.read_bytes(bucket) + bucket * row


@contextmanager
def rows_at(runner: Runner, count: int, context: int, logprobs: int = -1) -> Iterator[list[RowInputs]]:
    """Yield `count` rows with `context - 1` tokens in the cache.

    `logprobs`: top log-probabilities that a step computes; -1: none.
    """
    cache, length = runner.cache, context + STEPS_PER_STAGING
    names: list[object] = []
    try:
        for _ in range(count):
            name = object()
            cache.add(name, ())
            names.append(name)
            cache.reserve(name, length)
        sampling = RowSampling(last_position=length - 1, num_logprobs=logprobs)
        memories = [SequenceMemory(cache.pages_of(name), cache.state_row_of(name)) for name in names]
        yield [RowInputs([1] * context, context, memory, sampling) for memory in memories]
    finally:
        for name in names:
            cache.free(name)


def fill_pages(runner: Runner, rows: Sequence[RowInputs]) -> None:
    """Write to the pages of some rows: unwritten pages all map to one page of zeros, which stays in the cache."""
    rolling, device = runner.cache.rolling, runner.model.device
    for inputs in rows:
        pages = ring = torch.tensor(inputs.memory.pages, device=device)
        if rolling is not None and inputs.memory.state_row is not None:
            ring = torch.tensor(rolling.ring(inputs.memory.state_row), device=device)
        for layer in runner.cache.layers:
            if isinstance(layer, LayerCache):
                for tensor in layer:
                    format_of(tensor.dtype).fill(tensor, ring if layer.is_rolling else pages)


class LatencyProfiler:
    """Measures the captured decode step of a runner, with `steps` replays at each point."""

    def __init__(self, runner: Runner, *, steps: int = 200) -> None:
        if steps < 1:
            raise ArgumentError(f"steps must be >= 1, got {steps}")
        self.runner = runner
        self._steps = steps
        self._is_cuda = runner.model.device.type == "cuda"

    def profile(self, contexts: Sequence[int], *, model: str, progress: bool = True) -> dict:
        """Measure every bucket at every context in rounds, with the read bandwidth; return `profile.json`.

        A context is the tokens in the cache of each row; an `ArgumentError` names one that is out of range.
        """
        runner, device = self.runner, self.runner.model.device
        longest = runner.cache.max_pages_per_row * runner.cache.page_size - STEPS_PER_STAGING
        if outside := [context for context in contexts if not 1 <= context <= longest]:
            limits = f"1..{longest} (max_sequence_length less some steps)"
            raise ArgumentError(f"a context must be in {limits}, got {outside[0]}")
        environment = describe_environment(device)  # before this run adds to the load
        with rows_at(runner, max(runner.graphs.buckets), max(contexts)) as largest:
            fill_pages(runner, largest)
        points: dict[tuple[int, int], list[dict[str, list[float]]]]
        points = {(bucket, context): [] for context in contexts for bucket in runner.graphs.buckets}
        rounds = min(ROUNDS, self._steps)
        bandwidths: list[float] = []
        visits = [(index, point) for index in range(rounds) for point in points]
        for index, point in tqdm(visits, "profiling", unit="point", disable=None if progress else True, leave=False):
            if len(bandwidths) == index:
                bandwidths.append(read_bandwidth(device, repeats=2))
            steps = self._steps // rounds + (index < self._steps % rounds)
            with rows_at(runner, *point) as live:
                times = self.replayed(live, steps)
                eager_ms = self.eager(live, max(steps // _EAGER_SHARE, _MIN_EAGER_STEPS))
            points[point].append(dict(zip(_KINDS, (*times, eager_ms), strict=True)))
        wide = self._wide_steps(contexts[0], min(self._steps, _WIDE_STEPS))
        bandwidth, cache_bytes = statistics.median(bandwidths), int(environment["cache_bytes"])
        rows = [_row(point, of, step_bytes(runner, *point), bandwidth, cache_bytes) for point, of in points.items()]
        return {
            "schema": SCHEMA_VERSION,
            "model": model,
            "dtype": str(runner.model.dtype).removeprefix("torch."),
            "environment": environment,
            "backend": runner.graphs.backend,
            "weight_bytes": runner.model.weight_bytes,
            "read_bandwidth": bandwidth,
            "read_bandwidth_rounds": bandwidths,
            "steps": self._steps,
            "rounds": rounds,
            "captures": runner.graphs.report().as_dict(),
            "rows": rows,
            "wide_steps": wide,
        }

    def write_trace(self, path: Path, context: int) -> Path:
        """Write a Chrome trace of ten steps of the largest bucket, to be opened in Perfetto."""
        count = self.runner.graphs.buckets[-1]
        with rows_at(self.runner, count, context) as rows:
            self.runner.stage(rows)
            with torch.profiler.profile() as profiler:
                for _ in range(TRACED_STEPS):
                    with torch.profiler.record_function("decode step"):
                        with torch.profiler.record_function("launch"):
                            launch = self.runner.launch(LaunchPlan(StepShape(count)))
                        with torch.profiler.record_function("read tokens"):
                            self.runner.read(launch)
            profiler.export_chrome_trace(str(path))
        return path

    def _wide_steps(self, context: int, count: int) -> list[dict[str, float]]:
        """Time steps of each number of queries a row, if there are several; rows are staged again before each step."""
        graphs = self.runner.graphs
        widths = graphs.ladder.queries
        if len(widths) == 1:
            return []
        times: dict[tuple[int, int], list[float]] = {}
        for repeat in range(count + 2):
            for bucket in graphs.buckets:
                with rows_at(self.runner, bucket, context) as rows:
                    for queries in widths:
                        self._stage(rows)
                        began = time.perf_counter()
                        self.runner.read(self.runner.launch(LaunchPlan(StepShape(bucket, queries))))
                        if repeat > 1:  # the first use may capture
                            times.setdefault((bucket, queries), []).append(1e3 * (time.perf_counter() - began))
        return [
            {"bucket": bucket, "queries": queries, "context": context, "step_ms": statistics.median(step_ms)}
            for (bucket, queries), step_ms in times.items()
        ]

    def replayed(
        self, rows: Sequence[RowInputs], steps: int | None = None
    ) -> tuple[list[float], list[float], list[float]]:
        """Return the times of replayed steps: host launch in us, step in ms, launch to token in ms.

        On a GPU the steps are timed again, back to back, so that launches do not count.
        """
        steps = self._steps if steps is None else steps
        launch_us, token_ms, step_ms = list[float](), list[float](), list[float]()
        warm_up = min(STEPS_PER_STAGING, steps)
        for index in range(steps + warm_up):
            if index % STEPS_PER_STAGING == 0:
                self._stage(rows)
            began = time.perf_counter()
            launch = self.runner.launch(LaunchPlan(StepShape(len(rows))))
            launched = time.perf_counter()
            self.runner.read(launch)
            done = time.perf_counter()
            if index >= warm_up:
                launch_us.append(1e6 * (launched - began))
                token_ms.append(1e3 * (done - began))
        if not self._is_cuda:  # the launch runs the step
            return launch_us, [microseconds / 1000 for microseconds in launch_us], token_ms
        while len(step_ms) < steps:
            self._stage(rows)
            count = min(STEPS_PER_STAGING, steps - len(step_ms))
            step_ms += back_to_back_ms(lambda: self.runner.launch(LaunchPlan(StepShape(len(rows)))), count)
        return launch_us, step_ms, token_ms

    def eager(self, rows: Sequence[RowInputs], count: int) -> list[float]:
        """Return the times of eager steps in ms, with the host's part, after two for warm-up."""
        run, step_ms = partial(self.runner.graphs.run_eager, len(rows)), list[float]()
        while len(step_ms) < count + 2:
            self._stage(rows)
            steps = min(STEPS_PER_STAGING, count + 2 - len(step_ms))
            if self._is_cuda:
                step_ms += back_to_back_ms(run, steps, is_queued_first=False)
                continue
            times = [time.perf_counter()]
            for _ in range(steps):
                run()
                times.append(time.perf_counter())
            step_ms += [1000 * (end - begin) for begin, end in pairwise(times)]
        return step_ms[2:]

    def _stage(self, rows: Sequence[RowInputs]) -> None:
        self.runner.stage(rows)
        if self._is_cuda:
            torch.cuda.synchronize()
