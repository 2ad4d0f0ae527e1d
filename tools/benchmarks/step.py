"""The decode step beside its floor, and what each optimisation is worth.

    tools/bench step --out results/step                                 models that suit this machine
    tools/bench step --model shape:llama-3.2-1b --batch-sizes 1,64 --contexts 512,4096 --out results/step

The floor is the time to move the bytes that a step must: the weights once, and each row's keys and values once, at the
read bandwidth that is measured in the same run. The step runs eagerly, replayed, and replayed with each optimisation
switched off in turn; all of them take turns (A B A B ...), and medians are compared. On a GPU a trace of some steps
tells the top kernels and the idle time between kernels. Writes step.json after every model.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from harness import Device, Dtype, OutFolder, Rounds, Sizes, numbers, write
from step_costs import EAGER, FULL, SCHEMA_VERSION, measure_steps

GPU_MODELS = "shape:qwen3-0.6b,shape:llama-3.2-1b,shape:llama-3.1-8b"
CPU_MODELS = "demo,shape:llama-100m"
# goals on an H200 in bf16: model -> (step over floor at batch 1, at batch 64, eager over replayed)
GOALS: dict[str, tuple[float | None, float | None, float]] = {
    "shape:llama-3.1-8b": (1.10, 1.15, 1.8),
    "shape:llama-3.2-1b": (1.30, None, 5.0),
    "shape:qwen3-0.6b": (1.9, None, 10.0),
    "shape:llama-100m": (1.25, None, 1.0),
}
HOST_GOAL_US, CAPTURE_GOAL_MS, POOL_GOAL_MIB = 15.0, 20.0, 4.0


def goal_of(model: str, cost: dict[str, Any]) -> str:
    """The goal that a figure stands next to, if there is one."""
    batch_1, batch_64, speedup = GOALS.get(model, (None, None, None))
    if cost["variant"] == FULL:
        goal = {1: batch_1, 64: batch_64}.get(cost["bucket"])
        return "" if goal is None else f"<= {goal} floors"
    return f">= {speedup}x full" if cost["variant"] == EAGER and speedup else ""


def print_model(result: dict[str, Any], console: Console) -> None:
    """Show one model's figures, each next to its limit."""
    table = Table(
        "batch", "context", "variant", "step ms", "GB/s", "floors", "times full", "host us", "logprob error", "goal",
        title=f"{result['model']} {result['dtype']}",
    )  # fmt: skip
    for cost in result["costs"]:
        table.add_row(
            str(cost["bucket"]),
            str(cost["context"]),
            cost["variant"],
            f"{cost['step_ms']:.3f}",
            f"{cost['read_bandwidth'] / 1e9:.0f}",
            f"{cost['times_floor']:.2f}",
            f"{cost['times_full']:.2f}",
            f"{cost['host_us']:.1f}",
            f"{cost['logprob_error']:.4f}",
            goal_of(result["model"], cost),
        )
    console.print(table)
    further = result["captures"][:-1]  # the largest bucket is captured first
    if further:
        slowest = max(capture["capture_ms"] for capture in further)
        largest = max(capture["pool_bytes"] for capture in further) / 2**20
        console.print(
            f"a further bucket: capture {slowest:.1f} ms (goal {CAPTURE_GOAL_MS:.0f}), "
            f"pool {largest:.2f} MiB (goal {POOL_GOAL_MIB:.0f}); host goal {HOST_GOAL_US:.0f} us, all on an H200"
        )
    for trace in result["traces"]:
        console.print(f"batch {trace['bucket']}: {trace['idle_us']:.1f} us of a step between kernels")


def main(
    model: Annotated[str, typer.Option(help="Separated by commas; none: those that suit the device.")] = "",
    device: Device = "auto",
    dtype: Dtype = "auto",
    batch_sizes: Sizes = "1,8",
    contexts: Sizes = "128",
    steps: Annotated[int, typer.Option(help="Of one variant in one round.")] = 64,
    rounds: Rounds = 5,
    out: OutFolder = None,
) -> None:
    """Measure steps, floors and what each optimisation is worth."""
    console = Console(width=120 if not sys.stdout.isatty() else None)
    chosen = model or (GPU_MODELS if device != "cpu" and torch.cuda.is_available() else CPU_MODELS)
    asked: dict[str, Any] = {"batch_sizes": numbers(batch_sizes), "contexts": numbers(contexts)}
    asked |= {"device": device, "dtype": dtype, "steps": steps, "rounds": rounds, "progress": console.is_terminal}
    results: list[dict[str, Any]] = []
    refused = 0
    for name in chosen.split(","):
        try:
            result = measure_steps(name, **asked)
        except ValueError as error:
            console.print(f"{name}: {error}", style="red", markup=False)
            refused += 1
            continue
        results.append(result)
        print_model(result, console)
        write(out and out / "step.json", {"schema": SCHEMA_VERSION, "models": results})
    if refused:
        raise typer.Exit(2)
