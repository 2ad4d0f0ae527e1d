"""Why a step cannot be captured, and where."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_KERNELS = (_HERE.parent / "kernels", _HERE.parents[1] / "kernels")
_TORCH = Path(torch.__file__).parent
_OWN_FOLDERS = tuple(str(folder) for folder in (_TORCH, _TORCH.parent / "triton", _HERE, *_KERNELS))

# kind of hazard -> (what a graph would get wrong, what to do instead)
HAZARDS = {
    "host-read": (
        "the step reads device memory on the host, where nothing is replayed: the value at capture would stay for ever",
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
    "undeclared-input": (
        "the step reads a tensor that is no slot, no constant and not made in the step: a graph would go on reading "
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
        "the step gives a tensor other memory, or a slot another tensor: a graph goes on using the old",
        "allocate at full capacity, and change the contents in place with copy_",
    ),
    "baked-value": (
        "the step does something else the next time: a graph would repeat what it did at capture",
        "put what changes into a slot, and read it on the device",
    ),
    "unregistered-launch": (
        "a Triton kernel is launched outside of any registered operator: it can be neither recorded nor checked",
        "register it with torch.library, with the tensors that it writes in mutates_args",
    ),
    "failed": ("the step or its capture raised an error", "see the error"),
}


class CaptureError(RuntimeError):
    """A step does what no graph can replay.

    Args:
        kind: of the hazard, a key of `HAZARDS`.
        operator: the operator to blame.
        detail: what is particular to this case.

    Attributes:
        file: of the step's line to blame; None where it is not known.
        line: the line's number.
        why: what a graph would get wrong.
        remedy: what to do instead.
    """

    def __init__(self, kind: str, operator: str, detail: str = "") -> None:
        self.kind = kind
        self.operator = operator
        self.why, self.remedy = HAZARDS[kind]
        if detail:
            self.why = f"{self.why} ({detail})"
        self.file, self.line = caller()
        super().__init__(f"{self.file}:{self.line}: {operator}: {self.why}; {self.remedy} [{kind}]")


def caller() -> tuple[str | None, int | None]:
    """Return file and line of the innermost frame that is neither torch's nor the runtime's own."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OWN_FOLDERS) and not path.startswith("<frozen"):
            return path, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, None
