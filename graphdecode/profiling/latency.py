"""The latency profile of a decode step: each bucket at each context, beside the floor that memory sets."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from graphdecode.engine.detokenizer import Detokenizer
from graphdecode.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from graphdecode.engine.runner import Runner
from graphdecode.engine.sampling_params import SamplingParams
from graphdecode.engine.sequence import Sequence
from graphdecode.profiling.bandwidth import read_bandwidth
from graphdecode.profiling.environment import describe_environment
from graphdecode.profiling.percentiles import Histogram, Percentiles

SCHEMA_VERSION = 2
STEPS_PER_STAGING = 16  # the graph advances itself: rows are set back before they grow far past the context
ROUNDS = 5  # in which all points take turns, so that a slow minute of the machine falls on all of them
TRACED_STEPS = 10
NOISY = 0.1  # medians of rounds that differ by more say little about a tenth
_EAGER_SHARE = 4  # one eager step is timed for so many replays
_LEAST_EAGER_STEPS = 2


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
        in_cache: so few that the processor's last cache may hold them: memory sets no floor then.
        achieved_bytes_per_second: `bytes_moved` over the median step.
        bandwidth_share: the same over the measured read bandwidth.
        floor_ms: `bytes_moved` over the measured read bandwidth.
        times_floor: median step over the floor.
        round_ms: median step of each round.
        noise: how far the rounds' medians lie apart, see `spread_of`.
        noisy: so far that the figures cannot be trusted to a tenth.
        histogram_ms: of all steps.
    """

    bucket: int
    context: int
    launch_us: Percentiles
    step_ms: Percentiles
    token_ms: Percentiles
    eager_ms: Percentiles
    replay_speedup: float
    bytes_moved: int
    in_cache: bool
    achieved_bytes_per_second: float
    bandwidth_share: float
    floor_ms: float
    times_floor: float
    round_ms: list[float]
    noise: float
    noisy: bool
    histogram_ms: Histogram


@dataclass
class _Samples:
    """What was timed at one point, over all rounds."""

    launch_us: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    eager_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)


def spread_of(round_ms: SequenceOf[float]) -> float:
    """Return half the range of the rounds' medians over their median; of three rounds or more, the worst is left out.

    One round may be spoilt by a neighbour without moving the median of all; two spoilt rounds may move it.
    """
    ordered = sorted(round_ms)
    kept = ordered[:-1] if len(ordered) > 2 else ordered
    return (kept[-1] - kept[0]) / 2 / statistics.median(ordered)


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

    Raises:
        ValueError: there are no steps.
    """

    def __init__(self, runner: Runner, *, steps: int = 200) -> None:
        if steps < 1:
            raise ValueError(f"steps must be >= 1, got {steps}")
        self.runner = runner
        self._steps = steps
        self._ids = itertools.count()

    def profile(self, contexts: SequenceOf[int], *, model: str, progress: bool = True) -> dict:
        """Measure every bucket at every context, and return what `profile.json` holds.

        The points take turns, and so does the probe of the read bandwidth.

        Args:
            contexts: tokens in the cache of each row.
            model: the model's name, for people.
            progress: show a bar on standard error.

        Raises:
            ValueError: a context is less than 1, or does not fit the capacity.
        """
        runner, device = self.runner, self.runner.model.device
        longest = runner.cache.max_sequence_length - STEPS_PER_STAGING
        for context in contexts:
            if not 1 <= context <= longest:
                raise ValueError(
                    f"a context must be in 1..{longest} (max_sequence_length less some steps), got {context}"
                )
        points = {(bucket, context): _Samples() for context in contexts for bucket in runner.graphs.buckets}
        rounds = min(ROUNDS, self._steps)
        bandwidths: list[float] = []
        visits = [(index, point) for index in range(rounds) for point in points]
        for index, (bucket, context) in tqdm(visits, desc="profiling", unit="point", disable=not progress, leave=False):
            if len(bandwidths) == index:
                bandwidths.append(read_bandwidth(device, repeats=2))
            steps = self._steps // rounds + (index < self._steps % rounds)
            self._visit(points[bucket, context], bucket, context, steps)
        bandwidth, environment = statistics.median(bandwidths), describe_environment(device)
        cache_bytes = int(environment["cache_bytes"])
        rows = [self._row(*point, samples, bandwidth, cache_bytes) for point, samples in points.items()]
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
                for _ in range(TRACED_STEPS):
                    with torch.profiler.record_function("decode step"):
                        with torch.profiler.record_function("launch"):
                            launch = self.runner.launch(sequences, 1)
                        with torch.profiler.record_function("read tokens"):
                            self.runner.read(launch)
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

    def _visit(self, samples: _Samples, bucket: int, context: int, steps: int) -> None:
        """Time one point's steps of one round, replayed and eager."""
        sequences = self.sequences(bucket, context)
        try:
            launch_us, step_ms, token_ms = self.replayed(sequences, steps)
            samples.eager_ms += self.eager(sequences, max(steps // _EAGER_SHARE, _LEAST_EAGER_STEPS))
        finally:
            for sequence in sequences:
                self.runner.cache.free_sequence(sequence.sequence_id)
        samples.launch_us += launch_us
        samples.step_ms += step_ms
        samples.token_ms += token_ms
        samples.round_ms.append(statistics.median(step_ms))

    def _row(self, bucket: int, context: int, samples: _Samples, bandwidth: float, cache_bytes: int) -> ProfileRow:
        step, eager = Percentiles.of(samples.step_ms), Percentiles.of(samples.eager_ms)
        bytes_moved = step_bytes(self.runner, bucket, context)
        seconds, noise = step.p50 / 1000, spread_of(samples.round_ms)
        return ProfileRow(
            bucket=bucket,
            context=context,
            launch_us=Percentiles.of(samples.launch_us),
            step_ms=step,
            token_ms=Percentiles.of(samples.token_ms),
            eager_ms=eager,
            replay_speedup=eager.p50 / step.p50,
            bytes_moved=bytes_moved,
            in_cache=bytes_moved <= cache_bytes,
            achieved_bytes_per_second=bytes_moved / seconds,
            bandwidth_share=bytes_moved / seconds / bandwidth,
            floor_ms=1000 * bytes_moved / bandwidth,
            times_floor=seconds * bandwidth / bytes_moved,
            round_ms=samples.round_ms,
            noise=noise,
            noisy=noise > NOISY,
            histogram_ms=Histogram.of(samples.step_ms),
        )

    def replayed(
        self, sequences: list[Sequence], steps: int | None = None
    ) -> tuple[list[float], list[float], list[float]]:
        """Return the times of replayed steps: host launch in us, step in ms, launch to token in ms.

        Args:
            sequences: the rows.
            steps: to time, after some that are not counted; None: as many as the profiler was made for.
        """
        steps = self._steps if steps is None else steps
        launch_us: list[float] = []
        step_ms: list[float] = []
        token_ms: list[float] = []
        warm_up = min(STEPS_PER_STAGING, steps)
        for index in range(steps + warm_up):
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
