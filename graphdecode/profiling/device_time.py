"""How long steps take on a GPU, by its own clock."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

_HELD_CYCLES = 4_000_000  # some 2 ms, in which the host gets ahead of the device


def back_to_back_ms(launch: Callable[[], object], count: int, *, is_held: bool = True) -> list[float]:
    """Return the time of each of `count` steps on a GPU in ms, one launched behind the other.

    Args:
        launch: starts a step.
        count: how many.
        is_held: hold the device back until the host has launched all of them, so that each begins where the one before
            ends, and no launch is part of its time; else a step takes as long as the slower of the two.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    hold = getattr(torch.cuda, "_sleep", None)
    if is_held and hold is not None:
        hold(_HELD_CYCLES)
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]
