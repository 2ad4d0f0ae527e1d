"""The tokenizer that a checkpoint's folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphdecode.models.source import ModelSourceError, refuse_pointer


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer.

    Raises:
        ModelSourceError: there is none, or it is not one that transformers can read.
    """
    for name in ("tokenizer.json", "tokenizer.model"):
        refuse_pointer(folder / name)
    from transformers import AutoTokenizer  # here, for it takes seconds, and a model's weights need none of it

    try:
        # a tokenizer in Python code of the checkpoint's own is not run
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a damaged file: whatever its parser stumbles over
        reason = str(error) if isinstance(error, (OSError, ValueError)) else repr(error)
        raise ModelSourceError(f"{folder} holds no tokenizer that can be read: {reason}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelSourceError(f"{folder}: the tokenizer has no tokenizer.json, which streaming needs")
    return tokenizer
