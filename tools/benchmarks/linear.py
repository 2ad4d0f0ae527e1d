"""The products of a decode step: bytes of weight read a second, next to what this device reads at most.

Every layer shape of each model, at every batch size, over weights that are rotated so that no cache holds them. On a
GPU: cuBLAS and every configuration of the small product, each in a captured graph, as when an engine chooses. On a CPU:
the plain, packed, compiled and int8 paths, taken in turn. Each figure is the median of several rounds; the bandwidth
is measured in the same run. Writes linear.json after every shape.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from graphdecode.linear.forms import FORMS
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.small_linear_timing import GraphClock, fastest_product
from graphdecode.linear.weight_form import FormOptions, WeightForm
from graphdecode.models import resolve_device
from graphdecode.models.shapes import shape_config
from graphdecode.profiling.bandwidth import read_bandwidth
from harness import Device, Dtype, Sizes, in_turn, medians, numbers, record, write

GPU_MODELS = "qwen3-0.6b,llama-3.2-1b,llama-3.1-8b"
CPU_MODELS = "llama-100m"
ROUNDS = 9
COLD_BYTES = 128 << 20  # what the copies of a weight hold together on a CPU at least


def layers(model: str) -> dict[str, tuple[int, int]]:
    """The fused products of a model: name -> (out_features, in_features)."""
    config = shape_config(model)
    hidden, ff = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "qkv": (q + 2 * kv, hidden),
        "o": (hidden, q),
        "gate_up": (2 * ff, hidden),
        "down": (hidden, ff),
        "lm_head": (config.vocab_size, hidden),
    }


def cpu_seconds(weight: Tensor, batch: int) -> dict[str, tuple[float, int]]:
    """Seconds of one product and the bytes that it reads, by path; the paths are taken in turn."""
    out_features, in_features = weight.shape
    options = FormOptions(weight.device, weight.dtype, LinearTuner())
    x = torch.randn(batch, in_features).to(weight.dtype)
    out = torch.empty(batch, out_features, dtype=weight.dtype)
    copies: dict[str, list[WeightForm]] = {}
    for form in FORMS:
        if form.path in copies or form.why_not(options):
            continue
        first = form.of(weight, None, options)
        more = min(COLD_BYTES // first.nbytes, 63)
        copies[form.path] = [first, *(form.of(weight.clone(), None, options) for _ in range(more))]

    def seconds(held: list[WeightForm]) -> float:
        began = time.perf_counter()
        for copy in held:
            copy.apply(out, x)
        return (time.perf_counter() - began) / len(held)

    turns = in_turn({path: partial(seconds, held) for path, held in copies.items()}, ROUNDS, warm=1)
    return {path: (median, copies[path][0].nbytes) for path, median in medians(turns).items()}


def gpu_seconds(weight: Tensor, batch: int, clock: GraphClock) -> dict[str, tuple[float, int]]:
    """Seconds of one product by path: cuBLAS, and each configuration, the fastest marked as chosen."""
    winner, times = fastest_product(weight, None, batch, clock)
    chosen = "plain" if winner is None else str(winner)
    named = {f"{name} (chosen)" if name == chosen else name: seconds for name, seconds in times.items()}
    return {name: (named[name], weight.nbytes) for name in sorted(named, key=named.__getitem__)}


def main(
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="A folder for linear.json.")] = Path("linear"),
    models: Annotated[str, typer.Option(help=f"None: {GPU_MODELS} on a GPU, {CPU_MODELS} on a CPU.")] = "",
    batches: Sizes = "1,2,4,8,16",
    dtype: Dtype = "bfloat16",
) -> None:
    """Time every product of the models."""
    place = resolve_device(device)
    cuda = place.type == "cuda"
    shapes = {model: layers(model) for model in (models or (GPU_MODELS if cuda else CPU_MODELS)).split(",")}
    bandwidth = read_bandwidth(place)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s")
    report = record(place, schema=1, read_bandwidth=bandwidth, dtype=dtype, rows=[])
    torch.manual_seed(0)
    clock = GraphClock(place) if cuda else None
    for model, model_layers in shapes.items():
        for layer, (out_features, in_features) in model_layers.items():
            weight = torch.empty(out_features, in_features, dtype=getattr(torch, dtype), device=place)
            weight.normal_(0.0, 0.02)
            for batch in numbers(batches):
                timed = cpu_seconds(weight, batch) if clock is None else gpu_seconds(weight, batch, clock)
                for path, (seconds, nbytes) in timed.items():
                    speed = nbytes / seconds
                    row = {
                        "model": model,
                        "layer": layer,
                        "out_features": out_features,
                        "in_features": in_features,
                        "batch": batch,
                        "path": path,
                        "weight_bytes": nbytes,
                        "us": seconds * 1e6,
                        "bytes_per_s": speed,
                        "of_read_bandwidth": speed / bandwidth,
                    }
                    report["rows"].append(row)
                    print(line(row), flush=True)
            write(out / "linear.json", report)


def line(row: dict[str, Any]) -> str:
    shape = f"{row['out_features']}x{row['in_features']}"
    where = f"{row['model']:14} {row['layer']:8} {shape:14} x {row['batch']:3}"
    speed = f"{row['bytes_per_s'] / 1e9:8.1f} GB/s {row['of_read_bandwidth']:5.2f} of what the device reads"
    return f"{where} {row['us']:10.1f} us {speed}  {row['path']}"
