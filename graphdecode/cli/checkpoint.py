"""What a command finds out about a model before it reads its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from graphdecode.cli.options import tokenizer_for
from graphdecode.config import EngineConfig
from graphdecode.errors import ArgumentError


class FoundCheckpoint(NamedTuple):
    """A model that can be loaded.

    Attributes:
        path: of its folder or file.
        tokenizer: of transformers.
        trained_length: tokens of a sequence that it was trained for.
    """

    path: Path
    tokenizer: Any
    trained_length: int


def find_checkpoint(
    model: str, tokenizer: str | None, settings: EngineConfig, max_sequence_length: int | None = None
) -> FoundCheckpoint:
    """Return what is known of a model.

    Args:
        model: as it was asked for.
        tokenizer: to take in the place of its own, or None.
        settings: say who runs the model, and whether its own code may run.
        max_sequence_length: as the option says, which must not be more than the model was trained for.

    Raises:
        ArgumentError: there is no such model, or it cannot be loaded so.
    """
    from graphdecode.models import check_model, resolve_model_path

    path = resolve_model_path(model)
    described = check_model(path, model_impl=settings.model_impl, trust_remote_code=settings.trust_remote_code)
    trained_length = described.max_position_embeddings
    if max_sequence_length is not None and max_sequence_length > trained_length:
        raise ArgumentError(
            f"--max-sequence-length must be at most {trained_length}, for which the model was trained, "
            f"got {max_sequence_length}"
        )
    return FoundCheckpoint(path, tokenizer_for(path, tokenizer, settings), trained_length)
