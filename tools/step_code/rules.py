"""What must hold of kernels that begin early, over a whole step; and of the grids and arguments of all of them.

A kernel that begins early may run beside the one before it until it has waited, and that one has waited for all that
came earlier, on every path: so it may have read anything but what the kernel just before it writes, and written
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from step_code.figures import Figures
from step_code.launches import Launch, RecordedStep, spread, storage_of

# a cache is written at the new tokens and read early at the old ones
_READ_ELSEWHERE = frozenset({"cache.k_cache", "cache.v_cache"})
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)


def early_start_faults(step: RecordedStep, figures: Callable[[Launch], Figures | None]) -> Iterator[str]:
    """Say which launches break a rule of the early start, and how."""
    before: tuple[Launch, Figures | None] | None = None
    for place, launch in enumerate(step.launches):
        own = figures(launch)
        if own is not None and launch.starts_early:
            for fault in _faults(launch, own, before):
                yield f"launch {place}, {launch.name} of {launch.operator}: {fault}"
        before = launch, own


def _faults(launch: Launch, own: Figures, before: tuple[Launch, Figures | None] | None) -> Iterator[str]:
    if not own.waits_always:
        yield "may end without having waited" if own.waits else "begins early and never waits"
    if own.triggers and not own.triggers_late:
        yield "lets the next kernel begin before it has waited"
    if own.early_stores:
        yield "writes before it has waited"
    if before is not None:
        written = _written(*before)
        given = spread(launch.arguments)
        for name in own.early_loads:
            value = given[name]
            if name not in _READ_ELSEWHERE and isinstance(value, Tensor) and storage_of(value) in written:
                yield f"reads {name} before it has waited for {before[0].name}, which writes it"


def _written(launch: Launch, figures: Figures | None) -> set[int]:
    """Return the storages that a launch writes; of one that is not ours, all that it is given."""
    given = spread(launch.arguments)
    values = [given[name] for name in (given if figures is None else figures.written)]
    return {storage_of(value) for value in values if isinstance(value, Tensor)}


def grid_faults(launch: Launch) -> Iterator[str]:
    """Say what is wrong with a launch's grid."""
    if any(size < 1 for size in launch.grid):
        yield f"{launch.name} has the empty grid {launch.grid}"
    for axis, (size, most) in enumerate(zip(launch.grid, _MOST_PROGRAMS, strict=False)):
        if size > most:
            yield f"{launch.name} of {launch.operator} has {size} programs on axis {'xyz'[axis]}, {most} are possible"
