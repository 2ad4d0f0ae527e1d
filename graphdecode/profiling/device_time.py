"""How long steps take on their device: by events on a GPU, by the clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

_HELD_CYCLES = 4_000_000  # some 2 ms, in which the host gets ahead of the device


class DeviceTimer:
    """Times what is launched inside it; on a GPU that is idle before, the time of the launch is part of it."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def __enter__(self) -> DeviceTimer:
        if self._events is not None:
            self._events[0].record()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def milliseconds(self) -> float:
        """Return the time, once the device is done."""
        if self._events is None:
            return 1000 * (self._ended - self._began)
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1])


def back_to_back_ms(launch: Callable[[], object], count: int) -> list[float]:
    """Return the time of each of `count` steps on a GPU in ms, without that of their launches.

    The device is held back until the host has launched all of them, so that each begins where the one before ends.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    hold = getattr(torch.cuda, "_sleep", None)
    if hold is not None:
        hold(_HELD_CYCLES)
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]
