"""Steps beside the measured floor, with CUDA C++ and as they were without, in turns, and the clock meanwhile.

python -m gpu_checks.steps DEVICE SHAPE [--weights bf16,int8] [--rows 1,8,64] [--context 512] [--layers N]
    [--variants "CUDA C++" ...]      known figures are not measured again
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.clock import ClockUnderLoad
from gpu_checks.figures import Figures
from gpu_checks.models import runner_of, shape_of
from graphdecode.buckets import StepShape
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.engine.steps import RowInputs, RowSampling
from graphdecode.kernels.cuda import decode_attention, nvrtc
from graphdecode.profiling.environment import read_bandwidth
from graphdecode.profiling.latency import LatencyProfiler, rows_at, step_bytes

STEPS, ROUNDS = 48, 3
# what the environment says while a model is loaded and captured
VARIANTS: dict[str, dict[str, str]] = {
    "CUDA C++": {},
    "attention by clusters": {decode_attention.SWITCH: "1"},
    "Triton alone": {nvrtc.SWITCH: "0"},
    "8-bit keys": {},
    "sampled": {},
}
DEFAULT = ("CUDA C++", "attention by clusters", "Triton alone")
OPTIONS: dict[str, dict[str, Any]] = {"8-bit keys": {"kv_cache_dtype": "fp8"}}


@contextmanager
def environment_of(variant: str) -> Iterator[None]:
    """Have the environment of a variant; what read it before reads it again."""
    remembered = (nvrtc.unavailable_reason, decode_attention.has_clusters)

    def forget() -> None:
        for function in remembered:
            function.cache_clear()

    with mock.patch.dict(os.environ, VARIANTS[variant]):
        forget()
        try:
            yield
        finally:
            forget()


def spans_of(runner: Runner, rows: Sequence[RowInputs]) -> list[tuple[str, float, float]]:
    """Return the kernels of one replay, by their ends, each with begin and end in us; on a CPU its operators."""
    is_cpu = runner.is_cpu
    activity = torch.profiler.ProfilerActivity.CPU if is_cpu else torch.profiler.ProfilerActivity.CUDA
    runner.stage(rows)
    runner.launch(LaunchPlan(StepShape(len(rows))))
    if not is_cpu:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activity]) as profile:
        runner.read(runner.launch(LaunchPlan(StepShape(len(rows)))))
    kind = torch.autograd.DeviceType.CPU if is_cpu else torch.autograd.DeviceType.CUDA
    events = [each for each in profile.events() if each.device_type == kind]
    found = sorted((each.time_range.end, each.time_range.start, each.name[:60]) for each in events)
    origin = min((begin for _, begin, _ in found), default=0.0)
    return [(name, float(begin - origin), float(end - origin)) for end, begin, name in found]


def kernel_times(runner: Runner, rows: Sequence[RowInputs]) -> dict[str, tuple[int, float]]:
    """Return how often one replay launches each kernel, and by how many microseconds these lengthen it, longest first.

    A kernel that starts early lengthens the step by what lies between the ends of the one before and its own.
    """
    added: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    before = 0.0
    for name, _, end in spans_of(runner, rows):
        launches[name] += 1
        added[name] += end - before  # type: ignore[assignment]
        before = end
    return {name: (launches[name], float(taken)) for name, taken in added.most_common(14)}


def step_ms(runner: Runner, rows: Sequence[RowInputs]) -> tuple[float, float]:
    """Return the median time of a step, and the host's microseconds for a launch."""
    launch_us, times, _ = LatencyProfiler(runner, steps=STEPS).replayed(rows)
    return statistics.median(times), statistics.median(launch_us)


def sampled(rows: Sequence[RowInputs]) -> list[RowInputs]:
    """Return rows that draw their tokens, with top-k and top-p."""
    drawn: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    return [
        replace(row, sampling=RowSampling(last_position=row.sampling.last_position, seed=place, **drawn))
        for place, row in enumerate(rows)
    ]


def measure_point(runners: dict[str, Runner], key: str, rows: int, context: int, figures: Figures) -> None:
    """Measure a step with all variants in turn; the first is whole, the others stand beside it."""
    first = next(iter(runners.values()))
    device = first.model.device
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in runners}
    bandwidths = []
    with ClockUnderLoad() as clock:
        for _ in range(ROUNDS):
            bandwidths.append(read_bandwidth(device, repeats=2))
            for variant, runner in runners.items():
                with rows_at(runner, rows, context) as staged:
                    times[variant].append(step_ms(runner, sampled(staged) if variant == "sampled" else staged))
    bandwidth = statistics.median(bandwidths)
    for variant, runner in runners.items():
        own = key if runner is first else f"{key}, {variant}"
        if own in figures:  # timed again as what the others stand beside
            continue
        taken_ms, host_us = (statistics.median(values) for values in zip(*times[variant], strict=True))
        floor_ms = 1000 * step_bytes(runner, rows, context) / bandwidth
        found: dict[str, Any] = {"step_ms": taken_ms, "floor_ms": floor_ms, "times_floor": taken_ms / floor_ms}
        if not runner.is_cpu:
            with rows_at(runner, rows, context) as staged:
                found["kernels_us"] = kernel_times(runner, staged)
        figures.add(own, **found, host_us=host_us, read_bandwidth=bandwidth, clock=clock.medians())


def name_of(shape: str, layers: int | None, weights: str) -> str:
    """Return a model's name in figures, such as "llama-3.1-8b, 8 layers:int8"."""
    return shape + (f", {layers} layers" if layers else "") + (f":{weights}" if weights != "bf16" else "")


def measure(
    device: str, shape: str, weights: str, rows: Sequence[int], variants: Sequence[str], figures: Figures,
    *, context: int, layers: int | None = None,
) -> None:  # fmt: skip
    """Measure the steps of a shape with one kind of weights, and note what was chosen for its products."""
    name = name_of(shape, layers, weights)
    last = variants[-1]
    keys = {count: f"step {name}, batch {count}, context {context}" for count in rows}
    missing = [count for count, key in keys.items() if (key if len(variants) == 1 else f"{key}, {last}") not in figures]
    if not missing:
        return
    path, quantize = shape_of(shape, layers=layers, is_small=device != "cuda"), None if weights == "bf16" else weights
    runners: dict[str, Runner] = {}
    for variant in variants:
        with environment_of(variant):
            runners[variant] = runner_of(path, rows, context, device, quantize, **OPTIONS.get(variant, {}))
            runners[variant].graphs.capture(progress=False)
    for variant, runner in runners.items():
        if (products := f"products {name}, {variant}") not in figures:
            figures.add(products, **{str(count): runner.model.linear_choices(count) for count in rows})
    for count in missing:
        measure_point(runners, keys[count], count, context, figures)
    for runner in runners.values():
        runner.close()


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Measure the steps of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device")
    parser.add_argument("shapes")
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULT)
    given, figures = parser.parse_args(), Figures()
    sizes = {"context": given.context, "layers": given.layers}
    for shape in given.shapes.split(","):
        for weights in given.weights.split(","):
            measure(given.device, shape, weights, given.rows, given.variants, figures, **sizes)


if __name__ == "__main__":
    main()
