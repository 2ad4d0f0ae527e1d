"""Owners of the memory that a step touches: slots, adopted tensors and constants by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from graphdecode.buffers import FrozenError, StepBuffers
from graphdecode.errors import ArgumentError

Constant = torch.nn.Module | Tensor


_begin_of = torch.UntypedStorage.data_ptr  # that name is patched while a step is observed
# methods that return the tensors of a sparse one
_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def is_wrapper(kind: type) -> bool:
    """Return whether a class of tensors computes each operator by others (`__torch_dispatch__`)."""
    return kind not in _PLAIN and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]


_PLAIN = (Tensor, torch.nn.Parameter)


def is_opaque(tensor: Tensor) -> bool:
    """Return whether a tensor has no storage of its own: sparse, nested, packed, or a wrapper of others."""
    return tensor.layout != torch.strided or tensor.is_nested or is_wrapper(type(tensor))


def can_be_moved(tensor: Tensor) -> bool:
    """Return whether a tensor is its storage, sizes, strides, and conjugate and negative bits, and nothing else."""
    return not (is_opaque(tensor) or tensor.is_quantized or tensor.is_meta or tensor._is_zerotensor())


def tensor_over(storage: UntypedStorage, like: Tensor) -> Tensor:
    """Return a tensor over a storage with the dtype, layout, and conjugate and negative bits of another."""
    tensor = torch.empty(0, dtype=like.dtype, device=storage.device)
    tensor.set_(storage, like.storage_offset(), like.shape, like.stride())
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor


def storage_key(tensor: Tensor) -> int | None:
    """Return an id of a tensor's storage; None for opaque tensors."""
    return None if is_opaque(tensor) else tensor.untyped_storage()._cdata


def storage_address(tensor: Tensor) -> int | None:
    """Return where a tensor's storage begins; None for opaque tensors."""
    return None if is_opaque(tensor) else _begin_of(tensor.untyped_storage())


class TensorInfo(NamedTuple):
    """A tensor's memory: fixed while its storage is not replaced."""

    tensor: Tensor  # kept, for it is known by its id
    key: int | None  # of its storage
    address: int | None  # where the storage begins
    owner: str | None
    alias: Tensor  # stays with the memory when the tensor is moved

    @classmethod
    def of(cls, tensor: Tensor, owner: str | None) -> TensorInfo:
        """Return the record of a tensor."""
        if is_opaque(tensor):
            return cls(tensor, None, None, owner, tensor)
        storage = tensor.untyped_storage()
        return cls(tensor, storage._cdata, _begin_of(storage), owner, tensor.detach())


class MemoryMap:
    """Names and sizes of tensors by their memory; several may share a storage, as the slots of a staging block do."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.sizes = {name: tensor.nbytes for name, tensor in tensors.items() if not is_opaque(tensor)}
        self.infos: dict[int, TensorInfo] = {}  # of `tensors`: filled while steps are observed, by their ids
        self._ids = {id(tensor) for tensor in tensors.values()}
        self._named: dict[int, list[tuple[int, int, str]]] = {}
        for name in self.sizes:
            begin = tensors[name].data_ptr()
            entry = (begin, begin + self.sizes[name], name)
            self._named.setdefault(tensors[name].untyped_storage()._cdata, []).append(entry)

    def __contains__(self, key: int | None) -> bool:
        return key in self._named

    def names(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of `tensors`, and no view of one."""
        return id(tensor) in self._ids

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the tensor whose memory a tensor lies in, or None."""
        named = self._named.get(storage_key(tensor) or 0)
        if named is None:
            return None
        if len(named) == 1:
            return named[0][2]
        address = tensor.data_ptr()
        return next((name for begin, end, name in named if begin <= address < end), None)

    def name_at(self, address: int) -> str | None:
        """Return the name of the tensor that an address lies in, or None."""
        ranges = (entry for named in self._named.values() for entry in named)
        return next((name for begin, end, name in ranges if begin <= address < end), None)


class Owners:
    """The memory that a step may touch, and whether it is still where it was.

    `buffers` and `prompts` hold slots and adopted tensors. `constants` are modules, tensors, and lists or dicts of
    these, and are kept alive; a ValueError if one is something else.
    """

    def __init__(
        self, buffers: StepBuffers, constants: Iterable[Any] = (), prompts: Sequence[StepBuffers] = ()
    ) -> None:
        self.buffers, self._prompts = buffers, prompts
        self._constants = [constants] if isinstance(constants, (Tensor, torch.nn.Module)) else list(constants)
        self._hooks: list[Any] = []
        # of the constants, and the tensors that it is of: kept, for their ids tell whether it still is
        self._map, self._map_of = MemoryMap({}), (list[Tensor](), list[tuple[int, int | None]]())
        named = _named_tensors(self._constants, "constants")
        self._addresses = [(name, tensor, tensor.data_ptr()) for name, tensor in named if not is_opaque(tensor)]

    def slots(self) -> MemoryMap:
        """Return the current memory of slots and adopted tensors."""
        prompts = {f"{name} of prompts": t for other in self._prompts for name, t in other.tensors.items()}
        return MemoryMap(self.buffers.tensors | prompts)

    def constants_now(self) -> MemoryMap:
        """Return the current memory of the constants."""
        named = list(_named_tensors(self._constants, "constants"))
        facts = [(id(tensor), None if is_opaque(tensor) else tensor.data_ptr()) for _, tensor in named]
        if self._map_of[1] != facts:
            self._map, self._map_of = MemoryMap(dict(named)), ([tensor for _, tensor in named], facts)
        return self._map

    def freeze(self) -> None:
        """Make the modules among the constants refuse to load weights."""
        self.thaw()
        modules = {
            module
            for constant in self._constants
            if isinstance(constant, torch.nn.Module)
            for module in constant.modules()
        }
        self._hooks = [module.register_load_state_dict_pre_hook(_refuse_to_load) for module in modules]

    def thaw(self) -> None:
        """Allow the modules to load weights again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def verify(self) -> None:
        """Raise a FrozenError if a slot, adopted tensor or constant was moved (`set_`, `resize_`, `.data = ...`)."""
        for buffers in (self.buffers, *self._prompts):
            buffers.verify_addresses()
        for name, tensor, address in self._addresses:
            if tensor.data_ptr() != address:
                raise FrozenError(f"{name} was moved after it was declared: graphs still point at its old memory")


def _refuse_to_load(module: torch.nn.Module, *_arguments: Any) -> None:
    raise FrozenError(f"the graphs that read {type(module).__name__} are frozen: thaw() before loading weights")


def _parts_of(tensor: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a sparse tensor or a wrapper is made of."""
    if tensor.layout in _PARTS:
        yield from ((f"{name}.{part.lstrip('_')}", getattr(tensor, part)()) for part in _PARTS[tensor.layout])
    elif is_wrapper(type(tensor)):
        for part, member in vars(tensor).items():
            if isinstance(member, Tensor):
                yield from _named_tensors(member, f"{name}.{part}")


def _named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        yield from _parts_of(value, name)
    elif isinstance(value, torch.nn.Module):
        for attribute, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield from _named_tensors(tensor, f"{name}.{attribute}")
    elif isinstance(value, (list, tuple, dict)):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named_tensors(member, f"{name}[{key!r}]")
    else:
        raise ArgumentError(
            f"{name} must be a tensor, a module, or a list or dict of these, got {type(value).__name__}"
        )
