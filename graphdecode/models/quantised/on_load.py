"""A source of plain weights that gives them in few bits: each is rounded when it is read.

The forms that keep a checkpoint's codes keep these, and a file of them is written by reading; there is one rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.linear.few_bits import FewBits, part_of
from graphdecode.linear.gguf_blocks import BLOCK_OF, GgufBlocks
from graphdecode.linear.groups import GROUP_TYPES, Groups
from graphdecode.linear.weight_form import Shard, Stored, TensorSource
from graphdecode.models.config import ModelConfig
from graphdecode.models.family import family_of
from graphdecode.models.gguf.quantize import dequantize, quantised_blocks
from graphdecode.models.quantised.experts_apart import ExpertsApart
from graphdecode.models.quantised.rounding import GROUP_SCHEMES, GroupScheme, rounded
from graphdecode.models.weight_map import Part, WeightMap, parts

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


class RoundedSource(ABC):
    """A source of plain weights that gives some of them in few bits.

    Args:
        source: of plain weights.
        weight_map: of the model.
        kinds: what is rounded, by name -> what `Stored.dtype` says of it then.

    Attributes:
        weight_map: of the model.
    """

    def __init__(self, source: TensorSource, weight_map: WeightMap, kinds: Mapping[str, str]) -> None:
        self._source = source
        self._kinds = kinds
        self.weight_map = weight_map

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """All that there are, by name."""
        there = self._source.tensors
        return {name: stored._replace(dtype=self._kinds.get(name, stored.dtype)) for name, stored in there.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write the values of a tensor, or a part of it, into `out`."""
        if name not in self._kinds:
            self._source.read(name, out, shard)
        else:
            whole = self._values(name)
            out.copy_(whole if shard is None else whole[shard.slices(tuple(whole.shape))])

    def read_few_bits(self, name: str, shard: Shard | None = None, expert: int | None = None) -> FewBits | None:
        """Return a rounded weight, or a part of it; None for other tensors, and parts within a group."""
        return part_of(self._rounded(name), shard) if name in self._kinds else None

    @abstractmethod
    def _rounded(self, name: str) -> FewBits: ...

    @abstractmethod
    def _values(self, name: str) -> Tensor:
        """Return what a rounded weight stands for."""


class QuantisedGroups(RoundedSource):
    """A source whose products' weights are in groups; the output layer and embeddings stay as they are.

    Args:
        source: of plain weights.
        weight_map: of the model.
        name: one of GROUP_SCHEMES.
        group_size: columns that share a scale; None: see `GroupScheme.sized`.

    Attributes:
        scheme: into what weights are rounded.

    Raises:
        ValueError: groups of such a size do not fit.
    """

    def __init__(self, source: TensorSource, weight_map: WeightMap, name: str, group_size: int | None) -> None:
        products = _products(weight_map)
        self.scheme: GroupScheme = GROUP_SCHEMES[name].sized(group_size, (part.shape[1] for part in products))
        super().__init__(source, weight_map, dict.fromkeys((part.name for part in products), self.scheme.type_name))

    def _rounded(self, name: str) -> Groups:
        return rounded(plain_weight(self._source, name), self.scheme)

    def _values(self, name: str) -> Tensor:
        return self._rounded(name).dequantised()


class QuantisedBlocks(RoundedSource):
    """A source whose products' weights, the output layer's and the embedding are in blocks of GGUF.

    Args:
        source: of plain weights.
        weight_map: of the model.
        name: "q8_0" or "q4_k".

    Raises:
        ValueError: a weight's columns are no whole blocks.
    """

    def __init__(self, source: TensorSource, weight_map: WeightMap, name: str) -> None:
        products, edges = _BLOCK_SCHEMES[name]
        of_edges = [part for place in ("embedding", "lm_head") for part in weight_map.get(place, ())]
        types = {part.name: _fitting(name, part, products) for part in _products(weight_map)}
        super().__init__(source, weight_map, types | {part.name: _fitting(name, part, edges) for part in of_edges})

    def _rounded(self, name: str) -> GgufBlocks:
        kind = self._kinds[name]
        return GgufBlocks(quantised_blocks(plain_weight(self._source, name), kind), kind)

    def _values(self, name: str) -> Tensor:
        return dequantize(self._rounded(name).stored.numpy(), BLOCK_OF[self._kinds[name]])


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
    if kinds & (GROUP_TYPES | BLOCK_OF.keys()):
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
        if part.shape[1] % BLOCK_OF[kind].values == 0:
            return kind
    raise ArgumentError(
        f"quantize={name!r}: {part.name} has {part.shape[1]} columns, into which blocks of "
        f"{BLOCK_OF[kinds[-1]].values} do not go"
    )
