"""Why a step cannot be captured, and where."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from graphdecode import buffers
from graphdecode.errors import GraphdecodeError


def _folders_of(package: str) -> Iterator[str]:
    """Yield the folders of a package, with links as they are and resolved."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from {os.path.join(folder, ""), os.path.join(os.path.realpath(folder), "")}


_NOT_THE_STEPS = ("torch", "triton", "graphdecode.graphs", "graphdecode.kernels")
_INTERNAL_FOLDERS = tuple(folder for package in _NOT_THE_STEPS for folder in _folders_of(package))
_INTERNAL_FILES = (buffers.__file__, os.path.realpath(buffers.__file__))  # raises for missing slots
# frames of these are above those of a registered operator's implementation
_DISPATCH_FILES = tuple(
    os.path.join(folder, part) for folder in _folders_of("torch") for part in ("_ops.py", "_library" + os.sep)
)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep

# kind of hazard -> (what a graph would get wrong, what to do instead)
HAZARDS = {
    "host-read": (
        "the step reads device memory on the host, which is not replayed: a graph would keep the value of the capture",
        "keep the value on the device and compute with it there (torch.where, a mask, a kernel)",
    ),
    "data-dependent-shape": (
        "the shape of the result depends on the data, and a graph has fixed shapes",
        "work on the whole capacity with a mask (torch.where)",
    ),
    "host-data": (
        "the step makes a tensor from host data: a graph would replay a copy of what the host held at capture",
        "declare a slot or a constant and write it before the replay, or use a torch factory such as full",
    ),
    "opaque-memory": (
        "the step makes a tensor that is more than its storage, sizes and strides (sparse, nested, quantized, packed): "
        "a graph would keep the values of the capture",
        "make it before the capture and pass it in constants; in the step, compute with dense tensors",
    ),
    "undeclared-input": (
        "the step reads a tensor that is neither a slot nor a constant nor made in the step: a graph would still read "
        "its address after it was freed or replaced",
        "declare it as a Slot, adopt it into the buffers, or pass it in constants",
    ),
    "constant-written": (
        "the step writes into a constant, which other graphs and steps read",
        "declare it as a slot, or adopt it into the buffers",
    ),
    "torch-rng": (
        "torch's generator is advanced by the host: a replay would not draw what an eager step draws",
        "use a counter-based generator that reads its seed and position from slots",
    ),
    "moved": (
        "the step changes the memory of a tensor, or the tensor of a slot: a graph would still use the old memory",
        "allocate at full capacity, and change the contents in place with copy_",
    ),
    "raw-pointer": (
        "the step takes a tensor's address: its use can be neither recorded nor checked",
        "do it in an operator registered with torch.library, with the tensors that it writes in mutates_args",
    ),
    "baked-value": (
        "the step differs from one run to the next: a graph would repeat what it did at capture",
        "put the value that changes into a slot, and read it on the device",
    ),
    "mixed-rows": (
        "the result depends on rows past the live ones; in a padded bucket these have any contents",
        "keep rows independent, or mask the others: torch.where(torch.arange(rows, device=...) < live_rows, ..., 0)",
    ),
    "unseen-work": (
        "no operator in the step's thread did this work: a graph would not contain it",
        "do all work in the thread that calls the step, and on a GPU on its stream",
    ),
    "lost-result": (
        "the step's result is in no slot: a replay gives nothing back, and its own tensors are overwritten",
        "write the result into a slot with copy_, or into an adopted tensor",
    ),
    "unregistered-launch": (
        "a Triton kernel is launched outside of any registered operator: it can be neither recorded nor checked",
        "register it with torch.library, with the tensors that it writes in mutates_args",
    ),
    "failed": ("the step or its capture raised an error", "see the error"),
}


class CaptureError(GraphdecodeError, RuntimeError):
    """No graph can replay a step: `reason`, what to do instead (`remedy`), and `file` and `line` if known."""

    def __init__(
        self, kind: str, operator: str, detail: str = "", location: tuple[str | None, int | None] | None = None
    ) -> None:
        self.kind, self.operator = kind, operator
        self.reason, self.remedy = HAZARDS[kind]
        if detail:
            self.reason = f"{self.reason} ({detail})"
        self.file, self.line = caller() if location is None else location
        where = f"{self.file}:{self.line}: " if self.file else ""
        super().__init__(f"{where}{operator}: {self.reason}; {self.remedy} [{kind}]")

    @classmethod
    def of(
        cls, error: BaseException, operator: str | None = None, location: tuple[str | None, int | None] | None = None
    ) -> CaptureError:
        """Wrap an error that the step raised, with the last operator, and the step's innermost line or `location`."""
        message = str(error).partition("\n")[0]
        detail = f"{type(error).__name__}: {message}" if message else type(error).__name__
        return cls("failed", operator or type(error).__name__, detail, location or raised_at(error.__traceback__))


Refuse = Callable[[CaptureError], None]


@functools.cache
def _is_internal(path: str) -> bool:
    is_librarys = path.startswith(_STANDARD_LIBRARY) and "-packages" not in path
    return is_librarys or path.startswith((*_INTERNAL_FOLDERS, *_INTERNAL_FILES, "<frozen"))


def caller() -> tuple[str | None, int | None]:
    """Return file and line of the innermost frame that is neither torch's, Triton's, Python's nor the runtime's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return (None, None) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def raised_at(trace: TracebackType | None) -> tuple[str | None, int | None]:
    """Return file and line of the innermost frame of a traceback that is the step's own; see `caller`."""
    location: tuple[str | None, int | None] = (None, None)
    for frame, line in traceback.walk_tb(trace):
        path = frame.f_code.co_filename
        if path.startswith(_DISPATCH_FILES) and location != (None, None):
            break
        if not _is_internal(path):
            location = (path, line)
    return location


def definition_of(step: Any) -> tuple[str | None, int | None]:
    """Return file and line where a step is defined, if it is Python; decorators and `functools.partial` are undone."""
    while (inner := getattr(step, "__wrapped__", None) or getattr(step, "func", None)) is not None:
        step = inner
    function = step if hasattr(step, "__code__") else vars(type(step)).get("__call__")
    code = getattr(function, "__code__", None)
    return (None, None) if code is None else (code.co_filename, code.co_firstlineno)
