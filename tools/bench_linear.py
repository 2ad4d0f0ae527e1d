"""Measure the products of a decode step: bytes of weight read per second, next to what this device reads at most.

    python tools/bench_linear.py --out results/linear                      # this machine's device
    python tools/bench_linear.py --models qwen3-0.6b --batches 1,8 --dtype bfloat16

Every layer shape of each model, at every batch size, over weights that are rotated so that no cache holds them. On a
GPU: cuBLAS and every configuration of the small product, each in a captured graph, as when an engine chooses. On a CPU:
the plain, packed, compiled and int8 paths, taken in turn. Each figure is the median of several rounds; the bandwidth
is measured in the same run. Writes linear.json after every shape.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphdecode.linear.forms import FORMS
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.small_linear_timing import GraphClock, fastest_product
from graphdecode.linear.weight_form import FormOptions, WeightForm
from graphdecode.models.shapes import shape_config
from graphdecode.profiling.bandwidth import read_bandwidth
from graphdecode.profiling.environment import describe_environment

GPU_MODELS = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
CPU_MODELS = ("llama-100m",)
ROUNDS = 9
COLD_BYTES = 128 << 20  # what the copies of a weight hold together on a CPU at least


@dataclass(frozen=True)
class Result:
    """One path at one layer shape and batch size."""

    model: str
    layer: str
    out_features: int
    in_features: int
    batch: int
    path: str
    weight_bytes: int
    us: float
    bytes_per_s: float
    of_read_bandwidth: float


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
    rounds: dict[str, list[float]] = {path: [] for path in copies}
    for _ in range(ROUNDS + 1):
        for path, held in copies.items():
            began = time.perf_counter()
            for copy in held:
                copy.apply(out, x)
            rounds[path].append((time.perf_counter() - began) / len(held))
    return {path: (statistics.median(taken[1:]), copies[path][0].nbytes) for path, taken in rounds.items()}


def gpu_seconds(weight: Tensor, batch: int, clock: GraphClock) -> dict[str, tuple[float, int]]:
    """Seconds of one product by path: cuBLAS, and each configuration, the fastest marked as chosen."""
    winner, times = fastest_product(weight, None, batch, clock)
    chosen = "plain" if winner is None else str(winner)
    named = {f"{name} (chosen)" if name == chosen else name: seconds for name, seconds in times.items()}
    return {name: (named[name], weight.nbytes) for name in sorted(named, key=named.__getitem__)}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("linear"), help="folder for linear.json")
    parser.add_argument("--models", help=f"default: {','.join(GPU_MODELS)} on a GPU, {','.join(CPU_MODELS)} on a CPU")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16], help="default: 1,2,4,8,16")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    return parser.parse_args()


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    models = options.models.split(",") if options.models else list(GPU_MODELS if cuda else CPU_MODELS)
    shapes = {model: layers(model) for model in models}
    dtype = getattr(torch, options.dtype)
    bandwidth = read_bandwidth(device)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s")
    report = {
        "schema": 1,
        "environment": describe_environment(device),
        "read_bandwidth": bandwidth,
        "dtype": options.dtype,
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    results: list[Result] = []
    clock = GraphClock(device) if cuda else None
    for model, model_layers in shapes.items():
        for layer, (out_features, in_features) in model_layers.items():
            weight = torch.empty(out_features, in_features, dtype=dtype, device=device).normal_(0.0, 0.02)
            for batch in options.batches:
                timed = cpu_seconds(weight, batch) if clock is None else gpu_seconds(weight, batch, clock)
                for path, (seconds, nbytes) in timed.items():
                    speed = nbytes / seconds
                    where = (model, layer, out_features, in_features, batch, path, nbytes)
                    results.append(Result(*where, seconds * 1e6, speed, speed / bandwidth))
                    print(line(results[-1]), flush=True)
            report["rows"] = [asdict(result) for result in results]
            (options.out / "linear.json").write_text(json.dumps(report, indent=1) + "\n")


def line(result: Result) -> str:
    shape = f"{result.out_features}x{result.in_features}"
    where = f"{result.model:14} {result.layer:8} {shape:14} x {result.batch:3}"
    speed = f"{result.bytes_per_s / 1e9:8.1f} GB/s {result.of_read_bandwidth:5.2f} of what the device reads"
    return f"{where} {result.us:10.1f} us {speed}  {result.path}"


if __name__ == "__main__":
    main()
