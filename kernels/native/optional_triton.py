"""Triton where a kernel can be launched, and a stand-in for its decorators where none can.

Triton has wheels for Linux alone, and its import takes 70 MB and a sixth of a second, which a torch that was built
without CUDA has no use for. There the torch versions of all operators work, and the kernels' source must still import:
the stand-in keeps `@triton.jit` functions as plain functions, which nothing ever launches. Whoever interprets kernels,
or compiles them for a GPU that is not there, has set TRITON_INTERPRET or imported Triton before.
"""

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

__all__ = ["tl", "triton"]
