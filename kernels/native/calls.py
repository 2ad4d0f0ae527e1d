"""Compiled kernels over fixed memory, and lists of them that run in one call."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from .library import run_all


class NativeCall:
    """One kernel over fixed memory; calling it runs it, on as many threads as torch has in the calling thread.

    Args:
        function: the kernel.
        packed: its arguments' struct.
        held: what the struct points into.
    """

    __slots__ = ("_held", "function", "packed")

    def __init__(self, function: Any, packed: bytes, held: Sequence[Any]) -> None:
        self.function = function
        self.packed = packed
        self._held = held

    def __call__(self) -> None:
        """Run the kernel."""
        self.function(self.packed, torch.get_num_threads())


class NativeSequence:
    """Some kernels one after another, in one call.

    Args:
        calls: what to run.
    """

    __slots__ = ("_addresses", "_arguments", "_run_all", "calls")

    def __init__(self, calls: Sequence[NativeCall]) -> None:
        self.calls = tuple(calls)
        self._run_all = run_all()
        self._addresses = (ctypes.c_void_p * len(calls))(
            *(ctypes.cast(call.function, ctypes.c_void_p).value for call in calls)
        )
        self._arguments = (ctypes.c_char_p * len(calls))(*(call.packed for call in calls))

    def __call__(self) -> None:
        """Run them."""
        self._run_all(self._addresses, self._arguments, len(self.calls), torch.get_num_threads())


def joined(calls: Iterable[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Return the same calls, neighbouring compiled ones as one `NativeSequence`."""
    result: list[Callable[[], Any]] = []
    single = (part for call in calls for part in (call.calls if isinstance(call, NativeSequence) else (call,)))
    for is_native, group in groupby(single, lambda call: isinstance(call, NativeCall)):
        neighbours: list[Any] = list(group)
        result += [NativeSequence(neighbours)] if is_native else neighbours
    return result
