"""Model families: the base class, and the registry of all that there are."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError, shown
from graphdecode.extensions import BRING_YOUR_OWN, EntryPoints, refuse_taken
from graphdecode.linear.across_ranks import Gathered
from graphdecode.linear.weight_form import RowTable, Stored
from graphdecode.models.blocks import Head, Layer, Stem, Tokens
from graphdecode.models.config import ModelConfig, UnsupportedModelError
from graphdecode.models.split_blocks import SplitStem
from graphdecode.models.weight_map import Part, WeightMap
from graphdecode.models.weights import Weights


@dataclass(frozen=True)
class BlocksStem(Stem):
    """An embedding that is dequantized as rows are gathered; `embedding` has no rows, it says dtype and channels."""

    table: RowTable = field(kw_only=True)  # the embedding, perhaps the output layer's own

    def embed(self, residual: Tensor, tokens: Tokens) -> None:
        """Write the embedded tokens into `residual`."""
        self.table.gather(residual, tokens.ids, tokens.live, self.scale)


class Family(ABC):
    """One architecture: its configuration, the map of its weights, and its layer."""

    architecture: ClassVar[str]  # Hugging Face's name of it, as a config.json has it
    # is added to the weights of all norms: 1 where checkpoints have their distance from 1
    norm_offset: ClassVar[float] = 0.0
    experts_interleaved: ClassVar[bool] = False  # how tensors lie that have all experts of a layer; see `ExpertNames`

    @abstractmethod
    def config(self, settings: dict[str, Any]) -> ModelConfig:
        """Take the fields of a config.json.

        Raises:
            UnsupportedModelError: a field is missing, has no value that makes sense, or asks for what is not supported.
        """

    @abstractmethod
    def weights(self, config: ModelConfig) -> WeightMap:
        """Return all tensors that such a model has, by their place in it, those of each expert by themselves."""

    def weights_in(self, config: ModelConfig, tensors: Mapping[str, Stored]) -> WeightMap:
        """Return the same for a source that has these tensors, in a family whose checkpoints come in several forms."""
        return self.weights(config)

    @abstractmethod
    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        """Return one layer, its weights read."""

    def stem(self, config: ModelConfig, weights: Weights) -> Stem:
        """Return what comes before the layers."""
        # rounded as the rows are: models were trained so
        scale, shared = float(torch.tensor(config.embedding_scale, dtype=weights.dtype)), weights.shared
        rows = weights.embedding_rows()
        if rows is not None:
            no_rows = torch.empty(0, config.hidden_size, dtype=weights.dtype, device=weights.device)
            stem: Stem = BlocksStem(no_rows, scale, table=rows)
        else:
            stem = Stem(weights.tensor("embedding"), scale)
        if shared is None:
            return stem
        begin, end = (config.vocab_size * rank // shared.count for rank in (shared.rank, shared.rank + 1))
        return SplitStem(stem.embedding, scale, part=stem, begin=begin, end=end, collectives=shared)

    def head(self, config: ModelConfig, weights: Weights, stem: Stem) -> Head:
        """Return what comes after them; the output layer is the embedding where the map has no place for it."""
        final_norm = weights.norm("final_norm", config.rms_norm_eps)
        if config.logits_scale != 1.0:
            final_norm = replace(final_norm, weight=final_norm.weight * config.logits_scale)
        lm_head, shared = weights.linear("lm_head", tied=stem.embedding, in_floats=True), weights.shared
        if shared is not None:
            lm_head = Gathered((config.vocab_size, config.hidden_size), None, lm_head, shared, "lm_head")
        return Head(final_norm, lm_head, config.logits_soft_cap)


FAMILIES: dict[str, Family] = {}  # by architecture; filled while files are imported, and then read


def register_family(family: Family, *, replace: bool = False) -> None:
    """Register a model family.

    Raises:
        ArgumentError: the architecture has one, and it is not to be replaced; or what is given is no family.
    """
    if not isinstance(family, Family):
        raise ArgumentError(f"a family must be an object of a class that inherits from Family, got {shown(family)}")
    refuse_taken("the family of", family.architecture, family.architecture in FAMILIES, replace)
    FAMILIES[family.architecture] = family


_OUTSIDE = EntryPoints("graphdecode.families", lambda _, family: register_family(family()), FAMILIES)


def known_families() -> Mapping[str, Family]:
    """Return the families by architecture, those of installed packages too."""
    _OUTSIDE.find()
    return FAMILIES


def family_of(architecture: object) -> Family:
    """Return the family of an architecture.

    Raises:
        UnsupportedModelError: it is not known; the message lists those that are.
    """
    family = known_families().get(architecture) if isinstance(architecture, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        asked = f"architecture {shown(architecture, plain=True)} is not supported"
        raise UnsupportedModelError(f"{asked}; supported are {known}; a family {BRING_YOUR_OWN}")
    return family


def config_of(settings: dict[str, Any]) -> ModelConfig:
    """Return the configuration that the fields of a config.json describe; see `family_of` and `Family.config`."""
    names = settings.get("architectures")
    return family_of(names[0] if isinstance(names, list) and names else names).config(settings)


def edges(config: ModelConfig) -> WeightMap:
    """Return the places of embedding, last norm and output layer under Hugging Face's names, which hardly differ."""
    table = (config.vocab_size, config.hidden_size)
    places: WeightMap = {
        "embedding": (Part("model.embed_tokens.weight", table, 0),),
        "final_norm": (Part("model.norm.weight", (config.hidden_size,)),),
    }
    if not config.tie_word_embeddings:
        places["lm_head"] = (Part("lm_head.weight", table, 0),)
    return places
