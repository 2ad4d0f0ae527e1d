"""The interface of a captured step, and loops: several steps in one launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.buffers import LIVE_ROWS, StepBuffers, StepSlots
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from graphdecode.graphs.inspect.owners import Owners

Step = Callable[[Any], Any]
Replay = Callable[[], None]


def run(step: Callable[[Any], Any], batch: StepSlots) -> Any:
    """Run a step eagerly and return its result."""
    with torch.no_grad():
        return step(batch)


def check_arguments(step: Any, buffers: Any) -> None:
    """Raise an ArgumentError if a step cannot be called, or its buffers are something else."""
    if not callable(step):
        raise ArgumentError(f"step must be a function of a batch, got {step!r}")
    if not isinstance(buffers, StepBuffers):
        raise ArgumentError(f"buffers must be StepBuffers, got {type(buffers).__name__}")


@contextmanager
def slots_restored(buffers: StepBuffers) -> Iterator[None]:
    """Restore the slots and the number of live rows afterwards; adopted tensors are not saved."""
    saved = {name: buffers.tensors[name].clone() for name in buffers.slots}
    live = buffers.live_row_count
    try:
        yield
    finally:
        buffers.set_live_rows(live)
        for name, values in saved.items():
            tensor = buffers.tensors[name]
            if tensor.shape == values.shape:
                tensor.copy_(values)


@contextmanager
def no_row_live(*buffers: StepBuffers) -> Iterator[None]:
    """Make every row padding, so that a step changes nothing but the slots, which are restored."""
    with ExitStack() as stack:
        for each in buffers:
            stack.enter_context(slots_restored(each))
            each.pad(0)
            each.set_live_rows(0)
        yield


class Argument(NamedTuple):
    """One tensor of an operator, or one address among the arguments of a kernel."""

    name: str  # an operator's argument, or "result"; for a kernel, "number of the argument+byte"
    address: int | None  # begin of the tensor's storage at capture, or the address itself
    owner: str | None  # the slot or constant; None: an intermediate, or unknown
    shape: Sequence[int] | None = None  # for an operator
    storage: int | None = None  # identifies the tensor's storage; None for opaque tensors
    alias: Tensor | None = None  # of the memory at capture; None for an intermediate
    is_written: bool = False
    is_certain: bool = True  # False: may be no address, such as padding in a kernel's struct


class Node(NamedTuple):
    """One operation of a graph."""

    name: str  # operator or kernel
    kind: str  # "kernel", "memcpy", ...; for a recorded operator, its name
    file: str | None = None  # file and line in the step's code, if known
    line: int | None = None
    arguments: tuple[Argument, ...] = ()  # its tensors, if known


class StepGraph(ABC):
    """One bucket's step, captured: replayed any number of times, closed once."""

    nodes: list[Node]  # the operations in order
    pool_bytes: int  # memory that this capture added to the shared pool
    moved_bytes: int  # upper bound of what a replay reads and writes: caches and embedding tables count whole
    capture_ms: float  # time of capture and instantiation, without warm-up
    driver_bytes: int = 0  # device memory of the instantiated graph; 0 on a CPU
    instantiate_ms: float = 0.0  # part of `capture_ms`; 0 on a CPU

    @property
    def kinds(self) -> Counter[str]:
        """Kind of node or operator -> count."""
        return Counter(node.kind for node in self.nodes)

    @abstractmethod
    def replay(self) -> None:
        """Run the step again over the same memory."""

    @abstractmethod
    def problem_finder(self, owners: Owners) -> Callable[[Argument], str | None]:
        """Return a function that describes how the owner of an argument's memory has changed; None: it has not."""

    @abstractmethod
    def close(self) -> None:
        """Release the graph and its memory."""


@dataclass(frozen=True)
class Loop:
    """A loop of steps in one launch: repeats the step while fewer than `limit` steps ran and any row is running.

    The device reads this from slots, int32 [1], so that a change of either needs no capture.
    """

    max_steps: int  # per launch
    running: str = "running"  # slot where the step writes how many rows are running
    limit: str = "loop_limit"  # slot of the number of steps to run; the table writes it
    count: str = "loop_count"  # slot of the number of steps that ran
    epilogue: Step | None = None  # captured, too; runs once after the steps of a launch


class LoopControl:
    """The tensors of a loop's slots; raises ArgumentError if a slot does not fit."""

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
        self._limit_value = 0
        self.set_limit(loop.max_steps)

    def set_limit(self, num_steps: int) -> None:
        """Set the steps of the next launches; no copy if the number stays the same."""
        if num_steps != self._limit_value:
            self.limit.fill_(num_steps)
            self._limit_value = num_steps

    def count_all(self) -> None:
        """Set the count to the limit."""
        self.count.copy_(self.limit)


class StepLoop:
    """Several steps of one shape per call of `launch`; this base class launches each step separately.

    `kind`: "while" (the device runs the loop), "host" (a CPU runs it), or "single" (a launch per step); `reason`: why
    it is not a better one.
    """

    kind = "single"
    reason: str | None = None

    def __init__(self, control: LoopControl, step: Replay, epilogue: Replay = lambda: None) -> None:
        self._control, self._step, self._epilogue = control, step, epilogue

    def launch(self, num_steps: int) -> int:
        """Run `num_steps` steps, fewer if the loop can end early, and the epilogue.

        Returns how many steps ran; 0 if the device decides and counts them.
        """
        for _ in range(num_steps):
            self._step()
        self._control.count_all()
        self._epilogue()
        return num_steps

    def counted(self) -> tuple[int, int]:
        """Return the steps that the device counted in all launches, and the sum of their live rows."""
        return 0, 0

    def close(self) -> None:
        """Release the loop's graph."""


class HostLoop(StepLoop):
    """The loop on a CPU: the host reads the slots after each step."""

    kind = "host"

    def launch(self, num_steps: int) -> int:
        """Run the steps; their number is read from the slot, as on a device."""
        control = self._control
        count, limit, running = (tensor.numpy() for tensor in (control.count, control.limit, control.running))
        ran = count[0] = 0
        while not ran or (ran < limit[0] and running[0] > 0):
            self._step()
            ran += 1
            count[0] = ran
        self._epilogue()
        return ran


@dataclass(frozen=True)
class CapturedStep:
    """The callables that run a shape."""

    replays: Sequence[Replay]  # a step and the loop's epilogue, or the two halves of a step
    loop: StepLoop | None = None
    graphs: Sequence[StepGraph] = ()  # of `replays`; empty if nothing is captured
