"""Compile all kernels that steps may launch, from one layer of each shape, in twelve processes, without launching.

python -m gpu_checks.warm DEVICE [SHAPE ROWS EVERY OF]      one: every so-many-th candidate, from the OF-th on
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.models import runner_of, shape_of
from gpu_checks.plan import SHAPES_OF_STEPS
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, candidates, small_linear
from graphdecode.linear import linear_choice
from graphdecode.linear.small_linear_timing import FusedForm

CONTEXT = 512
SHARES = (("1", "2", "0"), ("1", "2", "1"), ("8", "1", "0"), ("64", "1", "0"))  # rows, and a share of their candidates


def compiled_first(
    share: tuple[int, int], weight: Tensor, bias: Tensor | None, rows: int, clock: Any, fused: FusedForm
) -> tuple[SmallLinearConfig | None, dict[str, float]]:
    """Replace the tuning: call a share of the candidates, and choose the first."""
    out_features, in_features = weight.shape
    found = candidates(out_features, in_features, weight.element_size(), rows, clock.units, fused.is_normed)
    configs = [config._replace(pdl=clock.has_pdl and fused.starts_early(rows)) for config in found]
    x = weight.new_empty(rows, in_features)
    out = weight.new_empty(rows, out_features // 2 if fused.is_gated else out_features)
    gain = torch.empty(in_features, device=weight.device) if fused.is_normed else None
    for config in configs[share[1] :: share[0]]:
        counters = torch.zeros(max(config.counters(rows, out_features), 1), dtype=torch.int32, device=weight.device)
        small_linear(out, x, weight, bias, counters, config, gain=gain, eps=1e-5, epilogue=fused.epilogue)
    return configs[0], {"plain": 1.0, str(configs[0]): 1.0}


def compile_all(device: str) -> int:
    """Start a process for each share, and return how many failed."""
    command = [sys.executable, "-m", "gpu_checks.warm", device]
    started = [subprocess.Popen([*command, name, *share]) for name in SHAPES_OF_STEPS for share in SHARES]
    return sum(process.wait() != 0 for process in started)


def main() -> int:
    """Compile one share, or start all processes."""
    device, *one = sys.argv[1:]
    if device == "cpu":  # a CPU compiles nothing
        return 0
    if not one:
        return compile_all(device)
    from triton.runtime.jit import JITFunction

    name, (rows, every, of) = one[0], map(int, one[1:])

    launch = JITFunction.run

    def compile_alone(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    with (
        mock.patch.object(JITFunction, "run", compile_alone),
        mock.patch.object(linear_choice, "fastest_product", partial(compiled_first, (every, of))),
        mock.patch.object(linear_choice.ChoiceCache, "put", return_value=None),
        mock.patch.object(linear_choice.ChoiceCache, "get", return_value=None),
    ):
        runner = runner_of(shape_of(name, layers=1), (rows,), CONTEXT, device)
        runner.graphs.run_eager(rows)
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
