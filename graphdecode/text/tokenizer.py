"""The tokenizer of a model's folder or file."""

from __future__ import annotations

import json
import stat
from functools import partial
from pathlib import Path
from typing import Any

from graphdecode.errors import GraphdecodeError, shown
from graphdecode.hub.gguf_files import SUFFIX
from graphdecode.hub.model_path import ModelSourceError, refuse_pointer
from graphdecode.memory import collector_paused
from graphdecode.models.gguf.tokenizer import read_gguf_tokenizer
from graphdecode.text.light_tokenizer import LightTokenizer, is_tokenizer_error, light_folder_tokenizer

_READ_BY_TRANSFORMERS = (".json", ".jinja", ".model", ".txt", ".py")
_ANOTHER_TOKENIZER = (
    "; give another tokenizer (--tokenizer, `tokenizer=`), or load none in Python (skip_tokenizer_init=True)"
)


@collector_paused()
def load_tokenizer(folder: Path, *, trust_remote_code: bool = False, replaceable: bool = True) -> Any:
    """Return the tokenizer of a folder, or of a GGUF file.

    Args:
        trust_remote_code: run a tokenizer that is Python code of the checkpoint.
        replaceable: whether errors explain how to give another tokenizer.

    Raises:
        ModelSourceError: there is none that transformers can read, or it is code that is not trusted.
    """
    if folder.suffix == SUFFIX and folder.is_file():
        tokenizer, named, template, options = read_gguf_tokenizer(folder, _ANOTHER_TOKENIZER if replaceable else "")
        whole = partial(_fast_tokenizer, tokenizer, {**named, **options, "chat_template": template})
        return LightTokenizer(tokenizer, named, template, whole)
    for name in ("tokenizer.json", "tokenizer.model"):
        refuse_pointer(folder / name)
    for file in folder.iterdir():  # reading a pipe would never end
        if file.suffix in _READ_BY_TRANSFORMERS and file.exists() and not stat.S_ISREG(file.stat().st_mode):
            raise ModelSourceError(f"{file} is not a regular file")
    light = light_folder_tokenizer(folder, partial(_by_transformers, folder, trust_remote_code))
    return _checked(folder, trust_remote_code, replaceable) if light is None else light


def _fast_tokenizer(tokenizer: Any, options: dict[str, Any]) -> Any:
    from transformers import PreTrainedTokenizerFast  # takes a second

    return PreTrainedTokenizerFast(tokenizer_object=_Uncopied(tokenizer), **options)


class _Uncopied:
    """A tokenizer whose deep copy is itself: transformers' copy of a large vocabulary takes seconds."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._tokenizer


def _by_transformers(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # takes a second

    return AutoTokenizer.from_pretrained(
        folder, config=_minimal_config(folder), local_files_only=True, trust_remote_code=trust_remote_code
    )


def _checked(folder: Path, trust_remote_code: bool, replaceable: bool) -> Any:
    try:
        tokenizer = _by_transformers(folder, trust_remote_code)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelSourceError(f"{folder}: the tokenizer has no tokenizer.json, which streaming needs")
        ids = tokenizer("a", verbose=False).input_ids  # a damaged tokenizer may fail here
        tokenizer.backend_tokenizer.decode(ids)
    except BaseException as error:
        if isinstance(error, GraphdecodeError) or not is_tokenizer_error(error):
            raise
        code = _code_of(folder)
        if code is not None and not trust_remote_code:
            raise ModelSourceError(
                f"{folder}: the tokenizer is Python code of the checkpoint ({code}), which is run only with "
                "trust_remote_code=True"
            ) from error
        reason = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
        raise ModelSourceError(
            f"{folder} has no tokenizer that can be read (tokenizer.json, tokenizer_config.json)"
            f"{_ANOTHER_TOKENIZER if replaceable else ''}; transformers says: {reason}"
        ) from error
    return tokenizer


def _code_of(folder: Path) -> str | None:
    maps = [_settings_in(folder / name).get("auto_map") for name in ("tokenizer_config.json", "config.json")]
    classes = [
        auto_map["AutoTokenizer"] for auto_map in maps if isinstance(auto_map, dict) and "AutoTokenizer" in auto_map
    ]
    return shown(classes[0]) if classes else None


def _settings_in(file: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing if it cannot be read."""
    try:
        settings = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _minimal_config(folder: Path) -> Any:
    """Return a configuration with what AutoTokenizer needs; None if transformers has to read it itself.

    The model's own configuration class would cost 3 s and 80 MB of imports.
    """
    from transformers import PreTrainedConfig

    settings = _settings_in(folder / "config.json")
    if (
        "tokenizer_class" not in _settings_in(folder / "tokenizer_config.json")
        or not settings
        or "auto_map" in settings
    ):
        return None
    config = PreTrainedConfig()
    config.update({"model_type": settings.get("model_type", ""), "tokenizer_class": settings.get("tokenizer_class")})
    return config
