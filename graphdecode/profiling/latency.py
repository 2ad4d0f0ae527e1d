"""The latency profile of a decode step: each bucket at each context, beside the floor that memory sets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from graphdecode.engine.detokenizer import Detokenizer
from graphdecode.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from graphdecode.engine.runner import Runner
from graphdecode.engine.sampling_params import SamplingParams
from graphdecode.engine.sequence import Sequence
from graphdecode.profiling.bandwidth import read_bandwidth
from graphdecode.profiling.environment import describe_environment

SCHEMA_VERSION = 1
STEPS_PER_STAGING = 16  # the graph advances itself: rows are set back before they grow far past the context
_NOISY_SPREAD = 1.5  # p90 over p50 of a step that should take the same time every time
_EAGER_SHARE = 4  # one eager step is timed for so many replays


@dataclass(frozen=True)
class Percentiles:
    """Of one kind of duration."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: SequenceOf[float]) -> Percentiles:
        """Return the percentiles of some durations, in their unit."""
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        return cls(float(p50), float(p90), float(p99), float(max(values)))


@dataclass(frozen=True)
class ProfileRow:
    """One bucket at one context.

    Attributes:
        bucket: rows, all of them live.
        context: tokens in the cache of each row.
        launch_us: host time of the launch.
        step_ms: time of the step on the device.
        token_ms: from the launch to the tokens in the host's hands.
        eager_ms: time of the same step, run eagerly.
        replay_speedup: eager over replayed, medians.
        bytes_moved: bytes that a step must read and write: weights once, keys and values of all rows once.
        achieved_bytes_per_second: `bytes_moved` over the median step.
        bandwidth_share: the same over the measured read bandwidth.
        floor_ms: `bytes_moved` over the measured read bandwidth.
        times_floor: median step over the floor.
        noisy: the step's own times are spread too far for the figures to be trusted.
        samples_ms: every step's time, for histograms.
    """

    bucket: int
    context: int
    launch_us: Percentiles
    step_ms: Percentiles
    token_ms: Percentiles
    eager_ms: Percentiles
    replay_speedup: float
    bytes_moved: int
    achieved_bytes_per_second: float
    bandwidth_share: float
    floor_ms: float
    times_floor: float
    noisy: bool
    samples_ms: list[float]


def step_bytes(runner: Runner, bucket: int, context: int) -> int:
    """Return the bytes that a step must move: the weights once, each row's keys and values once, the new ones written.

    Args:
        runner: model and cache.
        bucket: rows.
        context: tokens of each row.
    """
    return runner.model.weight_bytes + bucket * (context + 1) * runner.capacity.token_bytes


class LatencyProfiler:
    """Measures the captured decode step of a runner.

    Args:
        runner: model, cache and captured graphs; nothing else may be using it.
        steps: replays to time at each point.
    """

    def __init__(self, runner: Runner, *, steps: int = 200) -> None:
        self.runner = runner
        self._steps = steps
        self._ids = itertools.count()

    def profile(self, contexts: SequenceOf[int], *, progress: bool = True) -> dict:
        """Measure every bucket at every context, and return what `profile.json` holds.

        Raises:
            ValueError: a context is less than 1, or does not fit the capacity.
        """
        runner = self.runner
        longest = runner.cache.max_sequence_length - STEPS_PER_STAGING
        for context in contexts:
            if not 1 <= context <= longest:
                raise ValueError(
                    f"a context must be in 1..{longest} (max_sequence_length less some steps), got {context}"
                )
        bandwidth = read_bandwidth(runner.model.device)
        points = [(bucket, context) for context in contexts for bucket in runner.graphs.buckets]
        rows = []
        for bucket, context in tqdm(points, desc="profiling", unit="point", disable=not progress, leave=False):
            with_pages = self.sequences(bucket, context)
            try:
                rows.append(self._measure(with_pages, context, bandwidth))
            finally:
                for sequence in with_pages:
                    runner.cache.free_sequence(sequence.sequence_id)
        return {
            "schema": SCHEMA_VERSION,
            "environment": describe_environment(runner.model.device),
            "backend": runner.graphs.backend,
            "weight_bytes": runner.model.weight_bytes,
            "read_bandwidth": bandwidth,
            "steps": self._steps,
            "captures": runner.graphs.report().as_dict(),
            "rows": [asdict(row) for row in rows],
        }

    def write_trace(self, path: Path, context: int) -> Path:
        """Write a Chrome trace of ten steps of the largest bucket, to be opened in Perfetto."""
        sequences = self.sequences(self.runner.graphs.buckets[-1], context)
        try:
            self.runner.stage_rows(sequences)
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.runner.model.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            with torch.profiler.profile(activities=activities) as profiler:
                for _ in range(10):
                    self.runner.read(self.runner.launch(sequences, 1))
            profiler.export_chrome_trace(str(path))
        finally:
            for sequence in sequences:
                self.runner.cache.free_sequence(sequence.sequence_id)
        return path

    def sequences(self, count: int, context: int, logprobs: int | None = None) -> list[Sequence]:
        """Make rows that have `context - 1` tokens in the cache and are about to feed the next one.

        Args:
            count: rows.
            context: tokens of each.
            logprobs: how many log-probabilities a step is to give besides the token's own; None: none.
        """
        cache = self.runner.cache
        params = SamplingParams(temperature=0.0, max_tokens=STEPS_PER_STAGING, ignore_eos=True, logprobs=logprobs)
        sequences: list[Sequence] = []
        try:
            for _ in range(count):
                ids = [1] * context
                output = CompletionOutput(0)
                request = RequestOutput(0, None, ids, [output], RequestMetrics(0.0))
                length = context + STEPS_PER_STAGING
                sequence = Sequence(next(self._ids), ids, params, Detokenizer(None), 0, length, (), output, request)
                cache.add(sequence.sequence_id)
                sequences.append(sequence)
                cache.reserve(sequence.sequence_id, length)
        except ValueError:
            for sequence in sequences:
                cache.free_sequence(sequence.sequence_id)
            raise
        return sequences

    def _measure(self, sequences: list[Sequence], context: int, bandwidth: float) -> ProfileRow:
        runner, bucket = self.runner, len(sequences)
        launch_us, step_ms, token_ms = self.replayed(sequences)
        eager_ms = list(self.eager(sequences, max(self._steps // _EAGER_SHARE, 5)))
        step, eager = Percentiles.of(step_ms), Percentiles.of(eager_ms)
        bytes_moved = step_bytes(runner, bucket, context)
        seconds = step.p50 / 1000
        return ProfileRow(
            bucket=bucket,
            context=context,
            launch_us=Percentiles.of(launch_us),
            step_ms=step,
            token_ms=Percentiles.of(token_ms),
            eager_ms=eager,
            replay_speedup=eager.p50 / step.p50,
            bytes_moved=bytes_moved,
            achieved_bytes_per_second=bytes_moved / seconds,
            bandwidth_share=bytes_moved / seconds / bandwidth,
            floor_ms=1000 * bytes_moved / bandwidth,
            times_floor=seconds * bandwidth / bytes_moved,
            noisy=step.p90 > _NOISY_SPREAD * step.p50,
            samples_ms=[round(value, 6) for value in step_ms],
        )

    def replayed(self, sequences: list[Sequence]) -> tuple[list[float], list[float], list[float]]:
        """Return the times of replayed steps: host launch in us, step in ms, launch to token in ms."""
        launch_us: list[float] = []
        step_ms: list[float] = []
        token_ms: list[float] = []
        warm_up = min(STEPS_PER_STAGING, self._steps)
        for index in range(self._steps + warm_up):
            if index % STEPS_PER_STAGING == 0:
                self.runner.stage_rows(sequences)
                self._synchronize()
            with _DeviceTimer(self.runner.model.device) as timer:
                began = time.perf_counter()
                launch = self.runner.launch(sequences, 1)
                launched = time.perf_counter()
            self.runner.read(launch)
            done = time.perf_counter()
            if index >= warm_up:
                launch_us.append(1e6 * (launched - began))
                step_ms.append(timer.milliseconds())
                token_ms.append(1e3 * (done - began))
        return launch_us, step_ms, token_ms

    def eager(self, sequences: list[Sequence], count: int) -> Iterator[float]:
        """Yield the times of eager steps in ms."""
        for index in range(count + 2):
            if index % STEPS_PER_STAGING == 0:
                self.runner.stage_rows(sequences)
                self._synchronize()
            with _DeviceTimer(self.runner.model.device) as timer:
                self.runner.graphs.run_eager(len(sequences))
            elapsed = timer.milliseconds()
            if index >= 2:
                yield elapsed

    def _synchronize(self) -> None:
        if self.runner.model.device.type == "cuda":
            torch.cuda.synchronize()


class _DeviceTimer:
    """Times what is launched inside it: by events on a GPU, by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def __enter__(self) -> _DeviceTimer:
        if self._events is not None:
            self._events[0].record()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def milliseconds(self) -> float:
        if self._events is None:
            return 1000 * (self._ended - self._began)
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1])
