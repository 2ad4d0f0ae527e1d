"""Writes checkpoint folders: weights as safetensors, plain or quantized, and the other files."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.linear.quantization.registry import CONFIGURATIONS
from graphdecode.linear.weight_form import Stored, TensorSource
from graphdecode.models.checkpoint import GENERATION_FILE, Checkpoint, generation_defaults
from graphdecode.models.config import ModelConfig
from graphdecode.models.family import family_of
from graphdecode.models.fields import read_json
from graphdecode.models.gguf.source import Gguf
from graphdecode.models.quantize_on_load import QuantizingSource, unquantized_weight

CONFIG_FILE = "config.json"
_KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # names in a config.json -> in safetensors
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_SHARD_BYTES = 1 << 30  # size of a file, which is in memory until it is written
_METADATA = {"format": "pt"}  # required by transformers
_INDEX = "model.safetensors.index.json"


class DequantizedGguf(Gguf):
    """A GGUF model with its tensors dequantized to one dtype; "auto": the model's."""

    def __init__(self, model: str | Path, dtype: str = "auto") -> None:
        if not Gguf.opens(model):
            raise ArgumentError(f"model {str(model)!r} is not a GGUF file")
        super().__init__(model)
        config, architecture = self.config(), self.config().architecture
        family = family_of(architecture)
        if family.stack_layout.transposed or not (family.experts_separate or config.experts is None):
            raise ArgumentError(f"{self.name}: the experts of {architecture} have another layout in folders")
        if self._architecture.has_states:
            raise ArgumentError(f"{self.name}: {architecture} has recurrent states, and is not written as a folder")
        if dtype not in ("auto", *_KINDS):
            raise ArgumentError(f"dtype must be auto, {', '.join(_KINDS)}, got {dtype!r}")
        self.dtype: str = self.settings["dtype"] if dtype == "auto" else dtype

    def config(self) -> ModelConfig:
        """Return the model's configuration."""
        return replace(super().config(), integer_quantized=False)

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """All tensors, by the names of transformers."""
        return {name: Stored(view.shape, _KINDS[self.dtype]) for name, view in self._views.items()}

    def write_other_files(self, folder: Path, tokenizer: Any, more: Mapping[str, Any]) -> None:
        """Write tokenizer, generation parameters, and config.json with additional fields `more`."""
        import transformers  # slow

        tokenizer.save_pretrained(folder)
        config = self.config()
        kind = getattr(transformers, config.architecture).config_class.model_type
        eos = list(config.eos_token_ids)
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
        ends["pad_token_id"] = tokenizer.pad_token_id  # null overrides the defaults of transformers' classes
        _write_json(folder / CONFIG_FILE, {**self.settings, "dtype": self.dtype, "model_type": kind, **ends, **more})
        stated = generation_defaults(self.path)
        if stated:
            _write_json(folder / GENERATION_FILE, {**ends, "do_sample": True, **stated})


def write_other_files(source: Checkpoint, folder: Path, quantization: Mapping[str, Any]) -> None:
    """Copy all other files of a checkpoint, and its config.json with a new `quantization_config`."""
    for file in source.folder.iterdir():
        if file.is_file() and file.name != CONFIG_FILE and not any(file.match(pattern) for pattern in _WEIGHTS):
            shutil.copyfile(file, folder / file.name)
    settings = read_json(source.folder / CONFIG_FILE)
    settings = {name: value for name, value in settings.items() if name not in CONFIGURATIONS}
    _write_json(folder / CONFIG_FILE, {**settings, "quantization_config": quantization})


def quantization_config(source: QuantizingSource) -> dict[str, Any]:
    """Return the `quantization_config` of rounded weights: all linear layers but the output layer and routers."""
    routers = [part.name for key, parts in source.weight_map.items() if key.endswith(".router") for part in parts]
    return source.quantization.written_config(["lm_head", *(name.removesuffix(".weight") for name in routers)])


def write_weights(source: TensorSource, folder: Path, names: Iterable[str]) -> None:
    """Write a source's tensors into a folder, as one file, or several with an index."""
    shard: dict[str, Tensor] = {}
    file_of: dict[str, int] = {}
    total = count = 0

    def save() -> None:
        nonlocal count
        path = folder / f"{count}"
        save_file(shard, path, metadata=_METADATA)
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that only the owner may read
        shard.clear()
        count += 1

    for name in names:
        for part, tensor in _stored(source, name):
            shard[part] = tensor.contiguous()
            total += tensor.nbytes
            file_of[part] = count
        if sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES:
            save()
    if shard:
        save()
    shards = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    files = shards if count > 1 else ["model.safetensors"]
    for number, file in enumerate(files):
        (folder / f"{number}").rename(folder / file)
    if count > 1:
        weight_map = {name: files[number] for name, number in file_of.items()}
        _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _stored(source: TensorSource, name: str) -> Iterator[tuple[str, Tensor]]:
    weight = source.read_quantized(name) if isinstance(source, QuantizingSource) else None
    if weight is None or not isinstance(source, QuantizingSource):
        yield name, unquantized_weight(source, name)
    else:
        yield from source.quantization.written(name, weight)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
