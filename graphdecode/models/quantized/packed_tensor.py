"""A weight that a checkpoint has in several tensors: which they are, and what they are together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from graphdecode.errors import shown
from graphdecode.linear.groups import Groups, packed, unpacked
from graphdecode.linear.weight_form import Shard, Stored
from graphdecode.models.fields import UnsupportedModelError
from graphdecode.models.weight_map import CheckpointError

Read = Callable[[str, tuple[slice, ...]], Tensor]  # a part of a tensor of the files, by its name; () is all of it
_VALUES_AT_ONCE = 1 << 22  # are undone together, in fp32


@dataclass(frozen=True)
class PackedTensor(ABC):
    """A weight, as a checkpoint without quantization would have it.

    Attributes:
        stored: its shape, and what it is stored as, one of GROUP_TYPES.
        tensors: of the files, that it is made of.
    """

    stored: Stored
    tensors: tuple[str, ...]

    @abstractmethod
    def groups(self, read: Read) -> Groups | None:
        """Return it as it is stored; None where it is no matrix."""

    def expert(self, read: Read, expert: int) -> Groups | None:
        """Return one expert's matrix [out_features, in_features] of a stack of them; None where it is none."""
        return None

    def write(self, read: Read, out: Tensor, shard: Shard | None) -> None:
        """Write its values, or those of a part, into `out`, some rows at a time."""
        groups = self.groups(read)
        if groups is None:
            raise CheckpointError(f"{self.tensors[0]} is no matrix")
        rows, *columns = (slice(0, len(out)),) if shard is None else shard.slices(self.stored.shape)
        first, last, _ = rows.indices(self.stored.shape[0])
        step = max(1, _VALUES_AT_ONCE // groups.shape[1])
        for begin in range(first, last, step):
            some = groups.rows(slice(begin, min(begin + step, last))).dequantized()
            out[begin - first : begin - first + step].copy_(some[:, columns[0]] if columns else some)


class Method(Protocol):
    """What `quantization_config` names as its `quant_method`.

    Attributes:
        name: that.
        spare: how tensors end that concern activations, which are not quantized here.
        of_integers: weights are integers of few bits.
    """

    name: ClassVar[str]
    spare: ClassVar[tuple[str, ...]]
    of_integers: bool

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Take the fields of a `quantization_config`.

        Raises:
            UnsupportedModelError: one has a value that is not known; the message lists those that are.
        """

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        """Yield the weights that the tensors of a checkpoint's files are, with the names that they go by.

        Raises:
            CheckpointError: tensors do not belong together.
        """


def is_one_of(
    settings: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any = None, *, of: str = ""
) -> Any:
    """Return a field's value.

    Args:
        settings: that hold it.
        name: of the field.
        known: its values.
        default: where it is left out.
        of: the field of `quantization_config` that the settings are, for the message; left out: all of it.

    Raises:
        UnsupportedModelError: it is none of those that are known.
    """
    value = settings.get(name)
    value = default if value is None else value
    if not any(value == each and type(value) is type(each) for each in known):
        words = ", ".join("none" if each is None else str(each) for each in known)
        field = f"{of}.{name}" if of else name
        raise UnsupportedModelError(
            f"quantization_config: {field} {shown(value, plain=True)} is not supported; supported are {words}"
        )
    return value


def require(tensors: Mapping[str, Stored], name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Refuse a tensor that is not there, or is another than it must be.

    Raises:
        CheckpointError: says what it is, and what it should be.
    """
    found = tensors.get(name)
    if found is None:
        raise CheckpointError(f"{name} is missing")
    if found.shape != shape or found.dtype not in dtypes:
        raise CheckpointError(
            f"{name} is {found.dtype} {list(found.shape)} and should be {' or '.join(dtypes)} {list(shape)}"
        )


def group_size_of(name: str, in_features: int, groups: int, sizes: tuple[int, ...]) -> int:
    """Return how many columns share a scale.

    Args:
        name: of the weight, for the message.
        in_features: columns of the weight.
        groups: scales of a row.
        sizes: that the configuration names; -1 is all columns.

    Raises:
        CheckpointError: no such size gives so many groups.
    """
    wide = [in_features if size == -1 else min(size, in_features) for size in sizes]
    found = [size for size in wide if -(-in_features // size) == groups]
    if not found:
        raise CheckpointError(f"{name} has {groups} groups of {in_features} columns, and should have groups of {sizes}")
    return found[0]


def reordered(groups: Groups, group_of: Tensor, name: str) -> Groups:
    """Return a weight whose columns stand by their groups, which GPTQ's `desc_act` dealt out by importance.

    Args:
        groups: with columns in the order of the input features, whatever group they are in.
        group_of: integers [in_features], the group of each column.
        name: for the message.

    Raises:
        CheckpointError: a group has more or fewer columns than the others.
    """
    expected = torch.arange(groups.shape[1]) // groups.group_size
    if torch.equal(group_of.long(), expected):
        return groups
    order = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[order].long(), expected):
        raise CheckpointError(f"{name}: g_idx has groups that have not {groups.group_size} columns each")
    codes = unpacked(groups.codes) if groups.bits == 4 else groups.codes
    codes = codes.index_select(1, order)
    return replace(groups, codes=packed(codes) if groups.bits == 4 else codes, order=order.int())
