"""Low-rank adapters (Hu et al., 2021), from PEFT's folders or GGUF, checked against the model; their slots in it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import regex
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from graphdecode.errors import ArgumentError, GraphdecodeError, shown
from graphdecode.linear.adapted import Adapted, AdaptedEmbedding
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.config import ModelShape, UnsupportedModelError, read_json
from graphdecode.models.gguf.adapter import read_gguf_adapter
from graphdecode.models.gguf.files import SUFFIX
from graphdecode.models.weight_map import Part

ADAPTER_FILE, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_EMBEDDING = "embedding"  # its place
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
    """What an adapter adds to one product: `scale * B @ A`."""

    down: Tensor  # A, [rank, in_features]
    up: Tensor  # B, [out_features, rank]
    scale: float
    is_table: bool = False  # whether PEFT says that it is of an embedding: the transposed weight

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.down.shape[0] if self.down.dim() else 0


class AdapterError(ArgumentError):
    """An adapter that the model cannot have; the message names the file and what is wrong, and nothing was changed."""


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory.

    Attributes:
        matrices: by place in the model `down` [parts, rank, in_features] and `up` [rank, out_features], scaled; zeros
            where a part has none, or a smaller rank. Of the embedding `down` is [vocab, rank].
    """

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
    """The slots of a model's products.

    Attributes:
        count: of slots.
        max_rank: of an adapter.
        dtype: of the slots.
        device: of the slots.
        config: of the model.
        products: by place in the model; of a rank, its shards.
        parts: of each product of the whole model, as the family's map names them.
        bases: by module, plain weights that an adapter's file may have a copy of; it must be the same.
    """

    count: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device
    config: ModelShape
    products: dict[str, Adapted | AdaptedEmbedding] = field(default_factory=dict)
    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    bases: dict[str, Tensor] = field(default_factory=dict)

    def around(self, form: WeightForm, place: str, parts: tuple[Part, ...]) -> WeightForm:
        """Return the product at a place with room for adapters."""
        made = Adapted.around(form, (part.shape[0] for part in parts), self._ranks(), self.max_rank, self.dtype)
        self.products[place], self.parts[place] = made, parts
        return made

    def of_embedding(self, part: Part) -> AdaptedEmbedding:
        """Return room for adapters of the token embedding."""
        shapes = (part.shape[0], self.max_rank), (self.max_rank, part.shape[1])
        down, up = (torch.zeros(self.count, *shape, dtype=self.dtype, device=self.device) for shape in shapes)
        made = AdaptedEmbedding(down, up, self._ranks())
        self.products[_EMBEDDING], self.parts[_EMBEDDING] = made, (part,)
        return made

    def _ranks(self) -> Tensor:
        return torch.zeros(self.count, dtype=torch.int32, device=self.device)

    def keep(self, products: Iterable[Any]) -> None:
        """Forget those that a model does not hold as they are: where something is done with their results, or several
        are one.
        """
        held = {id(product) for product in products}
        for place in [place for place, product in self.products.items() if id(product) not in held]:
            del self.products[place], self.parts[place]

    def write(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, in place. Products that it does not change get the rank 0."""
        for place, product in self.products.items():
            found = adapter.matrices.get(place)
            product.ranks[slot] = rank = 0 if found is None else len(found[1])
            if found is not None:
                product.down[slot, :, :rank].copy_(found[0], non_blocking=True)
                product.up[slot, :rank].copy_(found[1], non_blocking=True)

    def read(self, path: str | Path) -> Adapter:
        """Read an adapter: a folder as PEFT saves it, or a GGUF file.

        Raises:
            AdapterError: there is none, it is for other modules or sizes, has a larger rank, numbers that are not
                finite, or changes more than products.
        """
        path = Path(path)
        by_place: dict[str, dict[int, LowRank]] = {}
        where = {part.name: (place, at) for place, parts in self.parts.items() for at, part in enumerate(parts)}
        for module, found in self._read(path):
            place_and_part = where.get(f"{module}.weight")
            if place_and_part is None:
                experts = "of experts, which have no room for adapters" if "experts" in module.split(".") else ""
                raise AdapterError(f"{path}: {module} is {experts or 'no product that adapters can change'}")
            place, at = place_and_part
            shape = self.parts[place][at].shape
            if found.is_table and place != _EMBEDDING:
                raise AdapterError(f"{path}: {module} has matrices of an embedding, and is none")
            _check(path, module, found, shape[::-1] if place == _EMBEDDING else shape, self.max_rank)
            by_place.setdefault(place, {})[at] = found
        matrices = {place: self._joined(place, of_parts) for place, of_parts in by_place.items()}
        for place, pair in matrices.items():
            if not all(bool(matrix.isfinite().all()) for matrix in pair):
                raise AdapterError(f"{path}: {place} has numbers that are not finite in {self.dtype}")
        return Adapter(matrices)

    def _read(self, path: Path) -> Iterator[tuple[str, LowRank]]:
        if path.suffix != SUFFIX:
            yield from _read_peft(path, self.bases)
            return
        try:
            for module, down, up, scale in read_gguf_adapter(path, self.config):
                yield module, LowRank(down, up, scale)
        except GraphdecodeError as error:
            raise AdapterError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error

    def _joined(self, place: str, of_parts: Mapping[int, LowRank]) -> tuple[Tensor, Tensor]:
        parts, rank = self.parts[place], max(each.rank for each in of_parts.values())
        if place == _EMBEDDING:
            (only,) = of_parts.values()
            return only.down.to(self.dtype).T.contiguous(), (only.up.float() * only.scale).to(self.dtype).T.contiguous()
        down = torch.zeros(len(parts), rank, parts[0].shape[1], dtype=self.dtype)
        up = torch.zeros(rank, sum(part.shape[0] for part in parts), dtype=self.dtype)
        begins = [sum(part.shape[0] for part in parts[:at]) for at in range(len(parts))]
        for at, own in of_parts.items():
            down[at, : own.rank] = own.down
            up[: own.rank, begins[at] : begins[at] + len(own.up)] = (own.up.float() * own.scale).T
        return down, up


def _read_peft(folder: Path, bases: Mapping[str, Tensor]) -> Iterator[tuple[str, LowRank]]:
    """Yield what an adapter adds, by module; `bases` are those of `AdapterSlots`."""
    settings = _settings(folder)
    ranks, alphas = (_Pattern.list_of(folder, settings, name) for name in ("rank_pattern", "alpha_pattern"))
    targets, until = settings.get("target_parameters") or [], time.monotonic() + _MATCHING_S
    for module, found in _matrices(folder, bases).items():
        rank, is_parameter = found.rank, any(f".{module}.weight".endswith(f".{target}") for target in targets)
        name = f"{module}.weight" if is_parameter else module  # what PEFT matches
        stated = _of_module(ranks, name, settings.get("r"), until)
        if stated != rank:
            raise AdapterError(f"{folder}: {module} has rank {rank}, and {ADAPTER_FILE} says {shown(stated)}")
        alpha = _of_module(alphas, name, settings.get("lora_alpha"), until)
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise AdapterError(f"{folder}: lora_alpha of {module} is {shown(alpha)}, and not a number")
        # with rsLoRA (Kalajdzievski, 2023) alpha / sqrt(rank)
        divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
        yield module, found._replace(scale=alpha / (divisor or 1))


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


def _matrices(folder: Path, bases: Mapping[str, Tensor]) -> dict[str, LowRank]:
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
                elif base["module"] in bases and not _is_same(bases[base["module"]], reader.get_tensor(name)):
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
    wanted = [rank, shape[1]], [shape[0], rank]
    if not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterError(f"{path}: {module} has matrices of {down.dtype} and {up.dtype}, and not of floats")
    if ([*down.shape], [*up.shape]) != wanted:
        raise AdapterError(
            f"{path}: {module} has A {[*down.shape]} and B {[*up.shape]}; "
            f"of the model's {[*shape]} they would be {wanted[0]} and {wanted[1]}"
        )
    if not 1 <= rank <= max_rank:
        raise AdapterError(f"{path}: {module} has rank {rank}, and max_adapter_rank is {max_rank}")


class _Pattern(NamedTuple):
    """An expression for the names of modules, and what those have."""

    folder: Path
    field: str
    expression: regex.Pattern[str]
    value: Any

    @classmethod
    def list_of(cls, folder: Path, settings: Mapping[str, Any], field: str) -> list[_Pattern]:
        """Return those of a field of the configuration."""
        given = settings.get(field) or {}
        if not isinstance(given, dict):
            raise AdapterError(f"{folder / ADAPTER_FILE}: {field} is {shown(given)}, and no object")
        found = []
        for key, value in given.items():
            try:
                found.append(cls(folder, field, regex.compile(rf"(.*\.)?({key})$"), value))  # as PEFT matches
            except (regex.error, RecursionError) as error:
                raise AdapterError(f"{folder / ADAPTER_FILE}: {field} has {shown(key)}: {error}") from error
        return found


def _of_module(patterns: list[_Pattern], name: str, otherwise: Any, until: float) -> Any:
    """Return the value of the first expression that matches a module."""
    for folder, field_name, expression, value in patterns:
        try:
            if expression.match(name, timeout=max(until - time.monotonic(), 1e-3), concurrent=True):
                return value
        except TimeoutError as error:
            file = folder / ADAPTER_FILE
            raise AdapterError(f"{file}: {field_name} takes longer than {_MATCHING_S} s to match") from error
    return otherwise
