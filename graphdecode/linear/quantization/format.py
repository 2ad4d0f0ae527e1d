"""The interface of a quantization format: how weights are stored, read, rounded on load, and written.

A format of Hugging Face's checkpoints finds the tensors of each quantized weight, checks them, and unpacks them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from graphdecode.errors import CheckpointError, UnsupportedModelError, shown
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight, WeightType
from graphdecode.linear.weight_form import Shard, Stored

Read = Callable[[str, tuple[slice, ...]], Tensor]  # reads a slice of a tensor by name; (): all of it
FLOATS = ("F32", "F16", "BF16")  # dtypes of scales
_CHUNK_VALUES = 1 << 22  # float32 values dequantized at a time


@dataclass(frozen=True)
class PackedTensor:
    """A quantized weight in the files of a checkpoint."""

    stored: Stored  # unpacked shape, and the name of a weight type
    tensors: Mapping[str, str]  # parameters of `unpack` -> names in the files
    unpack: Callable[..., QuantizedWeight]  # returns the weight; experts are concatenated by rows
    is_stack: bool = False  # it is [experts, in_features, out_features], each expert stored transposed

    def weight(self, read: Read, expert: int | None = None) -> QuantizedWeight | None:
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
        weight = self._unpacked(read, ())
        first, last, _ = rows.indices(self.stored.shape[0])
        step = max(1, _CHUNK_VALUES // weight.shape[1])
        for begin in range(first, last, step):
            some = weight.rows(slice(begin, min(begin + step, last))).dequantized()
            out[begin - first : begin - first + step].copy_(some[:, columns[0]] if columns else some)

    def _unpacked(self, read: Read, part: tuple[slice, ...]) -> QuantizedWeight:
        return self.unpack(**{parameter: read(name, part) for parameter, name in self.tensors.items()})


class OnlineQuantization(ABC):
    """How `quantize=NAME` rounds unquantized weights when a model is loaded, or copied."""

    name: str  # value of `quantize`
    file_format: ClassVar[str | None] = None  # "safetensors" or "gguf"; None: copies are not written
    covers_embedding: ClassVar[bool] = False  # whether embedding and output layer are rounded, too

    @abstractmethod
    def sized(self, group_size: int | None, columns: Iterable[int]) -> Self:
        """Return the scheme with `quantize_group_size`, or the default, for weights with these numbers of columns.

        Raises:
            ArgumentError: it has no groups, or they do not divide the columns.
        """

    @abstractmethod
    def type_of(self, name: str, columns: int, *, is_outer: bool) -> str:
        """Return the weight type for a weight; `is_outer`: it is the embedding or the output layer.

        Raises:
            ArgumentError: the columns cannot be divided.
        """

    @abstractmethod
    def quantized(self, weight: Tensor, weight_type: str) -> QuantizedWeight:
        """Quantize a weight [out_features, in_features]."""

    def written(self, name: str, weight: QuantizedWeight) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of each tensor of a weight in a checkpoint folder."""
        raise NotImplementedError(f"{self.name} is not written")

    def written_config(self, ignored: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint folder; `ignored`: modules with unquantized weights."""
        raise NotImplementedError(f"{self.name} is not written")


class QuantizationFormat:
    """A format of quantized weights; an instance reads a checkpoint's, from its `quantization_config`."""

    name: ClassVar[str]  # `quant_method` of config.json
    weight_types: ClassVar[tuple[WeightType, ...]] = ()  # of its weights
    online: ClassVar[tuple[OnlineQuantization, ...]] = ()  # values of `quantize` that round unquantized weights to it
    is_integer: bool = False  # weights are integers: a CPU then computes in float16
    unused_suffixes: ClassVar[tuple[str, ...]] = ()  # suffixes of unused tensors for quantized activations

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check the fields of `quantization_config`, and keep those that `find` needs."""

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        """Yield name and tensor of each quantized weight in a checkpoint's files; `tensors`: all of them."""
        raise UnsupportedModelError(f"{self.name} is not read from checkpoint folders")


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


def checked_size(settings: Mapping[str, Any], name: str) -> int:
    """Return a field that is an integer >= 1."""
    value = settings.get(name)
    if not is_size(value):
        raise UnsupportedModelError(f"{name} must be an integer >= 1, got {shown(value)}")
    return int(settings[name])


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
    stored = tensors.get(name)
    if stored is None:
        raise CheckpointError(f"{name} is missing")
    if stored.shape != shape or stored.dtype not in dtypes:
        raise CheckpointError(
            f"{name} is {stored.dtype} {list(stored.shape)} and should be {' or '.join(dtypes)} {list(shape)}"
        )
