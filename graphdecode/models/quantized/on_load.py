"""A source that quantizes plain weights on load, for `quantize=` and quantized copies.

Stacked experts are read as if each expert had its own tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.linear.experts import StackLayout
from graphdecode.linear.gguf_blocks import BLOCK_OF, GgufBlocks
from graphdecode.linear.groups import GROUP_TYPES, Code, Groups, packed
from graphdecode.linear.quantized_weight import QuantizedWeight
from graphdecode.linear.weight_form import PLAIN_DTYPES, Shard, Stored, TensorSource
from graphdecode.models.config import ModelConfig
from graphdecode.models.family import family_of
from graphdecode.models.gguf.quantize import quantized_blocks
from graphdecode.models.weight_map import Part, WeightMap, parts


class _Piece(NamedTuple):
    stack: str  # name of the stack [experts, ...]
    expert: Shard  # the expert's shard of the stack
    place: int  # index of this product among an expert's
    places: int  # products of an expert in the stack
    shape: tuple[int, ...]


class SeparateExperts:
    """A source whose stacked experts are read as one tensor per expert.

    The source has the tensors of `stacked`, and is read as `separate`.
    """

    def __init__(self, source: TensorSource, stacked: WeightMap, separate: WeightMap, layout: StackLayout) -> None:
        self._source, self._layout = source, layout
        self._pieces: dict[str, _Piece] = {}
        self._named: dict[str, str] = {}  # names in `separate` -> names in `stacked`, if only these differ
        for place, ours in separate.items():
            theirs = stacked[place]
            if len(theirs) == len(ours):
                self._named |= {part.name: their.name for part, their in zip(ours, theirs, strict=True)}
                continue
            stack, count = theirs[0].name, theirs[0].shape[0]
            places = len(ours) // count  # ordered by experts
            for index, part in enumerate(ours):
                expert = Shard(index // places, count, 0)
                self._pieces[part.name] = _Piece(stack, expert, index % places, places, part.shape)

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        there = self._source.tensors
        used = {piece.stack for piece in self._pieces.values()} | set(self._named.values())
        found = {name: stored for name, stored in there.items() if name not in used}
        found |= {name: there[theirs] for name, theirs in self._named.items() if theirs in there}
        return found | {name: Stored(piece.shape, there[piece.stack].dtype) for name, piece in self._pieces.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write a tensor, or a shard of it, into `out`, without reading other experts."""
        piece = self._pieces.get(name)
        if piece is None:
            self._source.read(self._named.get(name, name), out, shard)
            return
        if self._layout.transposed:
            own = out.new_empty((1, *self._source.tensors[piece.stack].shape[1:]))
            self._source.read(piece.stack, own, piece.expert)
            own = own.mT if own.ndim > 2 else own
            interleaved = self._layout.interleaved
            own = own[:, piece.place :: piece.places] if interleaved else own.chunk(piece.places, 1)[piece.place]
        else:
            own = out.new_empty((1, *piece.shape))
            self._source.read(piece.stack, own, Shard(piece.place, piece.places, 1, within=piece.expert))
        out.copy_(own[0] if shard is None else own[0][shard.slices(piece.shape)])


_VALUES_AT_ONCE = 1 << 22  # float32 values quantized at a time
_GROUP_SIZES = (128, 64, 32)  # default: the first that divides all columns
_FLOAT8_MOST = 448.0
# candidates for a group's largest value over its scale: larger ones clip it, for more precise others
_LARGEST_CODES = (7.0, 7.5, 8.0, 8.5, 9.0, 10.0, 11.0)


@dataclass(frozen=True)
class GroupScheme:
    """Codes with a scale per row, or per group of a row."""

    name: str  # value of `quantize`
    code: Code
    bits: int  # bits of a code
    is_grouped: bool = False  # whether the default is several groups per row
    group_size: int | None = None  # columns that share a scale; None: a whole row

    @property
    def type_name(self) -> str:
        """`Stored.dtype` of such a weight."""
        return "FP8" if self.code == "e4m3" else f"INT{self.bits}"

    def sized(self, group_size: int | None, columns: Iterable[int]) -> GroupScheme:
        """Return the scheme with a group size that divides all `columns`; None: the default."""
        if group_size is None and not self.is_grouped:
            return self
        if self.code != "integer":
            raise ArgumentError(f"quantize={self.name!r} has a scale for each row: leave the group size out")
        divisor = math.gcd(*columns)
        fitting = [size for size in _GROUP_SIZES if divisor % size == 0]
        size = group_size if group_size is not None else fitting[0] if fitting else 0
        if size < 16 or size % 16 or divisor % size:
            asked = "" if group_size is None else f"of {group_size} "
            can = f"; those of {', '.join(map(str, fitting))} are" if fitting else ""
            raise ArgumentError(
                f"groups {asked}are not available with quantize={self.name!r}: they must be a multiple of 16, and "
                f"divide all weights' columns, and so {divisor}{can}"
            )
        return replace(self, group_size=size)


GROUP_SCHEMES = {
    "int8": GroupScheme("int8", "integer", 8),
    "int4": GroupScheme("int4", "integer", 4, is_grouped=True),
    "fp8": GroupScheme("fp8", "e4m3", 8),
}


def quantized_groups(weight: Tensor, scheme: GroupScheme) -> Groups:
    """Quantize a weight [out_features, in_features], float32, bfloat16 or float16; scales have its dtype."""
    rows, columns = weight.shape
    size = scheme.group_size or columns
    scales = torch.empty(rows, columns // size, dtype=weight.dtype)
    kind = torch.float8_e4m3fn if scheme.code == "e4m3" else torch.uint8
    codes = torch.empty(rows, columns * scheme.bits // 8, dtype=kind)
    step = max(1, _VALUES_AT_ONCE // columns)
    for begin in range(0, rows, step):
        some = slice(begin, begin + step)
        groups = weight[some].float().unflatten(1, (-1, size))
        scales[some] = _scales(groups, scheme, weight.dtype)
        found = groups / scales[some].float()[..., None]
        if scheme.code == "e4m3":
            codes[some] = found.clamp_(-_FLOAT8_MOST, _FLOAT8_MOST).flatten(1).to(kind)
            continue
        half = 2 ** (scheme.bits - 1)
        integers = (found.round_().clamp_(-half, half - 1) + half).flatten(1).to(torch.uint8)
        codes[some] = packed(integers) if scheme.bits == 4 else integers
    return Groups(scheme.code, scheme.bits, codes, scales, None, size)


def _scales(groups: Tensor, scheme: GroupScheme, dtype: torch.dtype) -> Tensor:
    """Return scales > 0 of groups [rows, groups, columns] that make the squared error small."""
    largest = groups.abs().amax(-1)
    least = torch.finfo(dtype).tiny
    if scheme.bits == 8:
        return (largest / (_FLOAT8_MOST if scheme.code == "e4m3" else 127.0)).to(dtype).clamp_(min=least)
    best, best_error = torch.empty_like(largest, dtype=dtype), torch.full_like(largest, torch.inf)
    for code in _LARGEST_CODES:
        scales = (largest / code).to(dtype).clamp_(min=least)
        wide = scales.float()[..., None]
        error = ((groups / wide).round_().clamp_(-8, 7) * wide - groups).square_().sum(-1)
        best = torch.where(error < best_error, scales, best)
        best_error = torch.minimum(best_error, error)
    return best


_BLOCK_SCHEMES = {  # block types of products, and of the output layer; the second of each if 256 does not divide
    "q8_0": (("Q8_0", "Q8_0"), ("Q8_0", "Q8_0")),
    "q4_k": (("Q4_K", "Q5_0"), ("Q6_K", "Q8_0")),
}
# values of `quantize` -> those of `forms.py`
FORMS_OF: dict[str, str | None] = {**dict.fromkeys(GROUP_SCHEMES), **dict.fromkeys(_BLOCK_SCHEMES, "gguf")}


class QuantizingSource:
    """A source that quantizes the weights of `kinds` (name -> `Stored.dtype`), in groups or GGUF blocks."""

    def __init__(
        self, source: TensorSource, weight_map: WeightMap, kinds: Mapping[str, str], scheme: GroupScheme | None
    ) -> None:
        self._source = source
        self._kinds = kinds
        self.weight_map = weight_map
        self.scheme = scheme

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        there = self._source.tensors
        return {name: stored._replace(dtype=self._kinds.get(name, stored.dtype)) for name, stored in there.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        if name not in self._kinds:
            self._source.read(name, out, shard)
            return
        whole = self._quantized(name).dequantized()
        out.copy_(whole if shard is None else whole[shard.slices(tuple(whole.shape))])

    def read_quantized(self, name: str, expert: int | None = None) -> QuantizedWeight | None:
        return self._quantized(name) if name in self._kinds else None

    def _quantized(self, name: str) -> Groups | GgufBlocks:
        plain, kind = plain_weight(self._source, name), self._kinds[name]
        if self.scheme is None:
            return GgufBlocks(quantized_blocks(plain, kind), kind)
        return quantized_groups(plain, self.scheme)


def quantized_on_load(source: TensorSource, config: ModelConfig, name: str, group_size: int | None) -> QuantizingSource:
    """Return a source that quantizes the weights of another one, each expert separately.

    Groups are for the products of layers; GGUF blocks also for the embedding and the output layer. Routers, and what
    latent attention multiplies dequantized, are left alone.

    Args:
        source: the plain weights.
        config: the model's configuration.
        name: one of FORMS_OF.
        group_size: columns that share a scale, for "int4" and "int8"; None: the default.

    Raises:
        ValueError: the weights are already quantized, or groups or blocks do not fit.
    """
    family = family_of(config.architecture)
    stored, weight_map = family.weights_in(config, source.tensors), family.weights(config)
    names = {part.name for part in parts(stored)}
    kinds = {source.tensors[name].dtype for name in names if name in source.tensors} - PLAIN_DTYPES.keys()
    if kinds & (GROUP_TYPES | BLOCK_OF.keys()):
        raise ArgumentError(f"quantize={name!r} is for plain weights, and these are {', '.join(sorted(kinds))} already")
    if stored != weight_map:
        source = SeparateExperts(source, stored, weight_map, family.stack_layout)
    products = [
        part
        for place, found in weight_map.items()
        for part in found
        if place.startswith("layers.") and len(part.shape) == 2 and not place.endswith(("router", "kv_b"))
    ]
    if name in GROUP_SCHEMES:
        scheme = GROUP_SCHEMES[name].sized(group_size, (part.shape[1] for part in products))
        return QuantizingSource(source, weight_map, {part.name: scheme.type_name for part in products}, scheme)
    if group_size is not None:
        raise ArgumentError(f"quantize={name!r} has blocks of one size: leave the group size out")
    of_products, of_outer = _BLOCK_SCHEMES[name]
    types = {part.name: _fitting(name, part, of_products) for part in products}
    for place in ("embedding", "lm_head"):
        types |= {part.name: _fitting(name, part, of_outer) for part in weight_map.get(place, ())}
    return QuantizingSource(source, weight_map, types, None)


def plain_weight(source: TensorSource, name: str) -> Tensor:
    """Return a tensor of a source in its own dtype."""
    stored = source.tensors[name]
    out = torch.empty(stored.shape, dtype=PLAIN_DTYPES.get(stored.dtype, torch.float32))
    source.read(name, out)
    return out


def _fitting(name: str, part: Part, kinds: tuple[str, str]) -> str:
    """Return the first block type that divides a weight's columns."""
    found = [kind for kind in kinds if part.shape[1] % BLOCK_OF[kind].values == 0]
    if not found:
        least = BLOCK_OF[kinds[-1]].values
        raise ArgumentError(
            f"quantize={name!r}: {part.name} has {part.shape[1]} columns, into which blocks of {least} do not go"
        )
    return found[0]
