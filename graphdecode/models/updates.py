"""New values for a loaded model's weights, copied into its tensors: addresses do not change, graphs stay valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError, shown
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight
from graphdecode.linear.weight_form import FLOAT_DTYPES, Shard, Stored, TensorSource
from graphdecode.models.config import ModelShape
from graphdecode.models.decoder import Decoder
from graphdecode.models.model import Model
from graphdecode.models.weight_map import CheckpointError

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
_KINDS = {dtype: kind for kind, dtype in FLOAT_DTYPES.items()}
# configuration fields that say how weights are stored
_MAY_DIFFER = ("dtype", "integer_quantized", "tie_word_embeddings")
_NOT_LAYOUT = ("choices", "config")  # fields of forms with measurements, which may differ between runs


class ReplacedTensors:
    """A source whose tensors are partly replaced by tensors in memory, by name.

    A float tensor counts as having the source's float dtype, and is quantized like the source's.
    """

    def __init__(self, source: Any, replaced: Mapping[str, Tensor]) -> None:
        name_of = getattr(source, "name_of", str)  # a source may have names other than those of its files
        self._source = source
        self.replaced = {name_of(name): tensor for name, tensor in replaced.items()}
        self.tensors: dict[str, Stored] = {**source.tensors}
        for name, tensor in self.replaced.items():
            kind, stored = _KINDS.get(tensor.dtype, str(tensor.dtype)), source.tensors.get(name)
            kind = stored.dtype if stored is not None and {stored.dtype, kind} <= FLOAT_DTYPES.keys() else kind
            self.tensors[name] = Stored((*tensor.shape,), kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write a tensor, or a shard of it, into `out`; raise CheckpointError if a replaced one is not finite there."""
        tensor = self.replaced.get(name)
        if tensor is None:
            self._source.read(name, out, shard)
        else:
            copy_finite(name, out, tensor if shard is None else tensor[shard.slices((*tensor.shape,))])

    def read_quantized(self, name: str, expert: int | None = None) -> QuantizedWeight | None:
        """Return a quantized weight of the source; None if a plain one replaces it."""
        return None if name in self.replaced else self._source.read_quantized(name, expert)


def copy_finite(name: str, out: Tensor, tensor: Tensor) -> None:
    """Copy a tensor; raise CheckpointError if numbers are not finite in the dtype of `out`."""
    out.copy_(tensor)
    if not bool(out.isfinite().all()):
        raise CheckpointError(f"{name} has numbers that are not finite in {str(out.dtype).removeprefix('torch.')}")


def differs(name: str, other: str) -> str:
    """Return what is wrong with a value for a name that stands for another one's tensor, too."""
    return (
        f"weights: {name} differs from {other}, and the model has one tensor for both: give neither or both with the "
        "same values, or load a model whose output layer is its own"
    )


def as_named_tensors(tensors: NamedTensors) -> dict[str, Tensor]:
    """Return detached tensors by name; raise ArgumentError if they are something else, none, or a name repeats."""
    named: dict[str, Tensor] = {}
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors if isinstance(tensors, Iterable) else [tensors]
    for pair in pairs:
        match pair:
            case (str(name), Tensor() as tensor) if name not in named:
                named[name] = tensor.detach()
            case (str(name), Tensor()):
                raise ArgumentError(f"weights: {name} is given twice")
            case _:
                raise ArgumentError(f"weights must be a folder, a file, or names with their tensors, got {shown(pair)}")
    if not named:
        raise ArgumentError("weights: no tensor is given")
    return named


def check_config(model: ModelShape, other: ModelShape) -> None:
    """Raise ArgumentError if a configuration's weights cannot replace a model's."""
    if type(model) is not type(other):
        raise ArgumentError(f"weights are of {other.architecture}, and the model is {model.architecture}")
    for entry in fields(model):
        ours, theirs = getattr(model, entry.name), getattr(other, entry.name)
        if entry.name not in _MAY_DIFFER and ours != theirs:
            raise ArgumentError(f"weights have {entry.name} {shown(theirs)}, and the model has {shown(ours)}")


def check_stored(model: TensorSource, other: TensorSource) -> None:
    """Raise ArgumentError if a tensor has another shape or quantization; the message names it."""
    for name in model.tensors.keys() & other.tensors.keys():
        (shape, kind), (other_shape, other_kind) = model.tensors[name], other.tensors[name]
        if shape != other_shape:
            raise ArgumentError(f"weights: {name} is {[*other_shape]}, and the model's is {[*shape]}")
        if kind != other_kind and not {kind, other_kind} <= FLOAT_DTYPES.keys():
            raise ArgumentError(f"weights: {name} is stored as {other_kind}, and the model's as {kind}")


def check_layout(model: Model, other: Model) -> None:
    """Raise ArgumentError if two models' tensors differ in layout; the message names one."""
    for mine, theirs in zip_longest(_parts(model), _parts(other)):  # what is tied in one alone makes fewer
        (name, ours), (_, others) = mine or theirs, theirs or mine
        if mine is None or theirs is None or _layout(ours) != _layout(others):
            raise ArgumentError(f"weights: {name} is stored or quantized otherwise than the model's, which is captured")
    if model.cache_scales != other.cache_scales:
        raise ArgumentError("weights come with other scales of cached keys and values, which are captured")


def copy_weights(model: Model, other: Model) -> None:
    """Copy the weights of a model of the same layout into those of another, in place."""
    with torch.no_grad():
        for tensor, new in zip(model.constants, other.constants, strict=True):
            tensor.copy_(new)


def _parts(model: Model) -> Iterator[tuple[str, Any]]:
    """Yield the parts that a step reads, by name."""
    if isinstance(model, Decoder):
        for index, block in enumerate(model.blocks):
            layer = f"layers.{index - 1}" if 0 < index <= model.num_layers else type(block).__name__.lower()
            yield from ((f"{layer}.{name}", value) for name, value in block.leaves())
    else:
        yield from model.products()
        yield from ((f"tensor {index}", tensor) for index, tensor in enumerate(model.constants))


def _layout(value: Any) -> Any:
    """Return all of a form or tensor but its numbers: what must match for a copy."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.layout
    if is_dataclass(value):
        parts = {entry.name: getattr(value, entry.name) for entry in fields(value) if entry.name not in _NOT_LAYOUT}
        return type(value), {name: _layout(each) for name, each in parts.items()}
    return tuple(map(_layout, value)) if isinstance(value, tuple) else value
