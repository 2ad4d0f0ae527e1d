"""A captured step: what it is run within, what it must offer, and how several of its steps are one launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphdecode.buffers import LIVE_ROWS, Batch, StepBuffers
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from graphdecode.graphs.inspect.owners import Owners

Step = Callable[[Batch], None]
Replay = Callable[[], None]


def run(step: Callable[[Batch], Any], batch: Batch) -> Any:
    """Run a step as it is, and return what it does."""
    with torch.no_grad():
        return step(batch)


@contextmanager
def slots_restored(buffers: StepBuffers) -> Iterator[None]:
    """Give the slots, and how many rows are live, back as they were. Adopted tensors are not saved."""
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
    """Make every row padding for a while, so that a step touches nothing but the slots, which are given back."""
    with ExitStack() as held:
        for each in buffers:
            held.enter_context(slots_restored(each))
            each.pad(0)
            each.set_live_rows(0)
        yield


@dataclass(frozen=True)
class Argument:
    """One tensor of an operator, or one address among the arguments of a kernel."""

    name: str  # of the operator's argument, "result" for what it returns; for a kernel, its number and the byte in it
    address: int | None  # where the tensor's storage began at capture, or the address itself
    owner: str | None  # the slot or constant that it belongs to; None: an operator's intermediate, or nobody's
    tensor: Tensor | None = None  # of an operator, an alias that goes on pointing at the memory of the capture
    storage: int | None = None  # what identifies the tensor's storage; None for opaque tensors
    is_written: bool = False  # whether the operation writes there
    is_certain: bool = True  # whether it surely is an address: a word of a kernel's struct may be padding


@dataclass(frozen=True)
class Node:
    """One operation of a graph."""

    name: str  # of the operator or kernel
    kind: str  # of the node ("kernel", "memcpy", ...); a recorded operator is a kind of its own
    file: str | None = None  # of the step's line that it comes from, where that is known
    line: int | None = None  # its number
    arguments: tuple[Argument, ...] = ()  # its tensors, where they are known


class StepGraph(ABC):
    """One bucket's step, captured: replayed any number of times, closed once."""

    nodes: list[Node]  # the operations in order
    pool_bytes: int  # memory of intermediates that this capture added to the pool, where others left too little
    # what one replay reads and writes at most, as far as it is known; what is read in part (the live pages of a cache,
    # the gathered rows of a table) is counted whole
    moved_bytes: int
    capture_ms: float  # time that it took to capture the graph and make it fit to launch, without warm-up
    driver_bytes: int = 0  # device memory that the driver took to make the graph fit to launch; 0 where there is none
    instantiate_ms: float = 0.0  # time of it that the driver took; 0 where there is none

    @property
    def kinds(self) -> Counter[str]:
        """Kind of node or operator -> count."""
        return Counter(node.kind for node in self.nodes)

    @abstractmethod
    def replay(self) -> None:
        """Run the step again over the same memory."""

    @abstractmethod
    def problem_finder(self, owners: Owners) -> Callable[[Argument], str | None]:
        """Return a function that says what has become of an argument's memory since capture; None if nothing."""

    @abstractmethod
    def close(self) -> None:
        """Release graph and memory."""


@dataclass(frozen=True)
class Loop:
    """A loop of steps in one launch: the step again and again, while fewer than `limit` ran and any row is running.

    All of this is read from slots on the device, each int32 [1]: neither another number of steps nor another membership
    needs another capture.
    """

    max_steps: int  # steps that a launch may be asked for at most
    running: str = "running"  # the slot where the step writes how many rows go on
    limit: str = "loop_limit"  # steps that the launch was asked for; the manager writes it when that changes
    count: str = "loop_count"  # steps that ran in the last launch; where the device cannot end a loop early, all
    epilogue: Step | None = None  # runs once behind the steps of a launch, over the same batch, and is captured, too


class LoopControl:
    """The slots of a loop, where they are in memory; a ValueError says what of it cannot be."""

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


class StepLoop:
    """One shape's steps, several to a launch; here a launch for each, for a host that does not wait to learn who runs.

    `kind` is "while" (the device runs the loop), "unrolled" (a graph of as many steps), "host" (the host runs it over
    memory that it can read), or "single" (a launch for each step); `reason` says why it is none of those before.
    """

    kind = "single"
    reason: str | None = None

    def __init__(self, control: LoopControl, step: Replay, epilogue: Replay = lambda: None) -> None:
        self._control, self._step, self._epilogue = control, step, epilogue

    def launch(self, num_steps: int) -> int:
        """Run that many steps, or fewer where the loop can end early, and the epilogue.

        Returns how many steps ran; 0 where the device decides that, and counts them.
        """
        for _ in range(num_steps):
            self._step()
        self._control.count_all()
        self._epilogue()
        return num_steps

    def counted(self) -> tuple[int, int]:
        """Return the steps that the device counted in all launches, and the live rows of these steps, summed."""
        return 0, 0

    def close(self) -> None:
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
        self._epilogue()
        return ran


@dataclass(frozen=True)
class Ready:
    """The callables that run a shape."""

    replays: Sequence[Replay]  # run one step, and the loop's epilogue; or the two halves of a step
    loop: StepLoop | None = None  # runs several steps; None where there is no loop
    graphs: Sequence[StepGraph] = ()  # whose replays these are; none where nothing is captured
