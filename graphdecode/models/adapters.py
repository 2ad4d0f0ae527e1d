"""Low-rank adapters (Hu et al., 2021), from PEFT's folders or GGUF, checked against the model; their slots in it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from graphdecode.errors import ArgumentError, GraphdecodeError, shown
from graphdecode.linear.adapted import Adapted, AdaptedEmbedding, AdaptedExperts
from graphdecode.linear.experts import ExpertForm, ExpertNames
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.config import ModelShape
from graphdecode.models.fields import UnsupportedModelError, read_json
from graphdecode.models.gguf.adapter import read_gguf_adapter
from graphdecode.models.gguf.files import SUFFIX
from graphdecode.models.weight_map import Part, Run, WeightMap

ADAPTER_FILE, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HoldingWeights: TypeAlias = Callable[[], AbstractContextManager[None]]
_MOST_ALPHA = 1e30
_EMBEDDING, _EVERY = "embedding", -1  # its place; all experts of a stack
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>embedding_[AB]|[AB]\.weight)")
# PEFT saves what is below an adapted embedding or output layer, too: the base model has it
_BASE_WEIGHT = re.compile(r"base_model\.model\.(?P<module>(.+\.)?(embed_tokens|lm_head))\.base_layer\.weight")
# what changes more than products, and what of it there may be
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "bias": (None, "none"),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "trainable_token_indices": (None, [], {}),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "use_bdlora": (None, False),
}
_LEAST_HALF, _ROWS_AT_ONCE = 2.0**-24, 4096  # the smallest float16; rows of a table that are compared at once
_MATCHING_S = 1.0  # seconds that all expressions of an adapter may take: some take years


class LowRank(NamedTuple):
    """What an adapter adds to one product, `scale * B @ A`, or to those of all experts."""

    down: Tensor  # A, [experts * rank, in_features], one expert's rows after another's
    up: Tensor  # B, [out_features, rank * experts], the columns of a rank side by side, one of each expert
    scale: float
    is_embedding: bool = False  # PEFT says that it is of an embedding: the transposed weight
    experts: int = 1  # 1: of one product

    @property
    def rank(self) -> int:
        """Rows of A, of each expert."""
        return self.down.shape[0] // self.experts if self.down.dim() else 0

    def transposed(self) -> LowRank:
        """Return the adapter of the transposed weights of experts."""
        down = self.up.view(len(self.up), -1, self.experts).permute(2, 1, 0)
        up = self.down.view(self.experts, -1, self.down.shape[1]).permute(2, 1, 0)
        return self._replace(down=down.flatten(0, 1), up=up.flatten(1, 2))

    def parts_of_experts(self, sizes: list[int], *, interleaved: bool) -> Iterator[tuple[tuple[int, int], LowRank]]:
        """Yield (expert, part) and the adapter of each, given the parts' output features.

        `interleaved`: outputs alternate between two parts.
        """
        down = self.down.view(self.experts, self.rank, -1)
        up = self.up.view(-1, self.rank, self.experts)
        up = torch.cat((up[::2], up[1::2])) if interleaved else up
        for at, of_part in enumerate(up.split(sizes)):
            for expert in range(self.experts):
                yield (expert, at), LowRank(down[expert], of_part[..., expert], self.scale)


class AdapterError(ArgumentError):
    """An adapter that the model cannot have; the message names the file and what is wrong, and nothing was changed."""


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory."""

    # by place in the model `down` [parts, rank, in_features] and `up` [rank, out_features], scaled; zeros if a part has
    # none, or a smaller rank. The embedding's `down` is [vocab, rank]; experts add a first dimension to both.
    matrices: dict[str, tuple[Tensor, Tensor]]

    def to_bytes(self) -> bytes:
        """Return the matrices for another rank."""
        return save(
            {f"{place}.{which}": each for place, pair in self.matrices.items() for which, each in enumerate(pair)}
        )

    @classmethod
    def of_bytes(cls, data: bytes) -> Adapter:
        """Return an adapter of the matrices that `to_bytes` wrote."""
        found = load(data)
        places = {name.removesuffix(".0") for name in found if name.endswith(".0")}
        return cls({place: (found[f"{place}.0"], found[f"{place}.1"]) for place in places})


@dataclass(frozen=True)
class AdapterSlots:
    """The adapter slots of a model's products."""

    count: int  # number of slots
    max_rank: int  # of an adapter
    adapts_experts: bool  # whether the products of experts have slots
    dtype: torch.dtype
    device: torch.device
    config: ModelShape
    # of the whole model, if it has experts: its weight map with one tensor per expert, and with stacks
    layouts: tuple[WeightMap, ...] = ()
    # by name in the model; a rank has its shards
    products: dict[str, Adapted | AdaptedEmbedding | AdaptedExperts] = field(default_factory=dict)
    # of each product of the whole model, as the weight map names them; for experts those of one expert
    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    expert_names: dict[str, ExpertNames] = field(default_factory=dict)  # how each product of experts is stored
    bases: dict[str, Tensor] = field(default_factory=dict)  # by module, plain weights of which a file may have a copy

    def wrap(self, form: WeightForm, place: str, parts: tuple[Part, ...]) -> WeightForm:
        """Return the product at a place with adapter slots."""
        made = Adapted.wrap(form, (part.shape[0] for part in parts), self._ranks(), self.max_rank, self.dtype)
        self.products[place], self.parts[place] = made, parts
        return made

    def wrap_experts(self, form: ExpertForm, place: str, names: ExpertNames) -> ExpertForm:
        """Return the product of all experts at a place, with adapter slots if experts have some."""
        if not self.adapts_experts:
            return form
        parts = _parts_of_one(self.layouts[0][place], names)
        ranks = torch.zeros(self.count, names.experts, dtype=torch.int32, device=self.device)
        made = AdaptedExperts.wrap(form, len(parts), ranks, self.max_rank, self.dtype)
        self.products[place], self.parts[place], self.expert_names[place] = made, parts, names
        return made

    def of_embedding(self, part: Part) -> AdaptedEmbedding:
        """Return adapter slots of the token embedding."""
        shapes = (part.shape[0], self.max_rank), (self.max_rank, part.shape[1])
        down, up = (torch.zeros(self.count, *shape, dtype=self.dtype, device=self.device) for shape in shapes)
        made = AdaptedEmbedding(down, up, self._ranks())
        self.products[_EMBEDDING], self.parts[_EMBEDDING] = made, (part,)
        return made

    def _ranks(self) -> Tensor:
        return torch.zeros(self.count, dtype=torch.int32, device=self.device)

    def keep(self, products: Iterable[Any]) -> None:
        """Forget products that are not among those of the model: wrapped in other forms, or joined."""
        held = {id(product) for product in products}
        for place in [place for place, product in self.products.items() if id(product) not in held]:
            del self.products[place], self.parts[place]
            self.expert_names.pop(place, None)

    def write(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, in place. Products, and experts, that it does not change get the rank 0."""
        for place, product in self.products.items():
            found = adapter.matrices.get(place)
            rank = 0 if found is None else found[1].shape[-2]
            is_changed = found is not None and (found[1].dim() == 2 or found[1].flatten(1).any(1))
            product.ranks[slot] = rank * is_changed
            for held, given in zip((product.down, product.up), found or (), strict=False):
                held[slot][tuple(map(slice, given.shape))].copy_(given, non_blocking=True)

    def read(self, path: str | Path, holding_weights: HoldingWeights = nullcontext) -> Adapter:
        """Read an adapter: a folder as PEFT saves it, or a GGUF file.

        `holding_weights` returns a context in which the model's weights are in memory and do not change.

        Raises:
            AdapterError: there is none, it is for other modules or sizes, has a larger rank, numbers that are not
                finite, or changes more than products.
        """
        path = Path(path)
        by_place: dict[str, dict[tuple[int, int], LowRank]] = {}
        where = self._by_name()
        for name, found in self._read(path, where, holding_weights):
            module = name.removesuffix(".weight")
            if name not in where:
                without_room = "experts" in module.split(".") and not self.adapts_experts
                experts = "of experts, which have room for adapters with adapt_experts=True" if without_room else ""
                raise AdapterError(f"{path}: {module} is {experts or 'no product that adapters can change'}")
            place, expert, at = where[name]
            if found.is_embedding and place != _EMBEDDING:
                raise AdapterError(f"{path}: {module} has matrices of an embedding, and is none")
            parts = self.parts[place]
            sizes = [part.shape[0] for part in parts]
            shape = (sum(sizes) if expert == _EVERY else sizes[at], parts[at].shape[1])
            _check(path, module, found, shape[::-1] if place == _EMBEDDING else shape, self.max_rank)
            own = {(expert, at): found}
            if expert == _EVERY:
                own = dict(found.parts_of_experts(sizes, interleaved=self.expert_names[place].interleaves))
            of_place = by_place.setdefault(place, {})
            if of_place.keys() & own.keys():
                raise AdapterError(f"{path}: {module} is adapted by matrices of another name, too")
            of_place.update(own)
        matrices = {place: self._joined(place, of_parts) for place, of_parts in by_place.items()}
        for place, pair in matrices.items():
            if not all(bool(matrix.isfinite().all()) for matrix in pair):
                raise AdapterError(f"{path}: {place} has numbers that are not finite in {self.dtype}")
        return Adapter(matrices)

    def _by_name(self) -> dict[str, tuple[str, int, int]]:
        """Return place, expert and part of each weight."""
        where: dict[str, tuple[str, int, int]] = {}
        for place, parts in self.parts.items():
            found_in = [layout[place] for layout in self.layouts if place in layout]
            names = self.expert_names.get(place)
            if names is None:
                alike = (found for found in (*found_in, parts) if len(found) == len(parts))
                where |= {part.name: (place, 0, at) for found in alike for at, part in enumerate(found)}
                continue
            for found in found_in:
                each, is_stack = len(found) // names.experts, len(found[0].shape) == 3
                where |= {
                    part.name: (place, _EVERY, 0) if is_stack else (place, at // each, at % each)
                    for at, part in enumerate(found)
                }
        return where

    def _read(
        self, path: Path, where: Mapping[str, tuple[str, int, int]], holding_weights: HoldingWeights
    ) -> Iterator[tuple[str, LowRank]]:
        """Yield what an adapter adds, by the names of weights."""
        if path.suffix != SUFFIX:
            places = {name: place for name, (place, expert, _) in where.items() if expert == _EVERY}
            stacks = {name: _Stack(self.parts[at], self.expert_names[at]) for name, at in places.items()}
            settings = _settings(path)
            yield from _read_peft(path, settings, _matrices(path, self.bases, holding_weights), stacks)
            return
        try:
            for module, down, up, scale in read_gguf_adapter(path, self.config):
                yield f"{module}.weight", LowRank(down, up, scale)
        except GraphdecodeError as error:
            raise AdapterError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error

    def _joined(self, place: str, of_parts: Mapping[tuple[int, int], LowRank]) -> tuple[Tensor, Tensor]:
        parts, rank = self.parts[place], max(each.rank for each in of_parts.values())
        if place == _EMBEDDING:
            (only,) = of_parts.values()
            return only.down.to(self.dtype).T.contiguous(), (only.up.float() * only.scale).to(self.dtype).T.contiguous()
        names = self.expert_names.get(place)
        experts, rows = 1 if names is None else names.experts, [part.shape[0] for part in parts]
        down = torch.zeros(experts, len(parts), rank, parts[0].shape[1], dtype=self.dtype)
        up = torch.zeros(experts, rank, sum(rows), dtype=self.dtype)
        ups = up.split(rows, dim=-1)
        for (expert, at), own in of_parts.items():
            down[expert, at, : own.rank] = own.down
            ups[at][expert, : own.rank] = (own.up.float() * own.scale).T
        return (down[0], up[0]) if names is None else (down, up)


def _parts_of_one(found: tuple[Part, ...], names: ExpertNames) -> tuple[Part, ...]:
    """Return the parts of one expert's weight, [out_features, in_features], the gate first."""
    if len(found[0].shape) == 2:
        return found[: len(found) // names.experts]
    (stack,) = found
    axis = None if stack.split is None else stack.split - 1
    shape, runs = stack.shape[1:], stack.runs
    if names.layout.transposed:
        shape, axis = shape[::-1], None if axis is None else 1 - axis
    if names.interleaves:
        runs = (Run(shape[0] // 2),) * 2
    return (Part(stack.name, shape, axis, runs),)


class _Stack(NamedTuple):
    """A weight of all experts in one tensor, [experts, outputs, inputs] or transposed."""

    parts: tuple[Part, ...]  # of one expert
    names: ExpertNames

    def oriented(self, found: LowRank, version: Any) -> LowRank | None:
        """Return an adapter of the weights as [outputs, inputs]; None if that is ambiguous.

        In PEFT 0.17, which names no version, and 0.18, A has the stack's second dimension; in 0.21 the inputs.
        """
        experts, outputs, inputs = self.names.experts, sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]
        found = found._replace(experts=experts)
        if found.down.dim() != 2 or found.up.dim() != 2:
            return found  # `_check` refuses it
        if (*found.down.shape[1:], *found.up.shape[:1]) != (outputs, inputs):
            return found
        if outputs == inputs:
            is_old = version is None or str(version).startswith(("0.17.", "0.18."))
            if str(version).startswith(("0.19.", "0.20.")):
                return None
            if self.names.layout.transposed or not is_old:
                return found
        is_whole = found.down.shape[0] % experts == found.up.shape[-1] % experts == 0
        return found.transposed() if is_whole else found


def _read_peft(
    folder: Path, settings: dict[str, Any], matrices: Mapping[str, LowRank], stacks: Mapping[str, _Stack]
) -> Iterator[tuple[str, LowRank]]:
    """Yield what an adapter adds, by the names of weights.

    `matrices`: by module, not scaled yet. `stacks`: of experts, by name, in the order of their module.
    """
    until, targets = time.monotonic() + _MATCHING_S, settings.get("target_parameters") or []
    rank_of, alpha_of = (_pattern(folder, settings, name, until) for name in ("rank_pattern", "alpha_pattern"))
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise AdapterError(f"{folder / ADAPTER_FILE}: target_parameters is {shown(targets)}, and no list of names")
    for wrapper, pair in matrices.items():
        weight = _weight_of(wrapper, targets, stacks)
        module, version = weight.removesuffix(".weight"), settings.get("peft_version")
        found = stacks[weight].oriented(pair, version) if weight in stacks else pair
        if found is None:
            raise AdapterError(f"{folder}: {module} is of square weights, and PEFT {shown(version)} may transpose them")
        rank, name = found.rank, weight if _is_target(weight, targets) else module  # what PEFT matches
        stated = rank_of(name, settings.get("r"))
        if stated != rank:
            raise AdapterError(f"{folder}: {module} has rank {rank}, and {ADAPTER_FILE} says {shown(stated)}")
        alpha = alpha_of(name, settings.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) <= _MOST_ALPHA:
            raise AdapterError(f"{folder}: lora_alpha of {module} is {shown(alpha)}, and not a number")
        # with rsLoRA (Kalajdzievski, 2023) alpha / sqrt(rank)
        divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
        yield weight, found._replace(scale=alpha / (divisor or 1))


def _is_target(weight: str, targets: Iterable[Any]) -> bool:
    return any(f".{weight}".endswith(f".{target}") for target in targets)


def _weight_of(wrapper: str, targets: Iterable[Any], stacks: Iterable[str]) -> str:
    """Return the weight that a module of PEFT's model changes.

    PEFT wraps the stacks of a module one after another: the first one's wrapper is the `base_layer` of the second's.
    """
    module = wrapper
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    depth = (len(wrapper) - len(module)) // len(".base_layer")
    wrapped = [name for name in stacks if name.rpartition(".")[0] == module and _is_target(name, targets)]
    return wrapped[-1 - depth] if depth < len(wrapped) else f"{wrapper}.weight"


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise AdapterError(f"{folder} holds no {ADAPTER_FILE}")
    try:
        settings = read_json(file)
    except UnsupportedModelError as error:
        raise AdapterError(str(error)) from error
    if settings.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"{file}: peft_type is {shown(settings['peft_type'])}; adapters are LORA")
    for name, allowed in _REFUSED.items():
        if settings.get(name) not in allowed:
            raise AdapterError(f"{file}: {name} is {shown(settings[name])}, and adapters change products alone")
    return settings


def _matrices(folder: Path, bases: Mapping[str, Tensor], holding_weights: HoldingWeights) -> dict[str, LowRank]:
    """Return the matrices by module, not scaled yet."""
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        raise AdapterError(f"{folder} holds no {ADAPTER_WEIGHTS}; pickles are not read")
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a mapping)
                match, base = _NAME.fullmatch(name), _BASE_WEIGHT.fullmatch(name)
                if match is not None:
                    halves.setdefault(match["module"], {})[match["half"]] = reader.get_tensor(name)
                elif base is None:
                    raise AdapterError(f"{file}: {name} is not the A or B of a product")
                elif base["module"] in bases:
                    with holding_weights():
                        is_same = _is_same(bases[base["module"]], reader.get_tensor(name))
                    if not is_same:
                        raise AdapterError(f"{file}: {name} is not the base model's: it is of another, or was trained")
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file}: {error}") from error
    if not halves:
        raise AdapterError(f"{file}: it is empty")
    for module, found in halves.items():
        if len(found) > 2:
            raise AdapterError(f"{file}: {module} has matrices of an embedding, and of another product")
        if found.keys() not in ({"A.weight", "B.weight"}, {"embedding_A", "embedding_B"}):
            raise AdapterError(f"{file}: {module} has only one of A and B")
    return {
        module: LowRank(found[first], found[second], 1.0, first == "embedding_A")
        for module, found in halves.items()
        for first, second in [sorted(found)]
    }


def _is_same(base: Tensor, saved: Tensor) -> bool:
    """Whether two copies of a weight differ by no more than the rounding to their types."""
    if base.shape != saved.shape or not saved.is_floating_point():
        return False
    is_exact = base.dtype == saved.dtype
    relative = 0.0 if is_exact else max(torch.finfo(each.dtype).eps for each in (base, saved))
    return all(
        torch.allclose(own.float(), its.to(own.device).float(), rtol=relative, atol=0.0 if is_exact else _LEAST_HALF)
        for own, its in zip(base.split(_ROWS_AT_ONCE), saved.split(_ROWS_AT_ONCE), strict=True)
    )


def _check(path: Path, module: str, found: LowRank, shape: tuple[int, ...], max_rank: int) -> None:
    down, up, rank = found.down, found.up, found.rank
    rows = rank * found.experts
    wanted = [rows, shape[1]], [shape[0], rows]
    if not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterError(f"{path}: {module} has matrices of {down.dtype} and {up.dtype}, and not of floats")
    if ([*down.shape], [*up.shape]) != wanted:
        raise AdapterError(
            f"{path}: {module} has A {[*down.shape]} and B {[*up.shape]}; "
            f"of the model's {[*shape]} they would be {wanted[0]} and {wanted[1]}"
        )
    if not 1 <= rank <= max_rank:
        raise AdapterError(f"{path}: {module} has rank {rank}, and max_adapter_rank is {max_rank}")


def _pattern(folder: Path, settings: Mapping[str, Any], field: str, until: float) -> Callable[[str, Any], Any]:
    """Return what the expressions of a field say of a module; of one that none matches, the second argument."""
    import regex  # only patterns need it

    given, file, expressions = settings.get(field) or {}, folder / ADAPTER_FILE, []
    if not isinstance(given, dict):
        raise AdapterError(f"{file}: {field} is {shown(given)}, and no object")
    for key, value in given.items():
        try:
            expressions.append((regex.compile(rf"(.*\.)?({key})$"), value))  # as PEFT matches
        except (regex.error, RecursionError) as error:
            raise AdapterError(f"{file}: {field} has {shown(key)}: {error}") from error

    def value_of(name: str, otherwise: Any) -> Any:
        try:
            for expression, value in expressions:
                if expression.match(name, timeout=max(until - time.monotonic(), 1e-3), concurrent=True):
                    return value
        except TimeoutError as error:
            raise AdapterError(f"{file}: {field} takes longer than {_MATCHING_S} s to match") from error
        return otherwise

    return value_of
