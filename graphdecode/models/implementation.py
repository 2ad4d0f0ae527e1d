"""Who runs a model: a family of ours, or transformers."""

from __future__ import annotations

from pathlib import Path

from graphdecode.errors import ArgumentError
from graphdecode.models.config import read_json
from graphdecode.models.family import known_families
from graphdecode.models.sources import Source
from graphdecode.models.transformers_backend import AdoptedFolder

MODEL_IMPLS = ("auto", "native", "transformers")


def adopted(source: Source, model_impl: str = "auto", *, trust_remote_code: bool = False) -> AdoptedFolder | None:
    """Return a source's model as transformers runs it; None where a family of ours does.

    Args:
        source: of the model.
        model_impl: "native", "transformers", or "auto": ours where there is one.
        trust_remote_code: see `AdoptedFolder`.

    Raises:
        ArgumentError: transformers is asked for, and the source is no folder; or there is no such implementation.
        UnsupportedModelError: the folder's config.json cannot be read.
    """
    if model_impl not in MODEL_IMPLS:
        raise ArgumentError(f"model_impl must be one of {', '.join(MODEL_IMPLS)}, got {model_impl!r}")
    folder: Path | None = getattr(source, "folder", None)
    if model_impl == "native" or (folder is None and model_impl == "auto"):
        return None
    if folder is None:
        raise ArgumentError(f"model_impl='transformers' runs checkpoint folders, and {source.name} is none")
    file = folder / "config.json"
    if model_impl == "auto" and (not file.exists() or _is_ours(read_json(file).get("architectures"))):
        return None
    return AdoptedFolder(folder, trust_remote_code=trust_remote_code)


def _is_ours(architectures: object) -> bool:
    """Whether a family of ours has an architecture, or none is named at all, which is for ours to say."""
    return not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)) or (
        architectures[0] in known_families()
    )
