"""The decode step compared with its floor, and the gain of each optimization.

    tools/bench step --out results/step                                 models that suit this machine
    tools/bench step --model shape:llama-3.2-1b --batch-sizes 1,64 --contexts 512,4096 --out results/step

The floor is the time to read the weights, keys and values once at the read bandwidth of the same run. The step runs
eagerly, replayed, and replayed with each optimization switched off, alternately. On a GPU a trace shows the top kernels
and the idle time between kernels. Writes step.json after every model.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, cast
from unittest import mock

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from gpu_checks.models import decoder_with
from graphdecode.attention import QKNormRope
from graphdecode.buckets import StepShape
from graphdecode.config import BucketConfig
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.engine.steps import RowInputs
from graphdecode.errors import ArgumentError
from graphdecode.hub.model_path import SHAPE_PREFIX
from graphdecode.kernels.model.act_mul import gated
from graphdecode.kernels.model.embedding import embedding
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.norm.rms_norm import normed
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import WeightForm
from graphdecode.memory import free_bytes
from graphdecode.models import Decoder, blocks, decoder, forward_context, load_model, resolve_device
from graphdecode.models.forward_context import AppendAndAttend, Attend, ForwardContext, Tokens
from graphdecode.models.shapes import shape_config
from graphdecode.profiling.environment import read_bandwidth
from graphdecode.profiling.latency import STEPS_PER_STAGING, LatencyProfiler, rows_at, step_bytes
from harness import Device, Dtype, OutFolder, Rounds, Sizes, alternated, numbers, record, show, write

SCHEMA_VERSION = 1
FULL, EAGER = "full", "eager"
GPU_MODELS = "shape:qwen3-0.6b,shape:llama-3.2-1b,shape:llama-3.1-8b"
CPU_MODELS = "demo,shape:llama-100m"
_TRACED_STEPS = 10
_LARGEST_GAPS = 5
_TOP_KERNELS = 12
_EAGER_STEPS = 5
_MEMORY_SHARE = 0.8  # of the free memory that a model's weights may take


def measure_steps(
    model: str,
    *,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    batch_sizes: Sequence[int] = (1, 8),
    contexts: Sequence[int] = (512,),
    steps: int = 64,
    rounds: int = 5,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure a model's step and its variants alternately; return its entry of `step.json`."""
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
        costs: list[dict[str, Any]] = []
        points = [(bucket, context) for bucket in config.ladder for context in contexts]
        errors = {point: _errors(runners, *point) for point in points}
        for bucket, context in tqdm(points, desc=model, unit="point", disable=not progress, leave=False):
            costs += _measure_point(runners, bucket, context, steps, rounds, errors[bucket, context])
        full = runners[FULL]
        facts = {"model": model, "dtype": str(full.model.dtype)[6:], "weight_bytes": full.model.weight_bytes}
        captures = [
            {"bucket": b.bucket, "capture_ms": b.capture_ms, "pool_bytes": b.pool_bytes, "nodes": b.nodes.total()}
            for b in full.graphs.report().buckets
        ]
        traces = [_trace(full, bucket, contexts[0]) for bucket in config.ladder] if place.type == "cuda" else []
        return record(place, **facts, costs=costs, captures=captures, traces=traces)


def _refuse_if_too_large(model: str, dtype: str, device: torch.device) -> None:
    if not model.startswith(SHAPE_PREFIX):
        return
    shape = shape_config(model)
    hidden, heads = shape.hidden_size, shape.num_attention_heads + 2 * shape.num_key_value_heads
    layer = hidden * (heads + shape.num_attention_heads) * shape.head_dim + 3 * hidden * shape.intermediate_size
    tables = 1 if shape.tie_word_embeddings and device.type == "cuda" else 2
    elements = shape.num_hidden_layers * layer + tables * shape.vocab_size * hidden
    needed = elements * (4 if dtype == "float32" else 2)
    copies = 2 if device.type == "cpu" else 1  # a CPU also measures other layouts of the weights
    free = free_bytes(device)
    if copies * needed > _MEMORY_SHARE * free:
        raise ArgumentError(
            f"{model} takes {copies * needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {device}"
        )


def _rope_append(
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    rows: Tensor,
    positions: Tensor,
    live: Tensor,
    page_table: Tensor,
    rope: QKNormRope,
    **_scales: object,
) -> None:
    """The operator of this name in torch's operators; padding goes to the null page."""
    tokens, qo_heads, head_dim = q_out.shape
    pages, page_size, kv_heads = k_cache.shape[:3]
    q, k, v = qkv.view(tokens, -1, head_dim).split([qo_heads, kv_heads, kv_heads], dim=1)
    if rope.q_norm is not None and rope.k_norm is not None:
        q, k = _normed_heads(q, rope.q_norm, rope.eps), _normed_heads(k, rope.k_norm, rope.eps)
    alive = torch.arange(tokens, device=qkv.device) < live
    at = torch.where(alive, positions, 0)
    angles = rope.cos_sin.index_select(0, at)
    page = page_table.index_select(0, torch.where(alive, rows, 0)).gather(1, (at // page_size).long()[:, None])[:, 0]
    place = (torch.where(alive, page, pages - 1) * page_size + at % page_size).long()
    q_out.copy_(_rotated(q, angles))
    k_cache.view(-1, kv_heads, head_dim).index_copy_(0, place, _rotated(k, angles).to(k_cache.dtype))
    v_cache.view(-1, kv_heads, head_dim).index_copy_(0, place, v.to(v_cache.dtype))


def _normed_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [t, heads, head_dim]: per head, or over all heads if the weight is that long."""
    is_together = weight.shape[0] > x.shape[2]
    return normed(x.flatten(1) if is_together else x, weight, eps).view(x.shape).to(x.dtype)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return x [t, heads, head_dim] rotated by angles [t, 2, rot / 2], in float32 (Su et al., 2021, half-split)."""
    half = angles.shape[-1]
    cos, sin = angles[:, :1], angles[:, 1:]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _embedding_norm(
    out: Tensor, residual: Tensor, ids: Tensor, table: Tensor, live: Tensor, weight: Tensor, scale: float, eps: float
) -> None:
    embedding(residual, ids, table, live, scale)
    versions("rms_norm").torch(out, residual, weight, eps)


class Apart(ForwardContext):
    """A pass with no fused products, and with append and attention as two operators."""

    appends_too = False  # whether attention appends the new keys and values itself

    def __init__(self, parts: Sequence[Tokens], like: Tensor, attend: Attend, append: AppendAndAttend | None):
        super().__init__(parts, like, attend, append if self.appends_too else None)

    def fused(self, linear: WeightForm) -> None:
        """Return None: no product fuses anything."""


class ProductsApart(Apart):
    """A pass with no fused products."""

    appends_too = True


@contextmanager
def passing(context: type[ForwardContext]) -> Iterator[None]:
    """Capture passes of another kind in the context."""
    with mock.patch.object(decoder, "ForwardContext", context):
        yield


@contextmanager
def unfused() -> Iterator[None]:
    """Replace fused operators by torch's own in the context, to measure the gain of fusing."""
    norms: dict[str, Any] = {name: versions(name).torch for name in ("rms_norm", "add_rms_norm")}
    others = {"rms_norm": norms["rms_norm"], "rope_append": _rope_append, "act_mul": gated}
    with (
        passing(Apart),
        mock.patch.multiple(forward_context, **others),
        mock.patch.multiple(blocks, **norms, embedding_norm=_embedding_norm),
    ):
        yield


def _variants(
    model: str, device: torch.device, dtype: str, config: BucketConfig
) -> Iterator[tuple[str, Decoder, AbstractContextManager[Any]]]:
    """Yield name, decoder and capture context of the full step and its variants."""

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
    yield FULL, full, nullcontext()
    yield "without fused operators", full, unfused()
    if device.type == "cuda":
        yield "without fused products", full, passing(ProductsApart)
        yield "cuBLAS alone", decoder_with(full, lambda _: None), nullcontext()
        yield "without early start", decoder_with(full, _without_early_start), nullcontext()
    elif native.library() is not None:
        with native.switched_off():
            plain = load()
        yield "without compiled kernels", plain, native.switched_off()


def _without_early_start(choice: LinearChoice) -> LinearChoice:
    return choice if choice.config is None else replace(choice, config=choice.config._replace(pdl=False))


@contextmanager
def captured_variants(
    model: str, device: torch.device, dtype: str, config: BucketConfig
) -> Iterator[dict[str, Runner]]:
    """Yield the full step and its variants, captured over one cache."""
    runners: dict[str, Runner] = {}
    with ExitStack() as held:
        for name, changed, within in _variants(model, device, dtype, config):
            if not runners:
                runner = make_runner(changed, config, prefix_cache=False)
            else:
                full = runners[FULL]
                runner = Runner(replace(full.setting, model=changed), full.cache, full.capacity)
            held.callback(runner.close)
            with within:
                runner.graphs.capture(progress=False)
            runners[name] = runner
        yield runners


def _measure_point(
    runners: dict[str, Runner], bucket: int, context: int, steps: int, rounds: int, errors: dict[str, float]
) -> list[dict[str, Any]]:
    full = runners[FULL]
    device = full.model.device
    with rows_at(full, bucket, context) as rows:
        eager = LatencyProfiler(full)
        calls: dict[str, Callable[[], list[Any]]] = {
            # between the steps, as it changes
            "bandwidth": lambda: [read_bandwidth(device, repeats=2)],
            **{name: partial(_replayed, LatencyProfiler(each, steps=steps), rows) for name, each in runners.items()},
            EAGER: lambda: [(step_ms, 0.0) for step_ms in eager.eager(rows, _EAGER_STEPS)],
        }
        turns = {name: [each for turn in found for each in turn] for name, found in alternated(calls, rounds).items()}
    bandwidth = statistics.median(turns.pop("bandwidth"))
    floor_ms = 1000 * step_bytes(full, bucket, context) / bandwidth
    medians = {name: statistics.median(step_ms for step_ms, _ in times) for name, times in turns.items()}
    costs = []
    for name, step_ms in medians.items():
        host_us = sorted(us for _, us in turns[FULL if name == EAGER else name])
        cost = {"variant": name, "bucket": bucket, "context": context, "step_ms": step_ms}
        cost |= {"host_us": statistics.median(host_us), "host_p99_us": host_us[int(0.99 * len(host_us))]}
        cost |= {"read_bandwidth": bandwidth, "floor_ms": floor_ms, "times_floor": step_ms / floor_ms}
        costs.append(cost | {"times_full": step_ms / medians[FULL], "logprob_error": errors.get(name, 0.0)})
    return costs


def _replayed(profiler: LatencyProfiler, rows: Sequence[RowInputs]) -> list[tuple[float, float]]:
    """Return the milliseconds of each step, and the host's microseconds; on a CPU, all but the step's work."""
    launch_us, step_ms, token_ms = profiler.replayed(rows)
    if profiler.runner.model.device.type != "cuda":
        launch_us = [1000 * (token - step) for token, step in zip(token_ms, step_ms, strict=True)]
    return list(zip(step_ms, launch_us, strict=True))


def _errors(runners: dict[str, Runner], bucket: int, context: int) -> dict[str, float]:
    """Return each variant's distance from the full step, of the log-probability of each row's most likely token."""
    given: dict[str, list[float]] = {}
    with rows_at(runners[FULL], bucket, context, logprobs=0) as rows:
        for name, runner in runners.items():
            runner.stage(rows)
            (step,) = runner.read(runner.launch(LaunchPlan(StepShape(bucket))), logprobs=True)
            given[name] = [] if step.logprobs is None else step.logprobs.sampled
    return {
        name: max(abs(a - b) for a, b in zip(logprobs, given[FULL], strict=True)) for name, logprobs in given.items()
    }


def _trace(runner: Runner, bucket: int, context: int) -> dict[str, Any]:
    """Return the top kernels and the idle gaps of some steps, from torch's profiler."""
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
    """Return, per step, the time in kernels by name, between them, and the largest gaps; kernels may overlap."""
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


def show_model(result: dict[str, Any]) -> None:
    columns = {
        "batch": "{bucket}",
        "context": "{context}",
        "variant": "{variant}",
        "step ms": "{step_ms:.3f}",
        "GB/s": "{gigabytes:.0f}",
        "floors": "{times_floor:.2f}",
        "times full": "{times_full:.2f}",
        "host us": "{host_us:.1f}",
        "logprob error": "{logprob_error:.4f}",
    }
    rows = (cost | {"gigabytes": cost["read_bandwidth"] / 1e9} for cost in result["costs"])
    show(columns, rows, f"{result['model']} {result['dtype']}")
    further = result["captures"][:-1]  # the largest bucket is captured first
    if further:
        slowest = max(capture["capture_ms"] for capture in further)
        largest = max(capture["pool_bytes"] for capture in further) / 2**20
        print(f"a further bucket: capture {slowest:.1f} ms, pool {largest:.2f} MiB")
    for trace in result["traces"]:
        print(f"batch {trace['bucket']}: {trace['idle_us']:.1f} us of a step between kernels")


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
    chosen = model or (GPU_MODELS if device != "cpu" and torch.cuda.is_available() else CPU_MODELS)
    asked: dict[str, Any] = {"batch_sizes": numbers(batch_sizes), "contexts": numbers(contexts)}
    asked |= {"device": device, "dtype": dtype, "steps": steps, "rounds": rounds, "progress": sys.stdout.isatty()}
    results: list[dict[str, Any]] = []
    refused = 0
    for name in chosen.split(","):
        try:
            results.append(measure_steps(name, **asked))
        except ValueError as error:
            print(f"{name}: {error}")
            refused += 1
            continue
        show_model(results[-1])
        write(out and out / "step.json", {"schema": SCHEMA_VERSION, "models": results})
    if refused:
        raise typer.Exit(2)
