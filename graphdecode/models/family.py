"""Model families: the base class, and the registry."""

import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from graphdecode.errors import ArgumentError, shown
from graphdecode.extensions import HOW_TO_REGISTER, EntryPoints, refuse_duplicate
from graphdecode.linear.composite import ColumnParallelLinear
from graphdecode.linear.experts import StackLayout
from graphdecode.linear.weight_form import Stored
from graphdecode.models.blocks import Head, Layer, Stem
from graphdecode.models.config import ModelConfig, UnsupportedModelError
from graphdecode.models.families import ARCHITECTURES
from graphdecode.models.split_blocks import SplitStem
from graphdecode.models.weight_map import Part, WeightMap
from graphdecode.models.weights import Weights

_STACKED = {".experts.down_proj": Stored((), "F32")}  # of a checkpoint that has one tensor for all experts of a layer
HEAD = "lm_head.weight"  # of the output layer, in all families
_PREDICTION = re.compile(r"(?:model\.|backbone\.)?mtp[._].+")


class Family(ABC):
    """One architecture: its configuration, weight map and layers."""

    architecture: ClassVar[str]  # Hugging Face's name in config.json
    defaults: ClassVar[dict[str, Any]] = {}  # transformers' defaults of fields that a config.json may leave out
    norm_offset: ClassVar[float] = 0.0  # added to all norm weights; 1 if checkpoints store `weight - 1`
    stack_layout: ClassVar[StackLayout] = StackLayout()  # of stacked experts
    experts_separate: ClassVar[bool] = True  # whether transformers reads a tensor for each expert, too

    @abstractmethod
    def config(self, settings: dict[str, Any]) -> ModelConfig:
        """Return the configuration, from the fields of config.json and `defaults`, which it may change.

        Raises:
            UnsupportedModelError: a field is missing, invalid or not supported.
        """

    @abstractmethod
    def weights(self, config: ModelConfig) -> WeightMap:
        """Return the weight map, with separate tensors for each expert."""

    def weights_in(self, config: ModelConfig, tensors: Mapping[str, Stored]) -> WeightMap:
        """Return the weight map that fits a source's tensors, for families whose checkpoints have several layouts."""
        return self.weights(config)

    def unread(self, config: ModelConfig, tensors: Collection[str]) -> list[str]:
        """Return the names of tensors that this decoder lacks and transformers ignores: layers that predict tokens."""
        return [name for name in tensors if _PREDICTION.fullmatch(name)]

    @abstractmethod
    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        """Read and return one layer."""

    def layouts(self, config: ModelConfig) -> tuple[WeightMap, ...]:
        """Return the weight maps of all sources, by whose names adapters name products; the first is `weights`."""
        separate = self.weights(config)
        return (separate,) if config.experts is None else (separate, self.weights_in(config, _STACKED))

    def adapted_features(self, config: ModelConfig, param_name: str, parts: tuple[Part, ...]) -> int:
        """Return the inputs and outputs of a product's adapters, at most."""
        return sum(math.prod(part.shape[:-2]) * sum(part.shape[-2:]) for part in parts)

    def stem(self, config: ModelConfig, weights: Weights) -> Stem:
        """Read and return the embedding."""
        # rounded to the dtype, as in training
        scale, collectives = float(torch.tensor(config.embedding_scale, dtype=weights.dtype)), weights.collectives
        table = weights.embedding_rows()
        no_rows = torch.empty(0, config.hidden_size, dtype=weights.dtype, device=weights.device)
        stem = Stem(weights.tensor("embedding") if table is None else no_rows, scale, table=table)
        if collectives is not None:
            rank, count = collectives.rank, collectives.count
            begin, end = (config.vocab_size * each // count for each in (rank, rank + 1))
            stem = SplitStem(stem.embedding, scale, part=stem, begin=begin, end=end, collectives=collectives)
        return replace(stem, adapted=weights.embedding_adapters(config.vocab_size))

    def head(self, config: ModelConfig, weights: Weights, stem: Stem) -> Head:
        """Read and return the final norm and the output layer, which is the embedding if tied."""
        final_norm = weights.norm("final_norm", config.rms_norm_eps)
        if config.logits_scale != 1.0:
            final_norm = replace(final_norm, weight=final_norm.weight * config.logits_scale)
        lm_head = weights.linear("lm_head", tied=stem.embedding, in_floats=True)
        if weights.collectives is not None:
            lm_head = ColumnParallelLinear(
                (config.vocab_size, config.hidden_size), None, lm_head, weights.collectives, "lm_head"
            )
        return Head(final_norm, weights.adapted_head(lm_head), config.logits_soft_cap)


# by architecture; one that was not used yet is the name of its class
FAMILIES: dict[str, Family | str] = {architecture: name for name, architecture in ARCHITECTURES.items()}


def register_family(family: Family, *, replace: bool = False) -> None:
    """Register a model family.

    Raises:
        ArgumentError: the architecture has one and `replace` is False, or it is not a `Family`.
    """
    if not isinstance(family, Family):
        raise ArgumentError(f"a family must be an object of a class that inherits from Family, got {shown(family)}")
    refuse_duplicate("the family of", family.architecture, family.architecture in FAMILIES, replace)
    FAMILIES[family.architecture] = family


_OUTSIDE = EntryPoints("graphdecode.families", lambda _, family: register_family(family()), FAMILIES)


def known_families() -> Collection[str]:
    """Return the architectures of all families, including those of other packages."""
    if not _OUTSIDE.is_loaded:
        _OUTSIDE.find()
    return FAMILIES.keys()


def family_of(architecture: object) -> Family:
    """Return the family of an architecture; raise UnsupportedModelError if it is unknown."""
    known = known_families()
    if not isinstance(architecture, str) or architecture not in known:
        message = f"architecture {shown(architecture, plain=True)} is not supported"
        raise UnsupportedModelError(f"{message}; supported are {', '.join(known)}; a family {HOW_TO_REGISTER}")
    family = FAMILIES[architecture]
    if isinstance(family, str):
        module, _, name = family.partition(".")
        imported = getattr(importlib.import_module(f"graphdecode.models.families.{module}"), name)()
        if FAMILIES[architecture] is family:  # not replaced meanwhile
            FAMILIES[architecture] = imported
        return family_of(architecture)
    return family


def config_of(settings: dict[str, Any]) -> ModelConfig:
    """Return the configuration, from the fields of config.json."""
    names = settings.get("architectures")
    family = family_of(names[0] if isinstance(names, list) and names else names)
    return family.config(family.defaults | settings)


def outer_weights(
    config: ModelConfig, *, embedding: str = "model.embed_tokens", final_norm: str = "model.norm"
) -> WeightMap:
    """Return the weight map of embedding, final norm and output layer, given their modules in the source."""
    table = (config.vocab_size, config.hidden_size)
    weight_map: WeightMap = {
        "embedding": (Part(f"{embedding}.weight", table, 0),),
        "final_norm": (Part(f"{final_norm}.weight", (config.hidden_size,)),),
    }
    if not config.tie_word_embeddings:
        weight_map["lm_head"] = (Part(HEAD, table, 0),)
    return weight_map
