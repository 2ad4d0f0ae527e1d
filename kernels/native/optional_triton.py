"""Triton, or a stand-in for its decorators if no kernel can be launched.

Triton has wheels only for Linux, and its import takes 70 MB and a sixth of a second. With a torch built without CUDA
the torch versions of operators are used, but the kernels' source must still import: the stand-in leaves `@triton.jit`
functions plain, and they are never launched. To interpret kernels, or compile them for an absent GPU, set
TRITON_INTERPRET or import Triton first.

Programmatic dependent launch: a kernel may start before the previous one ends. With `launch_pdl=True` it first reads
constants, then waits with `gdc_wait` for the previous kernel's writes, and then allows the next kernel to start with
`gdc_launch_dependents`. Two rules keep a chain of such kernels correct:

- Wait, then trigger. After the wait the previous kernel has ended; so when a kernel starts early, all but the previous
  kernel have ended, and their results may be read without a wait.
  CUDA C++ products (`kernels/cuda/`) trigger first: behind them only what came before the last kernel that waited first
  has ended. So they read constants alone before their wait, and attention, which reads pages, waits first.
- Every path through a kernel waits, also early returns: a program that ends without waiting would let the next kernel
  start before the previous one has ended.
"""

import functools
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

_NEEDS_TRITON = torch.backends.cuda.is_built() or os.environ.get("TRITON_INTERPRET") == "1" or "triton" in sys.modules

try:
    if not _NEEDS_TRITON:
        raise ImportError("nothing here launches a kernel")  # as without Triton
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
    """Whether the device supports programmatic dependent launch: NVIDIA GPUs from sm_90 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def early_start_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel with the flag `PDL`, for an early start if supported."""
    return {"PDL": True, "launch_pdl": True} if has_early_start(device) else {"PDL": False}


@triton.jit
def prefetch(addresses, mask):
    """Prefetch the 128-byte line at each masked address into the L2 cache.

    A tensor with fewer elements than threads is replicated, and each thread would prefetch.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s64 p, $1, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [tl.where(mask, addresses.to(tl.int64), 0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_and_trigger():
    """Wait for the previous kernel, and let the next one start."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
