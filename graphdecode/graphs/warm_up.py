"""Runs of a step before its capture: they name hazards, and get done what happens only once."""

from __future__ import annotations

from collections.abc import Callable

from graphdecode.buffers import Batch
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.observer import StepObserver, observed
from graphdecode.graphs.owners import Owners


def warm_up(step: Callable[[Batch], None], batch: Batch, owners: Owners, num_steps: int) -> None:
    """Run a step under observation.

    What it makes in its first run and keeps in some Python object has no owner in the second, and is refused: a graph
    would go on pointing at it.

    Raises:
        CaptureError: the step does what no graph can replay, or raised an error.
    """
    observer = StepObserver(owners)
    try:
        for _ in range(num_steps):
            observer.made.clear()
            with observed(observer, batch) as watched:
                step(watched)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError.of(error, observer.last_operator) from error
