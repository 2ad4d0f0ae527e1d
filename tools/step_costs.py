"""What a decode step costs beside its floor, and what each optimisation is worth: the step with one of them off."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from tqdm import tqdm

from graphdecode.buckets import StepShape
from graphdecode.config import BucketConfig
from graphdecode.engine.capacity import free_bytes
from graphdecode.engine.loading import make_runner, resolve_device
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.engine.steps import RowInputs
from graphdecode.errors import ArgumentError
from graphdecode.kernels.native import library as native
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.models import Decoder, load_model
from graphdecode.models.blocks import StepOperators
from graphdecode.models.shapes import PREFIX, shape_config
from graphdecode.profiling.bandwidth import read_bandwidth
from graphdecode.profiling.environment import describe_environment
from graphdecode.profiling.latency import STEPS_PER_STAGING, LatencyProfiler, rows_at, step_bytes
from unfused import UNFUSED

SCHEMA_VERSION = 1
FULL, EAGER = "full", "eager"
_TRACED_STEPS = 10
_LARGEST_GAPS = 5
_TOP_KERNELS = 12
_MEMORY_SHARE = 0.8  # of what is free that a model's weights may take


@dataclass(frozen=True)
class StepCost:
    """One variant of the step at one bucket and context.

    Attributes:
        variant: "full", "eager" or what is switched off.
        bucket: rows, all live.
        context: tokens of each row.
        step_ms: median time of a step on the device.
        host_us: median host time of the launch; on a CPU, where the launch is the work, of all but the work.
        host_p99_us: its 99th percentile.
        read_bandwidth: bytes per second, measured between the variants' turns.
        floor_ms: the bytes that a step must move, over the read bandwidth.
        times_floor: step over floor.
        times_full: step over the full step's.
        logprob_error: largest difference from the full step's log-probabilities of the chosen tokens.
    """

    variant: str
    bucket: int
    context: int
    step_ms: float
    host_us: float
    host_p99_us: float
    read_bandwidth: float
    floor_ms: float
    times_floor: float
    times_full: float
    logprob_error: float


def measure_steps(
    model: str,
    *,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    batch_sizes: SequenceOf[int] = (1, 8),
    contexts: SequenceOf[int] = (512,),
    steps: int = 64,
    rounds: int = 5,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure a model's step and its variants in turn, and return what `step.json` holds of it.

    Args:
        model: `"demo"`, a checkpoint folder, or a shape such as `"shape:llama-3.1-8b"`.
        device: where.
        dtype: of weights and cache.
        batch_sizes: buckets.
        contexts: tokens of each row, >= 1.
        steps: of one variant in one round.
        rounds: in which the variants take turns.
        progress: show a bar on standard error.

    Raises:
        ValueError: the model does not fit the device's free memory, or an argument is out of range.
    """
    if min(batch_sizes, default=0) < 1 or min(contexts, default=0) < 1 or steps < 1 or rounds < 1:
        raise ArgumentError(
            f"batch_sizes, contexts, steps and rounds must be >= 1, got {list(batch_sizes)}, {list(contexts)}, "
            f"{steps} and {rounds}"
        )
    place = resolve_device(device)
    _refuse_if_too_large(model, dtype, place)
    longest = max(contexts) + STEPS_PER_STAGING
    config = BucketConfig(
        max_batch_size=max(batch_sizes),
        max_sequence_length=longest,
        batch_sizes=sorted(set(batch_sizes)),
        total_num_pages=max(batch_sizes) * (-(-longest // 16) + 1),
    )
    with captured_variants(model, place, dtype, config) as runners:
        costs: list[StepCost] = []
        points = [(bucket, context) for bucket in config.ladder for context in contexts]
        errors = {point: _errors(runners, *point) for point in points}
        for bucket, context in tqdm(points, desc=model, unit="point", disable=not progress, leave=False):
            costs += _measure_point(runners, bucket, context, steps, rounds, errors[bucket, context])
        full = runners[FULL]
        return {
            "model": model,
            "dtype": str(full.model.dtype)[6:],
            "environment": describe_environment(place),
            "weight_bytes": full.model.weight_bytes,
            "costs": [asdict(cost) for cost in costs],
            "captures": [
                {"bucket": b.bucket, "capture_ms": b.capture_ms, "pool_bytes": b.pool_bytes, "nodes": b.nodes.total()}
                for b in full.graphs.report().buckets
            ],
            "traces": [_trace(full, bucket, contexts[0]) for bucket in config.ladder] if place.type == "cuda" else [],
        }


def _refuse_if_too_large(model: str, dtype: str, device: torch.device) -> None:
    if not model.startswith(PREFIX):
        return
    shape = shape_config(model)
    hidden, heads = shape.hidden_size, shape.num_attention_heads + 2 * shape.num_key_value_heads
    layer = hidden * (heads + shape.num_attention_heads) * shape.head_dim + 3 * hidden * shape.intermediate_size
    tables = 1 if shape.tie_word_embeddings and device.type == "cuda" else 2
    elements = shape.num_hidden_layers * layer + tables * shape.vocab_size * hidden
    needed = elements * (4 if dtype == "float32" else 2)
    copies = 2 if device.type == "cpu" else 1  # a CPU measures other forms of the weights beside the compiled one's
    free = free_bytes(device)
    if copies * needed > _MEMORY_SHARE * free:
        raise ArgumentError(
            f"{model} takes {copies * needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {device}"
        )


def _variants(
    model: str, device: torch.device, dtype: str, config: BucketConfig
) -> Iterator[tuple[str, Decoder, bool]]:
    """Yield name, decoder, and whether it is captured with compiled kernels, of the full step and those with less."""

    def load() -> Decoder:
        loaded = load_model(
            model,
            device=device,
            dtype=dtype,
            max_sequence_length=config.max_sequence_length,
            batch_sizes=config.ladder.sizes,
            model_impl="native",
        )
        return cast(Decoder, loaded)  # which all of ours are

    full = load()
    yield FULL, full, True
    yield "without fused operators", full.varied(operators=UNFUSED), True
    if device.type == "cuda":
        yield "without fused products", full.varied(operators=StepOperators(fuses_products=False)), True
        yield "cuBLAS alone", full.varied(linear=lambda weight: weight.rechosen(lambda _: None)), True
        yield "without early start", full.varied(linear=lambda weight: weight.rechosen(_without_early_start)), True
    elif native.library() is not None:
        with native.switched_off():
            plain = load()
        yield "without compiled kernels", plain, False


def _without_early_start(choice: LinearChoice) -> LinearChoice:
    return choice if choice.config is None else replace(choice, config=choice.config._replace(pdl=False))


@contextmanager
def captured_variants(
    model: str, device: torch.device, dtype: str, config: BucketConfig
) -> Iterator[dict[str, Runner]]:
    """Give the full step and those with less, captured; all over one cache, for they take turns.

    Args:
        model: its name.
        device: where.
        dtype: of weights and cache.
        config: buckets and capacity.
    """
    runners: dict[str, Runner] = {}
    with ExitStack() as held:
        for name, decoder, is_compiled in _variants(model, device, dtype, config):
            if not runners:
                runner = make_runner(decoder, config, prefix_cache=False)
            else:
                full = runners[FULL]
                runner = Runner(decoder, full.cache, config, full.capacity, prefill_budget=full.prefill_budget)
            held.callback(runner.close)
            with nullcontext() if is_compiled else native.switched_off():
                runner.graphs.capture(progress=False)
            runners[name] = runner
        yield runners


def _measure_point(
    runners: dict[str, Runner],
    bucket: int,
    context: int,
    steps: int,
    rounds: int,
    errors: dict[str, float],
) -> list[StepCost]:
    with rows_at(runners[FULL], bucket, context) as rows:
        samples = {name: _Samples(LatencyProfiler(runner, steps=steps), rows) for name, runner in runners.items()}
        bandwidths = []  # measured in turn with the steps, for it is not the same for long
        for _ in range(rounds):
            bandwidths.append(read_bandwidth(runners[FULL].model.device, repeats=2))
            for sample in samples.values():
                sample.replay()
            samples[FULL].run_eagerly()
        full = samples[FULL]
        bandwidth = statistics.median(bandwidths)
        floor_ms = 1000 * step_bytes(runners[FULL], bucket, context) / bandwidth

        def cost(variant: str, step_ms: list[float], host_us: list[float], error: float) -> StepCost:
            median = statistics.median(step_ms)
            return StepCost(
                variant,
                bucket,
                context,
                median,
                statistics.median(host_us),
                sorted(host_us)[int(0.99 * len(host_us))],
                bandwidth,
                floor_ms,
                median / floor_ms,
                median / statistics.median(full.step_ms),
                error,
            )

        return [
            *(cost(name, sample.step_ms, sample.host_us, errors[name]) for name, sample in samples.items()),
            cost(EAGER, full.eager_ms, full.host_us, 0.0),
        ]


def _errors(runners: dict[str, Runner], bucket: int, context: int) -> dict[str, float]:
    """Return how far each variant's log-probabilities are from the full step's.

    They are those of each row's most likely token: rounding moves it little, whichever token it is.
    """
    given: dict[str, list[float]] = {}
    with rows_at(runners[FULL], bucket, context, logprobs=0) as rows:
        for name, runner in runners.items():
            runner.stage(rows)
            (step,) = runner.read(runner.launch(LaunchPlan(StepShape(bucket))), logprobs=True)
            given[name] = [] if step.logprobs is None else step.logprobs.sampled
    return {
        name: max(abs(a - b) for a, b in zip(logprobs, given[FULL], strict=True)) for name, logprobs in given.items()
    }


class _Samples:
    """Times of one variant at one point, over rounds."""

    def __init__(self, profiler: LatencyProfiler, rows: SequenceOf[RowInputs]) -> None:
        self._profiler = profiler
        self._rows = rows
        self._is_cuda = profiler.runner.model.device.type == "cuda"
        self.step_ms: list[float] = []
        self.host_us: list[float] = []
        self.eager_ms: list[float] = []

    def replay(self) -> None:
        launch_us, step_ms, token_ms = self._profiler.replayed(self._rows)
        self.step_ms += step_ms
        if self._is_cuda:
            self.host_us += launch_us
        else:
            self.host_us += [1000 * (token - step) for token, step in zip(token_ms, step_ms, strict=True)]

    def run_eagerly(self) -> None:
        self.eager_ms += self._profiler.eager(self._rows, 5)


def _trace(runner: Runner, bucket: int, context: int) -> dict[str, Any]:
    """Return the top kernels and the idle gaps of some steps, from a profiler's trace."""
    with rows_at(runner, bucket, context) as rows:
        runner.stage(rows)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(_TRACED_STEPS):
                runner.launch(LaunchPlan(StepShape(bucket)))
            torch.cuda.synchronize()
        kernels = [
            (event.name, float(event.time_range.start), float(event.time_range.end))
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return {"bucket": bucket, "context": context} | kernel_summary(kernels, _TRACED_STEPS)


def kernel_summary(kernels: list[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """Return, for one step, the time in kernels by name, the time between them, and the largest gaps.

    Args:
        kernels: name, begin and end in microseconds, in any order; they may overlap.
        steps: that they belong to.
    """
    busy: Counter[str] = Counter()
    gaps: list[tuple[float, str, str]] = []
    last_end, last_name = float("-inf"), ""
    for name, begin, end in sorted(kernels, key=lambda kernel: kernel[1]):
        busy[name] += end - begin  # type: ignore[assignment]
        if last_name and begin > last_end:
            gaps.append((begin - last_end, last_name, name))
        if end > last_end:
            last_end, last_name = end, name
    gaps.sort(reverse=True)
    return {
        "top_kernels_us": {name: taken / steps for name, taken in busy.most_common(_TOP_KERNELS)},
        "idle_us": sum(gap for gap, _, _ in gaps) / steps,
        "largest_gaps_us": [
            {"us": gap, "after": before, "before": after} for gap, before, after in gaps[:_LARGEST_GAPS]
        ],
    }
