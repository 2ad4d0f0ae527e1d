"""Low-rank adapters (Hu et al., 2021) from PEFT's folders, checked against the model, and their slots in it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from graphdecode.errors import ArgumentError, shown
from graphdecode.linear.adapted import Adapted
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.config import UnsupportedModelError, read_json
from graphdecode.models.weight_map import Part

ADAPTER_FILE, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
# what changes more than products, and what of it there may be
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "bias": (None, "none"),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
}

_Scaled = tuple[Tensor, Tensor, float]  # A, B, and what B is to be multiplied by


class AdapterError(ArgumentError):
    """An adapter that the model cannot have; the message names the file and what is wrong, and nothing was changed."""


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory.

    Attributes:
        rank: the largest of its modules.
        matrices: by place in the model `down` [parts, rank, in_features] and `up` [rank, out_features], scaled; zeros
            where a part has none, or a smaller rank.
    """

    rank: int
    matrices: dict[str, tuple[Tensor, Tensor]]

    def to_bytes(self) -> bytes:
        """Return the matrices for another rank."""
        return save(
            {f"{place}.{which}": each for place, pair in self.matrices.items() for which, each in enumerate(pair)}
        )

    @classmethod
    def of_bytes(cls, rank: int, data: bytes) -> Adapter:
        """Return an adapter of a rank, and of the matrices that `to_bytes` wrote."""
        found = load(data)
        places = {name.removesuffix(".0") for name in found if name.endswith(".0")}
        return cls(rank, {place: (found[f"{place}.0"], found[f"{place}.1"]) for place in places})


@dataclass(frozen=True)
class AdapterSlots:
    """The slots of a model's products.

    Attributes:
        products: by place in the model; of a rank, its shards.
        parts: of each product of the whole model, as the family's map names them.
        ranks: int32 [slots], which all products share.
        max_rank: of an adapter.
        dtype: of the slots.
    """

    products: dict[str, Adapted]
    parts: dict[str, tuple[Part, ...]]
    ranks: Tensor
    max_rank: int
    dtype: torch.dtype

    @classmethod
    def empty(cls, slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> AdapterSlots:
        """Return slots of no product yet."""
        return cls({}, {}, torch.zeros(slots, dtype=torch.int32, device=device), max_rank, dtype)

    def around(self, form: WeightForm, place: str, parts: tuple[Part, ...]) -> WeightForm:
        """Return the product at a place with room for adapters."""
        made = Adapted.around(form, (part.shape[0] for part in parts), self.ranks, self.max_rank, self.dtype)
        self.products[place], self.parts[place] = made, parts
        return made

    def keep(self, products: Iterable[Any]) -> None:
        """Forget those that a model does not hold as they are: where something is done with their results, or several
        are one.
        """
        held = {id(product) for product in products}
        for place in [place for place, product in self.products.items() if id(product) not in held]:
            del self.products[place], self.parts[place]

    def write(self, slot: int, adapter: Adapter | None) -> None:
        """Put an adapter into a slot, in place; None empties it. Products that it does not change get zeros."""
        self.ranks[slot] = 0 if adapter is None else adapter.rank
        if adapter is None:
            return
        for place, product in self.products.items():
            found = adapter.matrices.get(place)
            down, up = product.down[slot, :, : adapter.rank], product.up[slot, : adapter.rank]
            if found is None:
                down.zero_()
                up.zero_()
            else:
                down.copy_(found[0], non_blocking=True)
                up.copy_(found[1], non_blocking=True)

    def read(self, folder: str | Path) -> Adapter:
        """Read an adapter as PEFT saves it.

        Raises:
            AdapterError: there is none, it is for other modules or sizes, has a larger rank, numbers that are not
                finite, or changes more than products.
        """
        folder = Path(folder)
        settings = _settings(folder)
        found = _matrices(folder)
        by_place: dict[str, dict[int, _Scaled]] = {}
        where = {part.name: (place, at) for place, parts in self.parts.items() for at, part in enumerate(parts)}
        for module, (down, up) in found.items():
            place_and_part = where.get(f"{module}.weight")
            if place_and_part is None:
                raise AdapterError(f"{folder}: {module} is no product of the model that adapters can change")
            place, at = place_and_part
            _check(folder, module, down, up, self.parts[place][at].shape, self.max_rank)
            by_place.setdefault(place, {})[at] = (down, up, _scale(folder, settings, module, len(down)))
        rank = max(len(down) for down, _ in found.values())
        matrices = {place: self._joined(place, of_parts, rank) for place, of_parts in by_place.items()}
        for place, pair in matrices.items():
            if not all(bool(matrix.isfinite().all()) for matrix in pair):
                raise AdapterError(f"{folder}: {place} has numbers that are not finite in {self.dtype}")
        return Adapter(rank, matrices)

    def _joined(self, place: str, of_parts: Mapping[int, _Scaled], rank: int) -> tuple[Tensor, Tensor]:
        parts = self.parts[place]
        down = torch.zeros(len(parts), rank, parts[0].shape[1], dtype=self.dtype)
        up = torch.zeros(rank, sum(part.shape[0] for part in parts), dtype=self.dtype)
        begins = [sum(part.shape[0] for part in parts[:at]) for at in range(len(parts))]
        for at, (own_down, own_up, scale) in of_parts.items():
            down[at, : len(own_down)] = own_down
            columns = slice(begins[at], begins[at] + len(own_up))
            up[: len(own_down), columns] = (own_up.float() * scale).T
        return down, up


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


def _matrices(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return by module [rank, in_features] and [out_features, rank]."""
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        raise AdapterError(f"{folder} holds no {ADAPTER_WEIGHTS}; pickles are not read")
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a mapping)
                match = _NAME.fullmatch(name)
                if match is None:
                    raise AdapterError(f"{file}: {name} is not the A or B of a product")
                halves.setdefault(match["module"], {})[match["matrix"]] = reader.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file}: {error}") from error
    incomplete = [module for module, found in halves.items() if len(found) < 2]
    if incomplete or not halves:
        raise AdapterError(f"{file}: {incomplete[0] + ' has only one of A and B' if incomplete else 'it is empty'}")
    return {module: (found["A"], found["B"]) for module, found in halves.items()}


def _check(folder: Path, module: str, down: Tensor, up: Tensor, shape: tuple[int, ...], max_rank: int) -> None:
    rank, wanted = len(down), ([len(down), shape[1]], [shape[0], len(down)])
    if not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterError(f"{folder}: {module} has matrices of {down.dtype} and {up.dtype}, and not of floats")
    if ([*down.shape], [*up.shape]) != wanted:
        raise AdapterError(
            f"{folder}: {module} has A {[*down.shape]} and B {[*up.shape]}; "
            f"of the model's {[*shape]} they would be {wanted[0]} and {wanted[1]}"
        )
    if not 1 <= rank <= max_rank:
        raise AdapterError(f"{folder}: {module} has rank {rank}, and max_adapter_rank is {max_rank}")


def _scale(folder: Path, settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank, or with rsLoRA (Kalajdzievski, 2023) alpha / sqrt(rank)."""
    ranks = _of_module(settings, "rank_pattern", module, settings.get("r"))
    if ranks != rank:
        raise AdapterError(f"{folder}: {module} has rank {rank}, and {ADAPTER_FILE} says {shown(ranks)}")
    alpha = _of_module(settings, "alpha_pattern", module, settings.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise AdapterError(f"{folder}: lora_alpha of {module} is {shown(alpha)}, and not a number")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _of_module(settings: Mapping[str, Any], patterns: str, module: str, otherwise: Any) -> Any:
    """Return what a module has by the first name that is it, or the end of its path; PEFT takes expressions, too."""
    given = settings.get(patterns) or {}
    for name in given:
        if not re.fullmatch(r"\^?[\w.]+", name):
            raise AdapterError(
                f"{ADAPTER_FILE}: {patterns} names {shown(name)}, which is an expression and not a module"
            )
    ends = f".{module}"
    return next((given[name] for name in given if ends.endswith(f".{name.removeprefix('^')}")), otherwise)
