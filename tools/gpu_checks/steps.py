"""Step times compared with the measured floor, a trace of one replay, and steps without single optimizations.

python -m gpu_checks.steps DEVICE SHAPE[:QUANTIZE] BATCH_SIZES CONTEXTS   known figures are not measured again

With GRAPHDECODE_NVRTC=0 the steps of Triton's kernels alone, under names of their own.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.figures import Figures
from gpu_checks.models import runner_of, shape_of
from gpu_checks.models import variant as variant_of
from graphdecode.buckets import StepShape
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.kernels.cuda.nvrtc import SWITCH
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.profiling.environment import read_bandwidth
from graphdecode.profiling.latency import STEPS_PER_STAGING, LatencyProfiler, rows_at, step_bytes

STEPS, ROUNDS = 48, 3
LOOP_STEPS = 8


def _changed(choice: LinearChoice, **changed: Any) -> LinearChoice:
    return choice if choice.config is None else replace(choice, config=choice.config._replace(**changed))


VARIANTS: dict[str, Callable[[LinearChoice], LinearChoice | None]] = {
    "cuBLAS alone": lambda _: None,
    "without prefetch": partial(_changed, prefetch=False),
    "without early start": partial(_changed, pdl=False),
}


def step_ms(runner: Runner, rows: Sequence[Any]) -> tuple[float, float]:
    """Return the median time of a step, and the host's microseconds for a launch."""
    launch_us, times, _ = LatencyProfiler(runner, steps=STEPS).replayed(rows)
    return statistics.median(times), statistics.median(launch_us)


def kernel_times(runner: Runner, rows: Sequence[Any]) -> dict[str, tuple[int, float]]:
    """Return how often one replay launches each kernel, and by how many microseconds these lengthen it, longest first.

    A kernel that starts early lengthens the step by what lies between the ends of the one before and its own.
    """
    runner.stage(rows)
    runner.launch(LaunchPlan(StepShape(len(rows))))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        runner.launch(LaunchPlan(StepShape(len(rows))))
        torch.cuda.synchronize()
    on_device = (each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA)
    spans = sorted((each.time_range.end, each.time_range.start, each.name) for each in on_device)
    added: Counter[str] = Counter()
    launches = Counter(name[:60] for *_, name in spans)
    before = spans[0][1] if spans else 0.0
    for end, _, name in spans:
        added[name[:60]] += end - before  # type: ignore[assignment]
        before = end
    return {name: (launches[name], float(taken)) for name, taken in added.most_common(14)}


def measure(device: str, name: str, batch_sizes: Sequence[int], contexts: Sequence[int], figures: Figures) -> None:
    """Measure the steps of all points, then variants, then loops."""
    is_cuda = device == "cuda"
    plain, _, quantize = name.partition(":")
    is_triton_alone = os.environ.get(SWITCH) == "0"
    name += ", Triton alone" * is_triton_alone
    shape = shape_of(plain, is_small=not is_cuda)
    points = [(bucket, context) for bucket in batch_sizes for context in contexts]
    runner = runner_of(shape, batch_sizes, max(contexts), device, quantize or None)
    runner.graphs.capture(progress=False)

    def add(key: str, measured: Runner, bucket: int, context: int, **more: Any) -> None:
        with rows_at(measured, bucket, context) as rows:
            found = [(read_bandwidth(device, repeats=2), *step_ms(measured, rows)) for _ in range(ROUNDS)]
            bandwidth, taken_ms, host_us = map(statistics.median, zip(*found, strict=True))
            floor_ms = 1000 * step_bytes(measured, bucket, context) / bandwidth
            took = {"step_ms": taken_ms, "floor_ms": floor_ms, "times_floor": taken_ms / floor_ms}
            kernels = {"kernels_us": kernel_times(measured, rows)} if is_cuda and not more else {}
        figures.add(key, **took, host_us=host_us, read_bandwidth=bandwidth, **kernels, **more)

    for bucket, context in points:
        key = f"step {name}, batch {bucket}, context {context}"
        if key not in figures:
            add(key, runner, bucket, context)
    if f"products {name}" not in figures:
        figures.add(f"products {name}", **{str(rows): runner.model.linear_choices(rows) for rows in batch_sizes})
    last = f"step {name}, batch {batch_sizes[-1]}, context {contexts[0]}, {[*VARIANTS][-1]}"
    if not (quantize or is_triton_alone) and last not in figures:
        for variant, change in VARIANTS.items():
            other = variant_of(runner, change)
            for bucket in batch_sizes:
                key = f"step {name}, batch {bucket}, context {contexts[0]}, {variant}"
                if key not in figures:
                    add(key, other, bucket, contexts[0], variant=variant)
            other.close()
    runner.close()
    if not (quantize or is_triton_alone) and f"loops {name}" not in figures:
        _loops(device, name, shape, (batch_sizes[0], batch_sizes[-1]), contexts[0], figures)


def _loops(device: str, name: str, shape: str, buckets: Sequence[int], context: int, figures: Figures) -> None:
    """Time launches of several steps, compared with the known time of single steps."""
    runner = runner_of(shape, buckets, context, device, steps_per_launch=LOOP_STEPS)
    runner.graphs.capture(progress=False)
    for bucket in buckets:
        times = []
        with rows_at(runner, bucket, context) as rows:
            for _ in range(2 * ROUNDS):
                runner.stage(rows)
                began = time.perf_counter()
                for _ in range(STEPS_PER_STAGING // LOOP_STEPS):
                    launch = runner.launch(LaunchPlan(StepShape(bucket), LOOP_STEPS))
                runner.read(launch)
                times.append(1e3 * (time.perf_counter() - began) / (STEPS_PER_STAGING // LOOP_STEPS * LOOP_STEPS))
        loop_ms = statistics.median(times[1:])
        single_ms = figures.known[f"step {name}, batch {bucket}, context {context}"]["step_ms"]
        figures.add(f"loop {name}, batch {bucket}", loop_ms=loop_ms, single_ms=single_ms, ratio=loop_ms / single_ms)
    chosen = {str(each.bucket): (each.loop, each.loop_reason) for each in runner.graphs.report().buckets}
    figures.add(f"loops {name}", kinds=chosen)
    runner.close()


def main() -> None:
    """Measure the steps of the arguments."""
    device, name, *sizes = sys.argv[1:]
    batch_sizes, contexts = ([int(size) for size in given.split(",")] for given in sizes)
    measure(device, name, batch_sizes, contexts, Figures())


if __name__ == "__main__":
    main()
