"""`torch.cuda` over the stand-in for the driver: streams, graphs, memory, and operators that are launched as kernels.

While it is installed, what an operator of torch makes lies in memory of the driver's, and every operator is a launch of
a kernel by its name, whose parameters are the addresses of its tensors. A stream that captures makes it a node. The
tensors say that they are on the CPU; nothing else is different from what production code finds on a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import finalize

import pytest
import torch
from cuda.bindings import driver as cuda
from cuda_driver.allocator import Block, CachingAllocator, PinnedAllocator, Workspaces, done, pool_handles
from cuda_driver.stand_in import Driver
from torch import Tensor

from graphdecode.graphs import backend
from graphdecode.graphs.inspect.observer import TorchDispatchMode, flattened, mapped

STREAMS_OF_TORCH = 4  # torch has 32, and gives them out in turn
MOST_POINTERS = 40
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
READS = {torch.ops.aten._local_scalar_dense.default}


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.cuda_stream = int(handle)

    def wait_stream(self, other: Stream) -> None:
        event = done(cuda.cuEventCreate(0))
        done(cuda.cuEventRecord(event, other.handle))
        done(cuda.cuStreamWaitEvent(self.handle, event, 0))
        done(cuda.cuEventDestroy(event))

    def synchronize(self) -> None:
        done(cuda.cuStreamSynchronize(self.handle))

    def is_capturing(self) -> bool:
        return int(done(cuda.cuStreamIsCapturing(self.handle))) == 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    __hash__ = None  # type: ignore[assignment]


class Graph:
    """Stands for `torch.cuda.CUDAGraph`, made to keep its graph."""

    def __init__(self, device: Device, keep_graph: bool) -> None:
        assert keep_graph
        self._device = device
        self._graph: Any = None
        self._exec: Any = None
        self._stream: Stream | None = None
        self._uses_pool = False
        self._pool: tuple[int, int] = (0, 0)

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        device = self._device
        mode = getattr(cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{capture_error_mode.upper()}")
        self._stream, self._pool = device.current, pool
        if self._stream.cuda_stream == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        own = self._stream
        device.allocator.begin(pool, lambda stream: stream == own.cuda_stream and own.is_capturing())
        device.pinned.begin(pool, self)
        done(cuda.cuStreamBeginCapture(own.handle, mode))

    def capture_end(self) -> None:
        assert self._stream is not None
        try:
            self._graph = done(cuda.cuStreamEndCapture(self._stream.handle))
        except RuntimeError:
            if self._device.version >= (2, 14):
                self._end_routing()
            raise
        self._end_routing()

    def _end_routing(self) -> None:
        self._device.allocator.end(self._pool)
        self._device.pinned.end(self._pool)
        self._uses_pool = True

    def instantiate(self) -> None:
        if self._exec is not None:
            done(cuda.cuGraphExecDestroy(self._exec))
        self._exec = done(cuda.cuGraphInstantiate(self._graph, 0))

    def raw_cuda_graph(self) -> int:
        return int(self._graph)

    def replay(self) -> None:
        done(cuda.cuGraphLaunch(self._exec, self._device.current.handle))

    def reset(self) -> None:
        if self._uses_pool:
            self._device.allocator.release(self._pool)
            self._uses_pool = False
        for destroy, handle in ((cuda.cuGraphExecDestroy, self._exec), (cuda.cuGraphDestroy, self._graph)):
            if handle is not None:
                done(destroy(handle))
        self._graph = self._exec = None
        if self._stream is not None and self._device.version >= (2, 12):
            self._device.workspaces.clear_of(self._stream.cuda_stream)

    def __del__(self) -> None:
        if not self._device.is_over:
            self.reset()


@dataclass(frozen=True)
class Place:
    """A tensor as a kernel knows it."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        elements = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        memory = (ctypes.c_char * (elements * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.shape, self.stride)


def block_of(tensor: Tensor) -> Block | None:
    """Return the memory of the device that a tensor lies in; None for others."""
    return getattr(tensor.untyped_storage(), "block", None)


def placed(value: Any) -> Any:
    """Return where a tensor of the device lies; anything else as it is."""
    if not isinstance(value, Tensor) or block_of(value) is None:
        return value
    return Place(value.data_ptr(), value.dtype, tuple(value.shape), value.stride())


def restored(value: Any) -> Any:
    return value.tensor() if isinstance(value, Place) else value


@dataclass
class Launched:
    """What a kernel does when its turn comes.

    Attributes:
        name: of the operator.
        work: does it.
        blocks: memory that it touches, as it was when a graph was captured; none where it was launched by itself.
    """

    name: str
    work: Callable[[], None]
    blocks: tuple[Block, ...]


class Device:
    """The state of torch on the device.

    Args:
        driver: the stand-in.
        version: of torch, whose manners the allocators have.

    Attributes:
        problems: what a real device would have answered with wrong numbers.
        current: stream.
    """

    def __init__(self, driver: Driver, version: tuple[int, int]) -> None:
        self.driver = driver
        self.version = version
        self.problems: list[str] = []
        self.allocator = CachingAllocator()
        self.pinned = PinnedAllocator(self.problems.append)
        self.workspaces = Workspaces(self.allocator)
        self.current = self.default = Stream(cuda.CUstream(0))
        self.is_over = False
        self._pools = pool_handles()
        self.streams = [Stream(done(cuda.cuStreamCreate(1))) for _ in range(STREAMS_OF_TORCH)]
        self._in_turn = itertools.cycle(self.streams)
        self._launched: list[Launched] = []
        self._kernels: dict[tuple[str, int], Any] = {}

    def next_stream(self, _device: object = None) -> Stream:
        """Return one of a few, as torch does."""
        return next(self._in_turn)

    def close(self) -> None:
        """Give back what torch keeps for the life of a process."""
        self.is_over = True
        for stream in self.streams:
            done(cuda.cuStreamDestroy(stream.handle))
        for segment in self.allocator.segments:
            done(cuda.cuMemFree(cuda.CUdeviceptr(segment.address)))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def synchronize(self, _device: object = None) -> None:
        done(cuda.cuCtxSynchronize())

    def new(self, like: Tensor) -> Tensor:
        """Return a tensor of the device's of the same form; nobody has written there."""
        block = self.allocator.allocate(like.nbytes, self.current.cuda_stream, "a tensor")
        memory = (ctypes.c_char * max(like.nbytes, 1)).from_address(block.address)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)[: like.nbytes].view(like.dtype)
        storage = tensor.untyped_storage()
        storage.block = block  # type: ignore[attr-defined]
        finalize(storage, self._freed, block).atexit = False
        return tensor.view(like.shape)

    def _freed(self, block: Block) -> None:
        if not self.is_over:
            self.allocator.free(block)

    def launch(self, name: str, work: Callable[[], None], tensors: list[Tensor], extra: list[Block]) -> None:
        """Launch a kernel that touches tensors, and blocks that no tensor stands for."""
        blocks = [*filter(None, map(block_of, tensors)), *extra]
        is_captured = self.current.is_capturing()
        words = [len(self._launched)]
        words += [tensor.data_ptr() for tensor in tensors if block_of(tensor)][:MOST_POINTERS]
        words += [block.address for block in extra]
        self._launched.append(Launched(name, work, tuple(blocks) if is_captured else ()))
        key = (name, len(words))
        if key not in self._kernels:
            self._kernels[key] = cuda.CUfunction(self.driver.kernel(name, self._run, len(words)))
        types = (ctypes.c_uint64,) * len(words)
        sizes = (1, 1, 1, 1, 1, 1, 0)
        done(cuda.cuLaunchKernel(self._kernels[key], *sizes, self.current.handle, (tuple(words), types), 0))

    def _run(self, words: list[int]) -> None:
        launched = self._launched[words[0]]
        for block in launched.blocks:
            is_pools = block.pool != (0, 0) and self.allocator.users.get(block.pool, 0) > 0
            if block.is_gone or (block.is_free and not is_pools):
                self.problems.append(f"{launched.name} of a graph touches what was {block.owner}, and is free now")
                return
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
            launched.work()


class Operators(TorchDispatchMode):
    """Launches operators, and takes what they make from the device's memory."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in flattened((args, kwargs)) if isinstance(value, Tensor)]
        if func in READS:
            self._device.current.synchronize()
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._in_place(func, args, kwargs, given)
        if any(result.alias_info is not None for result in func._schema.returns):
            return func(*args, **kwargs)  # a view
        return self._fresh(func, args, kwargs, given)

    def _in_place(self, func: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> Any:
        places = mapped(placed, (args, kwargs))

        def work() -> None:
            values, named = mapped(restored, places)
            func(*values, **named)

        self._device.launch(str(func), work, given, self._workspace(func))
        by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        written = [
            by_name[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in by_name
        ]
        results = written[: len(func._schema.returns)]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _fresh(self, func: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> Any:
        is_pinned = kwargs.get("pin_memory", False)
        sample = func(*args, **kwargs | ({"pin_memory": False} if is_pinned else {}))  # its form is used
        if is_pinned:
            self._device.pinned.allocate()
            return sample
        results = mapped(lambda value: self._device.new(value) if isinstance(value, Tensor) else value, sample)
        made = [value for value in flattened(results) if isinstance(value, Tensor)]
        targets, places = [placed(value) for value in made], mapped(placed, (args, kwargs))
        constant = None if any(block_of(value) for value in given) else sample

        def work() -> None:
            values, named = mapped(restored, places)
            found = func(*values, **named) if constant is None else constant
            for target, value in zip(targets, [v for v in flattened(found) if isinstance(v, Tensor)], strict=True):
                restored(target).copy_(value)

        self._device.launch(str(func), work, [*given, *made], self._workspace(func))
        return results

    def _workspace(self, func: Any) -> list[Block]:
        if func not in PRODUCTS:
            return []
        return [self._device.workspaces.of(self._device.current.cuda_stream)]


@contextmanager
def installed(driver: Driver, version: tuple[int, int] = (2, 13)) -> Iterator[Device]:
    """Let `torch.cuda` work over the stand-in, as a release of torch does it."""
    device = Device(driver, version)
    replacements = {
        "Stream": device.next_stream,
        "CUDAGraph": partial(Graph, device),
        "graph_pool_handle": lambda: next(device._pools),
        "current_stream": lambda _device=None: device.current,
        "stream": device.on,
        "device": lambda _device: nullcontext(),
        "synchronize": device.synchronize,
        "empty_cache": device.allocator.empty_cache,
        "memory_reserved": lambda _device=None: device.allocator.reserved(),
        "mem_get_info": lambda _device=None: tuple(done(cuda.cuMemGetInfo())),
        "memory_snapshot": device.allocator.snapshot,
        "current_device": lambda: 0,
        "get_device_capability": lambda _device=None: (9, 0),
    }

    def end(_device: int, pool: tuple[int, int]) -> None:
        device.allocator.end(pool)

    def release(_device: int, pool: tuple[int, int]) -> None:
        device.allocator.release(pool)

    private = {
        "_cuda_endAllocateToPool": end,
        "_cuda_releasePool": release,
        "_cuda_clearCublasWorkspaces": device.workspaces.clear,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, replacement in replacements.items():
            patch.setattr(torch.cuda, name, replacement)
        for name, function in private.items():
            patch.setattr(torch._C, name, function, raising=False)
        patch.setattr(backend, "backend_for", lambda _backend, _device: "cuda")
        try:
            with Operators(device):
                yield device
            device.synchronize()
        finally:
            device.close()
