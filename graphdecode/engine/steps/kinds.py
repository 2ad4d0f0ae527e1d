"""The kinds of step that came in from outside, by name: `[model] step_kind` asks for one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from graphdecode.engine.steps.step import Step, StepSetting
from graphdecode.errors import ArgumentError, shown
from graphdecode.extensions import EntryPoints, refuse_taken

StepMaker: TypeAlias = Callable[[StepSetting], Step]

STEPS: dict[str, StepMaker] = {}  # filled while files are imported, and then read


def register_step(name: str, make: StepMaker, *, replace: bool = False) -> None:
    """Let engines run another kind of step.

    Args:
        name: that settings ask for it by.
        make: its class.
        replace: take the place of the step of that name.

    Raises:
        ArgumentError: the name is taken.
    """
    refuse_taken("a step", name, name in STEPS, replace)
    STEPS[name] = make


_OUTSIDE = EntryPoints("graphdecode.steps", register_step, STEPS)


def step_named(name: str) -> StepMaker:
    """Return what makes the steps of a kind.

    Raises:
        ArgumentError: it is not known.
    """
    _OUTSIDE.find()
    if name not in STEPS:
        known = ", ".join(STEPS) or "none: they come with packages or load_modules"
        raise ArgumentError(f"step_kind {shown(name, plain=True)} is not registered; registered are {known}")
    return STEPS[name]
