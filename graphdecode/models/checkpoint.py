"""A checkpoint folder as a source of weights: config.json and safetensors, single or in shards; never a pickle."""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphdecode.errors import shown
from graphdecode.hub.model_path import (
    installed_as,
    refuse_link_outside,
    refuse_pointer,
    require_file,
    resolve_model_path,
)
from graphdecode.linear.quantization.format import PackedTensor, QuantizationFormat
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight
from graphdecode.linear.quantization.registry import CONFIGURATIONS, format_of
from graphdecode.linear.weight_form import Shard, Stored
from graphdecode.models.config import ModelConfig
from graphdecode.models.family import config_of, family_of
from graphdecode.models.fields import UnsupportedModelError, eos_token_ids, errors_name, flag, read_json
from graphdecode.models.multimodal import text_names, text_settings
from graphdecode.models.peft.fields import ADAPTER_FILE
from graphdecode.models.weight_map import CheckpointError

_NAMES_SHOWN = 5
_PREFIX = "model."  # prefix that checkpoints without a head leave out of tensor names
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")  # used by transformers if do_sample is true
_ALWAYS = ("repetition_penalty",)
GENERATION_FILE = "generation_config.json"


def _truncation(file: Path) -> str | None:
    """Return a message if a safetensors file is truncated, else None."""
    with suppress(OSError, ValueError, TypeError, KeyError, struct.error), file.open("rb") as opened:
        (header_bytes,) = struct.unpack("<Q", opened.read(8))
        size = file.stat().st_size
        header = json.loads(opened.read(header_bytes)) if header_bytes <= size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + header_bytes + max(ends, default=1)
        return f"it was cut: at least {expected} bytes are expected, and it has {size}" if size < expected else None
    return None


class Checkpoint:
    """A checkpoint folder, by path or repository id."""

    def __init__(self, model: str | Path) -> None:
        self.folder = resolve_model_path(model)
        self.name = str(self.folder)
        self._location_of: dict[str, tuple[Path, str]] = {}  # tensor -> its file, and its name there
        self._packed: dict[str, PackedTensor] = {}
        self._ours: Mapping[str, str] = {}  # names in the files -> names here
        self._skipped: list[str] = []

    @classmethod
    def opens(cls, model: str | Path) -> bool:
        """Return True: any name may be a folder."""
        return True

    def config(self) -> ModelConfig:
        """Read `config.json`, and the end-of-sequence tokens of `generation_config.json` if there is one."""
        file = self.folder / "config.json"
        if not file.exists():
            raise UnsupportedModelError(self._no_config())
        settings = text_settings(read_json(file))
        with errors_name(file):
            quantization = format_of(settings)
            config = config_of({name: value for name, value in settings.items() if name not in CONFIGURATIONS})
        config = replace(config, integer_quantized=quantization is not None and quantization.is_integer)
        generated = generation_eos_token_ids(self.folder)
        return config if generated is None else replace(config, eos_token_ids=generated)

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """All tensors; quantized ones with the names and shapes of the original weights."""
        tensors: dict[str, Stored] = {}
        for file in (self._regular_file(name) for name in self._file_names()):
            refuse_pointer(file)
            try:
                with safe_open(file, framework="pt") as reader:
                    for name in reader.keys():  # noqa: SIM118 (not a mapping)
                        part = reader.get_slice(name)
                        tensors[name] = Stored(tuple(part.get_shape()), part.get_dtype())
                        self._location_of[name] = (file, name)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: {_truncation(file) or error}") from error
        self._ours = self._names(tensors)
        self._skipped = [name for name in tensors if name not in self._ours]
        self._location_of = {name: self._location_of[stored] for stored, name in self._ours.items()}
        tensors = {name: tensors[stored] for stored, name in self._ours.items()}
        quantization = self._quantization
        if quantization is None:
            return tensors
        self._packed = dict(quantization.find(tensors, self._part))
        used = {name for packed in self._packed.values() for name in packed.tensors.values()}
        unquantized = {
            name: stored
            for name, stored in tensors.items()
            if name not in used and not name.endswith(quantization.unused_suffixes)
        }
        return unquantized | {name: packed.stored for name, packed in self._packed.items()}

    @property
    def skipped(self) -> list[str]:
        """Tensors of the files that are of other parts than the text model."""
        return self._skipped if self.tensors else []

    def name_of(self, stored: str) -> str:
        """Return the name of a tensor here, given its name in the files."""
        return self._ours.get(stored, stored) if self.tensors else stored

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Copy a tensor, or a shard of it, into `out`."""
        shape = self.tensors[name].shape
        if name in self._packed:
            self._packed[name].write(self._part, out, shard)
        else:
            out.copy_(self._part(name, () if shard is None else shard.slices(shape), out.device))

    def read_quantized(self, name: str, expert: int | None = None) -> QuantizedWeight | None:
        """Return a matrix as stored; None if it is not quantized."""
        packed = self._packed.get(name) if name in self.tensors else None
        return None if packed is None else packed.weight(self._part, expert)

    def _part(self, name: str, part: tuple[slice, ...], device: torch.device | str = "cpu") -> Tensor:
        file, stored = self._location_of[name]
        with safe_open(file, framework="pt", device=str(device)) as reader:
            return reader.get_slice(stored)[part] if part else reader.get_tensor(stored)

    def _names(self, tensors: Mapping[str, Stored]) -> dict[str, str]:
        """Return the text model's tensors by their names in the files -> as a model with a head has them."""
        ours = dict(text_names(tensors))
        try:
            config = self.config()
        except UnsupportedModelError:
            return ours
        (embedding, *_) = family_of(config.architecture).weights(config)["embedding"]
        table = embedding.name
        if table in tensors or table in ours.values():
            return ours
        if table.removeprefix(_PREFIX) in tensors:
            return {name: name if name.startswith("lm_head.") else f"{_PREFIX}{name}" for name in ours}
        if config.tie_word_embeddings:  # the output layer's tensor is then the embedding
            module = table.removesuffix(".weight")
            ours = {stored: re.sub(r"lm_head(?=\.)", module, name, count=1) for stored, name in ours.items()}
        return ours

    @cached_property
    def _quantization(self) -> QuantizationFormat | None:
        file = self.folder / "config.json"
        return format_of(read_json(file)) if file.exists() else None

    @property
    def quant_method(self) -> str | None:
        """`quant_method` of config.json; None: plain weights."""
        return None if self._quantization is None else self._quantization.name

    def _no_config(self) -> str:
        names = sorted(path.name for path in self.folder.iterdir())
        if ADAPTER_FILE in names:
            base = read_json(self.folder / ADAPTER_FILE).get("base_model_name_or_path")
            model = f"of {shown(base, plain=True)} " if isinstance(base, str) and base else ""
            kind = f"is an adapter (LoRA) {model}and no whole model: run that model with it, by lora_request of"
            return f"{self.folder} {kind} LLM.generate, chat --lora or serve --lora-modules"
        expected = "a checkpoint folder holds config.json, safetensors and a tokenizer"
        if not names:
            return f"{self.folder} is empty; {expected}"
        more = ", ..." if len(names) > _NAMES_SHOWN else ""
        return f"{self.folder} holds no config.json but {', '.join(names[:_NAMES_SHOWN])}{more}; {expected}"

    def _file_names(self) -> Iterator[str]:
        folder = self.folder
        if (folder / "model.safetensors").exists():
            yield "model.safetensors"
            return
        index = folder / "model.safetensors.index.json"
        if not index.exists():
            pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
            remedy = "load it in transformers and save_pretrained(FOLDER, safe_serialization=True)"
            hint = f"; {pickles[0]} is a pickle, which is never read: {remedy}" if pickles else ""
            raise CheckpointError(f"{folder} holds no model.safetensors and no model.safetensors.index.json{hint}")
        try:
            shards = read_json(index).get("weight_map")
        except UnsupportedModelError as error:
            raise CheckpointError(str(error)) from error
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{index} must have a weight_map of tensors and files, got {shown(shards)}")
        names = sorted(set(shards.values()))
        strange = [name for name in names if name in ("", ".", "..") or any(sign in name for sign in "/\\\0")]
        if strange:
            raise CheckpointError(f"{index}: a shard is a file of the folder, got {shown(strange[0])}")
        existing = {file.name for file in folder.iterdir()}  # a shard's name may be invalid in the file system
        absent = [name for name in names if name not in existing]
        if absent:
            raise CheckpointError(f"{folder} lacks the shards {', '.join(shown(name, plain=True) for name in absent)}")
        yield from names

    def _regular_file(self, name: str) -> Path:
        """Return the path of a regular file of the folder; links out of it are refused."""
        file = self.folder / name
        require_file(file)
        refuse_link_outside(self.folder, name, CheckpointError)
        return file


def generation_eos_token_ids(folder: Path) -> tuple[int, ...] | None:
    """Return the end-of-sequence tokens of `generation_config.json`; None if it does not have the field."""
    file = folder / GENERATION_FILE
    settings = read_json(file) if file.exists() else {}
    if "eos_token_id" not in settings:
        return None
    with errors_name(file):
        return eos_token_ids(settings)


def generation_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling parameters of `generation_config.json`, as transformers reads them.

    Without `do_sample`, decoding is greedy: temperature 0. Models of `graphdecode models install` have their own
    defaults. Ranges are not checked.
    """
    package = installed_as(folder)
    if package is not None:
        return dict(package.sampling)
    file = folder / GENERATION_FILE
    if not file.exists():
        return {}
    settings = read_json(file)
    with errors_name(file):
        samples = flag(settings, "do_sample", False)
    names = _ALWAYS + (_SAMPLED if samples else ())
    stated = {name: settings[name] for name in names if settings.get(name) is not None}
    for name, value in stated.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise UnsupportedModelError(f"{file}: {name} must be a number, got {shown(value)}")
    return stated if samples else {"temperature": 0.0, **stated}
