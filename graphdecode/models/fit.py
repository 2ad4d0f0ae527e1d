"""Fits a model's configuration to the tensors of its source: which are read, which are skipped, and what is wrong."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.linear.quantization.registry import weight_type
from graphdecode.linear.weight_form import Shard, TensorSource
from graphdecode.models.cache_scales import cache_scale_names
from graphdecode.models.config import ModelConfig
from graphdecode.models.family import HEAD, family_of
from graphdecode.models.sentence_transformers import MODULES_FILE
from graphdecode.models.updates import differs
from graphdecode.models.weight_map import WeightMap, check, parts

_CHUNK_VALUES = 1 << 24  # of two tensors that are compared


def fitted_config(source: TensorSource, config: ModelConfig, *, ties: bool | None = None) -> ModelConfig:
    """Return a configuration whose `tie_word_embeddings` is as the tensors have it.

    As in transformers, an output layer with values of its own is used although a configuration ties it to the
    embedding; one with the embedding's values shares its memory. A checkpoint for embeddings has none: the embedding
    takes its place, so that the model can be loaded, though what it generates means nothing.

    Args:
        ties: what `tie_word_embeddings` has to be, so that the layout is that of another model; None: either.

    Raises:
        ArgumentError: it cannot be what `ties` asks for.
    """
    if ties is not False and _is_for_embeddings(source):
        return replace(config, tie_word_embeddings=True)
    if ties is False or HEAD not in source.tensors or not (config.tie_word_embeddings or ties):
        return replace(config, tie_word_embeddings=False) if ties is False else config
    (embedding,) = family_of(config.architecture).weights_in(config, source.tensors)["embedding"]
    replaced: Mapping[str, Tensor] = getattr(source, "replaced", {})
    follows = embedding.name in replaced and HEAD not in replaced  # of a model that is loaded, there is one table
    if (ties and follows) or _are_equal(source, embedding.name, HEAD):
        return replace(config, tie_word_embeddings=True)
    if ties:
        raise ArgumentError(differs(HEAD, embedding.name))
    return replace(config, tie_word_embeddings=False)


def _is_for_embeddings(source: TensorSource) -> bool:
    """Whether a checkpoint has no output layer, and files that say how its hidden states are pooled."""
    folder: Path | None = getattr(source, "folder", None)
    return HEAD not in source.tensors and folder is not None and (folder / MODULES_FILE).is_file()


def _are_equal(source: TensorSource, one: str, other: str) -> bool:
    """Whether two tensors have the same values; a quantized one is not equal to a plain one."""
    shapes = [source.tensors[name] for name in (one, other) if name in source.tensors]
    if len(shapes) < 2 or shapes[0].shape != shapes[1].shape:
        return False
    if (weight_type(shapes[0].dtype) is None) != (weight_type(shapes[1].dtype) is None):
        return False
    rows, columns = shapes[0].shape
    count = max(1, math.ceil(rows * columns / _CHUNK_VALUES))
    for rank in range(count):
        part = Shard(rank, count, 0)
        size = (len(range(rows)[part.slices(shapes[0].shape)[0]]), columns)
        values = torch.empty(size), torch.empty(size)
        for name, out in zip((one, other), values, strict=True):
            source.read(name, out, part)
        if not torch.equal(*values):
            return False
    return True


def checked_weight_map(source: TensorSource, name: str, config: ModelConfig) -> WeightMap:
    """Return the weight map of a source; raise CheckpointError if its tensors do not fit."""
    family = family_of(config.architecture)
    if _is_for_embeddings(source):
        config = replace(config, tie_word_embeddings=True)
    weight_map = family.weights_in(config, source.tensors)
    checked = weight_map
    if config.tie_word_embeddings and HEAD in source.tensors:
        checked = family.weights_in(replace(config, tie_word_embeddings=False), source.tensors)
    unused = {*family.unread(config, source.tensors)}
    unused |= {name for pair in cache_scale_names(source.tensors, config.num_hidden_layers) for name in pair or ()}
    # quantizers write a bias of zeros for layers without one
    named = {part.name for part in parts(weight_map)}
    types = {stored.dtype for stored in source.tensors.values()}
    quantized = {dtype for dtype in types if weight_type(dtype) is not None}
    weights = [name for name in named if name in source.tensors and source.tensors[name].dtype in quantized]
    biases = (weight.removesuffix("weight") + "bias" for weight in weights)
    unused |= {bias for bias in biases if bias in source.tensors and bias not in named and _is_zero(source, bias)}
    check(name, source.tensors, checked, frozenset(unused))
    return weight_map


def skipped_tensors(source: TensorSource, config: ModelConfig) -> list[str]:
    """Return the tensors of the files that a model does not have, as transformers and llama.cpp skip them."""
    return [*getattr(source, "skipped", ()), *family_of(config.architecture).unread(config, source.tensors)]


def summary(names: list[str]) -> str:
    """Return how many tensors there are below each module, such as `12 of model.visual`."""
    below = Counter(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(f"{count} of {module}" for module, count in below.items())


def _is_zero(source: TensorSource, name: str) -> bool:
    values = torch.empty(source.tensors[name].shape)
    source.read(name, values)
    return not bool(values.any())
