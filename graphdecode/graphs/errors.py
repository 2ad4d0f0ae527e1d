"""Why a step cannot be captured, and where."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_OWN_FOLDERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    str(Path(__file__).parents[2] / "kernels"),
)


class CaptureError(RuntimeError):
    """A step does what no graph can replay.

    Attributes:
        kind: the class of hazard: "host-read", "data-dependent-shape", "host-data", "undeclared-input", "torch-rng",
            "constant-written" or "failed".
        operator: the operator to blame.
        file: of the step's line to blame; None where it is not known.
        line: the line's number.
        why: what a graph would get wrong.
        remedy: what to do instead.
    """

    def __init__(self, kind: str, operator: str, why: str, remedy: str) -> None:
        self.kind = kind
        self.operator = operator
        self.why = why
        self.remedy = remedy
        self.file, self.line = caller()
        super().__init__(f"{self.file}:{self.line}: {operator}: {why}; {remedy} [{kind}]")


def caller() -> tuple[str | None, int | None]:
    """Return file and line of the innermost frame that is neither torch's nor the runtime's own."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OWN_FOLDERS) and not path.startswith("<"):
            return path, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, None
