"""The three calls: what each one runs on a GPU, and what stands for it in a rehearsal on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from gpu_checks.part import Part

GPU_CONFIG = """\
[capacity]
max_batch_size = 64
max_sequence_length = 4352
page_size = 16
[buckets]
batch_sizes = [1, 8, 64]
"""
SMALL_CONFIG = "[capacity]\nmax_batch_size = 2\nmax_sequence_length = 64\n[buckets]\nbatch_sizes = [1, 2]\n"
_PYTHON = [sys.executable]
_CLI = [*_PYTHON, "-m", "graphdecode"]
_ENVIRONMENT = (
    "import json, torch; from graphdecode.profiling.environment import describe_environment as d; "
    "from graphdecode.profiling import read_bandwidth as r; device = 'cuda' if torch.cuda.is_available() else 'cpu'; "
    "print(json.dumps(d(device) | {'read_bandwidth': r(device)}))"
)


def _isolated(name: str, scratch: Path, limit_s: float, *arguments: str) -> list[str]:
    """Return the command that runs tests in processes of their own, and ends by itself before its limit."""
    out = str(scratch / f"{name.replace(' ', '-')}.json")
    return [*_PYTHON, "-m", "gpu_checks.isolated", "--limit", str(limit_s - 15), "--out", out, *arguments]


def call_a(scratch: Path) -> list[Part]:
    """Environment, a first look, the tests of GPU and kernels side by side, and the profiles of 0.6B and 8B."""
    config, small = scratch / "buckets.toml", scratch / "small.toml"
    config.write_text(GPU_CONFIG)
    small.write_text(SMALL_CONFIG)
    tests = ["-m", "gpu or not slow", "tests/engine/test_on_gpu.py", "tests/graphs/test_cuda_graph.py"]
    tests += ["tests/engine/test_device_loop.py", "tests/kernels", "tests/attention"]
    listed = [
        Part("environment", [*_PYTHON, "-c", _ENVIRONMENT], 60, [*_PYTHON, "-c", _ENVIRONMENT]),
        Part("smoke", [*_PYTHON, "-m", "gpu_checks.smoke"], 90, [*_PYTHON, "-m", "gpu_checks.smoke"]),
        Part(
            "gpu and kernel tests",
            _isolated("gpu and kernel tests", scratch, 210, *tests),
            210,
            _isolated("gpu and kernel tests", scratch, 60, "tests/kernels/test_act_mul.py"),
        ),
    ]
    for shape in ("qwen3-0.6b", "llama-3.1-8b"):
        options = ["--model", f"shape:{shape}", "--config", str(config), "--contexts", "512,4096", "--steps", "60"]
        in_small = ["--model", "demo", "--config", str(small), "--contexts", "32", "--steps", "5", "--device", "cpu"]
        out = ["--out", str(scratch / shape)]
        command = [*_CLI, "profile", *options, "--device", "cuda", *out]
        listed.append(Part(f"profile {shape}", command, 120, [*_CLI, "profile", *in_small, *out]))
    return listed


def call_b(scratch: Path) -> list[Part]:
    """The tests of the engine, and the sanitizers over eager steps."""
    small = scratch / "small.toml"
    small.write_text(SMALL_CONFIG + '[capture]\nbackend = "eager"\n')
    tests = ["-m", "not slow", "tests/engine", "tests/graphs", "tests/cache", "tests/models"]
    eager = [*_CLI, "generate", "--prompt", "12+30=", "--prompt", "rev abc=", "--max-tokens", "4"]
    eager += ["--config", str(small)]
    listed = [
        Part(
            "engine tests",
            _isolated("engine tests", scratch, 230, *tests),
            230,
            _isolated("engine tests", scratch, 60, "tests/graphs/test_edges.py"),
        ),
    ]
    for tool in ("memcheck", "racecheck"):
        # a caching allocator's blocks hide who writes past the end of which
        sanitizer = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", tool]
        command = [*sanitizer, "--error-exitcode", "9", *eager, "--device", "cuda"]
        listed.append(Part(tool, command, 90, [*eager, "--device", "cpu"] if tool == "memcheck" else []))
    return listed


def call_c(scratch: Path) -> list[Part]:
    """The step beside its floor, attention, and one profile of counters."""
    step = [*_PYTHON, "tools/bench", "step", "--out", str(scratch / "step")]
    attention = [*_PYTHON, "tools/bench", "attention", "--out", str(scratch / "attention")]
    of_step = ["--batch-sizes", "1,64", "--contexts", "512,4096", "--steps", "32", "--rounds", "3", "--device", "cuda"]
    step_in_small = ["--model", "demo", "--batch-sizes", "1", "--contexts", "32", "--steps", "2", "--rounds", "1"]
    attention_in_small = ["--device", "cpu", "--batches", "1", "--contexts", "64", "--shapes", "llama-8b"]
    metrics = ["gpu__time_duration.sum", "dram__bytes_read.sum", "sm__warps_active.avg.pct_of_peak_sustained_active"]
    counters = ["ncu", "--target-processes", "all", "--launch-skip", "200", "--launch-count", "60", "--csv"]
    counters += ["--metrics", ",".join(metrics)]
    one = [*_CLI, "generate", "--prompt", "12+30=", "--max-tokens", "8"]
    return [
        Part("step", [*step, *of_step], 200, [*step, *step_in_small, "--device", "cpu"]),
        Part("attention", attention, 90, [*attention, *attention_in_small]),
        Part("counters", [*counters, *one, "--device", "cuda"], 70, [*one, "--device", "cpu"]),
    ]


CALLS: dict[str, Callable[[Path], list[Part]]] = {"A": call_a, "B": call_b, "C": call_c}
