"""Sources of weights: what one is, which kinds there are, and what reads a model: one of them, or transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.extensions import EntryPoints, refuse_duplicate
from graphdecode.linear.weight_form import TensorSource
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.config import ModelConfig
from graphdecode.models.family import known_families
from graphdecode.models.fields import read_json
from graphdecode.models.gguf.source import Gguf
from graphdecode.models.multimodal import text_settings
from graphdecode.models.shapes import RandomWeights
from graphdecode.models.transformers_backend import AdoptedFolder
from graphdecode.models.updates import ReplacedTensors

MODEL_IMPLS = ("auto", "native", "transformers")


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
    refuse_duplicate("a source", source.__name__, any(each.__name__ == source.__name__ for each in SOURCES), replace)
    SOURCES.insert(0, source)


_OUTSIDE = EntryPoints("graphdecode.sources", lambda _, source: register_source(source), SOURCES)


def open_source(model: str | Path, replaced: Mapping[str, Tensor] | None = None) -> Source:
    """Return the source of a model: random weights of a shape, a GGUF file, a folder, or a registered kind.

    `replaced`: tensors that replace some of the source's; see `ReplacedTensors`.
    """
    if not _OUTSIDE.is_loaded:
        _OUTSIDE.find()
    source = next(source for source in SOURCES if source.opens(model))(model)
    return cast(Source, ReplacedTensors(source, replaced)) if replaced else source


def adopted_folder(
    source: Source, model_impl: str = "auto", *, trust_remote_code: bool = False
) -> AdoptedFolder | None:
    """Return the source's model to be run by transformers; None if a family of ours runs it."""
    if model_impl not in MODEL_IMPLS:
        raise ArgumentError(f"model_impl must be one of {', '.join(MODEL_IMPLS)}, got {model_impl!r}")
    folder: Path | None = getattr(source, "folder", None)
    if model_impl == "native" or (folder is None and model_impl == "auto"):
        return None
    if folder is None:
        raise ArgumentError(f"model_impl='transformers' runs checkpoint folders, and {source.name} is none")
    file = folder / "config.json"
    if model_impl == "auto":
        named = text_settings(read_json(file)).get("architectures") if file.exists() else None
        name = named[0] if isinstance(named, list) and named else None
        if not isinstance(name, str) or name in known_families():  # the native path reports a missing name
            return None
    return AdoptedFolder(folder, trust_remote_code=trust_remote_code)
