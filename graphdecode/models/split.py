"""One rank's shard of a model: configuration, tensors and adapters."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.linear.quantization.groups import Groups
from graphdecode.linear.quantization.quantized_weight import QuantizedSource, QuantizedWeight
from graphdecode.linear.weight_form import Shard, Stored, TensorSource
from graphdecode.models.adapters import Adapter
from graphdecode.models.config import ModelConfig, ModelShape
from graphdecode.models.weight_map import Part, Run, WeightMap, parts


def split_config(config: ModelShape, count: int) -> ModelConfig:
    """Return the configuration of one of `count` shards: its heads, and its channels of the MLPs.

    With fewer key and value heads than shards, several shards have the same heads. The vocabulary is not split: every
    rank has all logits.

    Raises:
        ArgumentError: sizes are not divisible (the message names all), or transformers runs the model.
    """
    if not isinstance(config, ModelConfig):
        raise ArgumentError(
            f"tensor_parallel_size={count} needs a family of graphdecode; {config.architecture} is run by transformers"
        )
    attends = not config.recurrent or any(state is None or state.beside_keys for state in config.recurrent)
    sizes = {"num_attention_heads": config.num_attention_heads, "intermediate_size": config.intermediate_size}
    if not attends:
        del sizes["num_attention_heads"]
    if config.intermediate_size == 1:  # no layer has an MLP
        del sizes["intermediate_size"]
    if config.experts is not None:
        sizes["moe_intermediate_size"] = config.experts.intermediate_size
        sizes["shared_expert_intermediate_size"] = config.experts.shared_intermediate_size
        if all(config.experts.layers):
            sizes.pop("intermediate_size", None)  # no layer has an MLP of that size
    odd = [f"{name} {size}" for name, size in sizes.items() if size % count]
    kv_heads = dict.fromkeys([config.num_key_value_heads, *(keys.heads for keys in config.layer_keys)])
    odd += [f"num_key_value_heads {heads}" for heads in kv_heads if heads % count and count % heads]
    mixer = config.mixer and config.mixer.split(count)
    if mixer is None and any(state is not None and state.shapes for state in config.recurrent):
        odd.append(f"the heads of recurrent layers, {config.mixer or 'whose sizes are not known'},")
    if odd:
        raise ArgumentError(f"tensor_parallel_size={count} does not divide {', '.join(odd)} of this model")
    experts = config.experts
    if experts is not None:
        width, shared = experts.intermediate_size // count, experts.shared_intermediate_size // count
        experts = replace(experts, intermediate_size=width, shared_intermediate_size=shared)
    return replace(
        config,
        num_attention_heads=max(config.num_attention_heads // count, 1),
        num_key_value_heads=max(config.num_key_value_heads // count, 1),
        layer_keys=tuple(replace(keys, heads=max(keys.heads // count, 1)) for keys in config.layer_keys),
        intermediate_size=max(config.intermediate_size // count, 1),
        experts=experts,
        mixer=mixer,
        recurrent=tuple(
            state if state is None or not state.shapes else replace(state, shapes=mixer.state.shapes)
            for state in config.recurrent
        ),
    )


class SplitSource:
    """One rank's shard of a source."""

    def __init__(self, source: TensorSource, weight_map: WeightMap, rank: int, count: int) -> None:
        self._source = source
        self._rank = rank
        self._count = count
        self._whole = {part.name: part for part in parts(weight_map)}
        shapes = {name: self._shape(part) for name, part in self._whole.items()}
        self.tensors: Mapping[str, Stored] = {
            name: Stored(shape, source.tensors[name].dtype) for name, shape in shapes.items() if name in source.tensors
        }
        self.weight_map: WeightMap = {
            param_name: tuple(part._replace(shape=shapes[part.name]) for part in weights)
            for param_name, weights in weight_map.items()
        }

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Copy the rank's shard of a tensor, or a shard of that along another axis, into `out`."""
        part, axis = self._whole[name], self._whole[name].split
        if part.is_added and self._rank > 0:
            out.zero_()
        elif axis is None:
            self._source.read(name, out, shard)
        else:
            cuts = list(_cuts(part, axis, self._rank, self._count))
            sizes = [_length(cut, part.shape) for cut in cuts]
            for cut, target in zip(cuts, out.split(sizes, dim=axis), strict=True):
                self._source.read(name, target, replace(cut, within=shard))

    def read_quantized(self, name: str, expert: int | None = None) -> QuantizedWeight | None:
        """Return the rank's shard of a quantized matrix; None if it is not quantized, or the shard cuts a block."""
        part, source = self._whole[name], self._source
        stored = source.read_quantized(name, expert=expert) if isinstance(source, QuantizedSource) else None
        if stored is None or part.split is None:
            return stored
        axis = part.split if expert is None else 2 - part.split  # a stack has its columns first
        cuts = [replace(cut, axis=axis) for cut in _cuts(part, part.split, self._rank, self._count)]
        with suppress(ValueError):  # a shard begins or ends within a group
            shards = [stored.part(cut) for cut in cuts]
            if axis == 0 or len(shards) == 1:
                return type(stored).joined(shards)
        if not isinstance(stored, Groups):
            return None
        reason = f"begins or ends within a group of {source.tensors[name].dtype}"
        if stored.order is not None:
            reason = "has columns of all groups, for they are in another order (GPTQ's desc_act)"
        raise ArgumentError(
            f"tensor_parallel_size={self._count} is not available: a part of {name}, {list(part.shape)}, {reason}"
        )

    def _shape(self, part: Part) -> tuple[int, ...]:
        if part.split is None:
            return part.shape
        sizes = list(part.shape)
        sizes[part.split] = sum(_length(cut, part.shape) for cut in _cuts(part, part.split, self._rank, self._count))
        return tuple(sizes)


def split_adapter(adapter: Adapter, parts: WeightMap, rank: int, count: int) -> Adapter:
    """Return a rank's shard of an adapter: A's columns of its inputs, B's rows of its outputs.

    `parts`: those of the whole model.
    """

    def split(param_name: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        whole = parts[param_name]
        if whole[0].split == 1:
            columns = [cut.slices(whole[0].shape)[1] for cut in _cuts(whole[0], 1, rank, count)]
            down = torch.cat([down[..., span] for span in columns], dim=-1)
        elif whole[0].split == 0:
            outputs = zip(whole, up.split([part.shape[0] for part in whole], dim=-1), strict=True)
            cuts = (
                (of_part, cut.slices(part.shape)[0]) for part, of_part in outputs for cut in _cuts(part, 0, rank, count)
            )
            up = torch.cat([of_part[..., span] for of_part, span in cuts], dim=-1)
        return down, up

    return replace(
        adapter, matrices={param_name: split(param_name, *pair) for param_name, pair in adapter.matrices.items()}
    )


def _cuts(part: Part, axis: int, rank: int, count: int) -> Iterator[Shard]:
    """Yield a rank's shard of each run."""
    begin = 0
    for run in part.runs or (Run(part.shape[axis]),):
        if 0 < run.heads < count:
            yield Shard(rank * run.heads // count, run.heads, axis, begin, run.size)
        else:
            yield Shard(rank, count, axis, begin, run.size)
        begin += run.size


def _length(cut: Shard, shape: tuple[int, ...]) -> int:
    span = cut.slices(shape)[cut.axis]
    return span.stop - span.start
