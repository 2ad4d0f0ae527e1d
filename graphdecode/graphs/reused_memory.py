"""The memory of a recorded graph's intermediates: what the step needs no more is given to what it makes later.

The step itself runs over memory of its own. Each storage that it makes stands for a block of the graph's, until nobody
refers to it: replays run the same operators in the same order, so that a later storage may stand for the same block.
It is what CUDA's allocator does within a capture.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_ALIGNMENT = 64  # bytes: a line of a processor's caches


class ReusedMemory:
    """Blocks, and which storage of the step stands for which.

    Attributes:
        blocks: uint8, all there are.
    """

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self._free: list[Tensor] = []
        self._in_use: dict[int, tuple[StorageWeakRef, Tensor]] = {}

    def hold(self, key: int, tensor: Tensor) -> Tensor:
        """Let a new storage of the step stand for a block, and return the tensor over it.

        Args:
            key: identifies the storage, and no later one of the step.
            tensor: the first one in it.
        """
        for one, (storage, block) in list(self._in_use.items()):
            if storage.expired():
                self._free.append(block)
                del self._in_use[one]
        size = -(-tensor.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        fitting = [block for block in self._free if size <= block.nbytes]
        if fitting:
            found = min(fitting, key=lambda block: block.nbytes)
            self._free = [block for block in self._free if block is not found]
        else:
            found = torch.empty(size, dtype=torch.uint8)
            self.blocks.append(found)
        self._in_use[key] = StorageWeakRef(tensor.untyped_storage()), found
        return _over(found, tensor)

    def standing_for(self, key: int | None, tensor: Tensor) -> Tensor:
        """Return a tensor over the block that a tensor's storage stands for, or an alias of what is not the step's."""
        if key not in self._in_use:
            return tensor.detach()
        return _over(self._in_use[key][1], tensor)


def _over(block: Tensor, tensor: Tensor) -> Tensor:
    storage = block.untyped_storage()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
