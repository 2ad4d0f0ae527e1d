"""Low-rank adapters (Hu et al., 2021), from PEFT's folders or GGUF, checked against the model; their slots in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from graphdecode.errors import GraphdecodeError, cause, shown
from graphdecode.hub.gguf_files import SUFFIX
from graphdecode.linear.experts import ExpertForm, ExpertNames
from graphdecode.linear.lora import Halves, LoRAEmbedding, LoRAExperts, LoRALinear, keys_by_head, values_by_head
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.config import ModelShape
from graphdecode.models.gguf.adapter import read_gguf_adapter
from graphdecode.models.low_rank import AdapterError, LowRank, Stack
from graphdecode.models.peft.adapter import HoldingWeights, read_peft
from graphdecode.models.weight_map import Part, Run, WeightMap

_EMBEDDING, _EVERY = "embedding", -1  # its param_name; all experts of a stack


class Spot(NamedTuple):
    """Where a weight stands in the model."""

    param_name: str
    expert: int = 0  # _EVERY: one tensor has all
    part: int = 0  # of the product


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory."""

    # by parameter: `down` [parts, rank, in_features] and `up` [rank, out_features], scaled; zeros if a part has
    # none, or a smaller rank. The embedding's `down` is [vocab, rank]; experts add a first dimension to both.
    matrices: dict[str, tuple[Tensor, Tensor]]

    def to_bytes(self) -> bytes:
        """Return the matrices for another rank."""
        return save({f"{name}.{half}": each for name, pair in self.matrices.items() for half, each in enumerate(pair)})

    @classmethod
    def of_bytes(cls, data: bytes) -> Adapter:
        """Return an adapter of the matrices that `to_bytes` wrote."""
        halves = load(data)
        names = [name.removesuffix(".0") for name in halves if name.endswith(".0")]
        return cls({name: (halves[f"{name}.0"], halves[f"{name}.1"]) for name in names})


@dataclass(frozen=True)
class AdapterSlots:
    """The adapter slots of a model's products."""

    count: int  # number of slots
    max_rank: int  # of an adapter
    adapts_experts: bool  # whether the products of experts have slots
    dtype: torch.dtype
    device: torch.device
    config: ModelShape
    # weight maps of the whole model, whose names adapters may have; if it has experts, the first has a tensor for each
    layouts: tuple[WeightMap, ...] = ()
    # by name in the model; a rank has its shards
    products: dict[str, LoRALinear | LoRAEmbedding | LoRAExperts] = field(default_factory=dict)
    # of each product of the whole model, as the weight map names them; for experts those of one expert
    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    expert_names: dict[str, ExpertNames] = field(default_factory=dict)  # how each product of experts is stored
    bases: dict[str, Tensor] = field(default_factory=dict)  # by module, plain weights of which a file may have a copy
    # by product that is computed from another one's weight: its name, and how its A and B become the product's
    derived: dict[str, tuple[str, Callable[[ExpertForm, Halves], Halves]]] = field(default_factory=dict)

    def wrap(self, form: WeightForm, param_name: str, parts: tuple[Part, ...]) -> WeightForm:
        """Return a product with adapter slots."""
        adapted = LoRALinear.wrap(form, (part.shape[0] for part in parts), self._ranks(), self.max_rank, self.dtype)
        self.products[param_name], self.parts[param_name] = adapted, parts
        return adapted

    def wrap_experts(self, form: ExpertForm, param_name: str, names: ExpertNames) -> ExpertForm:
        """Return the product of all experts of a layer, with adapter slots if experts have some."""
        if not self.adapts_experts:
            return form
        parts = _parts_of_one(self.layouts[0][param_name], names)
        adapted = LoRAExperts.wrap(form, len(parts), self._ranks(names.experts), self.max_rank, self.dtype)
        self.products[param_name], self.parts[param_name], self.expert_names[param_name] = adapted, parts, names
        return adapted

    def wrap_heads(
        self, to_keys: ExpertForm, to_values: ExpertForm, param_name: str, part: Part
    ) -> tuple[ExpertForm, ExpertForm]:
        """Return two products by head, made of one weight, with adapter slots; see `keys_by_head`."""
        adapted, self.parts[param_name] = [], (part,)
        for form, by_head in ((to_keys, keys_by_head), (to_values, values_by_head)):
            name = f"{param_name} {by_head.__name__}"
            adapted.append(LoRAExperts.wrap(form, 1, self._ranks(form.shape[0]), self.max_rank, self.dtype))
            self.products[name], self.derived[name] = adapted[-1], (param_name, by_head)
        return adapted[0], adapted[1]

    def of_embedding(self, part: Part) -> LoRAEmbedding:
        """Return adapter slots of the token embedding."""
        shapes = (part.shape[0], self.max_rank), (self.max_rank, part.shape[1])
        down, up = (torch.zeros(self.count, *shape, dtype=self.dtype, device=self.device) for shape in shapes)
        adapted = LoRAEmbedding(down, up, self._ranks())
        self.products[_EMBEDDING], self.parts[_EMBEDDING] = adapted, (part,)
        return adapted

    def _ranks(self, *experts: int) -> Tensor:
        return torch.zeros(self.count, *experts, dtype=torch.int32, device=self.device)

    def keep(self, constants: Iterable[Tensor]) -> None:
        """Forget products whose slots are not among the tensors of the model."""
        ids = {id(tensor) for tensor in constants}
        for name in [name for name, product in self.products.items() if id(product.down) not in ids]:
            param_name, _ = self.derived.pop(name, (name, None))
            del self.products[name]
            self.parts.pop(param_name, None)
            self.expert_names.pop(param_name, None)

    def write(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, in place. Products, and experts, that it does not change get the rank 0."""
        for name, product in self.products.items():
            param_name, by_head = self.derived.get(name, (name, None))
            pair = adapter.matrices.get(param_name)
            if pair is not None and by_head is not None:
                assert isinstance(product, LoRAExperts)
                pair = by_head(product, pair)
            rank = 0 if pair is None else pair[1].shape[-2]
            is_changed = pair is not None and (pair[1].dim() == 2 or pair[1].flatten(1).any(1))
            product.ranks[slot] = rank * is_changed
            for target, matrix in zip((product.down, product.up), pair or (), strict=False):
                target[slot][tuple(map(slice, matrix.shape))].copy_(matrix, non_blocking=True)

    def read(self, path: str | Path, holding_weights: HoldingWeights = nullcontext) -> Adapter:
        """Read an adapter: a folder as PEFT saves it, or a GGUF file.

        `holding_weights` returns a context in which the model's weights are in memory and do not change.

        Raises:
            AdapterError: there is none, it is for other modules or sizes, has a larger rank, numbers that are not
                finite, or changes more than products.
        """
        path = Path(path)
        try:
            path.stat()
        except (OSError, ValueError) as error:
            raise AdapterError(f"{shown(str(path))} is no path of an adapter: {cause(error)}") from error
        by_param: dict[str, dict[tuple[int, int], LowRank]] = {}
        spots = self._by_name()
        for name, low_rank in self._read(path, spots, holding_weights):
            module = name.removesuffix(".weight")
            if name not in spots:
                without_room = "experts" in module.split(".") and not self.adapts_experts
                experts = "of experts, which have room for adapters with adapt_experts=True" if without_room else ""
                raise AdapterError(f"{path}: {module} is {experts or 'no product that adapters can change'}")
            for spot in spots[name]:
                added, of_param = self._at(spot, path, module, low_rank), by_param.setdefault(spot.param_name, {})
                if of_param.keys() & added.keys():
                    raise AdapterError(f"{path}: {module} is adapted by matrices of another name, too")
                of_param.update(added)
        matrices = {param_name: self._matrices_of(param_name, of_parts) for param_name, of_parts in by_param.items()}
        for param_name, pair in matrices.items():
            if not all(bool(matrix.isfinite().all()) for matrix in pair):
                raise AdapterError(f"{path}: {param_name} has numbers that are not finite in {self.dtype}")
        return Adapter(matrices)

    def _at(self, spot: Spot, path: Path, module: str, low_rank: LowRank) -> dict[tuple[int, int], LowRank]:
        """Return what an adapter adds to a product, by expert and part; raise AdapterError if it does not fit."""
        param_name, expert, at = spot
        if low_rank.is_embedding and param_name != _EMBEDDING:
            raise AdapterError(f"{path}: {module} has matrices of an embedding, and is none")
        parts = self.parts[param_name]
        sizes = [part.shape[0] for part in parts]
        shape = (sum(sizes) if expert == _EVERY else sizes[at], parts[at].shape[1])
        _check(path, module, low_rank, shape[::-1] if param_name == _EMBEDDING else shape, self.max_rank)
        if expert == _EVERY:
            return dict(low_rank.parts_of_experts(sizes, interleaved=self.expert_names[param_name].interleaves))
        return {(expert, at): low_rank}

    def _by_name(self) -> dict[str, tuple[Spot, ...]]:
        """Return the parameters that have each weight: several if, as in some layers of Gemma 4, keys are values."""
        by_name: dict[str, dict[Spot, None]] = {}
        for name, spot in self._spots():
            by_name.setdefault(name, {})[spot] = None  # layouts may have the same name for it
        return {name: tuple(spots) for name, spots in by_name.items()}

    def _spots(self) -> Iterator[tuple[str, Spot]]:
        for param_name, parts in self.parts.items():
            stored = [layout[param_name] for layout in self.layouts if param_name in layout]
            names = self.expert_names.get(param_name)
            if names is None:
                alike = (weights for weights in (*stored, parts) if len(weights) == len(parts))
                yield from (
                    (part.name, Spot(param_name, 0, at)) for weights in alike for at, part in enumerate(weights)
                )
                continue
            for weights in stored:
                each, is_stack = len(weights) // names.experts, len(weights[0].shape) == 3
                for at, part in enumerate(weights):
                    yield part.name, Spot(param_name, _EVERY) if is_stack else Spot(param_name, *divmod(at, each))

    def _read(
        self, path: Path, spots_of: Mapping[str, tuple[Spot, ...]], holding_weights: HoldingWeights
    ) -> Iterator[tuple[str, LowRank]]:
        """Yield what an adapter adds, by the names of weights."""
        if path.suffix != SUFFIX:
            weight_map = {
                name: spot.param_name for name, spots in spots_of.items() for spot in spots if spot.expert == _EVERY
            }
            stacks = {name: Stack(self.parts[at], self.expert_names[at]) for name, at in weight_map.items()}
            yield from read_peft(path, spots_of, stacks, self.bases, holding_weights)
            return
        try:
            for module, down, up, scale in read_gguf_adapter(path, self.config):
                yield f"{module}.weight", LowRank(down, up, scale)
        except GraphdecodeError as error:
            raise AdapterError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error

    def _matrices_of(self, param_name: str, of_parts: Mapping[tuple[int, int], LowRank]) -> tuple[Tensor, Tensor]:
        parts, rank = self.parts[param_name], max(each.rank for each in of_parts.values())
        if param_name == _EMBEDDING:
            (only,) = of_parts.values()
            return only.down.to(self.dtype).T.contiguous(), (only.up.float() * only.scale).to(self.dtype).T.contiguous()
        names = self.expert_names.get(param_name)
        experts, rows = 1 if names is None else names.experts, [part.shape[0] for part in parts]
        down = torch.zeros(experts, len(parts), rank, parts[0].shape[1], dtype=self.dtype)
        up = torch.zeros(experts, rank, sum(rows), dtype=self.dtype)
        ups = up.split(rows, dim=-1)
        for (expert, at), low_rank in of_parts.items():
            down[expert, at, : low_rank.rank] = low_rank.down
            ups[at][expert, : low_rank.rank] = (low_rank.up.float() * low_rank.scale).T
        return (down[0], up[0]) if names is None else (down, up)


def _parts_of_one(stored: tuple[Part, ...], names: ExpertNames) -> tuple[Part, ...]:
    """Return the parts of one expert's weight, [out_features, in_features], the gate first."""
    if len(stored[0].shape) == 2:
        return stored[: len(stored) // names.experts]
    (stack,) = stored
    axis = None if stack.split is None else stack.split - 1
    shape, runs = stack.shape[1:], stack.runs
    if names.layout.transposed:
        shape, axis = shape[::-1], None if axis is None else 1 - axis
    if names.interleaves:
        runs = (Run(shape[0] // 2),) * 2
    return (Part(stack.name, shape, axis, runs),)


def _check(path: Path, module: str, low_rank: LowRank, shape: tuple[int, ...], max_rank: int) -> None:
    down, up, rank = low_rank.down, low_rank.up, low_rank.rank
    rows = rank * low_rank.experts
    expected = [rows, shape[1]], [shape[0], rows]
    if not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterError(f"{path}: {module} has matrices of {down.dtype} and {up.dtype}, and not of floats")
    if ([*down.shape], [*up.shape]) != expected:
        raise AdapterError(
            f"{path}: {module} has A {[*down.shape]} and B {[*up.shape]}; "
            f"of the model's {[*shape]} they would be {expected[0]} and {expected[1]}"
        )
    if not 1 <= rank <= max_rank:
        raise AdapterError(f"{path}: {module} has rank {rank}, and max_adapter_rank is {max_rank}")
