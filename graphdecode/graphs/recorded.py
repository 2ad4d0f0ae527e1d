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
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from graphdecode.buffers import StepSlots
from graphdecode.graphs.errors import CaptureError, caller, definition_of
from graphdecode.graphs.inspect.observer import (
    Schema,
    TensorArg,
    flattened,
    mapped,
    observed,
    tensors_of,
    values_of,
)
from graphdecode.graphs.inspect.owners import Owners, TensorInfo, storage_address, storage_key, tensor_over
from graphdecode.graphs.inspect.trace import Call, StepTracer, compare, raise_first
from graphdecode.graphs.step_graph import Argument, Node, Step, StepGraph
from graphdecode.kernels.native.library import NativeCall, NativeSequence, joined
from graphdecode.kernels.native.registration import bind

# factories of uninitialized memory: the memory is part of the graph, and there is nothing to replay
_UNINITIALIZED = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
}
_ALIGNMENT = 64  # bytes: a line of a processor's caches


class ReusedMemory:
    """Assigns memory blocks to the intermediates of a step, as CUDA's allocator does within a capture.

    Each storage that the step makes gets a block until the storage is freed: replays run the same operators in the same
    order. All graphs share the blocks.
    """

    def __init__(self, blocks: list[Tensor]) -> None:
        self.blocks = blocks  # uint8; new ones are appended
        self._free = list(blocks)
        self._in_use: list[tuple[StorageWeakRef, Tensor]] = []

    def allocate(self, nbytes: int) -> tuple[UntypedStorage, Tensor]:
        """Return a storage over a block, and the block, which is free again when nobody uses the storage."""
        in_use, self._in_use = self._in_use, []
        for storage, block in in_use:
            if storage.expired():
                self._free.append(block)
            else:
                self._in_use.append((storage, block))
        size = max(-(-nbytes // _ALIGNMENT), 1) * _ALIGNMENT
        fitting = [block for block in self._free if size <= block.nbytes]
        if fitting:
            chosen = min(fitting, key=lambda block: block.nbytes)
            self._free = [block for block in self._free if block is not chosen]
        else:
            chosen = torch.empty(size, dtype=torch.uint8)
            self.blocks.append(chosen)
        allocated = torch.frombuffer(chosen.numpy(), dtype=torch.uint8, count=size).untyped_storage()
        self._in_use.append((StorageWeakRef(allocated), chosen))
        return allocated, chosen

    def is_referenced(self) -> bool:
        """Whether something still uses a storage of the step."""
        return any(not storage.expired() for storage, _ in self._in_use)


class Recorder(StepTracer):
    """Records operators as a flat list of calls without arguments, and skips those whose values nobody needs."""

    binds_native = True

    def __init__(self, owners: Owners, blocks: list[Tensor], *, is_traced: bool = False) -> None:
        super().__init__(owners)
        self._is_traced = is_traced
        self.calls: list[Callable[[], Any]] = []
        self.memory = ReusedMemory(blocks)  # for intermediates
        self.pool: dict[Tensor, torch.dtype] = {}  # blocks, and the dtype of the last intermediate in them
        self.nodes: list[Node] = []  # one per call
        self.moved_bytes = 0
        self._blocks: dict[int | None, tuple[Tensor, int]] = {}  # of the storages that the step made, with addresses

    def on_new_tensors(self, schema: Schema, tensors: Sequence[Tensor]) -> None:
        """Move what the step made into the graphs' memory."""
        moved: dict[int | None, UntypedStorage] = {}
        for tensor in tensors:
            key, nbytes = storage_key(tensor), tensor.untyped_storage().nbytes()
            if key not in moved:
                moved[key], block = self.memory.allocate(nbytes)
                self._blocks[moved[key]._cdata] = block, moved[key].data_ptr()
                self.pool[block] = tensor.dtype
            values = None if schema.name in _UNINITIALIZED else tensor.clone()
            tensor.set_(moved[key], tensor.storage_offset(), tensor.shape, tensor.stride())
            if values is not None:
                tensor.copy_(values)

    def on_operator(self, schema: Schema, args: tuple, kwargs: dict, inputs: Sequence[TensorArg], result: Any) -> None:
        """Record a call that repeats the operator over the same memory."""
        if self._is_traced:
            super().on_operator(schema, args, kwargs, inputs, result)
        if schema.name in _UNINITIALIZED or schema.reshapes:
            return
        new: list[Tensor] = []
        if result is not None:
            old = {key for *_, key in inputs}
            new = [tensor for tensor in tensors_of(result) if storage_key(tensor) not in old]
        if not new and not schema.is_mutable:
            return  # a view
        arguments = [self._argument(*each) for each in inputs]
        arguments += (self._argument("result", tensor, True, storage_key(tensor)) for tensor in new)
        self.nodes.append(Node(schema.overload, schema.overload, *caller(), tuple(arguments)))
        self.calls.append(self._call(schema, args, kwargs, result, new, [argument.alias for argument in arguments]))
        # an index may depend on integers
        if schema.is_registered and any(
            is_written and not tensor.is_floating_point() for _, tensor, is_written, _ in inputs
        ):
            self.calls[-1]()

    def _call(
        self, schema: Schema, args: tuple, kwargs: dict, result: Any, new: list[Tensor], keep_alive: list[Tensor | None]
    ) -> Callable[[], Any]:
        """Return a call that repeats an operator, and keeps no memory but the blocks and what is `keep_alive`."""
        bound: Any = bind(schema.operator, *values_of(schema, args, kwargs)) if schema.is_registered else None
        if isinstance(bound, (NativeCall, NativeSequence)):
            for call in bound.calls if isinstance(bound, NativeSequence) else [bound]:
                call.keep_alive = keep_alive
            return bound
        fresh = {id(tensor) for tensor in new}
        outputs = [self._alias(leaf) if id(leaf) in fresh else None for leaf in flattened(result)]
        args, kwargs = mapped(lambda value: self._alias(value) if isinstance(value, Tensor) else value, (args, kwargs))
        if bound is not None:
            return functools.partial(bound.func, *values_of(schema, args, kwargs))
        if not new:
            return functools.partial(schema.operator._op, *args, **kwargs)
        return _into_outputs(schema.operator, args, kwargs, outputs)

    def _argument(self, name: str, tensor: Tensor, is_written: bool, key: int | None) -> Argument:
        self.moved_bytes += 0 if key is None else tensor.nbytes
        if key in self._blocks:
            return Argument(name, self._blocks[key][1], None, tensor.shape, key, None, is_written)
        info = self._slot_infos.get(id(tensor)) or self._constants.infos.get(id(tensor))
        info = info or TensorInfo.of(tensor, self.owner_of(tensor))
        return Argument(name, info.address, info.owner, tensor.shape, key, info.alias, is_written)

    def _alias(self, tensor: Tensor) -> Tensor:
        """Return the same memory as another tensor; of an intermediate, the block."""
        block, _ = self._blocks.get(storage_key(tensor), (None, 0))
        if block is None:
            return TensorInfo.of(tensor, None).alias
        return tensor_over(block.untyped_storage(), tensor)


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
    if any(argument.name == "reduction" for argument in func._schema.arguments):
        return None, []  # losses resize their output, to compute in it
    inputs = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        written = [a for a in candidate._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        others = [(a.name, str(a.type)) for a in candidate._schema.arguments if a not in written]
        if written and all(argument.kwarg_only for argument in written) and others == inputs:
            return candidate._op, [argument.name for argument in written]
    return None, []


class RecordedStepGraph(StepGraph):
    """One bucket's step as a flat list of operators over fixed memory; `blocks` are the pool.

    Raises:
        CaptureError: the step does what no graph can replay, or raised an error.
    """

    def __init__(self, step: Step, batch: StepSlots, owners: Owners, blocks: list[Tensor]) -> None:
        had, began, is_first = sum(block.nbytes for block in blocks), time.perf_counter(), not blocks
        trace: list[Call] | None = None
        for _ in range(2):
            recorder = Recorder(owners, blocks, is_traced=is_first)
            with observed(recorder, batch, step=step) as watched:
                result = step(watched)
            last = recorder.nodes[-1] if recorder.nodes else Node("", "", *definition_of(step))
            if (lost := recorder.lost_result(result, last[2:4])) is not None:
                raise lost
            del watched, result
            if not (is_first or recorder.memory.is_referenced()):
                break  # else the second run refuses what Python keeps from the first
            if is_first:
                if trace is not None:
                    compare(trace, recorder.trace, refuse=raise_first)
                trace = recorder.trace
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
        self.nodes, self.moved_bytes = recorder.nodes, recorder.moved_bytes

    def problem_finder(self, owners: Owners) -> Callable[[Argument], str | None]:
        """Return a function that describes how an argument's memory has changed since capture, or returns None."""
        owned = (owners.slots(), owners.constants_now())

        def problem_of(argument: Argument) -> str | None:
            if argument.owner is None or argument.storage is None or argument.alias is None:
                return None  # an intermediate, a number in the step's code, or opaque
            if storage_address(argument.alias) != argument.address:
                return f"the memory of {argument.owner} was reallocated after capture"
            if not any(memory.name_of(argument.alias) for memory in owned):
                return f"{argument.owner} has other memory now than at capture"
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
        for block, dtype in self._pool.items():
            whole = block.view(dtype)
            if dtype.is_floating_point or dtype.is_complex:
                whole.fill_(float("nan"))
            else:
                whole.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)

    def close(self) -> None:
        """Release the memory."""
        self._calls, self._pool, self.nodes = [], {}, []
