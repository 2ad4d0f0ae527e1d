"""The four calls: their parts on a GPU, and in a rehearsal on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gpu_checks.part import Part

SHAPES_OF_STEPS = ("llama-3.1-8b", "qwen3-0.6b", "llama-3.2-1b")  # in order of importance
_PYTHON = [sys.executable]
_CLI = [*_PYTHON, "-m", "graphdecode"]
GPU_TESTS = ["tests/engine/test_on_gpu.py", "tests/engine/test_device_loop.py", "tests/graphs/test_cuda_graph.py"]
GPU_TESTS += ["tests/graphs/test_loop.py", "tests/kernels", "tests/attention"]


def _part(module: str, name: str, limit_s: float, of_gpu: list[str], rehearsed: list[str]) -> Part:
    command = [*_PYTHON, "-m", f"gpu_checks.{module}"]
    return Part(name, [*command, "cuda", *of_gpu], limit_s, [*command, "cpu", *rehearsed])


def _tests(name: str, scratch: Path, limit_s: float, tests: list[str], rehearsed: list[str]) -> Part:
    """Return the part that runs tests in separate processes; it ends before its limit."""
    out = str(scratch / f"{name.replace(' ', '-')}.json")

    def command(seconds: float, *arguments: str) -> list[str]:
        return [*_PYTHON, "-m", "gpu_checks.isolated", "--limit", str(seconds - 15), "--out", out, *arguments]

    return Part(name, command(limit_s, *tests), limit_s, command(150, *rehearsed) if rehearsed else [])


def _triton_alone(name: str) -> Part:
    """Return the part that times steps without CUDA C++, for comparison with the others."""
    part = _part("steps", f"step {name}, Triton alone", 60, [name, "1,8", "512"], [name, "1", "16"])
    without = ["env", "GRAPHDECODE_NVRTC=0"]
    return replace(part, command=[*without, *part.command], rehearsal=[*without, *part.rehearsal])


def call_a(scratch: Path) -> list[Part]:
    """Call A: one layer, all kernels compiled, and each model's step compared with its measured floor."""
    steps = [
        _part("steps", f"step {name}", 220, [name, "1,8,64", "512,4096"], [name, "1,2", "16,32"])
        for name in SHAPES_OF_STEPS
    ]
    return [_part("layer", "layer", 90, [], []), _part("warm", "compile", 150, [], []), *steps]


def call_b(scratch: Path) -> list[Part]:
    """Call B: the tests for a GPU, those that measure its memory by themselves, and the engine's."""
    engine = ["tests/engine", "tests/graphs", "tests/models/test_tiled_weights.py"]
    few = ["tests/kernels/test_rms_norm.py", "-k", "strided or hostile"]
    alone = ["--processes", "1", "-m", "gpu and alone", "tests/graphs/test_cuda_graph.py"]
    return [
        _tests("gpu tests", scratch, 200, ["-m", "gpu and not alone", *GPU_TESTS], few),
        _tests("gpu tests alone", scratch, 80, alone, []),
        _tests("engine tests", scratch, 200, engine, ["tests/graphs/test_graph_manager.py", "-k", "not left_open"]),
    ]


def call_c(scratch: Path) -> list[Part]:
    """Call C: products in both languages, int8, attention, the tuner's profile; counters and sanitizers if allowed."""
    attention = [*_PYTHON, "tools/bench", "attention", "--peers", "sdpa", "--out", str(scratch / "attention")]
    points = "1:512,64:512,64:4096"
    profile = [*_CLI, "profile", "--model", "shape:qwen3-0.6b", "--contexts", "512", "--steps", "40"]
    metrics = ["gpu__time_duration.sum", "dram__bytes_read.sum", "sm__warps_active.avg.pct_of_peak_sustained_active"]
    counters = ["ncu", "--target-processes", "all", "--launch-skip", "200", "--launch-count", "60", "--csv"]
    layer = [*_PYTHON, "-m", "gpu_checks.layer", "cuda"]
    sanitizer = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--error-exitcode", "9", *layer]
    return [
        _part("languages", "CUDA C++ beside Triton", 90, ["1,8", "bf16,int8,int4,Q4_K,fp8"], []),
        *(_triton_alone(name) for name in ("llama-3.1-8b", "llama-3.1-8b:int8")),
        _part("steps", "step in int8", 120, ["llama-3.1-8b:int8", "1,64", "512"], ["llama-3.1-8b:int8", "1", "16"]),
        _part("attention", "attention in steps", 60, ["llama-3.1-8b", points], ["llama-3.2-1b", "1:16,2:32"]),
        Part("attention", attention, 90, [], is_optional=True),
        Part("profile", [*profile, "--device", "cuda", "--out", str(scratch)], 90, [], is_optional=True),
        Part("counters", [*counters, "--metrics", ",".join(metrics), *layer], 70, [], is_optional=True),
        Part("memcheck", sanitizer, 70, [], is_optional=True),
    ]


def call_d(scratch: Path) -> list[Part]:
    """Call D: every test of an operator, a cache or a model that runs on whatever device there is."""
    folders = [f"tests/{name}" for name in ("models", "kernels", "attention", "cache", "surfaces", "graphs")]
    plugin = ["-p", "gpu_checks.on_device"]
    few = [*plugin, "tests/cache/test_cache_operators.py", "-k", "strided"]
    return [_tests("tests on the device", scratch, 490, [*plugin, *folders], few)]


CALLS: dict[str, Callable[[Path], list[Part]]] = {"A": call_a, "B": call_b, "C": call_c, "D": call_d}
