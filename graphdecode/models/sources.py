"""Where a model's configuration and weights can come from, and which of the sources has a model of a given name."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from graphdecode.extensions import EntryPoints, refuse_taken
from graphdecode.linear.weight_form import TensorSource
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.config import ModelConfig
from graphdecode.models.gguf.source import Gguf
from graphdecode.models.shapes import RandomWeights


class Source(TensorSource, Protocol):
    """One model: its configuration, the tensors that there are, and the reading of one of them.

    Attributes:
        name: of the model, for messages.
    """

    name: str

    def __init__(self, model: str | Path) -> None: ...

    @classmethod
    def opens(cls, model: str | Path) -> bool:
        """Whether a model's name is one of this kind of source; whether there is such a model is not asked here."""

    def config(self) -> ModelConfig:
        """Return the configuration, without reading any tensor.

        Raises:
            UnsupportedModelError: it cannot be read, or describes no model that is supported.
        """


SOURCES: list[type[Source]] = [RandomWeights, Gguf, Checkpoint]  # the first that opens a name has the model


def register_source(source: type[Source], *, replace: bool = False) -> None:
    """Let models come from another kind of source, which is asked before those that are known.

    Args:
        source: the class.
        replace: even before one of the same name.

    Raises:
        ArgumentError: there is a source of that name.
    """
    refuse_taken("a source", source.__name__, any(each.__name__ == source.__name__ for each in SOURCES), replace)
    SOURCES.insert(0, source)


_OUTSIDE = EntryPoints("graphdecode.sources", lambda _, source: register_source(source), SOURCES)


def open_source(model: str | Path) -> Source:
    """Return the source of a model: a shape's random weights, a GGUF file, a folder, or what was registered.

    Raises:
        ValueError: there is no model of that name.
    """
    _OUTSIDE.find()
    return next(source for source in SOURCES if source.opens(model))(model)
