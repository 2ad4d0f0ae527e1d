"""Sees Triton kernels that are launched outside of any operator, where nothing else would."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graphdecode.graphs.errors import CaptureError


def _kernel_classes() -> tuple[Any, ...]:
    """Return what a kernel can be; where nobody has imported Triton there is none to launch."""
    if "triton" not in sys.modules:
        return ()
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return JITFunction, InterpretedFunction


@contextmanager
def launches_watched(in_operator: Callable[[], bool], refuse: Callable[[CaptureError], None]) -> Iterator[None]:
    """Refuse the kernels that this thread launches while no operator is running.

    Args:
        in_operator: says whether an operator is running.
        refuse: what to do with a launch.
    """
    originals = [(kernel_class, kernel_class.run) for kernel_class in _kernel_classes()]
    watched_thread = threading.get_ident()

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == watched_thread and not in_operator():
                refuse(CaptureError("unregistered-launch", getattr(kernel, "__name__", "triton kernel")))
                return None
            return original(kernel, *args, **kwargs)

        return run

    try:
        for kernel_class, original in originals:
            kernel_class.run = watched(original)
        yield
    finally:
        for kernel_class, original in originals:
            kernel_class.run = original
