"""The tokenizer that a model's folder or file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphdecode.models.gguf.files import SUFFIX
from graphdecode.models.source import ModelSourceError, refuse_pointer
from graphdecode.text.gguf_tokenizer import load_gguf_tokenizer


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, or of a GGUF file.

    Raises:
        ModelSourceError: there is none, or it is not one that transformers can read.
    """
    if folder.suffix == SUFFIX and folder.is_file():
        return load_gguf_tokenizer(folder)
    for name in ("tokenizer.json", "tokenizer.model"):
        refuse_pointer(folder / name)
    from transformers import AutoTokenizer  # here, for it takes a second, and a model's weights need none of it

    try:
        # a tokenizer in Python code of the checkpoint's own is not run
        tokenizer = AutoTokenizer.from_pretrained(
            folder, config=_plain_config(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of a damaged file: whatever its parser stumbles over
        reason = str(error) if isinstance(error, (OSError, ValueError)) else repr(error)
        raise ModelSourceError(f"{folder} holds no tokenizer that can be read: {reason}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelSourceError(f"{folder}: the tokenizer has no tokenizer.json, which streaming needs")
    return tokenizer


def _plain_config(folder: Path) -> Any:
    """Return the model's configuration as one of no particular model; None where transformers had better look itself.

    From the configuration AutoTokenizer takes the type of the model, which with the class that the tokenizer names is
    all that it goes by. The configuration's own class costs 3 s and 80 MB, for transformers imports its models with it.
    """
    from transformers import PreTrainedConfig

    try:
        names_its_class = "tokenizer_class" in json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        settings = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not names_its_class or "auto_map" in settings:
        return None
    config = PreTrainedConfig()
    config.update({"model_type": settings.get("model_type", ""), "tokenizer_class": settings.get("tokenizer_class")})
    return config
