"""A source of plain weights that gives them in few bits: each is rounded when it is read.

The forms that keep a checkpoint's codes keep these, and a file of them is written by reading; there is one rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.linear.groups import GROUP_TYPES, Groups
from graphdecode.linear.weight_form import Shard, Stored, TensorSource
from graphdecode.models.config import ModelConfig
from graphdecode.models.family import family_of
from graphdecode.models.gguf.block_types import BLOCK_TYPE_NAMES, BLOCK_TYPES
from graphdecode.models.gguf.dequantize import dequantize
from graphdecode.models.gguf.quantize import quantised_blocks
from graphdecode.models.quantised.experts_apart import ExpertsApart
from graphdecode.models.quantised.rounding import GROUP_SCHEMES, GroupScheme, rounded
from graphdecode.models.weight_map import Part, WeightMap, parts

_BLOCK_OF = {block.name: block for block in BLOCK_TYPES.values()}
_BLOCK_SCHEMES = {  # by name: of a product's weights and of the output layer's; where 256 does not divide the columns
    "q8_0": (("Q8_0", "Q8_0"), ("Q8_0", "Q8_0")),
    "q4_k": (("Q4_K", "Q5_0"), ("Q6_K", "Q8_0")),
}
# what `quantize=` takes -> by what the forms are asked for that keep what is rounded so
FORMS_OF: dict[str, str | None] = {**dict.fromkeys(GROUP_SCHEMES), **dict.fromkeys(_BLOCK_SCHEMES, "gguf")}
PLAIN = {  # dtypes of weights that are not in few bits, in safetensors' words
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class QuantisedGroups:
    """A source whose products' weights are in groups; the output layer and embeddings stay as they are.

    Args:
        source: of plain weights.
        weight_map: of the model.
        name: one of GROUP_SCHEMES.
        group_size: columns that share a scale; None: see `GroupScheme.sized`.

    Attributes:
        weight_map: of the model.
        parts: what is rounded, by name.
        scheme: into what.

    Raises:
        ValueError: groups of such a size do not fit.
    """

    def __init__(self, source: TensorSource, weight_map: WeightMap, name: str, group_size: int | None) -> None:
        self._source = source
        self.weight_map = weight_map
        self.parts = {part.name: part for part in _products(weight_map)}
        self.scheme: GroupScheme = GROUP_SCHEMES[name].sized(group_size, (p.shape[1] for p in self.parts.values()))

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """All that there are, by name."""
        kind = self.scheme.type_name
        return {
            name: Stored(stored.shape, kind) if name in self.parts else stored
            for name, stored in self._source.tensors.items()
        }

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write the values of a tensor, or a part of it, into `out`."""
        if name not in self.parts:
            self._source.read(name, out, shard)
        else:
            whole = self._rounded(name).dequantised()
            out.copy_(whole if shard is None else whole[shard.slices(tuple(whole.shape))])

    def read_groups(self, name: str, shard: Shard | None = None, expert: int | None = None) -> Groups | None:
        """Return a product's weight, or a part of it, in groups; None for other tensors, and parts within a group."""
        if name not in self.parts:
            return None
        try:
            return self._rounded(name).part(shard)
        except ValueError:
            return None

    def _rounded(self, name: str) -> Groups:
        return rounded(plain_weight(self._source, name), self.scheme)


class QuantisedBlocks:
    """A source whose products' weights, the output layer's and the embedding are in blocks of GGUF.

    Args:
        source: of plain weights.
        weight_map: of the model.
        name: "q8_0" or "q4_k".

    Attributes:
        weight_map: of the model.

    Raises:
        ValueError: a weight's columns are no whole blocks.
    """

    def __init__(self, source: TensorSource, weight_map: WeightMap, name: str) -> None:
        self._source = source
        self.weight_map = weight_map
        products, edges = _BLOCK_SCHEMES[name]
        of_edges = [part for place in ("embedding", "lm_head") for part in weight_map.get(place, ())]
        self._types = {part.name: _fitting(name, part, products) for part in _products(weight_map)}
        self._types |= {part.name: _fitting(name, part, edges) for part in of_edges}

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """All that there are, by name."""
        return {
            name: Stored(stored.shape, self._types.get(name, stored.dtype))
            for name, stored in self._source.tensors.items()
        }

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write the values of a tensor, or a part of it, into `out`."""
        blocks = self.read_blocks(name)
        if blocks is None:
            self._source.read(name, out, shard)
            return
        shape, block = self.tensors[name].shape, _BLOCK_OF[self._types[name]]
        rows, *columns = (slice(None),) if shard is None else shard.slices(shape)
        out.copy_(dequantize(blocks[rows].numpy(), block)[(slice(None), *columns)])

    def read_blocks(self, name: str) -> Tensor | None:
        """Return a matrix in blocks, uint8 [rows, bytes of a row]; None for other tensors."""
        kind = self._types.get(name)
        return None if kind is None else quantised_blocks(plain_weight(self._source, name), kind)


def quantised_on_load(
    source: TensorSource, config: ModelConfig, name: str, group_size: int | None
) -> QuantisedGroups | QuantisedBlocks:
    """Return a source that rounds the weights of another one, those of each expert by themselves.

    Args:
        source: of plain weights.
        config: of the model.
        name: one of FORMS_OF.
        group_size: columns that share a scale, where one can say so; None: what is usual.

    Raises:
        ValueError: the weights are in few bits already, or groups or blocks do not fit.
    """
    family = family_of(config.architecture)
    stored, weight_map = family.weights_in(config, source.tensors), family.weights(config)
    names = {part.name for part in parts(stored)}
    kinds = {source.tensors[name].dtype for name in names if name in source.tensors} - PLAIN.keys()
    if kinds & (GROUP_TYPES | BLOCK_TYPE_NAMES):
        raise ArgumentError(f"quantize={name!r} is for plain weights, and these are {', '.join(sorted(kinds))} already")
    if stored != weight_map:
        source = ExpertsApart(source, stored, weight_map, has_turns=family.experts_have_turns)
    if name in GROUP_SCHEMES:
        return QuantisedGroups(source, weight_map, name, group_size)
    if group_size is not None:
        raise ArgumentError(f"quantize={name!r} has blocks of one size: leave the group size out")
    return QuantisedBlocks(source, weight_map, name)


def plain_weight(source: TensorSource, name: str) -> Tensor:
    """Return a tensor of a source as it has it, in memory of its own."""
    stored = source.tensors[name]
    out = torch.empty(stored.shape, dtype=PLAIN.get(stored.dtype, torch.float32))
    source.read(name, out)
    return out


def _products(weight_map: WeightMap) -> list[Part]:
    """Return the weights of the layers' products."""
    return [
        part
        for place, parts in weight_map.items()
        for part in parts
        if place.startswith("layers.") and len(part.shape) == 2 and not place.endswith("router")
    ]


def _fitting(name: str, part: Part, kinds: tuple[str, str]) -> str:
    """Return the first type of block into which a weight's columns go.

    Raises:
        ArgumentError: there is none.
    """
    for kind in kinds:
        if part.shape[1] % _BLOCK_OF[kind].values == 0:
            return kind
    raise ArgumentError(
        f"quantize={name!r}: {part.name} has {part.shape[1]} columns, into which blocks of "
        f"{_BLOCK_OF[kinds[-1]].values} do not go"
    )
