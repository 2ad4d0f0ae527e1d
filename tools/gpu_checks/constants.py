"""The constants of a step on this GPU: boundaries between kernels, hops, barriers, bandwidth, products, and the clock.

python -m gpu_checks.constants DEVICE      on a CPU the kernels are compiled for sm_90a alone
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.clock import ClockUnderLoad
from gpu_checks.figures import Figures
from graphdecode.kernels.cuda import nvrtc
from graphdecode.kernels.cuda.launch import Kernel
from graphdecode.profiling.environment import describe_environment, read_bandwidth

SOURCE = Path(__file__).with_name("constants.cu")
KERNELS = ("triggers_first", "waits_first", "hops", "cluster_barriers", "block_barriers", "clocks")
HOPS = ("one counter", "two levels", "a flag for each block")
CHAIN, REPEATS = 200, 7
_COUNT = 500  # hops or barriers of a launch
_CLUSTER = 8
_GIBIBYTES, _PRODUCT = 2, 8192


def compile_constants(arch: str) -> bytes:
    """Return the machine code of the kernels."""
    headers = {file.name: file.read_text() for file in nvrtc.FOLDER.glob("*.cuh")}
    options = ["--std=c++17", f"--gpu-architecture={arch}"]
    return nvrtc.compile_sources({SOURCE.name: SOURCE.read_text()} | headers, options)


def _seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call on the device."""
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times[1:])


def _chain_us(kernel: Kernel, blocks: int, state: torch.Tensor, *, starts_early: bool) -> float:
    """Return what a kernel adds to a captured chain of such kernels."""

    def captured(length: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(length):
                kernel.launch((blocks,), 128, (state,), starts_early=starts_early)
        return graph

    short, long = captured(CHAIN // 4), captured(CHAIN)
    return 1e6 * (_seconds(long.replay) - _seconds(short.replay)) / (CHAIN - CHAIN // 4)


def _boundaries(kernels: dict[str, Kernel], units: int, state: torch.Tensor) -> dict[str, float]:
    found = {"late launch": _chain_us(kernels["waits_first"], units, state, starts_early=False)}
    for name in ("triggers_first", "waits_first"):
        for blocks in (units, 8 * units):
            key = f"early launch, {name.replace('_', ' ')}, {blocks} blocks"
            found[key] = _chain_us(kernels[name], blocks, state, starts_early=True)
    return found


def _barriers(kernels: dict[str, Kernel], units: int, state: torch.Tensor) -> dict[str, float]:
    def each_us(launch: Callable[[int], None]) -> float:
        return 1e6 * (_seconds(lambda: launch(_COUNT)) - _seconds(lambda: launch(0))) / _COUNT

    def hop(kind: int, count: int) -> None:
        state.zero_()
        kernels["hops"].launch((units,), 256, (state, count, kind))

    def of_clusters(count: int) -> None:
        kernels["cluster_barriers"].launch((units // _CLUSTER * _CLUSTER,), 160, (state, count), cluster=_CLUSTER)

    found = {f"hop, {name}": each_us(lambda n, kind=kind: hop(kind, n)) for kind, name in enumerate(HOPS)}  # type: ignore[misc]
    if torch.cuda.get_device_capability()[0] >= 9:
        found[f"barrier of a cluster of {_CLUSTER}"] = each_us(of_clusters)
    launch = kernels["block_barriers"].launch
    return found | {"barrier of a block": each_us(lambda count: launch((units,), 160, (state, count)))}


def _clock_mhz(kernel: Kernel, units: int) -> float:
    out = torch.zeros(units, 4, dtype=torch.int64, device="cuda")
    for _ in range(5):
        kernel.launch((units,), 256, (out, 1 << 18))
    cycles, nanoseconds = out.sum(0).tolist()[:2]
    return 1000 * cycles / nanoseconds


def _copied() -> float:
    """Return the bytes per second that a copy reads and writes."""
    data = torch.randn(_GIBIBYTES << 28, device="cuda")
    out = torch.empty_like(data)
    return 2 * data.nbytes / _seconds(lambda: out.copy_(data))


def _rates() -> dict[str, float]:
    """Return bandwidths in bytes per second, and operations per second of a large product in bf16."""
    copied = _copied()
    a, b = (torch.randn(_PRODUCT, _PRODUCT, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    with ClockUnderLoad() as clock:
        product_s = _seconds(lambda: [torch.mm(a, b, out=out) for _ in range(20)]) / 20
    rates = {"read": read_bandwidth("cuda"), "copied": copied, "bf16_per_s": 2 * _PRODUCT**3 / product_s}
    return rates | {f"product_{name}": value for name, value in clock.medians().items()}


def main() -> int:
    """Measure, or compile."""
    device, figures = sys.argv[1], Figures()
    figures.add("environment", **describe_environment(device))
    missing = nvrtc.unavailable_reason()
    if missing is not None:
        figures.add("constants", missing=missing)
    elif device == "cpu":
        figures.add("constants", compiled_bytes=len(compile_constants("sm_90a")))
    if device == "cpu":
        return 0
    figures.add("rates", **_rates())
    if missing is None:
        code = compile_constants(nvrtc.architecture(torch.cuda.get_device_capability()))
        kernels = {name: Kernel(code, name) for name in KERNELS}
        units = torch.cuda.get_device_properties("cuda").multi_processor_count
        state = torch.zeros(32 * (units + 1), dtype=torch.int32, device="cuda")
        figures.add("boundaries", us=_boundaries(kernels, units, state))
        figures.add("barriers", us=_barriers(kernels, units, state))
        figures.add("clock", mhz=_clock_mhz(kernels["clocks"], units))
    return 0


if __name__ == "__main__":
    sys.exit(main())
