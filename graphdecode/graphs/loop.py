"""Several steps in one launch: what such a loop is governed by, and the loops that the host runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphdecode.buffers import LIVE_ROWS, Batch, StepBuffers
from graphdecode.errors import ArgumentError
from graphdecode.graphs.step_graph import StepGraph


@dataclass(frozen=True)
class Loop:
    """How steps follow one another in one launch.

    The loop runs the step, and runs it again while fewer than `limit` steps ran and any row is running. All of this is
    read from slots on the device: neither another number of steps nor another membership needs another capture.

    Attributes:
        max_steps: steps that a launch may be asked for at most.
        running: a slot, int32 [1]: the step writes how many rows go on; none ends the loop.
        limit: a slot, int32 [1]: steps that the launch was asked for; the manager writes it when that changes.
        count: a slot, int32 [1]: steps that ran in the last launch. Where the device cannot end a loop early, all.
        epilogue: runs once behind the steps of a launch, over the same batch, and is captured like the step; may be
            None.
    """

    max_steps: int
    running: str = "running"
    limit: str = "loop_limit"
    count: str = "loop_count"
    epilogue: Callable[[Batch], None] | None = None


class LoopControl:
    """The slots of a loop, where they are in memory.

    Args:
        loop: names them.
        buffers: hold them.

    Raises:
        ValueError: `max_steps` is less than 1, or a slot is missing, used twice, of another shape or dtype, or staged
            where the loop's own writes would be overwritten.
    """

    def __init__(self, loop: Loop, buffers: StepBuffers) -> None:
        if loop.max_steps < 1:
            raise ArgumentError(f"max_steps of a loop must be >= 1, got {loop.max_steps}")
        names = (loop.running, loop.limit, loop.count)
        if len(set(names)) < len(names):
            raise ArgumentError(f"running, limit and count of a loop must be three slots, got {names}")
        for name in names:
            slot = buffers.slots.get(name)
            if slot is None or slot.dtype != torch.int32 or tuple(slot.shape) != (1,) or slot.staged is not None:
                raise ArgumentError(f"a loop needs {name!r} to be an unstaged slot of shape (1,) and int32, got {slot}")
        self.loop = loop
        self.running, self.limit, self.count = (buffers.tensors[name] for name in names)
        self.live_rows = buffers.tensors[LIVE_ROWS]
        self._asked_for = 0
        self.ask_for(loop.max_steps)

    def ask_for(self, num_steps: int) -> None:
        """Set the steps of the launches to come; costs nothing while the number stays the same."""
        if num_steps != self._asked_for:
            self.limit.fill_(num_steps)
            self._asked_for = num_steps

    def count_all(self) -> None:
        """Count all steps that were asked for as run."""
        self.count.copy_(self.limit)


class StepLoop(ABC):
    """One bucket's steps, several to a launch.

    Args:
        control: the slots.
        step: runs one step.
        epilogue: runs behind the last, or None.

    Attributes:
        kind: "while" (the device runs the loop), "unrolled" (a graph of as many steps), "host" (the host runs it over
            memory that it can read), or "single" (a launch for each step).
        reason: why it is none of those named before; None where there is nothing to explain.
    """

    kind: str
    reason: str | None = None

    def __init__(self, control: LoopControl, step: Callable[[], None], epilogue: Callable[[], None] | None) -> None:
        self._control = control
        self._step = step
        self._epilogue = epilogue

    @abstractmethod
    def launch(self, num_steps: int) -> int:
        """Run that many steps, or fewer where the loop can end early, and the epilogue.

        Returns how many steps ran; 0 where the device decides that, and counts them.
        """

    def counted(self) -> tuple[int, int]:
        """Return the steps that the device counted in all launches, and the live rows of these steps, summed."""
        return 0, 0

    def close(self) -> None:  # noqa: B027 (only graphs hold something)
        """Release what the loop holds."""


class HostLoop(StepLoop):
    """The loop of a device whose memory the host reads: the same slots decide, step by step."""

    kind = "host"

    def launch(self, num_steps: int) -> int:
        """Run the steps; how many is read from the slot, as a device would."""
        control = self._control
        count, limit, running = (tensor.numpy() for tensor in (control.count, control.limit, control.running))
        ran = count[0] = 0
        while not ran or (ran < limit[0] and running[0] > 0):
            self._step()
            ran += 1
            count[0] = ran
        if self._epilogue is not None:
            self._epilogue()
        return ran


class SingleLaunches(StepLoop):
    """No loop: one launch for each step, none left out, for a host that does not wait to learn which rows run."""

    kind = "single"

    def launch(self, num_steps: int) -> int:
        """Launch the steps one by one."""
        for _ in range(num_steps):
            self._step()
        self._control.count_all()
        if self._epilogue is not None:
            self._epilogue()
        return num_steps


@dataclass(frozen=True)
class Ready:
    """How a shape runs."""

    replay: Callable[[], None]  # runs one step
    loop: StepLoop | None = None  # runs several steps; None where there is no loop
    graphs: tuple[StepGraph, ...] = ()  # what was captured: nothing, the step, or the step and the loop's epilogue
