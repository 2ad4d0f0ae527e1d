"""A step's programs in order: of every kernel its begin and end, of those in CUDA C++ also each block's multiprocessor.

python -m gpu_checks.traces DEVICE FOLDER SHAPE[:QUANTIZE],... ROWS,...      known figures are not measured again

Every block writes its place and times (in ns, by the device's global timer) when it ends. All of them are in FOLDER as
`trace-SHAPE-ROWS.npz`; the figures are those of the layer in the middle.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.figures import Figures
from gpu_checks.models import runner_of, shape_of
from gpu_checks.steps import spans_of
from graphdecode.buckets import StepShape
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.kernels.cuda import launch, nvrtc
from graphdecode.kernels.cuda.launch import Kernel
from graphdecode.profiling.latency import rows_at

CONTEXT = 512
_BLOCKS = 1 << 21  # of all launches while a step is warmed up and captured
_FIELDS = 3  # multiprocessor, begin, end
_DECLARED = re.compile(r"KERNEL\(([^)]*)\)\s*(\w+)\((.*?)\)\s*\{", re.DOTALL)
_TRACED = """
KERNEL({bounds})
traced({parameters}, u64 *trace) {{
  u64 begin, end;
  u32 processor;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
  {name}({names});
  block_barrier();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end)::"memory");
  asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
  if (thread_index() == 0) {{
    u64 *const own = trace + 3 * (block_index() + block_index_y() * (u64)block_count());
    own[0] = processor, own[1] = begin, own[2] = end;
  }}
}}
"""


def traced_source(text: str) -> str:
    """Return a source whose kernel, `traced`, also writes where and when each block ran; it has one kernel."""
    ((bounds, name, parameters),) = _DECLARED.findall(text)
    names = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters))
    device = _DECLARED.sub(rf"DEVICE void {name}({parameters}) {{", text)
    return device + _TRACED.format(bounds=bounds, parameters=parameters, name=name, names=names)


def compile_traced(source: str, defines: nvrtc.Defines, arch: str) -> bytes:
    """Return the machine code of a traced source of `kernels/cuda`."""
    headers = {file.name: file.read_text() for file in nvrtc.FOLDER.glob("*.cuh")}
    options = ["--std=c++17", f"--gpu-architecture={arch}", *(f"-D{name}={value}" for name, value in defines.items())]
    return nvrtc.compile_sources({source: traced_source((nvrtc.FOLDER / source).read_text())} | headers, options)


class Launched(NamedTuple):
    """A launch that was traced: its kernel, and where its blocks write."""

    name: str
    first: int
    blocks: int


class Tracer:
    """Loads traced kernels in the place of the others, and notes the launches of a capture."""

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self._records = torch.zeros(_BLOCKS, _FIELDS, dtype=torch.int64, device="cuda")
        self._used = 0
        self._kernels: dict[Any, Kernel] = {}

    def loaded(self, source: str, name: str, defines: tuple[tuple[str, int | str], ...], device: int) -> _Traced:
        """Return a traced kernel; see `launch.loaded`."""
        key = source, defines
        if key not in self._kernels:
            arch = nvrtc.architecture(torch.cuda.get_device_capability(device))
            self._kernels[key] = Kernel(compile_traced(source, dict(defines), arch), "traced")
        return _Traced(self._kernels[key], name, self)

    def place(self, name: str, blocks: int) -> torch.Tensor:
        """Return where the blocks of a launch write."""
        first, self._used = self._used, self._used + blocks
        if self._used > _BLOCKS:
            raise RuntimeError(f"{_BLOCKS} blocks were launched; more cannot be traced")
        if torch.cuda.is_current_stream_capturing():
            self.launches.append(Launched(name, first, blocks))
        return self._records[first:]

    def records(self) -> list[np.ndarray]:
        """Return the records of the captured launches, int64 [blocks, 3] each, in order."""
        whole = self._records.cpu().numpy()
        return [whole[each.first : each.first + each.blocks] for each in self.launches]


class _Traced:
    def __init__(self, kernel: Kernel, name: str, tracer: Tracer) -> None:
        self._kernel, self._name, self._tracer = kernel, name, tracer

    def launch(self, grid: tuple[int, ...], threads: int, arguments: Sequence[Any], **options: Any) -> None:
        """Launch; see `Kernel.launch`."""
        blocks = int(np.prod(grid))
        if blocks:
            self._kernel.launch(grid, threads, (*arguments, self._tracer.place(self._name, blocks)), **options)


@contextmanager
def tracing() -> Iterator[Tracer]:
    """Let steps that are captured inside write where and when their blocks ran; their kernels are chosen before."""
    tracer, loaded = Tracer(), launch.loaded
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "loaded", None) is loaded:
                stack.enter_context(mock.patch.object(module, "loaded", tracer.loaded))
        yield tracer


def summary(name: str, records: np.ndarray, origin: int) -> dict[str, Any]:
    """Return the times of a launch's blocks in us after an origin, and how evenly they came to lie."""
    processors, begins, ends = records.T
    of_processor = np.bincount(processors)
    used = of_processor[of_processor > 0]
    taken = (ends - begins) / 1000
    return {
        "kernel": name,
        "blocks": len(records),
        "first_begin": float(begins.min() - origin) / 1000,
        "last_begin": float(begins.max() - origin) / 1000,
        "first_end": float(ends.min() - origin) / 1000,
        "last_end": float(ends.max() - origin) / 1000,
        "block_us": float(np.median(taken)),
        "processors": len(used),
        "most_of_one": int(used.max()),
        "fewest_of_one": int(used.min()),
    }


def trace(runner: Runner, rows: int, layers: int, file: Path) -> dict[str, Any]:
    """Trace one replay of a runner that is not captured yet; return the figures of the layer in the middle."""
    with tracing() as tracer, rows_at(runner, rows, CONTEXT) as staged:
        runner.graphs.capture(progress=False)
        for _ in range(3):
            runner.stage(staged)
            runner.launch(LaunchPlan(StepShape(rows)))
        torch.cuda.synchronize()
        records = tracer.records()
        spans = spans_of(runner, staged)
    names = [launched.name for launched in tracer.launches]
    arrays = {f"{place:04d} {name}": found for place, (name, found) in enumerate(zip(names, records, strict=True))}
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    in_layer = len(names) // layers
    if not in_layer:
        return {"programs": "no kernel of the step is in CUDA C++", "spans": spans}
    begin = layers // 2 * in_layer
    part = slice(begin, begin + in_layer)
    origin = int(records[begin][:, 1].min())
    programs = [summary(name, found, origin) for name, found in zip(names[part], records[part], strict=True)]
    return {"programs": programs, "spans": spans}


def main() -> None:
    """Trace the arguments' steps."""
    device, folder, names, rows = sys.argv[1:]
    figures = Figures()
    for name in names.split(","):
        plain, _, quantize = name.partition(":")
        shape = shape_of(plain, layers=4, is_small=device != "cuda")
        for count in map(int, rows.split(",")):
            key = f"trace {name}, batch {count}, context {CONTEXT}"
            if key in figures:
                continue
            runner = runner_of(shape, (count,), CONTEXT, device, quantize or None)
            if device == "cuda":
                layers = runner.model.config.num_hidden_layers
                file = Path(folder) / f"trace-{name.replace(':', '-')}-{count}.npz"
                figures.add(key, **trace(runner, count, layers, file))
            else:
                runner.graphs.capture(progress=False)
                with rows_at(runner, count, 1) as staged:
                    figures.add(key, spans=len(spans_of(runner, staged)))
            runner.close()


if __name__ == "__main__":
    main()
