"""Checks kernels that start early, over a whole step, and the grids and arguments of all kernels.

Before its wait, a kernel that starts early may run at the same time as the previous kernel, but not as earlier ones,
for which the previous kernel has waited on every path. So until then it must not read what the previous kernel writes,
and must not write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from step_code.figures import Figures
from step_code.launches import Launch, RecordedStep, spread, storage_of

# the cache is written at new tokens, and read early at old ones
_READ_ELSEWHERE = frozenset({"cache.k_cache", "cache.v_cache"})
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)


def early_start_faults(step: RecordedStep, figures: Callable[[Launch], Figures | None]) -> Iterator[str]:
    """Yield violations of the rules for an early start."""
    before: tuple[Launch, Figures | None] | None = None
    for place, launch in enumerate(step.launches):
        own = figures(launch)
        if own is not None and launch.starts_early:
            for fault in _faults(launch, own, before):
                yield f"launch {place}, {launch.name} of {launch.operator}: {fault}"
        before = launch, own


def _faults(launch: Launch, own: Figures, before: tuple[Launch, Figures | None] | None) -> Iterator[str]:
    if not own.waits_always:
        yield "may end without a wait" if own.waits else "starts early and never waits"
    if own.triggers and not own.triggers_late:
        yield "lets the next kernel start before its own wait"
    if own.early_stores:
        yield "writes before its wait"
    if before is not None:
        written = _written(*before)
        given = spread(launch.arguments)
        for name in own.early_loads:
            value = given[name]
            if name not in _READ_ELSEWHERE and isinstance(value, Tensor) and storage_of(value) in written:
                yield f"reads {name} before its wait for {before[0].name}, which writes it"


def _written(launch: Launch, figures: Figures | None) -> set[int]:
    """Return the storages that a launch writes; for a library's kernel, those of all arguments."""
    given = spread(launch.arguments)
    values = [given[name] for name in (given if figures is None else figures.written)]
    return {storage_of(value) for value in values if isinstance(value, Tensor)}


def grid_faults(launch: Launch) -> Iterator[str]:
    """Yield errors of a launch's grid."""
    if any(size < 1 for size in launch.grid):
        yield f"{launch.name} has the empty grid {launch.grid}"
    for axis, (size, most) in enumerate(zip(launch.grid, _MOST_PROGRAMS, strict=False)):
        if size > most:
            yield f"{launch.name} of {launch.operator} has {size} programs on axis {'xyz'[axis]}, {most} are possible"
