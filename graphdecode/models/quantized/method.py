"""The base of quantization methods of Hugging Face's checkpoints.

A method finds the tensors of each quantized weight, checks them, and unpacks them as `Groups`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphdecode.errors import shown
from graphdecode.linear.groups import Groups, packed, unpacked
from graphdecode.linear.weight_form import Shard, Stored
from graphdecode.models.fields import UnsupportedModelError
from graphdecode.models.weight_map import CheckpointError

Read = Callable[[str, tuple[slice, ...]], Tensor]  # reads a slice of a tensor by name; (): all of it
FLOATS = ("F32", "F16", "BF16")  # dtypes of scales
_VALUES_AT_ONCE = 1 << 22  # float32 values dequantized at a time


@dataclass(frozen=True)
class PackedTensor:
    """A quantized weight."""

    stored: Stored  # unpacked shape, and one of GROUP_TYPES
    tensors: Mapping[str, str]  # parameters of `unpack` -> names in the files
    unpack: Callable[..., Groups]  # returns the weight; experts are concatenated by rows
    is_stack: bool = False  # it is [experts, in_features, out_features], each expert stored transposed

    def groups(self, read: Read, expert: int | None = None) -> Groups | None:
        """Return a matrix, or one expert's of a stack; None if `expert` does not match."""
        if self.is_stack is (expert is None):
            return None
        return self._unpacked(read, () if expert is None else (slice(expert, expert + 1),))

    def write(self, read: Read, out: Tensor, shard: Shard | None) -> None:
        """Write the dequantized values, or a shard of them, into `out`."""
        rows, *columns = (slice(None),) if shard is None else shard.slices(self.stored.shape)
        if self.is_stack:
            of_experts = self._unpacked(read, (rows,)).dequantized().unflatten(0, (-1, self.stored.shape[2]))
            out.copy_(of_experts.transpose(1, 2)[(slice(None), *columns)])
            return
        groups = self._unpacked(read, ())
        first, last, _ = rows.indices(self.stored.shape[0])
        step = max(1, _VALUES_AT_ONCE // groups.shape[1])
        for begin in range(first, last, step):
            some = groups.rows(slice(begin, min(begin + step, last))).dequantized()
            out[begin - first : begin - first + step].copy_(some[:, columns[0]] if columns else some)

    def _unpacked(self, read: Read, part: tuple[slice, ...]) -> Groups:
        return self.unpack(**{parameter: read(name, part) for parameter, name in self.tensors.items()})


class Method(ABC):
    """A `quant_method`, from the fields of `quantization_config`."""

    name: ClassVar[str]
    unused_suffixes: ClassVar[tuple[str, ...]] = ()  # suffixes of unused tensors for quantized activations
    of_integers: bool = False  # weights are integers

    def __init__(self, settings: Mapping[str, Any]) -> None:  # noqa: B027 (a method may have no fields)
        """Check the fields of `quantization_config`, and keep those that `find` needs."""

    @abstractmethod
    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        """Yield name and tensor of each quantized weight."""


def one_of(settings: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any = None, *, of: str = "") -> Any:
    """Return a field of `quantization_config`, or of its object `of`; raise UnsupportedModelError if unknown."""
    value = settings.get(name)
    value = default if value is None else value
    if not any(value == each and type(value) is type(each) for each in known):
        words = ", ".join("none" if each is None else str(each) for each in known)
        field = f"{of}.{name}" if of else name
        raise UnsupportedModelError(
            f"quantization_config: {field} {shown(value, plain=True)} is not supported; supported are {words}"
        )
    return value


def is_size(value: Any) -> bool:
    """Whether a value is an integer >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def checked_block(block: Any, field: str) -> tuple[int, int]:
    """Return rows and columns of a block from `quantization_config`."""
    if not isinstance(block, list) or len(block) != 2 or not all(map(is_size, block)):
        raise UnsupportedModelError(f"quantization_config: {field} must be two sizes, got {shown(block)}")
    return block[0], block[1]


def checked_group_size(size: Any) -> int:
    """Return a `group_size`; -1: a whole row."""
    if not (is_size(size) or (size == -1 and isinstance(size, int))):
        raise UnsupportedModelError(f"quantization_config: group_size must be an integer >= 1, got {shown(size)}")
    return int(size)


def require(tensors: Mapping[str, Stored], name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Raise CheckpointError if a tensor is missing, or has another shape or dtype."""
    found = tensors.get(name)
    if found is None:
        raise CheckpointError(f"{name} is missing")
    if found.shape != shape or found.dtype not in dtypes:
        raise CheckpointError(
            f"{name} is {found.dtype} {list(found.shape)} and should be {' or '.join(dtypes)} {list(shape)}"
        )


def sorted_by_group(groups: Groups, group_of: Tensor | None, name: str) -> Groups:
    """Return a weight with its columns sorted by their groups, for GPTQ's `desc_act`.

    `group_of`: the group of each column, integers [in_features]; None: already sorted.
    """
    expected = torch.arange(groups.shape[1]) // groups.group_size
    if group_of is None or torch.equal(group_of.long(), expected):
        return groups
    order = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[order].long(), expected):
        raise CheckpointError(f"{name}: g_idx has groups that have not {groups.group_size} columns each")
    codes = (unpacked(groups.codes) if groups.bits == 4 else groups.codes).index_select(1, order)
    return replace(groups, codes=packed(codes) if groups.bits == 4 else codes, order=order.int())
