"""The parts of the check in order, each with its budget and its rehearsal on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gpu_checks.part import Part

TOTAL_S = 550.0  # of a call, below the machine's ten minutes; the planned parts' budgets fit
SHAPES_OF_STEPS = ("llama-3.1-8b", "qwen3-0.6b", "llama-3.2-1b")  # in order of importance
_PYTHON = [sys.executable]
NEW_TESTS = ["tests/kernels/test_skinny_linear.py", "tests/kernels/test_wide_linear.py"]
NEW_TESTS += ["tests/attention/test_cluster_launches.py", "tests/kernels/test_small_linear_timing.py"]
NEW_TESTS += ["tests/kernels/test_tiled_linear.py", "tests/kernels/test_linear_choice.py"]
GPU_TESTS = ["tests/engine/test_on_gpu.py", "tests/engine/test_device_loop.py", "tests/graphs/test_cuda_graph.py"]
GPU_TESTS += ["tests/graphs/test_loop.py", "tests/kernels", "tests/attention"]


def _part(
    name: str, limit_s: float, module: str, of_gpu: list[str], rehearsed: list[str] | None, *, is_planned: bool = True
) -> Part:
    """Return a part that runs a module; None: it is not rehearsed."""
    command = [*_PYTHON, "-m", f"gpu_checks.{module}"]
    rehearsal = [] if rehearsed is None else [*command, "cpu", *rehearsed]
    return Part(name, [*command, "cuda", *of_gpu], limit_s, rehearsal, is_planned=is_planned)


def _tests(
    name: str, scratch: Path, limit_s: float, tests: list[str], rehearsed: list[str], *, is_planned: bool = False
) -> Part:
    """Return the part that runs tests in separate processes; it ends before its limit."""
    out = str(scratch / f"{name.replace(' ', '-')}.json")

    def command(seconds: float, *arguments: str) -> list[str]:
        return [*_PYTHON, "-m", "gpu_checks.isolated", "--limit", str(seconds - 10), "--out", out, *arguments]

    rehearsal = command(150, *rehearsed) if rehearsed else []
    return Part(name, command(limit_s, *tests), limit_s, rehearsal, is_planned=is_planned)


def _sanitized(tool: str, limit_s: float) -> Part:
    sanitizer = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--error-exitcode", "9"]
    module = [*_PYTHON, "-m", "gpu_checks.sanitized"]
    return Part(tool, [*sanitizer, "--tool", tool, *module, "cuda"], limit_s, [*module, "cpu"], is_optional=True)


def _steps(name: str, limit_s: float, of_gpu: list[str], rehearsed: list[str]) -> Part:
    return _part(f"steps {name}", limit_s, "steps", of_gpu, [*rehearsed, "--rows", "1,2", "--context", "16"])


def planned(scratch: Path) -> list[Part]:
    """Return the parts of a first call: what is new is tested before it is timed."""
    big, small, middle = SHAPES_OF_STEPS
    quantized = ["--weights", "bf16,int8,int4", "--layers", "8", "--variants", "CUDA C++", "Triton alone"]
    all_weights = ["--weights", "bf16,int8,int4", "--variants", "CUDA C++", "Triton alone"]
    others = "glm-4.7-flash,qwen3-30b-a3b,mamba2-2.7b"
    few = ["--layers", "4", "--rows", "1,8", "--variants", "CUDA C++"]
    kinds = [middle, "--rows", "1,64", "--variants", "CUDA C++", "8-bit keys", "sampled"]
    one = ["--variants", "CUDA C++"]
    test = "tests/kernels/test_skinny_linear.py"
    return [
        _tests("new kernels", scratch, 45, ["-m", "gpu", *NEW_TESTS], [test, "-k", "gpu"], is_planned=True),
        _sanitized("memcheck", 35),
        _sanitized("racecheck", 25),
        _part("constants", 25, "constants", [], []),
        _part("compile", 60, "warm", [], []),
        _steps("8B", 45, [big], [big]),
        _steps("8B quantized", 40, [big, *quantized], [big, "--weights", "bf16,int8", *one]),
        _steps("0.6B", 35, [small, *all_weights], [small, *one]),
        _steps("1B", 30, [middle, *all_weights], [middle, *one]),
        _part("programs", 25, "traces", [str(scratch), f"{big},{big}:int8,{small}", "1,8"], [str(scratch), small, "1"]),
        _part("products", 30, "languages", ["1,8,64,256", "bf16,int8,int4,Q4_K,fp8"], []),
        _steps("other models", 30, [others, *few], ["glm-4.7-flash", *one]),
        _steps("keys and sampling", 20, kinds, [middle, "--variants", "CUDA C++", "sampled"]),
        _part("operators", 20, "operators", [], []),
        _part("prompts", 35, "prompts", [f"{small},{big}", "bf16,int8", "512,2048,8192"], [small, "bf16", "24"]),
        _part("serving", 50, "serving", [big, "1,8,64,256", "512", "128", "6"], [middle, "1,2", "12", "4", "1"]),
    ]  # fmt: skip


def others(scratch: Path) -> list[Part]:
    """Return the parts of later calls: all tests for a GPU, and those that run on whatever device there is."""
    engine = ["tests/engine", "tests/graphs", "tests/models/test_tiled_weights.py"]
    few = ["tests/kernels/test_rms_norm.py", "-k", "strided or hostile"]
    alone = ["--processes", "1", "-m", "gpu and alone", "tests/graphs/test_cuda_graph.py"]
    folders = [f"tests/{name}" for name in ("models", "kernels", "attention", "cache", "surfaces", "graphs")]
    plugin = ["-p", "gpu_checks.on_device"]
    on_device = [*plugin, "tests/cache/test_cache_operators.py", "-k", "strided"]
    layer = [*_PYTHON, "-m", "gpu_checks.layer", "cuda"]
    metrics = ["gpu__time_duration.sum", "dram__bytes_read.sum", "sm__warps_active.avg.pct_of_peak_sustained_active"]
    counters = ["ncu", "--target-processes", "all", "--launch-skip", "200", "--launch-count", "60", "--csv"]
    profile = [*_PYTHON, "-m", "graphdecode", "profile", "--model", "shape:qwen3-0.6b", "--contexts", "512"]
    attention = [*_PYTHON, "tools/bench", "attention", "--peers", "sdpa", "--out", str(scratch / "attention")]
    optional: dict[str, Any] = {"is_optional": True, "is_planned": False}
    return [
        _part("layer", 90, "layer", [], [], is_planned=False),
        _tests("gpu tests", scratch, 200, ["-m", "gpu and not alone", *GPU_TESTS], few),
        _tests("gpu tests alone", scratch, 80, alone, []),
        _tests("engine tests", scratch, 200, engine, ["tests/graphs/test_graph_manager.py", "-k", "not left_open"]),
        Part("profile", [*profile, "--device", "cuda", "--out", str(scratch)], 90, [], **optional),
        Part("attention", attention, 90, [], **optional),
        Part("counters", [*counters, "--metrics", ",".join(metrics), *layer], 70, [], **optional),
        _tests("tests on the device", scratch, 490, [*plugin, *folders], on_device),
    ]


def parts(scratch: Path) -> list[Part]:
    """Return all parts, given a folder for their files."""
    return [*planned(scratch), *others(scratch)]
