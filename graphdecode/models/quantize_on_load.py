"""A source that quantizes plain weights on load, for `quantize=` and quantized copies.

Stacked experts are read as if each expert had its own tensors.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.linear.experts import StackLayout
from graphdecode.linear.forms import quantized_form
from graphdecode.linear.quantization.format import OnlineQuantization
from graphdecode.linear.quantization.gguf import GgufFormat
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight
from graphdecode.linear.quantization.registry import FORMATS, online_quantizations, weight_type
from graphdecode.linear.weight_form import FLOAT_DTYPES, FormOptions, LinearNames, Shard, Stored, TensorSource
from graphdecode.models.config import ModelConfig
from graphdecode.models.family import family_of
from graphdecode.models.weight_map import WeightMap, parts

DEQUANTIZE = "none"  # value of `quantize` that dequantizes stored weights


class _Piece(NamedTuple):
    stack: str  # name of the stack [experts, ...]
    expert: Shard  # the expert's shard of the stack
    product: int  # index of this product among an expert's
    total: int  # products of an expert in the stack
    shape: tuple[int, ...]


class SeparateExperts:
    """A source whose stacked experts are read as one tensor per expert.

    The source has the tensors of `stacked`, and is read as `separate`.
    """

    def __init__(self, source: TensorSource, stacked: WeightMap, separate: WeightMap, layout: StackLayout) -> None:
        self._source, self._layout = source, layout
        self._pieces: dict[str, _Piece] = {}
        self._named: dict[str, str] = {}  # names in `separate` -> names in `stacked`, if only these differ
        for param_name, ours in separate.items():
            theirs = stacked[param_name]
            if len(theirs) == len(ours):
                self._named |= {part.name: their.name for part, their in zip(ours, theirs, strict=True)}
                continue
            stack, count = theirs[0].name, theirs[0].shape[0]
            num_products = len(ours) // count  # ordered by experts
            for index, part in enumerate(ours):
                expert = Shard(index // num_products, count, 0)
                self._pieces[part.name] = _Piece(stack, expert, index % num_products, num_products, part.shape)

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        tensors = self._source.tensors
        used = {piece.stack for piece in self._pieces.values()} | set(self._named.values())
        result = {name: stored for name, stored in tensors.items() if name not in used}
        result |= {name: tensors[theirs] for name, theirs in self._named.items() if theirs in tensors}
        return result | {name: Stored(piece.shape, tensors[piece.stack].dtype) for name, piece in self._pieces.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write a tensor, or a shard of it, into `out`, without reading other experts."""
        piece = self._pieces.get(name)
        if piece is None:
            self._source.read(self._named.get(name, name), out, shard)
            return
        if self._layout.transposed:
            values = out.new_empty((1, *self._source.tensors[piece.stack].shape[1:]))
            self._source.read(piece.stack, values, piece.expert)
            values = values.mT if values.ndim > 2 else values
            interleaved = self._layout.interleaved
            values = (
                values[:, piece.product :: piece.total] if interleaved else values.chunk(piece.total, 1)[piece.product]
            )
        else:
            values = out.new_empty((1, *piece.shape))
            self._source.read(piece.stack, values, Shard(piece.product, piece.total, 1, within=piece.expert))
        out.copy_(values[0] if shard is None else values[0][shard.slices(piece.shape)])


class QuantizingSource:
    """A source that quantizes the weights of `types` (name -> weight type) when they are read."""

    def __init__(
        self,
        source: TensorSource,
        weight_map: WeightMap,
        types: Mapping[str, str],
        quantization: OnlineQuantization,
    ) -> None:
        self._source = source
        self._types = types
        self.weight_map = weight_map
        self.quantization = quantization

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        tensors = self._source.tensors
        return {name: stored._replace(dtype=self._types.get(name, stored.dtype)) for name, stored in tensors.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        quantized = self.read_quantized(name)
        if quantized is None:
            self._source.read(name, out, shard)
            return
        whole = quantized.dequantized()
        out.copy_(whole if shard is None else whole[shard.slices(tuple(whole.shape))])

    def read_quantized(self, name: str, expert: int | None = None) -> QuantizedWeight | None:
        if name not in self._types:
            return None
        return self.quantization.quantized(unquantized_weight(self._source, name), self._types[name])


def quantized_on_load(source: TensorSource, config: ModelConfig, name: str, group_size: int | None) -> QuantizingSource:
    """Return a source that quantizes the weights of another one, each expert separately.

    Routers, and what latent attention multiplies dequantized, are left alone.

    Args:
        source: the plain weights.
        config: the model's configuration.
        name: one of `online_quantizations`.
        group_size: columns that share a scale, for "int4" and "int8"; None: the default.

    Raises:
        ValueError: the weights are already quantized, or groups or blocks do not fit.
    """
    family = family_of(config.architecture)
    stored, weight_map = family.weights_in(config, source.tensors), family.weights(config)
    names = {part.name for part in parts(stored)}
    kinds = {source.tensors[name].dtype for name in names if name in source.tensors}
    already = sorted(kind for kind in kinds if weight_type(kind) is not None)
    if already:
        raise ArgumentError(f"quantize={name!r} is for plain weights, and these are {', '.join(already)} already")
    if stored != weight_map:
        source = SeparateExperts(source, stored, weight_map, family.stack_layout)
    products = [
        part
        for param_name, weights in weight_map.items()
        for part in weights
        if param_name.startswith("layers.") and len(part.shape) == 2 and not param_name.endswith(("router", "kv_b"))
    ]
    quantization = online_quantizations()[name].sized(group_size, (part.shape[1] for part in products))
    types = {part.name: quantization.type_of(part.name, part.shape[1], is_outer=False) for part in products}
    for param_name in ("embedding", "lm_head") if quantization.covers_embedding else ():
        outer = weight_map.get(param_name, ())
        types |= {part.name: quantization.type_of(part.name, part.shape[1], is_outer=True) for part in outer}
    return QuantizingSource(source, weight_map, types, quantization)


def unquantized_weight(source: TensorSource, name: str) -> Tensor:
    """Return a tensor of a source in its own dtype."""
    stored = source.tensors[name]
    out = torch.empty(stored.shape, dtype=FLOAT_DTYPES.get(stored.dtype, torch.float32))
    source.read(name, out)
    return out


def unless_stored_so(quantize: str | None, source: TensorSource) -> str | None:
    """Return `quantize`, or None if it names the stored weights' format; "gguf" stays: it needs kernels.

    Raises:
        ArgumentError: it names another format that weights are stored in.
    """
    stored, online = getattr(source, "quant_method", None), online_quantizations()
    if quantize in FORMATS and quantize not in online and quantize != stored:
        name, rounded = getattr(source, "name", "the model"), ", ".join(map(repr, online))
        raise ArgumentError(
            f"quantize={quantize!r} is for weights that are stored so, and those of {name} are {stored or 'not'}; "
            f"plain ones are rounded while they are read by quantize={rounded}"
        )
    return None if quantize == stored != GgufFormat.name else quantize


def quantizing_source(
    source: TensorSource, config: ModelConfig, options: FormOptions, quantize: str | None, group_size: int | None
) -> QuantizingSource | None:
    """Return a source that quantizes weights when they are read; None if `quantize` does not need one.

    Raises:
        ArgumentError: nothing here multiplies such weights, or they are quantized already.
    """
    if quantize is not None and options.quantize != quantize:
        quantizing = quantized_on_load(source, config, quantize, group_size)
        types = {stored.dtype: name for name, stored in quantizing.tensors.items() if stored.dtype not in FLOAT_DTYPES}
        for kind, name in types.items():  # without a form, it would be dequantized again
            if quantized_form(quantizing, LinearNames((name,)), options) is None:
                device = options.device.type
                raise ArgumentError(
                    f"quantize={quantize!r} is not available here: nothing multiplies {kind} on a {device}"
                )
        return quantizing
    if group_size is not None:
        raise ArgumentError(f"quantize_group_size is for quantize='int4' and 'int8', and quantize is {quantize!r}")
    if quantize and getattr(source, "quant_method", None) not in (None, GgufFormat.name):
        raise ArgumentError(f"quantize={quantize!r} is for plain weights, and these are quantized already")
    return None


class Dequantized:
    """A source without `read_quantized`: its weights are dequantized."""

    def __init__(self, source: TensorSource) -> None:
        self.read, self.tensors = source.read, source.tensors
