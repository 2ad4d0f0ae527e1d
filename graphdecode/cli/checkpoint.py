"""A model's checkpoint and the capacity of a run, before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from graphdecode.config import EngineConfig
from graphdecode.errors import ArgumentError
from graphdecode.hub.model_path import resolve_model_path

_CONFIG_FILE = "config.json"


class ModelPaths(NamedTuple):
    """Where a model and its tokenizer are."""

    model: Path
    tokenizer: Path


class ResolvedModel(NamedTuple):
    """A model that can be loaded."""

    path: Path
    tokenizer: Any
    trained_length: int  # tokens of a sequence


def find_model(model: str, tokenizer: str | None) -> ModelPaths:
    """Find a model, and its tokenizer or another one, before anything slow is imported; raises `ArgumentError`."""
    path = resolve_model_path(model)
    return ModelPaths(path, path if tokenizer is None else resolve_model_path(tokenizer))


def models_named(models: Sequence[str]) -> dict[str, ModelPaths] | None:
    """Return several models by their names, those of a folder of models too; None: there is one, no folder of them.

    Raises `ArgumentError` if a model is not found, or two have one name.
    """
    paths: dict[str, ModelPaths] = {}
    folders = [Path(model) for model in models if _is_folder_of_models(Path(model))]
    if len(models) == 1 and not folders:
        return None
    for model in models:
        children = _models_in(Path(model)) if Path(model) in folders else [model]
        for child in children:
            name = Path(child).name.removesuffix(".gguf") if Path(child).exists() else child
            if name in paths:
                raise ArgumentError(f"--model names two models {name!r}: clients could not tell them apart")
            paths[name] = find_model(child, None)
    return paths


def _is_folder_of_models(folder: Path) -> bool:
    return folder.is_dir() and not (folder / _CONFIG_FILE).exists() and bool(_models_in(folder))


def _models_in(folder: Path) -> list[str]:
    """Return the models in a folder: folders with a config.json, and GGUF files."""
    children = sorted(folder.iterdir())
    return [
        str(each) for each in children if (each / _CONFIG_FILE).is_file() or (each.suffix == ".gguf" and each.is_file())
    ]


def load_checkpoint(paths: ModelPaths, settings: EngineConfig, max_sequence_length: int | None = None) -> ResolvedModel:
    """Check a model, and load its tokenizer.

    `max_sequence_length` is the option: at most what the model was trained for. Raises `ArgumentError`.
    """
    from graphdecode.models import check_model
    from graphdecode.text import load_tokenizer

    path, trusted = paths.model, settings.trust_remote_code
    described = check_model(path, model_impl=settings.model_impl, trust_remote_code=trusted)
    trained_length = described.max_position_embeddings
    if max_sequence_length is not None and max_sequence_length > trained_length:
        raise ArgumentError(
            f"--max-sequence-length must be at most {trained_length}, for which the model was trained, "
            f"got {max_sequence_length}"
        )
    return ResolvedModel(path, load_tokenizer(paths.tokenizer, trust_remote_code=trusted), trained_length)


def check_pages(settings: EngineConfig, length: int) -> None:
    """Raise ArgumentError if the cache has fewer pages than one sequence of a length needs."""
    pages, page_size = settings.buckets.total_num_pages, settings.buckets.page_size
    needed = -(-length // page_size)
    if not isinstance(pages, str) and pages < needed:
        raise ArgumentError(
            f"total_num_pages must be at least {needed}, which one sequence of {length} tokens needs with "
            f"page_size={page_size}, got {pages}; max_sequence_length may be smaller instead"
        )


def fitted(
    settings: EngineConfig,
    prompt_lengths: Sequence[int],
    max_tokens: int | None,
    *,
    outputs: int,
    trained_length: int,
    may_defer: bool = True,
) -> EngineConfig:
    """Return the settings with no more capacity and graphs than prompts of these lengths, at least one, need.

    `max_tokens` is per output; None: up to the capacity. `may_defer`: a CPU captures graphs while it is idle, whatever
    `capture_when` says.
    """
    from graphdecode.models import resolve_device

    buckets = settings.buckets
    rows, length = min(outputs, buckets.max_batch_size), min(buckets.max_sequence_length, trained_length)
    if max_tokens is not None:
        length = min(length, max(max(prompt_lengths) + max_tokens, 1))
    check_pages(settings, length)
    sizes = buckets.batch_sizes
    if not isinstance(sizes, str):
        rows = buckets.ladder.bucket_for(rows)  # the configured bucket that would run
        sizes = [size for size in buckets.ladder if size <= rows]
    # not on a GPU, where the cache takes the memory that a later capture would need
    defers = may_defer and resolve_device(settings.device).type == "cpu"
    when = "idle" if defers else buckets.capture_when
    return settings.with_settings(max_batch_size=rows, max_sequence_length=length, batch_sizes=sizes, capture_when=when)
