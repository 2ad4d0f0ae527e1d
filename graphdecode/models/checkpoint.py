"""A checkpoint folder as a source of weights: config.json, and safetensors, single or in shards; never a pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphdecode.linear.weight_form import Shard, Stored
from graphdecode.models.config import ModelConfig, UnsupportedModelError, read_json
from graphdecode.models.family import config_of
from graphdecode.models.mxfp4 import joined, read_joined
from graphdecode.models.rope import UnsupportedRopeError
from graphdecode.models.source import refuse_pointer, resolve_model_path
from graphdecode.models.weight_map import CheckpointError

_NAMES_SHOWN = 5


class Checkpoint:
    """A folder, by its path or as a repository of the hub.

    Args:
        model: see `resolve_model_path`.

    Attributes:
        folder: that it is.

    Raises:
        ModelSourceError: there is no such folder, and no such repository within reach.
    """

    def __init__(self, model: str | Path) -> None:
        self.folder = resolve_model_path(model)
        self.name = str(self.folder)
        self._file_of: dict[str, Path] = {}

    @classmethod
    def opens(cls, model: str | Path) -> bool:
        """Whether a model's name may be that of a folder: any may."""
        return True

    def config(self) -> ModelConfig:
        """Read `config.json`, and the end-of-sequence tokens of `generation_config.json` where there is one.

        Raises:
            UnsupportedModelError: the file cannot be read, or describes no model that is supported.
            ModelSourceError: the file is a pointer of Git LFS.
        """
        file, generation = self.folder / "config.json", self.folder / "generation_config.json"
        if not file.exists():
            raise UnsupportedModelError(self._no_config())
        settings = read_json(file)
        if generation.exists():
            settings["eos_token_id"] = read_json(generation).get("eos_token_id", settings.get("eos_token_id"))
        try:
            return config_of(settings)
        except (UnsupportedModelError, UnsupportedRopeError) as error:
            raise UnsupportedModelError(f"{file}: {error}") from error

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """All that the files hold.

        Raises:
            CheckpointError: there are no safetensors, or a file is missing or damaged.
            ModelSourceError: a file is a pointer of Git LFS.
        """
        found: dict[str, Stored] = {}
        for file in (self.folder / name for name in self._file_names()):
            refuse_pointer(file)
            try:
                with safe_open(file, framework="pt") as reader:
                    for name in reader.keys():  # noqa: SIM118 (not a mapping)
                        part = reader.get_slice(name)
                        found[name] = Stored(tuple(part.get_shape()), part.get_dtype())
                        self._file_of[name] = file
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: {error}") from error
        return joined(found)

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write one tensor, or a part of it and no more, into `out`.

        What safetensors gives on a CPU is a view of the mapped file: kept, it would change with the file.
        """
        shape = self.tensors[name].shape
        if name not in self._file_of:
            read_joined(partial(self._part, str(out.device)), name, shape, out, shard)
            return
        with safe_open(self._file_of[name], framework="pt", device=str(out.device)) as reader:
            out.copy_(reader.get_tensor(name) if shard is None else reader.get_slice(name)[shard.slices(shape)])

    def _part(self, device: str, name: str, part: tuple[slice, ...]) -> Tensor:
        with safe_open(self._file_of[name], framework="pt", device=device) as reader:
            return reader.get_slice(name)[part]

    def _no_config(self) -> str:
        held = sorted(path.name for path in self.folder.iterdir())
        expected = "a checkpoint folder holds config.json, safetensors and a tokenizer"
        if not held:
            return f"{self.folder} is empty; {expected}"
        more = ", ..." if len(held) > _NAMES_SHOWN else ""
        return f"{self.folder} holds no config.json but {', '.join(held[:_NAMES_SHOWN])}{more}; {expected}"

    def _file_names(self) -> Iterator[str]:
        folder = self.folder
        if (folder / "model.safetensors").exists():
            yield "model.safetensors"
            return
        index = folder / "model.safetensors.index.json"
        if not index.exists():
            pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
            hint = f"; {pickles[0]} is a pickle, which is never read: convert it" if pickles else ""
            raise CheckpointError(f"{folder} holds no model.safetensors and no model.safetensors.index.json{hint}")
        refuse_pointer(index)
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}") from error
        absent = [name for name in names if not (folder / name).exists()]
        if absent:
            raise CheckpointError(f"{folder} lacks the shards {', '.join(absent)}")
        yield from names
