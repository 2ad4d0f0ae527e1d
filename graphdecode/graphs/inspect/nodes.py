"""The nodes of a captured CUDA graph, and the owners of the addresses in them."""

from __future__ import annotations

import ctypes
import functools
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from graphdecode.graphs.inspect.owners import Owners
from graphdecode.graphs.step_graph import Argument, Node

try:
    from cuda.bindings import driver
except ImportError:  # capture and replay work without cuda-python
    driver = None

POOL = "the graphs' pool"
OTHERS = "memory that is not in the buffers"
NOT_OF_TORCH = "memory that torch did not allocate"
_LOWEST_ADDRESS = 1 << 20  # smaller numbers are sizes and counts
_TYPE_PREFIX = "CU_GRAPH_NODE_TYPE_"
_WORD_BYTES = 8


def is_mapped(address: int) -> bool:
    """Whether the driver has mapped memory at an address; False without cuda-python."""
    if driver is None or address < _LOWEST_ADDRESS:
        return False
    error, _ = driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    return int(error) == 0


class AddressMap:
    """The owners of device memory at one moment: slots, constants, the pool, another live allocation, or none.

    `segments` are from `torch.cuda.memory_snapshot()`; `is_mapped` tests addresses outside of all segments.
    """

    def __init__(
        self, owners: Owners, pool: Any, segments: Iterable[dict], is_mapped: Callable[[int], bool] = lambda _: False
    ) -> None:
        self._is_mapped = is_mapped
        self._declared = (owners.slots(), owners.constants_now())
        self._blocks: list[tuple[int, int, str | None]] = []  # begin, end, owner; ascending
        for segment in sorted(segments, key=lambda segment: segment["address"]):
            begin = segment["address"]
            end = begin + segment["total_size"]
            if tuple(segment.get("segment_pool_id", ())) == tuple(pool):
                self._blocks.append((begin, end, POOL))
                continue
            for block in segment["blocks"]:
                owner = OTHERS if block["state"] == "active_allocated" else None
                self._blocks.append((begin, begin + block["size"], owner))
                begin += block["size"]
            self._blocks.append((begin, end, None))
        self._owner_and_kind = functools.cache(self._look_up)  # kernels share most of their arguments

    @classmethod
    def now(cls, owners: Owners, pool: Any) -> AddressMap:
        """Return the current map."""
        return cls(owners, pool, torch.cuda.memory_snapshot(), is_mapped)

    def owner_at(self, address: int) -> str | None:
        """Return the owner of an address; None for free memory, or no address."""
        return self._owner_and_kind(address)[0]

    def is_ownerless(self, address: int) -> bool:
        """Whether an address lies in free memory of torch's allocator."""
        owner, is_torchs = self._owner_and_kind(address)
        return owner is None and is_torchs

    def bytes_touched(self, nodes: Iterable[Node]) -> int:
        """Return the summed sizes of the slots and constants that each node's arguments lie in."""
        owned = [{argument.owner for argument in node.arguments if argument.owner} for node in nodes]
        return sum(memory.sizes.get(owner, 0) for owners in owned for owner in owners for memory in self._declared)

    def problem_of(self, argument: Argument) -> str | None:
        """Return how the owner of an address has changed since capture, or None."""
        if argument.owner is None:
            return "the memory had no owner at capture"
        owner = None if argument.address is None else self.owner_at(argument.address)
        if owner == argument.owner:
            return None
        return f"its owner was {argument.owner} at capture, and is {owner or 'nothing'} now"

    def _look_up(self, address: int) -> tuple[str | None, bool]:
        for memory in self._declared:
            name = memory.name_at(address)
            if name is not None:
                return name, True
        index = bisect_right(self._blocks, address, key=lambda block: block[0]) - 1
        if index >= 0 and address < self._blocks[index][1]:
            return self._blocks[index][2], True
        return (NOT_OF_TORCH if self._is_mapped(address) else None), False


def nodes_of(raw_graph: int, memory: AddressMap) -> list[Node]:
    """Return the nodes of a `cudaGraph_t`; none without cuda-python, or with a warning if the driver refuses.

    Kernels have their function's name, other nodes that of their kind. Arguments are the addresses of a copy or fill,
    and those 8-byte words of a kernel's parameters that are addresses.
    """
    if driver is None:
        return []
    graph = driver.CUgraph(init_value=raw_graph)
    try:
        _, count = _checked(driver.cuGraphGetNodes(graph, 0))
        handles, _ = _checked(driver.cuGraphGetNodes(graph, count)) if count else ([], 0)
        return [_node(handle, memory) for handle in handles]
    except RuntimeError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return []


def _node(handle: Any, memory: AddressMap) -> Node:
    (node_type,) = _checked(driver.cuGraphNodeGetType(handle))
    kind = name = node_type.name.removeprefix(_TYPE_PREFIX).replace("_", "").lower()
    arguments: list[Argument] = []
    if kind == "kernel":
        (parameters,) = _checked(driver.cuGraphKernelNodeGetParams(handle))
        name, words = _kernel(parameters)
        for position, word, is_whole in words:
            owner = memory.owner_at(word)
            is_declared = owner not in (None, POOL, OTHERS, NOT_OF_TORCH)
            arguments.append(
                Argument(position, word, owner, is_certain=is_declared or (is_whole and owner is not None))
            )
    elif kind == "memcpy":
        (copy,) = _checked(driver.cuGraphMemcpyNodeGetParams(handle))
        for side in ("src", "dst"):
            address = _copied_at(copy, side)
            arguments.append(Argument(side, address, memory.owner_at(address), is_written=side == "dst"))
    elif kind == "memset":
        (fill,) = _checked(driver.cuGraphMemsetNodeGetParams(handle))
        arguments.append(Argument("dst", int(fill.dst), memory.owner_at(int(fill.dst)), is_written=True))
    owned = tuple(a for a in arguments if a.owner is not None or memory.is_ownerless(a.address or 0))
    return Node(name, kind, arguments=owned)


def _copied_at(copy: Any, side: str) -> int:
    on_host = getattr(copy, f"{side}MemoryType") == driver.CUmemorytype.CU_MEMORYTYPE_HOST
    x, y, z, pitch, height = (int(getattr(copy, side + n)) for n in ("XInBytes", "Y", "Z", "Pitch", "Height"))
    return int(getattr(copy, side + ("Host" if on_host else "Device"))) + (z * height + y) * pitch + x


def _kernel(parameters: Any) -> tuple[str, Iterator[tuple[str, int, bool]]]:
    """Return a kernel's name, and the 8-byte words of its parameters: position, word, whether it is all of one."""
    kind, handle = ("Func", parameters.func) if int(parameters.func) else ("Kernel", parameters.kern)
    (name,) = _checked(getattr(driver, f"cu{kind}GetName")(handle))
    words = _words(parameters, functools.partial(getattr(driver, f"cu{kind}GetParamInfo"), handle))
    return name.decode() if isinstance(name, bytes) else str(name), words


def _words(parameters: Any, info_of: Callable[[int], tuple]) -> Iterator[tuple[str, int, bool]]:
    if not int(parameters.kernelParams):
        return
    index = 0
    while True:
        error, _, size = info_of(index)
        if error == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
            return  # past the last one
        _checked((error,))
        values = ctypes.c_uint64.from_address(int(parameters.kernelParams) + index * _WORD_BYTES).value
        if values:
            for begin in range(0, size - _WORD_BYTES + 1, _WORD_BYTES):
                yield f"{index}+{begin}", ctypes.c_uint64.from_address(values + begin).value, size == _WORD_BYTES
        index += 1


def _checked(result: tuple) -> tuple:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"the CUDA driver refused to describe a graph: {error.name}")
    return tuple(values)
