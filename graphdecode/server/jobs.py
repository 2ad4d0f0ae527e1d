"""Jobs of the pool of child processes, their limits and results, as client and fork server exchange them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from graphdecode.errors import GraphdecodeError

STACK_BYTES = 4 << 20  # stack of a child; the engine's process has a larger one for the same grammar


class JobLimits(NamedTuple):
    """Limits of a job."""

    cpu_seconds: int
    wall_seconds: float
    memory_bytes: int  # beyond the memory of the fork server


class Job(NamedTuple):
    """A call `function(state, *arguments)`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    limits: JobLimits


class JobResult(NamedTuple):
    """Result of a job, or what it raised."""

    result: Any = None
    error: GraphdecodeError | None = None  # for its caller
    fault: str | None = None  # the traceback of any other exception, for the log


class Accepted(NamedTuple):
    """The fork server has a job; its child answers next."""


class ChildExited(NamedTuple):
    """The child ended without a result."""

    code: int | None  # exit code; below 0: minus a signal; None: it could not be forked


class JobError(GraphdecodeError):
    """A job exceeded its limit of CPU time, memory or stack."""


class CpuTimeError(JobError):
    """A job exceeded its CPU time."""
