"""A GGUF model as a checkpoint folder: plain weights, config.json, tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.linear.weight_form import Shard, Stored
from graphdecode.models.checkpoint import GENERATION_FILE, generation_defaults
from graphdecode.models.config import ModelConfig
from graphdecode.models.family import family_of
from graphdecode.models.gguf.source import Gguf
from graphdecode.models.source import resolve_model_path
from graphdecode.text.tokenizer import load_tokenizer

CONFIG_FILE = "config.json"
KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # what a config.json and what safetensors calls them


class PlainGguf:
    """A GGUF model whose tensors are plain ones, of one type.

    Args:
        model: see `resolve_model_path`.
        dtype: of KINDS; "auto": what the model is computed in.

    Attributes:
        path: of the file.
        name: of the model.
        settings: of the config.json that it has.

    Raises:
        ArgumentError: it is none, or cannot be said in a checkpoint folder.
    """

    def __init__(self, model: str | Path, dtype: str = "auto") -> None:
        if not Gguf.opens(model):
            raise ArgumentError(f"model {str(model)!r} is no GGUF file")
        self._source = Gguf(model)
        self.path, self.name = resolve_model_path(model), self._source.name
        self._config = replace(self._source.config(), few_bits=False)
        if family_of(self._config.architecture).experts_interleaved:
            raise ArgumentError(
                f"{self.name}: the experts of {self._config.architecture} have another order in folders"
            )
        settings = self._source.settings
        if dtype not in ("auto", *KINDS):
            raise ArgumentError(f"dtype must be auto, {', '.join(KINDS)}, got {dtype!r}")
        self.settings = settings if dtype == "auto" else {**settings, "dtype": dtype}

    def config(self) -> ModelConfig:
        """Return the model's configuration."""
        return self._config

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """All tensors, by the names of transformers."""
        kind = KINDS[self.settings["dtype"]]
        return {name: Stored(stored.shape, kind) for name, stored in self._source.tensors.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write one tensor, or a part of it, into `out`."""
        self._source.read(name, out, shard)

    def tokenizer(self) -> Any:
        """Return the file's tokenizer, which `write_rest` takes; to be read before anything is written.

        Raises:
            ModelSourceError: there is none that can be read.
        """
        return load_tokenizer(self.path, replaceable=False)

    def write_rest(self, folder: Path, tokenizer: Any, more: Mapping[str, Any] | None = None) -> None:
        """Write all but the weights into a folder.

        Args:
            folder: that is there.
            tokenizer: of the file.
            more: fields of config.json beside those of the model.
        """
        import transformers  # here, for it takes a second

        tokenizer.save_pretrained(folder)
        kind = getattr(transformers, self._config.architecture).config_class.model_type
        eos = list(self._config.eos_token_ids)
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
        ends["pad_token_id"] = tokenizer.pad_token_id  # null too: some classes of transformers have another one else
        settings = {**self.settings, "model_type": kind, **ends, **(more or {})}
        (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        stated = generation_defaults(self.path)
        if stated:
            text = json.dumps({**ends, "do_sample": True, **stated}, indent=2)
            (folder / GENERATION_FILE).write_text(text + "\n")
