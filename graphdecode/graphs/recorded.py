"""`RecordedStepGraph`: the semantics of a CUDA graph on a machine without one.

One run of the step is recorded operator by operator, with the actual tensors; replay runs this flat list again on the
same storages, without the step's Python. What a CUDA graph would get wrong (a baked number, a stale pointer), this gets
wrong in the same way; what a graph cannot contain is refused.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphdecode.buffers import Batch
from graphdecode.graphs.errors import CaptureError, caller, definition_of
from graphdecode.graphs.inspect.observer import (
    Given,
    StepObserver,
    flattened,
    mapped,
    observed,
    schema_of,
    tensors_of,
    values_of,
)
from graphdecode.graphs.inspect.owners import Owners, is_opaque, storage_address, storage_key
from graphdecode.graphs.step_graph import Argument, Node, Step, StepGraph
from graphdecode.kernels.native.library import NativeSequence, joined
from graphdecode.kernels.native.registration import bind

# factories of uninitialized memory: the memory is part of the graph, and there is nothing to replay
_UNINITIALIZED = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
}
_ALIGNMENT = 64  # bytes: a line of a processor's caches


class ReusedMemory:
    """Assigns memory blocks to the intermediates of a step, as CUDA's allocator does within a capture.

    The recorded run uses memory of its own. Each storage that it makes gets a block until the storage is freed: replays
    run the same operators in the same order. All graphs share the blocks.
    """

    def __init__(self, blocks: list[Tensor]) -> None:
        self.blocks = blocks  # uint8; new ones are appended
        self._free = list(blocks)
        self._in_use: dict[int, tuple[StorageWeakRef, Tensor]] = {}

    def hold(self, key: int, tensor: Tensor) -> Tensor:
        """Assign a block to the new storage `key` of the step; return `tensor` over the block."""
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

    def block_of(self, key: int) -> Tensor | None:
        """Return the block of a storage; None if the step did not make it."""
        return self._in_use.get(key, (None, None))[1]


def _over(block: Tensor, tensor: Tensor) -> Tensor:
    storage = block.untyped_storage()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class Recorder(StepObserver):
    """Records operators as a flat list of calls without arguments, and skips those whose values nobody needs."""

    def __init__(self, owners: Owners, blocks: list[Tensor]) -> None:
        super().__init__(owners, computes=False)
        self.in_setitem = True  # the warm-up has refused all host data but numbers written by index
        self.calls: list[Callable[[], Any]] = []
        self.memory = ReusedMemory(blocks)  # for intermediates in replays
        self.pool: list[Tensor] = []  # the step's intermediates, over that memory
        self.nodes: list[Node] = []  # one per call

    def made_new(self, key: int, tensor: Tensor) -> None:
        """Assign memory to a tensor that the step made."""
        with self.working():
            self.pool.append(self.memory.hold(key, tensor))

    def seen(self, func: Any, args: tuple, kwargs: dict, given: Sequence[Given], result: Any) -> None:
        """Record a call that repeats the operator over aliases of the same memory."""
        schema = schema_of(func)
        if schema.name in _UNINITIALIZED or schema.reshapes:
            return
        with self.working():
            found = tensors_of(result)
            old = {storage_key(tensor) for _, tensor, _ in given} - {None} if found else set()
            new = [tensor for tensor in found if storage_key(tensor) not in old]
            if not new and not schema.is_mutable:
                return  # a view
            given = [*given, *(("result", tensor, True) for tensor in new)]
            places = {id(tensor): self._place(tensor) for tensor in [*(tensor for _, tensor, _ in given), *found]}
            args, kwargs = mapped(lambda value: places[id(value)][2] if id(value) in places else value, (args, kwargs))
        arguments = tuple(Argument(name, *places[id(tensor)], is_written) for name, tensor, is_written in given)
        self.nodes.append(Node(schema.overload, schema.overload, *caller(), arguments))
        own = bind(func, *values_of(schema, args, kwargs))
        if own is not None:
            self.calls.append(own)
        elif not new:
            self.calls.append(functools.partial(func._op, *args, **kwargs))
        else:
            fresh = {id(tensor) for tensor in new}
            outputs = [places[id(leaf)][2] if id(leaf) in fresh else None for leaf in flattened(result)]
            self.calls.append(_into_outputs(func, args, kwargs, outputs))

    def _place(self, tensor: Tensor) -> tuple[int | None, str | None, Tensor, int | None]:
        """Return a tensor's address, owner, alias and storage, as in `Argument`."""
        if is_opaque(tensor):
            return None, self.owner_of(tensor), tensor, None
        storage = tensor.untyped_storage()
        block = self.memory.block_of(storage._cdata)
        if block is None:
            return storage.data_ptr(), self.owner_of(tensor), tensor.detach(), storage._cdata
        storage = block.untyped_storage()
        return storage.data_ptr(), None, _over(block, tensor), storage._cdata


def _into_outputs(func: Any, args: tuple, kwargs: dict, outputs: list[Tensor | None]) -> Callable[[], Any]:
    """Return a call that computes into `outputs`; None is a view of an argument."""
    if not func._schema.is_mutable and None not in outputs:
        operator, names = _out_version(func)
        if len(outputs) == len(names):
            return functools.partial(operator, *args, **kwargs, **dict(zip(names, outputs, strict=True)))
    return functools.partial(_compute_and_copy, func._op, args, kwargs, outputs)


def _compute_and_copy(operator: Any, args: tuple, kwargs: dict, outputs: list[Tensor | None]) -> None:
    for target, source in zip(outputs, flattened(operator(*args, **kwargs)), strict=True):
        if target is not None:
            target.copy_(source)


def _out_version(func: Any) -> tuple[Any, list[str]]:
    """Return the operator's out= overload with the names of its outputs, or (None, [])."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        written = [a for a in candidate._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        others = [(a.name, str(a.type)) for a in candidate._schema.arguments if a not in written]
        if written and all(argument.kwarg_only for argument in written) and others == wanted:
            return candidate._op, [argument.name for argument in written]
    return None, []


class RecordedStepGraph(StepGraph):
    """One bucket's step as a flat list of operators over fixed memory; `blocks` are the pool.

    Raises:
        CaptureError: the step does what no graph can replay, or raised an error.
    """

    def __init__(self, step: Step, batch: Batch, owners: Owners, blocks: list[Tensor]) -> None:
        had = sum(block.nbytes for block in blocks)
        recorder, began = Recorder(owners, blocks), time.perf_counter()
        with observed(recorder, batch, step=step, guards_methods=False) as watched:
            step(watched)
        if not recorder.calls:
            raise CaptureError("unseen-work", "the step", "it ran no operator", definition_of(step))
        self._calls = joined(recorder.calls)
        self._is_compiled = all(isinstance(call, NativeSequence) for call in self._calls)
        try:
            self.replay()  # the recorder has skipped most operators
        except Exception as error:
            raise CaptureError.of(error) from error
        self.capture_ms = 1000 * (time.perf_counter() - began)
        self._pool = recorder.pool
        self.pool_bytes = sum(block.nbytes for block in blocks) - had
        self.nodes = recorder.nodes
        tensors = [argument.tensor for node in self.nodes for argument in node.arguments]
        self.moved_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None and not is_opaque(tensor))

    def problem_finder(self, owners: Owners) -> Callable[[Argument], str | None]:
        """Return a function that describes how an argument's memory has changed since capture, or returns None."""
        owned = (owners.slots(), owners.constants_now())
        pool = {storage_key(tensor) for tensor in self._pool}

        def problem_of(argument: Argument) -> str | None:
            if argument.tensor is None or argument.storage is None:
                return None  # opaque
            if argument.owner is None and argument.storage not in pool:
                return None  # a number in the step's code
            owner = argument.owner or "an intermediate"
            if storage_address(argument.tensor) != argument.address:
                return f"the memory of {owner} was reallocated after capture"
            if argument.owner is not None and not any(memory.name_of(argument.tensor) for memory in owned):
                return f"{owner} has other memory now than at capture"
            return None

        return problem_of

    def replay(self) -> None:
        """Run the recorded operators again, into the same memory."""
        # inference_mode skips more of the dispatcher than no_grad: a tenth of a small model's step
        if not self._is_compiled:
            with torch.inference_mode():
                for call in self._calls:
                    call()
            return
        for call in self._calls:
            call()

    def poison(self) -> None:
        """Fill all intermediates with NaN or the largest integer; a replay must not depend on their contents."""
        for tensor in self._pool:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                whole.fill_(float("nan"))
            else:
                whole.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)

    def close(self) -> None:
        """Release the memory."""
        self._calls, self._pool, self.nodes = [], [], []
