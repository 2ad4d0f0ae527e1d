"""Step buffers: every tensor that a decode step reads or writes, allocated once, at a fixed address.

A slot is declared with its shape, its dtype and its padding: by a `Slot`, or by a field of a dataclass, whose instances
are then what the step gets. Slots that the host writes belong to a staging block: one block of host memory (pinned with
a GPU) that mirrors one block of device memory, so that one copy uploads all of them.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar, get_type_hints, overload

import numpy as np
import torch
from torch import Tensor

from graphdecode.errors import ArgumentError, GraphdecodeError

LIVE_ROWS = "live_rows"
_ALIGNMENT_BYTES = 256
Device: TypeAlias = torch.device | str | None
_HOST_FOREIGN_DTYPES = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


class FrozenError(GraphdecodeError, RuntimeError):
    """A tensor that captured graphs use would have been allocated or moved."""


@dataclass(frozen=True)
class Slot:
    """One tensor of the step."""

    name: str  # the attribute of the step's batch
    # sizes; `"batch"` is the number of rows of the bucket, `"batch+1"` one more (cumulative lengths)
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    pad: float | int | bool = 0  # value of rows past the live ones
    # the staging block through which the host writes it; None: the device or the caller writes it
    staged: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise ArgumentError(f"a slot's name must be an identifier, got {self.name!r}")
        if not isinstance(self.shape, (tuple, list)):
            raise ArgumentError(f"slot {self.name!r}: shape must be a tuple such as ('batch', 8), got {self.shape!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise ArgumentError(f"slot {self.name!r}: dtype must be one of torch's, got {self.dtype!r}")
        if not (self.staged is None or isinstance(self.staged, str)):
            raise ArgumentError(f"slot {self.name!r}: staged must be the name of a block, got {self.staged!r}")
        self._check_pad()
        if self.staged is not None and self.dtype in _HOST_FOREIGN_DTYPES:
            raise ValueError(f"slot {self.name!r}: {self.dtype} cannot be staged, NumPy has no such type")
        for size in self.shape:
            if size not in ("batch", "batch+1") and not (type(size) is int and size >= 1):
                raise ValueError(f"slot {self.name!r}: a size must be >= 1, 'batch' or 'batch+1', got {size!r}")
        if sum(isinstance(size, str) for size in self.shape) > 1:
            raise ValueError(f"slot {self.name!r}: only one dimension can follow the batch, got {self.shape!r}")

    def _check_pad(self) -> None:
        """Raise an ArgumentError if the dtype cannot hold the pad."""
        pad, dtype = self.pad, self.dtype
        if dtype.is_floating_point or dtype.is_complex:
            fits, expected = isinstance(pad, (int, float)), "a number"
        elif dtype == torch.bool:
            fits, expected = pad in (0, 1), "True or False"
        else:
            least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            fits = isinstance(pad, (int, float)) and least <= pad <= most and pad == int(pad)
            expected = f"an integer in {least}..{most}"
        if not fits:
            raise ArgumentError(f"slot {self.name!r}: pad of {dtype} must be {expected}, got {pad!r}")

    @property
    def batch_dim(self) -> int | None:
        """The dimension of the batch, or None."""
        return next((i for i, size in enumerate(self.shape) if isinstance(size, str)), None)

    def rows(self, batch_size: int) -> int:
        """Return the size of the batch dimension for `batch_size` rows."""
        dim = self.batch_dim
        return batch_size + 1 if dim is not None and self.shape[dim] == "batch+1" else batch_size

    def sizes(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape for `batch_size` rows."""
        return tuple(self.rows(batch_size) if isinstance(size, str) else size for size in self.shape)


class SlotField(NamedTuple):
    """A slot of the field's name: `x: Annotated[Tensor, SlotField(("batch", 8), torch.float32)]`; see `Slot`.

    Sizes and the pad may be names, whose values the buffers get.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    pad: float | int | bool | str = 0
    staged: str | None = None


R = TypeVar("R")


@dataclass(kw_only=True)
class StepSlots:
    """Base of the dataclasses that declare what a step reads and writes.

    `StepBuffers` allocate fields with a `SlotField`; others are adopted tensors. A field is None by default if its slot
    is left out, since a size or the pad is None, or if nothing of its name was adopted.
    """

    size: int  # rows of the bucket
    live_rows: Tensor  # int32 [1], number of live rows; the others are padding

    @classmethod
    def declared(cls, sizes: Mapping[str, float | int | None]) -> list[Slot]:
        """Return the slots of the fields, given the values of names in their shapes and pads."""
        values: dict[Any, Any] = {"batch": "batch", "batch+1": "batch+1", **sizes}
        declared = []
        for name, hint in get_type_hints(cls, include_extras=True).items():
            for mark in getattr(hint, "__metadata__", ()):
                if isinstance(mark, SlotField):
                    shape = tuple(values[size] if isinstance(size, str) else size for size in mark.shape)
                    pad = values[mark.pad] if isinstance(mark.pad, str) else mark.pad
                    if None not in (*shape, pad):
                        declared.append(Slot(name, shape, mark.dtype, pad, mark.staged))
        return declared

    @classmethod
    def of(cls, size: int, tensors: Mapping[str, Tensor]) -> Self:
        """Return a batch of `size` rows; tensors of no field are attributes, too."""
        names = {field.name for field in fields(cls)}
        batch = cls(size=size, **{name: tensor for name, tensor in tensors.items() if name in names})
        vars(batch).update(tensors)
        return batch

    def without(self, name: str) -> Self:
        """Return the batch with None in place of a slot."""
        other = copy.copy(self)
        vars(other)[name] = None
        return other

    def record(self, kind: type[R], **others: Tensor) -> R:
        """Return a named tuple of the slots that its fields name, and of `others`."""
        tuple_type: Any = kind
        slots = vars(self) | others if others else vars(self)
        return tuple_type._make(map(slots.__getitem__, tuple_type._fields))


@dataclass(kw_only=True)
class Batch(StepSlots):
    """The buffers narrowed to the rows of one bucket; each slot is an attribute, at the same address.

    Its slots are declared when the program runs: to a type checker each name is a tensor. A dataclass has typed names.
    """

    def __getattr__(self, name: str) -> Tensor:
        declared = sorted(slot for slot, value in vars(self).items() if isinstance(value, Tensor))
        raise AttributeError(f"no slot {name!r}; declared are {declared}")


B = TypeVar("B")


class Change(NamedTuple):
    """A change of slots by the host, to repeat in the buffers of another process."""

    name: str  # the uploaded staging block, or a slot
    numbers: list[int]  # for a block: live rows; a staged slot: rows; another slot: first row, and columns
    data: bytes


class StagingBlock:
    """A host block and the device block that it is copied to, with a view of each slot into both."""

    def __init__(self, slots: list[Slot], max_batch_size: int, device: torch.device) -> None:
        sizes = [math.prod(slot.sizes(max_batch_size)) * slot.dtype.itemsize for slot in slots]
        *offsets, end = accumulate((-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes), initial=0)
        self.slots = slots
        self.host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = torch.zeros(end, dtype=torch.uint8, device=device)
        layout = list(zip(slots, offsets, strict=True))
        self.host_views, self.device_views = (
            {slot.name: self._view(block, slot, offset, max_batch_size) for slot, offset in layout}
            for block in (self.host, self.device)
        )
        self.arrays = {name: view.numpy() for name, view in self.host_views.items()}
        # as int64: torch splits CPU copies of more than 32768 elements among threads, which is slower while the threads
        # of a compiled step spin
        self._host_words, self._device_words = self.host.view(torch.int64), self.device.view(torch.int64)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    @staticmethod
    def _view(block: Tensor, slot: Slot, offset: int, max_batch_size: int) -> Tensor:
        sizes = slot.sizes(max_batch_size)
        return block.narrow(0, offset, math.prod(sizes) * slot.dtype.itemsize).view(slot.dtype).view(sizes)

    def wait(self) -> None:
        """Wait until the last upload has read the host block, which on a CPU is already so."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, num_bytes: int | None = None) -> None:
        """Start a copy of the host block, or of its first bytes, to the device; `wait` before writing again."""
        words = slice(None) if num_bytes is None else slice(-(-num_bytes // self._host_words.itemsize))
        self._device_words[words].copy_(self._host_words[words], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device.device))

    def upload_rows(self, name: str, rows: Sequence[int]) -> None:
        """Copy some rows of a slot to the device, adjacent ones in one copy; see `upload`."""
        source, target = self.host_views[name], self.device_views[name]
        first = end = -1
        for row in [*rows, -1]:
            if row != end:
                if end > first:
                    target[first:end].copy_(source[first:end], non_blocking=True)
                first = row
            end = row + 1
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device.device))


def default_device(device: torch.device | str | None) -> torch.device:
    """Return a device; None means CUDA if available, else the CPU."""
    try:
        return torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):
        raise ArgumentError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}") from None


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes a GPU the current device; it has no effect for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class StepBuffers(Generic[B]):
    """All tensors of a decode step at one fixed capacity.

    Every slot is an attribute with the whole tensor. A slot `live_rows`, int32 [1], is added: the number of live rows,
    which kernels read on the device; rows past it are padding.

    Args:
        slots: the declarations: `Slot` objects with unique names, or the step's dataclass; see `StepSlots`.
        max_batch_size: the capacity in rows, at least 1.
        device: None means CUDA if available, else the CPU.
        sizes: the values of names in the dataclass's shapes and pads; None: without the slots that have it.
        others: slots besides the dataclass's.
    """

    @overload
    def __init__(
        self: StepBuffers[Batch], slots: Iterable[Slot] | Slot, *, max_batch_size: int, device: Device = None
    ) -> None: ...

    @overload
    def __init__(
        self,
        slots: type[B],
        *,
        max_batch_size: int,
        device: Device = None,
        sizes: Mapping[str, float | int | None] = ...,
        others: Iterable[Slot] = ...,
    ) -> None: ...

    def __init__(
        self,
        slots: Any,
        *,
        max_batch_size: int,
        device: Device = None,
        sizes: Mapping[str, float | int | None] = MappingProxyType({}),
        others: Iterable[Slot] = (),
    ) -> None:
        if type(max_batch_size) is not int or max_batch_size < 1:
            raise ArgumentError(f"max_batch_size must be >= 1, got {max_batch_size!r}")
        self.max_batch_size = max_batch_size
        self.device = default_device(device)
        self._batch_type: Any = Batch
        if isinstance(slots, type) and issubclass(slots, StepSlots):
            self._batch_type, slots = slots, [*slots.declared(sizes), *others]
        declared = [slots] if isinstance(slots, Slot) else list(slots)
        for slot in declared:
            if not isinstance(slot, Slot):
                raise ArgumentError(f"slots must be Slot objects, got {slot!r}")
        blocks = [slot.staged for slot in declared if slot.staged is not None]
        of_batch = {slot.staged for slot in declared if slot.batch_dim is not None}
        self._sole_block = of_batch.pop() if len(of_batch) == 1 else None  # holds all slots with a batch dimension
        live = Slot(LIVE_ROWS, (1,), torch.int32, staged=blocks[0] if blocks else None)
        self.slots: dict[str, Slot] = {}
        for slot in [live, *declared]:
            if slot.name in self.slots or slot.name in _RESERVED_NAMES:
                raise ValueError(f"slot {slot.name!r} is declared twice, or the name is reserved")
            self.slots[slot.name] = slot
        if self.device.type == "cpu":
            _check_memory(self.slots.values(), max_batch_size)
        self.frozen = False
        self._blocks: dict[str, StagingBlock] = {}
        self._tensors: dict[str, Tensor] = {}
        self._batches: dict[int, B] = {}
        self._host_batches: dict[str, B] = {}
        self._live_rows = 0
        self._padded = max_batch_size  # rows from the live ones up to here are padding, unless a step wrote there
        self._last_user: object = None  # see `make_ready`
        self.relay: Callable[[Change], None] | None = None  # called with each change by the host
        try:
            self._allocate()
        except (AssertionError, RuntimeError):
            if self.device.type != "cuda" or torch.cuda.is_available():
                raise
            raise ArgumentError(f"device is {self.device}, but torch finds no CUDA device here") from None
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}

    def _allocate(self) -> None:
        for name in dict.fromkeys(slot.staged for slot in self.slots.values() if slot.staged is not None):
            members = [slot for slot in self.slots.values() if slot.staged == name]
            self._blocks[name] = StagingBlock(members, self.max_batch_size, self.device)
            self._tensors.update(self._blocks[name].device_views)
        for slot in self.slots.values():
            if slot.staged is None:
                self._tensors[slot.name] = torch.empty(
                    slot.sizes(self.max_batch_size), dtype=slot.dtype, device=self.device
                )
            else:
                self._blocks[slot.staged].host_views[slot.name].fill_(slot.pad)
            self._tensors[slot.name].fill_(slot.pad)

    def __getattr__(self: StepBuffers[Batch], name: str) -> Tensor:
        tensors = self.__dict__.get("_tensors", {})
        if name in tensors:
            return tensors[name]
        raise AttributeError(f"no slot {name!r}; declared are {sorted(tensors)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_tensors", {}):
            raise AttributeError(
                f"slot {name!r} has a fixed address that graphs use: write into it with "
                f"buffers.{name}.copy_(...), do not rebind it"
            )
        super().__setattr__(name, value)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All slots and adopted tensors, by name."""
        return dict(self._tensors)

    @property
    def live_row_count(self) -> int:
        """Number of live rows as the host set it, without synchronization."""
        return self._live_rows

    @property
    def size_bytes(self) -> int:
        """Bytes of device memory that the slots take, without adopted tensors."""
        return sum(self._tensors[name].nbytes for name in self.slots)

    def adopt(self, name: str, tensor: Tensor) -> None:
        """Add a tensor allocated elsewhere (a layer's KV cache, a workspace) to the step's.

        Raises:
            FrozenError: the buffers are frozen.
            ValueError: the name is taken, or the tensor is neither on the device nor in pinned memory.
        """
        if self.frozen:
            raise FrozenError(f"cannot adopt {name!r}: the buffers are frozen")
        if name in self._tensors or not name.isidentifier() or name in _RESERVED_NAMES:
            raise ValueError(f"{name!r} is taken, reserved or not an identifier")
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ArgumentError(f"{name!r} must be a tensor with storage of its own, got {type(tensor).__name__}")
        if tensor.device.type != self.device.type and not tensor.is_pinned():
            raise ValueError(f"{name!r} is on {tensor.device}, the buffers are on {self.device}")
        self._tensors[name] = tensor
        self._addresses[name] = tensor.data_ptr()
        self._batches.clear()

    @property
    def all_rows(self) -> B:
        """The batch of all rows."""
        return self.narrow(self.max_batch_size)

    def narrow(self, batch_size: int) -> B:
        """Return views of the first `batch_size` rows, at the same addresses."""
        if not 1 <= batch_size <= self.max_batch_size:
            raise ValueError(f"batch size must be in 1..max_batch_size={self.max_batch_size}, got {batch_size!r}")
        if batch_size not in self._batches:
            views = {
                name: self._tensors[name].narrow(slot.batch_dim, 0, slot.rows(batch_size))
                for name, slot in self.slots.items()
                if slot.batch_dim is not None
            }
            self._batches[batch_size] = self._batch_type.of(batch_size, self._tensors | views)
        return self._batches[batch_size]

    def staging(self, block: str) -> dict[str, np.ndarray]:
        """Return the host arrays of a staging block, to write before `upload`; waits for its last upload."""
        if block not in self._blocks:
            raise ValueError(f"no staging block {block!r}; there are {sorted(self._blocks)}")
        self._blocks[block].wait()
        return self._blocks[block].arrays

    def host_batch(self, block: str) -> B:
        """Return the batch of all rows with a staging block's slots in host memory, to write as those of `staging`."""
        self.staging(block)
        if block not in self._host_batches:
            views = self._blocks[block].host_views
            self._host_batches[block] = self._batch_type.of(self.max_batch_size, self._tensors | views)
        return self._host_batches[block]

    def upload(self, block: str, live_rows: int) -> None:
        """Copy a staging block to the device in one copy, with rows past `live_rows` set to padding.

        `live_rows` is in the block of the first staged slot.
        """
        if not 0 <= live_rows <= self.max_batch_size:
            raise ValueError(f"live_rows must be in 0..max_batch_size={self.max_batch_size}, got {live_rows!r}")
        arrays = self.staging(block)
        for slot in self._blocks[block].slots:
            dim = slot.batch_dim
            if dim is not None:
                arrays[slot.name][(slice(None),) * dim + (slice(slot.rows(live_rows), None),)] = slot.pad
        if LIVE_ROWS in arrays:
            arrays[LIVE_ROWS][0] = live_rows
            if live_rows != self._live_rows:
                self._padded = self.max_batch_size if block == self._sole_block else live_rows
            self._live_rows = live_rows
        self._blocks[block].upload()
        if self.relay is not None:
            self.relay(Change(block, [live_rows], self._blocks[block].host.numpy().tobytes()))

    def upload_rows(self, name: str, rows: Sequence[int]) -> None:
        """Copy some rows, ascending, of a staged slot with the batch as first dimension to the device."""
        block = self._blocks[self.slots[name].staged or ""]
        block.upload_rows(name, rows)
        if self.relay is not None:
            self.relay(Change(name, list(rows), block.arrays[name][rows].tobytes()))

    def write(self, name: str, first: int, values: np.ndarray) -> None:
        """Copy `values` of rows from `first` on, or of their first columns, to a slot that is not staged."""
        columns = values.shape[1] if values.ndim > 1 else 1
        rows = self._tensors[name][first : first + len(values)]
        (rows[:, :columns] if values.ndim > 1 else rows).copy_(torch.from_numpy(values))
        if self.relay is not None:
            self.relay(Change(name, [first, columns], values.tobytes()))

    def take(self, change: Change) -> None:
        """Apply a change from the host of other buffers with the same slots."""
        name, numbers, data = change
        if name in self._blocks:
            self.staging(name)
            self._blocks[name].host.numpy()[:] = np.frombuffer(data, np.uint8)
            self.upload(name, numbers[0])
        elif self.slots[name].staged is not None:
            staged = self.staging(self.slots[name].staged or "")[name]
            staged[numbers] = np.frombuffer(data, staged.dtype).reshape(len(numbers), *staged.shape[1:])
            self.upload_rows(name, numbers)
        else:
            values = np.frombuffer(data, torch.empty(0, dtype=self.slots[name].dtype).numpy().dtype).copy()
            columns = len(self.slots[name].shape) > 1
            self.write(name, numbers[0], values.reshape(-1, numbers[1]) if columns else values)

    def set_live_rows(self, live_rows: int) -> None:
        """Make the first `live_rows` rows live and set all others to padding, unless that many are live already."""
        if live_rows == self._live_rows:
            return
        self.pad(live_rows)
        self._tensors[LIVE_ROWS].fill_(live_rows)
        self._live_rows, self._padded, self._last_user = live_rows, self.max_batch_size, None

    def make_ready(self, live_rows: int, rows: int, user: object) -> None:
        """Make rows live for a step over `rows` of them, and set the others to padding.

        Nothing is done if the previous step had the same `user`, compared by identity, and as many live rows.
        """
        if live_rows == self._live_rows and user is self._last_user and rows <= self._padded:
            return
        if live_rows == self._live_rows:
            if live_rows < rows:
                self.pad(live_rows, rows)
            self._padded = rows
        self.set_live_rows(live_rows)
        self._last_user = user

    def pad(self, live_rows: int, rows: int | None = None) -> None:
        """Set every slot's rows from `live_rows` up to `rows`, or the capacity, to padding."""
        for slot, tail in self.tails(live_rows, rows):
            tail.fill_(slot.pad)

    def poison(self, live_rows: int) -> None:
        """Set every slot's rows past `live_rows` to NaN or extreme integers, for tests."""
        for slot, tail in self.tails(live_rows):
            if slot.dtype.is_floating_point or slot.dtype.is_complex or slot.dtype == torch.bool:
                tail.fill_(float("nan"))
            elif tail.numel():
                values = torch.full(tail.shape, torch.iinfo(slot.dtype).max, dtype=slot.dtype)
                values.view(-1)[::2] = torch.iinfo(slot.dtype).min
                tail.copy_(values)

    def tails(self, live_rows: int, rows: int | None = None) -> Iterator[tuple[Slot, Tensor]]:
        """Yield each slot that has rows, with its rows from `live_rows` up to `rows`, or the capacity."""
        for slot in self.slots.values():
            if slot.batch_dim is not None:
                start, end = slot.rows(live_rows), slot.rows(self.max_batch_size if rows is None else rows)
                yield slot, self._tensors[slot.name].narrow(slot.batch_dim, start, end - start)

    def freeze(self) -> None:
        """Raise FrozenError from now on for what would allocate or move a tensor of the step."""
        self.verify_addresses()
        self.frozen = True

    def thaw(self) -> None:
        """Allow changes again; they invalidate captured graphs."""
        self.frozen = False

    def verify_addresses(self) -> None:
        """Raise a FrozenError if a tensor was moved (`set_`, `resize_`, `.data = ...`)."""
        for name, tensor in self._tensors.items():
            if tensor.data_ptr() != self._addresses[name]:
                raise FrozenError(f"slot {name!r} was moved after it was allocated: graphs use its old memory")

    def __repr__(self) -> str:
        size = f"{self.size_bytes / 2**20:.1f} MiB of slots on {self.device}"
        return f"StepBuffers({len(self._tensors)} tensors, max_batch_size={self.max_batch_size}, {size})"


def _check_memory(slots: Collection[Slot], max_batch_size: int) -> None:
    """Raise an ArgumentError if slots need more memory than the machine has."""
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needs = {slot.name: math.prod(slot.sizes(max_batch_size)) * slot.dtype.itemsize for slot in slots}
    if sum(needs.values()) > has:
        largest = max(slots, key=lambda slot: needs[slot.name])
        raise ArgumentError(
            f"the slots need {sum(needs.values())} bytes, this machine has {has}; the largest is {largest.name!r} with "
            f"shape {largest.sizes(max_batch_size)} and {needs[largest.name]} bytes"
        )


_RESERVED_NAMES = frozenset(dir(StepBuffers)) | {"max_batch_size", "device", "slots", "frozen", "size"}
