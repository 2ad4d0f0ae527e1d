"""Steps with other tiles and plans of attention, compared with the engine's.

python -m gpu_checks.attention DEVICE SHAPE BATCH:CONTEXT,... [VARIANTS]   known figures are not measured again

VARIANTS are others than those below, as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.figures import Figures
from gpu_checks.models import runner_of, shape_of
from gpu_checks.steps import kernel_times
from graphdecode.buckets import StepShape
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.kernels.attention import append_attention, attention_plan
from graphdecode.kernels.attention.attention_plan import PlanMeta
from graphdecode.kernels.cuda import decode_attention as by_clusters
from graphdecode.profiling.latency import STEPS_PER_STAGING, back_to_back_ms, rows_at

ROUNDS = 4
# lower case and BLOCK_N: of the tile, or the kernel; the others: constants of the plan
VARIANTS: dict[str, dict[str, int]] = {
    "as it is": {},
    "2 stages": {"num_stages": 2},
    "3 stages": {"num_stages": 3},
    "4 stages": {"num_stages": 4},
    "8 warps": {"num_warps": 8},
    "tiles of 32": {"BLOCK_N": 32},
    "tiles of 64": {"BLOCK_N": 64},
    "tiles of 128": {"BLOCK_N": 128},
    "tiles of 32, 4 stages": {"BLOCK_N": 32, "num_stages": 4},
    "4 splits at most": {"MOST_SPLITS": 4},
    "2 more waves": {"WAVES_WHEN_FULL": 2},
    "3 more waves": {"WAVES_WHEN_FULL": 3},
    "7 more waves": {"WAVES_WHEN_FULL": 7},
    "without early start": {"pdl": 0},
    "by clusters, in CUDA C++": {"clusters": 1},
}


@contextmanager
def varied(changed: dict[str, int]) -> Iterator[None]:
    """Let steps that are captured inside have another tile or plan."""
    tile = append_attention.step_tile
    of_tile = {name: value for name, value in changed.items() if name.islower() or name == "BLOCK_N"}
    is_early, has_clusters = of_tile.pop("pdl", 1), of_tile.pop("clusters", 0)
    constants = {name: value for name, value in changed.items() if hasattr(attention_plan, name)}
    fields = {"WAVES_WHEN_FULL": "WAVES", "MOST_SPLITS": "MOST_SPLITS"}
    defaults = PlanMeta._field_defaults | {fields[name]: value for name, value in constants.items()}
    with ExitStack() as stack:

        def patch(where: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, value))

        patch(append_attention, "step_tile", lambda *given: tile(*given) | of_tile)
        if has_clusters:
            patch(by_clusters, "is_chosen", by_clusters.has_clusters)
        if not is_early:
            patch(append_attention, "early_start_options", lambda device: {"PDL": False})
        for name, value in constants.items():
            patch(attention_plan, name, value)
        patch(PlanMeta.__new__, "__defaults__", tuple(defaults.values()))
        yield


def steps_ms(runner: Runner, rows: Sequence[Any]) -> list[float]:
    """Return the times of steps, one right after the other; on a CPU 0."""
    runner.stage(rows)
    if runner.is_cpu:
        return [0.0]
    return back_to_back_ms(lambda: runner.launch(LaunchPlan(StepShape(len(rows)))), STEPS_PER_STAGING)


def measure(
    device: str, name: str, points: list[tuple[int, int]], variants: dict[str, dict[str, int]], figures: Figures
) -> None:
    """Measure the step of a shape at some points (batch size, context), with all variants in turn."""
    keys = {point: f"{name}, batch {point[0]}, context {point[1]}" for point in points}
    missing = {point: variants.keys() - figures.known.get(f"attention {key}", {}).keys() for point, key in keys.items()}
    runner = runner_of(
        shape_of(name, is_small=device != "cuda"), [bucket for bucket, _ in points], max(at for _, at in points), device
    )
    runners: dict[str, Runner] = {}
    for variant in (each for each in variants if any(each in wanted for wanted in missing.values())):
        with varied(variants[variant]):
            runners[variant] = Runner(runner.setting, runner.cache, runner.capacity)
            runners[variant].graphs.capture(progress=False)
    for point, key in keys.items():
        times: dict[str, list[float]] = {variant: [] for variant in runners if variant in missing[point]}
        with rows_at(runner, *point) as rows:
            for _ in range(ROUNDS):
                for variant, taken in times.items():
                    taken += steps_ms(runners[variant], rows)
            if times:
                found = {variant: statistics.median(taken) for variant, taken in times.items()}
                figures.add(f"attention {key}", **(figures.known.get(f"attention {key}", {}) | found))
            if device == "cuda" and "as it is" in times:
                figures.add(f"kernels {key}", kernels_us=kernel_times(runners["as it is"], rows))
    for each in (*runners.values(), runner):
        each.close()


def main() -> None:
    """Measure the points of the arguments."""
    device, name, given, *others = sys.argv[1:]
    points = [(int(bucket), int(context)) for bucket, _, context in (each.partition(":") for each in given.split(","))]
    measure(device, name, points, json.loads(others[0]) if others else VARIANTS, Figures())


if __name__ == "__main__":
    main()
