"""A model of torch's allocators over the driver: blocks, pools of graphs, pinned memory, and cuBLAS' workspaces.

What torch's sources say, in three variants where its releases differ:

- A graph's capture lets an allocator record for the graph's pool from its begin to its end. Up to 2.13 a capture that
  the driver refuses to end leaves both allocators recording; from 2.14 on neither.
- A pool is used by its captures, from their begin until the graphs are reset. When nobody uses it any more, its memory
  is free memory, which goes back to the driver with the next `empty_cache`.
- cuBLAS takes a workspace for each stream when it first needs one, from whatever pool is recorded for then, and keeps
  it. From 2.12 on the reset of a graph frees that of the stream that the graph was captured on.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as cuda

DEFAULT_POOL = (0, 0)
SEGMENT_BYTES = 1 << 16
BLOCK_BYTES = 512
WORKSPACE_BYTES = 1 << 14

Filter = Callable[[int], bool]


def done(answer: tuple[Any, ...]) -> Any:
    """Return what a call of the driver gave.

    Raises:
        RuntimeError: it was refused, in the words of torch's errors.
    """
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"CUDA error: {error.name}")
    return values[0] if len(values) == 1 else values


@dataclass
class Block:
    """A part of a segment; once it is free, another block stands for the same bytes.

    Attributes:
        owner: what it was allocated for.
    """

    address: int
    size: int
    pool: tuple[int, int]
    stream: int
    owner: str = ""
    is_free: bool = True
    is_gone: bool = False  # back with the driver


@dataclass
class Segment:
    """Memory of the driver's, cut into blocks, ascending."""

    address: int
    size: int
    pool: tuple[int, int]
    stream: int
    blocks: list[Block] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        return all(block.is_free for block in self.blocks)


class CachingAllocator:
    """Device memory, and which graph pool it is taken for.

    Attributes:
        recording: pool -> says of a stream whether what is allocated on it is the pool's.
        users: pool -> how many captures use it.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.recording: dict[tuple[int, int], Filter] = {}
        self.users: dict[tuple[int, int], int] = {}

    def allocate(self, size: int, stream: int, owner: str) -> Block:
        """Return a block for a stream; of the pool that is recorded for on it, if there is one."""
        size = -(-max(size, 1) // BLOCK_BYTES) * BLOCK_BYTES
        pool = next((pool for pool, takes in self.recording.items() if takes(stream)), DEFAULT_POOL)
        segment, block = self._free_block(size, stream, pool) or self._new_segment(size, stream, pool)
        place = segment.blocks.index(block)
        taken = Block(block.address, size, pool, stream, owner, is_free=False)
        rest = Block(block.address + size, block.size - size, pool, stream)
        segment.blocks[place : place + 1] = [taken, rest] if rest.size else [taken]
        return taken

    def _free_block(self, size: int, stream: int, pool: tuple[int, int]) -> tuple[Segment, Block] | None:
        for segment in self.segments:
            if (segment.pool, segment.stream) == (pool, stream):
                for block in segment.blocks:
                    if block.is_free and block.size >= size:
                        return segment, block
        return None

    def _new_segment(self, size: int, stream: int, pool: tuple[int, int]) -> tuple[Segment, Block]:
        size = -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
        relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = done(cuda.cuThreadExchangeStreamCaptureMode(relaxed))
        address = int(done(cuda.cuMemAlloc(size)))
        done(cuda.cuThreadExchangeStreamCaptureMode(before))
        segment = Segment(address, size, pool, stream, [Block(address, size, pool, stream)])
        self.segments.append(segment)
        return segment, segment.blocks[0]

    def free(self, block: Block) -> None:
        """Give a block back; whoever asks next on its stream may get it."""
        assert not block.is_free, "freed twice"
        block.is_free = True
        segment = next(segment for segment in self.segments if block in segment.blocks)
        merged: list[Block] = []
        for part in segment.blocks:
            if merged and merged[-1].is_free and part.is_free:
                last = merged.pop()
                part = Block(last.address, last.size + part.size, last.pool, last.stream)
            merged.append(part)
        segment.blocks = merged

    def begin(self, pool: tuple[int, int], takes: Filter) -> None:
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording[pool] = takes
        self.users[pool] = self.users.get(pool, 0) + 1

    def end(self, pool: tuple[int, int]) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        del self.recording[pool]

    def release(self, pool: tuple[int, int]) -> None:
        assert self.users.get(pool, 0) > 0, "a pool is released more often than it was used"
        self.users[pool] -= 1

    def empty_cache(self) -> None:
        """Give the driver back what nobody uses, and no graph may."""
        for segment in list(self.segments):
            if segment.is_free and self.users.get(segment.pool, 0) == 0:
                done(cuda.cuMemFree(cuda.CUdeviceptr(segment.address)))
                for block in segment.blocks:
                    block.is_gone = True
                self.segments.remove(segment)

    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return what `torch.cuda.memory_snapshot` does, as far as it is asked."""
        return [
            {
                "address": segment.address,
                "total_size": segment.size,
                "segment_pool_id": segment.pool,
                "blocks": [
                    {"size": block.size, "state": "inactive" if block.is_free else "active_allocated"}
                    for block in segment.blocks
                ],
            }
            for segment in self.segments
        ]


class PinnedAllocator:
    """Pinned memory of the host: it has to be told of captures as well, and asks their graphs who takes what."""

    def __init__(self, complain: Callable[[str], None]) -> None:
        self._complain = complain
        self.recording: dict[tuple[int, int], weakref.ref] = {}

    def begin(self, pool: tuple[int, int], graph: object) -> None:
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording[pool] = weakref.ref(graph)

    def end(self, pool: tuple[int, int]) -> None:
        self.recording.pop(pool, None)

    def allocate(self) -> None:
        """Ask every graph that is recorded for; only the asking matters here."""
        if any(graph() is None for graph in self.recording.values()):
            self._complain("the allocator of pinned memory asks a graph that is gone")


class Workspaces:
    """cuBLAS' memory for each stream that it was used on."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self.blocks: dict[int, Block] = {}

    def of(self, stream: int) -> Block:
        if stream not in self.blocks:
            self.blocks[stream] = self._allocator.allocate(WORKSPACE_BYTES, stream, "a workspace of cuBLAS")
        return self.blocks[stream]

    def clear(self) -> None:
        for stream in list(self.blocks):
            self.clear_of(stream)

    def clear_of(self, stream: int) -> None:
        block = self.blocks.pop(stream, None)
        if block is not None:
            self._allocator.free(block)


def pool_handles() -> Iterator[tuple[int, int]]:
    """Yield what `torch.cuda.graph_pool_handle` gives."""
    return ((0, number) for number in itertools.count(1))
