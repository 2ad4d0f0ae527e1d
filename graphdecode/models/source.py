"""Sources of weights: what one is, which kinds there are, and which kind reads a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from torch import Tensor

from graphdecode.extensions import EntryPoints, refuse_taken
from graphdecode.linear.weight_form import TensorSource
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.config import ModelConfig
from graphdecode.models.gguf.source import Gguf
from graphdecode.models.shapes import RandomWeights
from graphdecode.models.updates import ReplacedTensors


class Source(TensorSource, Protocol):
    """One model: its configuration, and its tensors."""

    name: str  # the model's name, for messages

    def __init__(self, model: str | Path) -> None: ...

    @classmethod
    def opens(cls, model: str | Path) -> bool:
        """Whether the model's name is of this kind; existence is not checked."""

    def config(self) -> ModelConfig:
        """Return the configuration, without reading tensors; raise UnsupportedModelError if it is not supported."""


SOURCES: list[type[Source]] = [RandomWeights, Gguf, Checkpoint]  # the first whose `opens` is true is used


def register_source(source: type[Source], *, replace: bool = False) -> None:
    """Register a kind of source, which takes precedence over the known ones.

    Raises:
        ArgumentError: the name is taken, and `replace` is False.
    """
    refuse_taken("a source", source.__name__, any(each.__name__ == source.__name__ for each in SOURCES), replace)
    SOURCES.insert(0, source)


_OUTSIDE = EntryPoints("graphdecode.sources", lambda _, source: register_source(source), SOURCES)


def open_source(model: str | Path, replaced: Mapping[str, Tensor] | None = None) -> Source:
    """Return the source of a model: random weights of a shape, a GGUF file, a folder, or a registered kind.

    `replaced`: tensors that replace some of the source's; see `ReplacedTensors`.
    """
    _OUTSIDE.find()
    source = next(source for source in SOURCES if source.opens(model))(model)
    return cast(Source, ReplacedTensors(source, replaced)) if replaced else source
