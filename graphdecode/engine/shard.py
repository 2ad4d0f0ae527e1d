"""One rank's part of a model, before it is loaded."""

from __future__ import annotations

from pathlib import Path

from graphdecode.config import EngineConfig
from graphdecode.engine.capacity import kv_format_of
from graphdecode.errors import ArgumentError
from graphdecode.models import ModelShape, describe_model
from graphdecode.models.split import split_config


def describe_shard(model: str | Path, settings: EngineConfig) -> ModelShape:
    """Return the shape of one rank's shard of a model; raise ArgumentError if it cannot be loaded or split."""
    shape = describe_model(model, model_impl=settings.model_impl, trust_remote_code=settings.trust_remote_code)
    draft = settings.draft_model if settings.speculation == "model" else None
    check_draft(settings, None if draft is None else describe_model(draft))
    count = settings.tensor_parallel_size
    if count == 1:
        return shape
    if settings.speculation == "model":
        raise ArgumentError(f"tensor_parallel_size={count} goes with the speculation method ngram, not with model")
    return split_config(shape, count)


def check_draft(settings: EngineConfig, draft: ModelShape | None) -> None:
    """Raise ArgumentError if a draft model has recurrent states, or latent keys of 8 bits."""
    if draft is None:
        return
    kv_format_of(settings, draft, draft.dtype)
    if draft.recurrent:
        raise ArgumentError(
            f"speculation={settings.speculation!r} needs the states before each draft; a draft model has no recurrent "
            "states"
        )
