"""New values of a loaded model's weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from graphdecode.config import EngineConfig
from graphdecode.engine.shard import describe_shard
from graphdecode.errors import ArgumentError
from graphdecode.models import Model, resolve_model_path
from graphdecode.models.source import open_source
from graphdecode.models.updates import NamedTensors, as_named_tensors, check_config, check_layout, check_stored

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # safetensors' names
_MAX_SEARCHED_BYTES = 8 << 30  # other requests wait meanwhile


def damaged_tensor(model: str | Path) -> str | None:
    """Return the name of a tensor of a model's files that has NaN; None: there is none, or they are too large."""
    source = open_source(model)
    stored = {name: each for name, each in source.tensors.items() if each.dtype in _FLOATS}
    if sum(math.prod(each.shape) * _FLOATS[each.dtype].itemsize for each in stored.values()) > _MAX_SEARCHED_BYTES:
        return None
    for name, each in stored.items():
        out = torch.empty(each.shape, dtype=_FLOATS[each.dtype])
        source.read(name, out)
        if bool(out.isnan().any()):
            return name
    return None


@dataclass(frozen=True)
class WeightReload:
    """Loads new values of a model's weights, with the options that it was loaded with.

    Attributes:
        name: the model's name, for `open_source`.
        model: the model to update; it is not changed here.
        load: `load_model` with its options.
        settings: the engine's settings.
        replaced: names of tensors that came from memory.
    """

    name: str | Path
    model: Model
    load: Callable[..., Model]
    settings: EngineConfig
    replaced: frozenset[str] = frozenset()

    def __call__(self, weights: str | Path | NamedTensors) -> tuple[Model, WeightReload]:
        """Return a model of the same layout with the new values, and the next reload."""
        name, tensors = self.name, {}
        if isinstance(weights, (str, Path)):
            name = resolve_model_path(weights)
        else:
            tensors = as_named_tensors(weights)
            if missing := self.replaced - tensors.keys():
                raise ArgumentError(
                    f"weights: {min(missing)} was given before and is in no file: name it again, or give a folder"
                )
        check_config(self.model.config, describe_shard(name, self.settings))
        if self.settings.quantize != "none":
            check_stored(open_source(self.name), open_source(name, tensors))
        loaded = self.load(name, replaced=tensors, ties=getattr(self.model.config, "tie_word_embeddings", None))
        check_layout(self.model, loaded)
        return loaded, replace(self, name=name, replaced=frozenset(tensors))
