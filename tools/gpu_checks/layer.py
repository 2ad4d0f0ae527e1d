"""One layer of an 8B model in bf16: graph, eager and cuBLAS compared, graph edges, the audit, and two replays.

python -m gpu_checks.layer DEVICE        exit code 1 if a check fails
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.figures import Figures
from gpu_checks.models import runner_of, shape_of, variant
from graphdecode.buckets import StepShape
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.profiling.environment import describe_environment, read_bandwidth
from graphdecode.profiling.latency import LatencyProfiler, fill_pages, rows_at

CONTEXT = 512
TOLERANCE = 0.05  # for a log-probability in bf16


def edges_of(graph: Any) -> dict[str, dict[str, int]] | None:
    """Count the edges of a captured graph and of its child graphs by type.

    Programmatic edges let a kernel start early.
    """
    if not hasattr(graph, "raw_graph"):
        return None
    from cuda.bindings import driver

    def called(function: Any, *arguments: Any) -> Any:
        error, *found = function(*arguments)
        if int(error) != 0:
            raise RuntimeError(f"{function.__name__}: {error.name}")
        return found[0] if len(found) == 1 else found

    def counted(handle: Any) -> dict[str, int]:
        number = called(driver.cuGraphGetEdges, handle, 0)[-1]
        *_, edges, _ = called(driver.cuGraphGetEdges, handle, number)
        names = {
            int(kind): kind.name.removeprefix("CU_GRAPH_DEPENDENCY_TYPE_") for kind in driver.CUgraphDependencyType
        }
        return dict(Counter(names[int(edge.type)] for edge in edges))

    whole = driver.CUgraph(init_value=graph.raw_graph())
    outer = called(driver.cuGraphCreate, 0)
    try:
        node = called(driver.cuGraphAddChildGraphNode, outer, None, 0, whole)
        return {"graph": counted(whole), "child": counted(called(driver.cuGraphChildGraphNodeGetGraph, node))}
    except RuntimeError as error:
        return {str(error): {}}
    finally:
        driver.cuGraphDestroy(outer)


def first_steps(runners: list[Runner], bucket: int) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of the same step by each runner; they share a cache."""
    found = []
    with rows_at(runners[0], bucket, CONTEXT, logprobs=0) as rows:
        fill_pages(runners[0], rows)
        for runner in runners:
            runner.stage(rows)
            (step,) = runner.read(runner.launch(LaunchPlan(StepShape(bucket))), logprobs=True)
            found.append((list(step.tokens), [] if step.logprobs is None else list(step.logprobs.sampled)))
    return found


def look_at(device: str, buckets: tuple[int, ...], figures: Figures) -> list[str]:
    """Run the checks, and return the failures."""
    is_cuda = device == "cuda"
    figures.add("environment", **describe_environment(device), read_bandwidth=read_bandwidth(device))
    shape = shape_of("llama-3.1-8b", layers=1, is_small=not is_cuda)
    runner = runner_of(shape, buckets, CONTEXT, device)
    runner.graphs.capture(progress=False)
    plain = variant(runner, lambda _: None)
    problems = []
    steps = {bucket: first_steps([runner, runner, plain], bucket) for bucket in buckets}  # eager steps advance the ring
    for bucket, (once, again, other) in steps.items():
        key = f"layer, batch {bucket}"
        off = max((abs(a - b) for a, b in zip(once[1], other[1], strict=True)), default=0.0)
        with rows_at(runner, bucket, CONTEXT) as rows:
            profiler = LatencyProfiler(runner, steps=20)
            _, step_ms, _ = profiler.replayed(rows)
            eager_ms = profiler.eager(rows, 5)
            _, plain_ms, _ = LatencyProfiler(plain, steps=20).replayed(rows)
        times = {"graph_ms": min(step_ms), "eager_ms": min(eager_ms), "cublas_ms": min(plain_ms)}
        figures.add(key, off_cublas=off, replays_agree=again == once, **times)
        if again != once:
            problems.append(f"{key}: two replays of one step differ")
        if off > TOLERANCE:
            problems.append(f"{key}: log-probabilities are {off:.3f} from those with cuBLAS")
    edges = {str(bucket): edges_of(graph) for bucket, graph in runner.graphs.graphs.items()}
    stale = [str(pointer) for pointer in runner.graphs.audit() if pointer.is_certain]
    figures.add("layer, graphs", edges=edges, stale=stale, captured=runner.graphs.report().as_dict())
    if stale:
        problems.append(f"{len(stale)} pointers whose owner has left them")
    if is_cuda and torch.cuda.get_device_capability()[0] >= 9 and "PROGRAMMATIC" not in str(edges):
        problems.append(f"no kernel may start early: {edges}")
    plain.close()
    runner.close()
    return problems


def main() -> int:
    """Print the failures."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    problems = look_at(device, (1, 64) if device == "cuda" else (1, 2), Figures())
    print("\n".join(problems) or "nothing is wrong", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
