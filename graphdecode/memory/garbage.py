"""Python's cyclic garbage collector, kept away from torch's objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would scan all of torch's objects several times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def collector_spared() -> Iterator[None]:
    """Keep the collector from what is loaded by now: a scan of it would take as long as several steps."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
