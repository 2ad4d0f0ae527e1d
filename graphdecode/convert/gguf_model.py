"""Writes a model as a GGUF file: its configuration as GGUF's fields, and its tensors in blocks.

The fields are those that `Architecture` reads. Before anything is written, the configuration that it reads from them is
compared with the model's own; a model that GGUF cannot describe completely is refused.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from graphdecode.linear.quantization.gguf import BLOCK_OF, GgufBlocks
from graphdecode.models.config import ModelConfig, UnsupportedModelError
from graphdecode.models.family import config_of
from graphdecode.models.gguf.architectures import (
    ARCHITECTURES,
    ONE_ROW,
    OUTER,
    ROTATED,
    architecture_for,
    architecture_of,
)
from graphdecode.models.gguf.container import GgufTensor
from graphdecode.models.gguf.ropes import llama3_factors
from graphdecode.models.quantize_on_load import QuantizingSource, unquantized_weight
from graphdecode.models.weight_map import parts

_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_ONLY_READ = ("deepseek2", "deepseek3", "gemma4", "llama4")  # and those with recurrent states


class GgufModel:
    """A model in GGUF's terms; raises `UnsupportedModelError` if GGUF cannot describe it."""

    def __init__(self, source: QuantizingSource, config: ModelConfig) -> None:
        self._source = source
        self._config = config
        written = [kind.name for key, kind in ARCHITECTURES.items() if not kind.has_states and key not in _ONLY_READ]
        names = [f"{name}ForCausalLM" for name in written]
        if config.architecture not in names:
            raise UnsupportedModelError(f"{config.architecture} is not written as GGUF; {', '.join(names)} are")
        key, self._architecture = architecture_for(config.architecture)
        self._sources: dict[str, list[str]] = {}  # GGUF's name -> name of the tensor, or of each expert's in order
        for part in parts(source.weight_map):
            self._sources.setdefault(self._name(part.name), []).append(part.name)
        self._factors = llama3_factors(config.rope, config.head_dim) if config.rope.rope_type == "llama3" else None
        self.fields: dict[str, Any] = {"general.architecture": key, **_fields_of(key, config)}
        self._check()

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in their order in the file."""
        return [name for names in self._sources.values() for name in names]

    def write(self, path: Path, vocabulary: Mapping[str, Any], names: Iterable[str]) -> None:
        """Write the file, with the fields of a tokenizer; `names` iterates over `self.names`, perhaps with a bar."""
        import gguf  # slow

        writer = gguf.GGUFWriter(path, self.fields["general.architecture"])
        for key, value in {**self.fields, **vocabulary}.items():
            if key != "general.architecture" and value != []:  # the library writes no empty arrays
                writer.add_key_value(key, value, *_kinds(value))
        if self._factors is not None:
            writer.add_tensor_info(_FACTORS, self._factors.shape, np.dtype(np.float32), self._factors.nbytes)
        for name in self._sources:
            shape, dtype, block_type = self._layout(name)
            kind = None if block_type is None else gguf.GGMLQuantizationType[block_type]
            writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if self._factors is not None:
            writer.write_tensor_data(self._factors)
        for name, members in groupby(names, self._name):
            shape, dtype, _ = self._layout(name)
            whole = np.empty((len(self._sources[name]), int(np.prod(shape)) // len(self._sources[name])), dtype)
            for row, each in zip(whole, members, strict=True):
                row[:] = self._rows(each).numpy().ravel()
            writer.write_tensor_data(whole)
        writer.close()

    def _stored(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return shape and type of a tensor by GGUF's name; experts are along the first dimension."""
        first, *others = self._sources[name]
        stored = self._source.tensors[first]
        part = name.split(".")[-2]
        if part in ONE_ROW:
            return stored.shape[1:], stored.dtype
        return (1 + len(others), *stored.shape) if part.endswith("_exps") else stored.shape, stored.dtype

    def _layout(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any], str | None]:
        """Return the shape and dtype of a tensor's bytes in the file, and the type of its blocks or None."""
        shape, kind = self._stored(name)
        block = BLOCK_OF[kind] if kind in BLOCK_OF and len(shape) > 1 else BLOCK_OF["F32"]
        if block.values == 1:
            return shape, np.dtype(np.float32), None
        return (*shape[:-1], block.size(shape[-1])), np.dtype(np.uint8), block.name

    def _rows(self, name: str) -> Tensor:
        """Return a tensor as it is stored in the file."""
        weight = self._source.read_quantized(name)
        if isinstance(weight, GgufBlocks):
            blocks = weight.stored
        else:
            blocks = unquantized_weight(self._source, name).float()
            if "norm" in name.rpartition(".")[0].rpartition(".")[2]:
                blocks = blocks - self._architecture.norm_shift
        part = self._name(name).split(".")[-2]
        if not (self._architecture.interleaved_rope and part in ROTATED):
            return blocks.contiguous()
        by_half = blocks.view(-1, 2, self._config.head_dim // 2, *blocks.shape[1:])
        return by_half.transpose(1, 2).reshape(blocks.shape).contiguous()

    def _name(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        for part, theirs in OUTER.items():
            if module == theirs:
                return f"{part}.{kind}"
        match = _LAYER.fullmatch(name)
        for part, theirs in self._architecture.layer.items():
            if match is not None and _EXPERT.sub(".experts.{expert}.", match[2]) == theirs:
                return f"blk.{match[1]}.{part}.{match[3] or 'weight'}"
        raise UnsupportedModelError(f"{name} has no name in GGUF")

    def _check(self) -> None:
        """Raise an error unless the configuration that is read from the fields is the model's."""
        layouts = {name: self._stored(name) for name in self._sources}
        stored = {name: GgufTensor(Path(), shape, BLOCK_OF[kind], 0) for name, (shape, kind) in layouts.items()}
        config = config_of(architecture_of(self.fields).settings(self.fields, stored))
        config = replace(config, dtype=self._config.dtype, eos_token_ids=self._config.eos_token_ids)
        if self._factors is not None:  # these are a tensor, not a field
            config = replace(config, rope=self._config.rope)
        for name, value in vars(self._config).items():
            if getattr(config, name) != value and not _is_near(getattr(config, name), value):
                raise UnsupportedModelError(
                    f"a GGUF file of {config.architecture} cannot state {name} = {value}: it would be read as "
                    f"{getattr(config, name)}"
                )


def _is_near(one: Any, other: Any) -> bool:
    """Whether two numbers are equal in float32, GGUF's type."""
    numbers = isinstance(one, float) and isinstance(other, float)
    return numbers and bool(np.float32(one) == np.float32(other))


def _fields_of(key: str, config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    of_architecture: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": round(config.head_dim * rope.rotary_factor),
        "vocab_size": config.vocab_size,
    }
    if config.experts is not None:
        of_architecture |= {
            "expert_count": config.experts.count,
            "expert_used_count": config.experts.top_k,
            "expert_feed_forward_length": config.experts.intermediate_size,
        }
        if config.experts.shared_intermediate_size:
            of_architecture["expert_shared_feed_forward_length"] = config.experts.shared_intermediate_size
    if key == "gpt-oss":
        of_architecture["attention.sliding_window"] = max(config.windows) + 1
    if rope.rope_type in ("linear", "yarn"):
        of_architecture |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": float(rope.factor)}
    if rope.rope_type == "yarn":
        of_architecture["rope.scaling.original_context_length"] = rope.original_max_positions
    return {f"{key}.{name}": value for name, value in of_architecture.items()} | {"general.quantization_version": 2}


def _kinds(value: Any) -> tuple[Any, Any]:
    """Return GGUF's type of a value, and of its entries."""
    from gguf import GGUFValueType as Kind

    kinds: dict[type, Any] = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}
    if not isinstance(value, list):
        return kinds[type(value)], None
    return Kind.ARRAY, (kinds | {int: Kind.INT32})[type(value[0])]
