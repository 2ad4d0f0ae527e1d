"""Triton where a kernel can be launched, and a stand-in for its decorators where none can.

Triton has wheels for Linux alone, and its import takes 70 MB and a sixth of a second, which a torch that was built
without CUDA has no use for. There the torch versions of all operators work, and the kernels' source must still import:
the stand-in keeps `@triton.jit` functions as plain functions, which nothing ever launches. Whoever interprets kernels,
or compiles them for a GPU that is not there, has set TRITON_INTERPRET or imported Triton before.

A kernel may begin while the one before it still runs, and wait where it must: programmatic dependent launch. One that
begins early (`launch_pdl=True`) reads what nobody writes, then waits with `gdc_wait` for all that the kernel before it
wrote, and then says with `gdc_launch_dependents` that the kernel behind it may begin. Two rules keep a chain of such
kernels right:

- Wait, then trigger. Whoever waits knows that the kernel before has ended; so when a kernel begins early, all but the
  one before it have ended, and what they wrote may be read without a wait.
- Every path through a kernel waits, early returns too: a program that ends without would let the kernel behind begin
  before the one before has ended.
"""

import functools
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

_IS_WANTED = torch.backends.cuda.is_built() or os.environ.get("TRITON_INTERPRET") == "1" or "triton" in sys.modules

try:
    if not _IS_WANTED:
        raise ImportError("nothing here launches a kernel")  # as where there is no Triton
    import triton
    import triton.language as tl
except ImportError:
    triton: Any = SimpleNamespace(  # type: ignore[no-redef]
        jit=lambda function=None, **_: function if function is not None else (lambda inner: inner),
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length(),
    )
    tl: Any = SimpleNamespace(constexpr=None)  # type: ignore[no-redef]


@functools.cache
def has_early_start(device: torch.device) -> bool:
    """Whether kernels can begin early on this device: NVIDIA GPUs from sm_90 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def early_start_options(device: torch.device) -> dict[str, bool]:
    """Return what the launch of a kernel with the flag `PDL` is given, for it to begin early where that is possible."""
    return {"PDL": True, "launch_pdl": True} if has_early_start(device) else {"PDL": False}


@triton.jit
def prefetch(places, is_wanted):
    """Ask for the line of 128 bytes at each place to be in the L2 cache, where it is wanted; nobody waits for it.

    A tensor with fewer elements than the program has threads is held by several of them, and each would ask.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s64 p, $1, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [tl.where(is_wanted, places.to(tl.int64), 0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_and_trigger():
    """Wait for the kernel before, and let the one behind begin."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
