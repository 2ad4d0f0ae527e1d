"""A GPU's streams on a CPU, as lazy as they may be: what is queued runs late, in any legal order that a seed picks.

While `lazy_device` is installed, a device "cuda:0" seems to be there. Its tensors have their memory on the CPU. Copies,
fills, prompts and steps are queued on streams; the host goes on at once, as it does in front of a GPU, and what is
queued runs when an event or a synchronization asks for it, or earlier where the seed says so. What the driver promises
is kept and nothing more: a stream runs in order, two streams in any order that their events allow, a copy from or to
pinned memory touches that memory when it runs, memory that was freed belongs to others as soon as the stream that it
was allocated on comes by. Host code that counts on more reads or writes the wrong tokens.

An operation of the tests' is a whole step or a whole prompt, and runs the CPU's operators. What the production code
does with tensors of the device beside these (views, `fill_`, `copy_`, `clone`, reading) is known by name; anything else
is refused, so that nothing runs at once by mistake.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
GARBAGE = 0x55  # in memory that belongs to somebody else now
_WORD_BYTES = 8
_EAGERNESS = (0.0, 0.2, 0.8)  # how likely something runs that nobody has waited for yet
_PREFERENCES = (0.1, 0.9)  # how likely the first stream goes on where another one could
_FACTORIES = {torch.zeros, torch.empty, torch.full, torch.ones}
_READS = {Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__bool__, Tensor.cpu}
_LOOKS = {
    Tensor.is_inference,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.size,
    Tensor.stride,
    Tensor.numel,
    Tensor.dim,
    Tensor.is_contiguous,
    Tensor.element_size,
    Tensor.storage_offset,
}


class Mark:
    """A place in a stream, which an event stands for."""

    def __init__(self) -> None:
        self.is_reached = False


@dataclass
class Wait:
    """A stream goes no further before another one has come to a mark."""

    mark: Mark


Work = Callable[[], None]


class Stream:
    """Stands for `torch.cuda.Stream`: operations that wait for their turn."""

    cuda_stream = 0

    def __init__(self) -> None:
        self.queue: deque[Work | Mark | Wait] = deque()

    @property
    def is_ready(self) -> bool:
        return bool(self.queue) and not (isinstance(self.queue[0], Wait) and not self.queue[0].mark.is_reached)

    def mark(self) -> Mark:
        mark = Mark()
        self.queue.append(mark)
        return mark

    def wait_stream(self, other: Stream) -> None:
        self.queue.append(Wait(other.mark()))


@dataclass
class Memory:
    """What a tensor of the device, or a pinned one, lies in.

    Attributes:
        raw: the bytes, which outlive the tensors that production code holds.
        is_pinned: memory of the host.
        stream: on which it was allocated.
    """

    raw: Tensor
    is_pinned: bool
    stream: Stream

    def forget(self) -> None:
        """Let somebody else have written there."""
        self.raw.fill_(GARBAGE)


def memory_of(tensor: Tensor) -> Memory | None:
    """Return where a tensor of the device, or a pinned one, lies; None for any other."""
    return getattr(tensor.untyped_storage(), "memory", None)


def as_operations_know(value: Any) -> Any:
    """Return the place of a tensor as an operation knows it: by its address, whoever it belongs to by then."""
    memory = memory_of(value) if isinstance(value, Tensor) else None
    if memory is None:
        return value
    with torch._C._DisableTorchDispatch():  # a step that is observed names its places here, and does nothing with them
        return memory.raw.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())


class Graph:
    """Stands for `torch.cuda.CUDAGraph`: what was queued while it captured, queued again by each replay."""

    def __init__(self, streams: LazyStreams) -> None:
        self._streams = streams
        self.works: list[Work] = []
        self.is_there = True
        self.under_way = 0
        self.instantiate = lambda: None
        self.raw_cuda_graph = lambda: self

    def capture_begin(self, **_options: object) -> None:
        assert self._streams.capturing is None
        self._streams.capturing = self

    def capture_end(self) -> None:
        self._streams.capturing = None

    def replay(self) -> None:
        assert self.is_there, "a graph is launched after its reset"
        self._streams.count_launch()
        self.under_way += 1
        self._streams.enqueue(self.run, last=self._ended)

    def run(self) -> None:
        for work in self.works:
            work()

    def _ended(self) -> None:
        self.under_way -= 1

    def reset(self) -> None:
        if self.under_way and not self._streams.is_over:
            raise RuntimeError("a graph is reset, and its memory freed, while it is under way")
        self.is_there = False


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, streams: LazyStreams) -> None:
        self._streams = streams
        self._mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        assert self._streams.capturing is None
        self._mark = (stream or self._streams.current).mark()
        self._streams.go_on()

    def synchronize(self) -> None:
        if self._mark is not None:
            self._streams.run_until(self._mark)


@dataclass
class LazyStreams:
    """The device: its streams, and the scheduler that runs them.

    Args:
        seed: of the order.

    Attributes:
        refused_launch: the number of a graph's launch that is refused.
        refused_bucket: rows for which the step fails where it is made ready to be captured.
        launches: of graphs up to now.
        ran: operations up to now.
        is_over: the device is gone, and what was under way with it.
    """

    seed: int
    refused_launch: int | None = None
    refused_bucket: int | None = None
    capturing: Graph | None = None
    launches: int = 0
    ran: int = 0
    is_over: bool = False
    streams: list[Stream] = field(default_factory=lambda: [Stream()])

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._eagerness, self._preference = self._random.choice(_EAGERNESS), self._random.choice(_PREFERENCES)
        self.current = self.streams[0]

    def enqueue(self, work: Work, last: Work | None = None) -> None:
        """Queue an operation on the current stream, or make it a part of the graph that is being captured."""
        if self.capturing is not None:
            self.capturing.works.append(work)
            return
        self.current.queue.append(work)
        if last is not None:
            self.current.queue.append(last)

    def count_launch(self) -> None:
        """Take note of a graph's launch, or refuse it."""
        self.launches += 1
        if self.launches == self.refused_launch:
            raise RuntimeError("the device refuses this launch")

    def go_on(self) -> None:
        """Run some of what nobody has waited for yet, as a device does while the host is busy."""
        while self.capturing is None and self._random.random() < self._eagerness and self._ready():
            self._run_one()

    def _ready(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.is_ready]

    def _run_one(self) -> None:
        ready = self._ready()
        if not ready:
            raise RuntimeError("streams wait for one another, or the host for what was never queued")
        stream = ready[0] if self._random.random() < self._preference else self._random.choice(ready)
        work = stream.queue.popleft()
        if isinstance(work, Mark):
            work.is_reached = True
        elif not isinstance(work, Wait):
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
                work()
            self.ran += 1

    def run_until(self, mark: Mark) -> None:
        """Let the host wait for a mark; others may come further meanwhile."""
        assert self.capturing is None, "the host waits for what is only being captured"
        while not mark.is_reached:
            self._run_one()

    def synchronize(self, *_device: object) -> None:
        """Run all there is."""
        assert self.capturing is None, "the host waits for what is only being captured"
        while any(stream.queue for stream in self.streams):
            self._run_one()

    def new_stream(self, *_device: object) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def allocate(self, sizes: tuple[int, ...], dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        """Return a tensor of the device, or a pinned one; it holds zeros."""
        tensor = torch.empty(sizes, dtype=dtype)
        raw = torch.zeros(-(-tensor.nbytes // _WORD_BYTES) * _WORD_BYTES, dtype=torch.uint8)
        tensor = torch.from_numpy(raw.numpy())[: tensor.nbytes].view(dtype).view(sizes)
        storage = tensor.untyped_storage()
        memory = Memory(raw, is_pinned, self.current)
        storage.memory = memory  # type: ignore[attr-defined]
        if not is_pinned:  # torch keeps pinned memory until the copies that it knows of have run
            freed = finalize(storage, lambda: memory.stream.queue.append(memory.forget))
            freed.atexit = False
        return tensor

    def copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """Queue a copy; the host waits where one side is pageable memory, or where it was not told to go on."""
        ends = [memory_of(tensor) for tensor in (target, source)]
        both_here = all(end is not None and not end.is_pinned for end in ends)
        self.enqueue(partial(as_operations_know(target).copy_, as_operations_know(source)))
        if not both_here and (not non_blocking or None in ends):
            self.run_until(self.current.mark())
        self.go_on()


class DeviceTensors(TorchFunctionMode):
    """What production code does with tensors of the device: queued, or waited for, or refused."""

    def __init__(self, streams: LazyStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            return self._made(func, args, kwargs)
        involved = [memory for value in args[:2] if isinstance(value, Tensor) and (memory := memory_of(value))]
        if func is Tensor.is_pinned:
            return bool(involved) and involved[0].is_pinned
        here = [memory for memory in involved if not memory.is_pinned]
        if not here:
            return func(*args, **kwargs)
        return self._of_device(func, args, kwargs)

    def _made(self, func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        device, is_pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        on_host = device is None or torch.device(device).type == "cpu"
        made = func(*args, **kwargs)
        if on_host and not is_pinned:
            return made
        tensor = self._streams.allocate(tuple(made.shape), made.dtype, is_pinned=is_pinned)
        return tensor.copy_(made) if func is not torch.empty else tensor

    def _of_device(self, func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        tensor = args[0]
        if getattr(func, "__name__", "") == "__get__":
            return DEVICE if func == Tensor.device.__get__ else func(*args, **kwargs)
        if func is Tensor.fill_:
            self._streams.enqueue(partial(as_operations_know(tensor).fill_, *args[1:]))
            self._streams.go_on()
            return tensor
        if func is Tensor.copy_:
            self._streams.copy(*args, non_blocking=kwargs.get("non_blocking", False))
            return tensor
        if func is Tensor.clone:
            clone = self._streams.allocate(tuple(tensor.shape), tensor.dtype, is_pinned=False)
            self._streams.copy(clone, tensor, non_blocking=True)
            return clone
        if func in _READS:
            self._streams.run_until(self._streams.current.mark())
            return func(*args, **kwargs)
        if func in _LOOKS:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "numpy" or (name.endswith("_") and not name.startswith("__")):
            raise TypeError(f"{name} of a tensor on the device")
        result = func(*args, **kwargs)
        views = result if isinstance(result, (tuple, list)) else [result]
        if not all(isinstance(view, Tensor) and memory_of(view) is memory_of(tensor) for view in views):
            raise TypeError(f"{name} of a tensor on the device: only views, fill_, copy_, clone and reads are known")
        return result
