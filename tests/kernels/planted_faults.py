"""Kernels with faults of every kind that the rules of the early start know, and one without; compiled, not run.

Run as `python planted_faults.py CACHE`: prints {kernel: what the rules say of it}. In a process of its own, for the
compiler cannot be asked where Triton's interpreter is switched on.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from step_code.compiled import Measured
from step_code.launches import Launch
from step_code.rules import early_start_faults, grid_faults


@triton.jit
def writes_x(x, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(x + tl.arange(0, BLOCK), 1.0)


@triton.jit
def sound(out, x, weight, plan, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    w = tl.load(weight + at)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    if tl.load(plan) > 0:
        tl.store(out + at, tl.load(x + at) * w)


@triton.jit
def ends_without_waiting(out, x, weight, plan, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.load(plan) <= tl.program_id(0):
        return
    tl.extra.cuda.gdc_wait()
    tl.store(out + at, tl.load(x + at))


@triton.jit
def never_waits(out, x, weight, plan, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def triggers_too_early(out, x, weight, plan, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    tl.store(out + at, tl.load(x + at))


@triton.jit
def reads_too_early(out, x, weight, plan, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.extra.cuda.gdc_wait()
    tl.store(out + at, value)


@triton.jit
def writes_too_early(out, x, weight, plan, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 0.0)
    tl.extra.cuda.gdc_wait()
    tl.store(out + at, tl.load(x + at))


def main(cache: Path) -> dict[str, list[str]]:
    """Return what the rules say."""
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    out, x, weight = (torch.empty(128) for _ in range(3))
    plan, early = torch.empty(1, dtype=torch.int32), {"launch_pdl": True}
    measured = Measured(90, cache / "figures")
    first = Launch("writes_x", "", (1,), {"x": x, "BLOCK": 128}, early, writes_x)
    said = {}
    for kernel in (sound, ends_without_waiting, never_waits, triggers_too_early, reads_too_early, writes_too_early):
        given = {"out": out, "x": x, "weight": weight, "plan": plan, "BLOCK": 128}
        second = Launch(kernel.fn.__name__, "", (1,), given, early, kernel)
        said[second.name] = list(early_start_faults(SimpleNamespace(launches=[first, second]), measured))
    said["grid"] = list(grid_faults(Launch("tall", "", (1, 65536, 1), {})))
    return said


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
