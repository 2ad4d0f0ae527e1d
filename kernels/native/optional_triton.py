"""Triton where it is installed, and a stand-in for its decorators where it is not.

Triton has wheels for Linux alone. On other systems the torch versions of all operators work, and the
kernels' source must still import: the stand-in keeps `@triton.jit` functions as plain functions, which
nothing ever launches there.
"""

from types import SimpleNamespace
from typing import Any

try:
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
