"""Who owns which device address: slots and constants, the graphs' pool, somebody else's live allocation, or nobody."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import torch

from graphdecode.graphs.inspect.owners import Owners
from graphdecode.graphs.step_graph import Argument, Node

try:
    from cuda.bindings import driver
except ImportError:  # without cuda-python graphs are captured and replayed all the same
    driver = None

POOL = "the graphs' pool"
OTHERS = "memory that is no part of the buffers"
NOT_OF_TORCH = "memory that torch did not allocate"
_LOWEST_ADDRESS = 1 << 20  # smaller numbers are sizes and counts


def is_mapped(address: int) -> bool:
    """Whether the driver knows of memory at an address; without cuda-python, False."""
    if driver is None or address < _LOWEST_ADDRESS:
        return False
    error, _ = driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    return int(error) == 0


class AddressMap:
    """The owners of device memory at one moment.

    Args:
        owners: slots, adopted tensors and constants.
        pool: id of the pool that the graphs share.
        segments: what `torch.cuda.memory_snapshot()` says.
        is_mapped: whether the driver knows an address that lies in none of the segments.
    """

    def __init__(
        self, owners: Owners, pool: Any, segments: Iterable[dict], is_mapped: Callable[[int], bool] = lambda _: False
    ) -> None:
        self._is_mapped = is_mapped
        self._declared = (owners.slots(), owners.constants_now())
        self._blocks: list[tuple[int, int, str]] = []  # begin, end, owner; ascending
        self._segments: list[tuple[int, int]] = []  # begin, end; ascending
        for segment in sorted(segments, key=lambda segment: segment["address"]):
            begin = segment["address"]
            self._segments.append((begin, begin + segment["total_size"]))
            if tuple(segment.get("segment_pool_id", ())) == tuple(pool):
                self._blocks.append((begin, begin + segment["total_size"], POOL))
                continue
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    self._blocks.append((begin, begin + block["size"], OTHERS))
                begin += block["size"]
        self._begins = [begin for begin, _, _ in self._blocks]
        self._known: dict[int, str | None] = {}  # the kernels of a step share most of their arguments

    @classmethod
    def now(cls, owners: Owners, pool: Any) -> AddressMap:
        """Return the map of this moment."""
        return cls(owners, pool, torch.cuda.memory_snapshot(), is_mapped)

    def owner_at(self, address: int) -> str | None:
        """Return who owns an address; None if it is free memory, or no address."""
        if address not in self._known:
            self._known[address] = self._look_up(address)
        return self._known[address]

    def is_ownerless(self, address: int) -> bool:
        """Whether an address lies in memory of torch's that is free."""
        return self.owner_at(address) is None and self._is_torchs(address)

    def declares(self, owner: str) -> bool:
        """Whether an owner is a slot, an adopted tensor or a constant."""
        return owner not in (POOL, OTHERS, NOT_OF_TORCH)

    def bytes_touched(self, nodes: Iterable[Node]) -> int:
        """Return the sizes of what each node's arguments lie in, slots and constants alone, each once a node."""
        owned = [{argument.owner for argument in node.arguments if argument.owner} for node in nodes]
        return sum(memory.size_of(owner) for owners in owned for owner in owners for memory in self._declared)

    def problem_of(self, argument: Argument) -> str | None:
        """Return what has become of the memory at an address since it was captured; None if nothing."""
        if argument.owner is None:
            return "nobody owned the memory there at capture"
        owner = None if argument.address is None else self.owner_at(argument.address)
        if owner == argument.owner:
            return None
        return f"{argument.owner} was there at capture, {owner or 'nothing'} is there now"

    def _look_up(self, address: int) -> str | None:
        for memory in self._declared:
            name = memory.name_at(address)
            if name is not None:
                return name
        place = bisect_right(self._begins, address) - 1
        if place >= 0 and address < self._blocks[place][1]:
            return self._blocks[place][2]
        return NOT_OF_TORCH if not self._is_torchs(address) and self._is_mapped(address) else None

    def _is_torchs(self, address: int) -> bool:
        place = bisect_right(self._segments, address, key=lambda segment: segment[0]) - 1
        return place >= 0 and address < self._segments[place][1]
