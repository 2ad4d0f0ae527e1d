"""A model in GGUF as a source of weights: in one file, or in shards."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from graphdecode.hub.gguf_files import SUFFIX, shards_of
from graphdecode.hub.model_path import resolve_model_path
from graphdecode.linear.quantization.gguf import BLOCKS_ON_CPU, GgufBlocks, GgufFormat
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight
from graphdecode.linear.weight_form import Shard, Stored
from graphdecode.models.config import ModelConfig
from graphdecode.models.family import config_of
from graphdecode.models.fields import errors_name
from graphdecode.models.gguf.architectures import Architecture, architecture_of
from graphdecode.models.gguf.container import GgufTensor, JoinedView, Metadata, TensorView, read_header
from graphdecode.models.weight_map import CheckpointError


class Gguf:
    """A `.gguf` file, by its path, the folder that holds no other, or as a repository of the hub."""

    quant_method = GgufFormat.name

    def __init__(self, model: str | Path) -> None:
        self.path = resolve_model_path(model)
        self.name = str(self.path)
        files = [read_header(self.path.with_name(name)) for name in shards_of(self.path.name)]
        self._metadata = files[0].fields
        self._stored: dict[str, GgufTensor] = {}
        for file in files:
            twice = self._stored.keys() & file.tensors.keys()
            if twice:
                raise CheckpointError(f"{file.path}: the tensor {min(twice)} is in another shard, too")
            self._stored |= file.tensors
        further = self._further_layers()
        self.skipped = [name for name in self._stored if name.startswith(further)]  # they predict further tokens
        self._stored = {name: tensor for name, tensor in self._stored.items() if not name.startswith(further)}

    @classmethod
    def opens(cls, model: str | Path) -> bool:
        """Whether a model's name leads to a GGUF file."""
        return resolve_model_path(model).suffix == SUFFIX

    def config(self) -> ModelConfig:
        """Return the configuration of the metadata."""
        architecture = self._architecture
        with errors_name(self.path):
            config = config_of(architecture.settings(self._metadata, self._stored))
        kinds = {tensor.block for tensor in self._stored.values()}
        return replace(config, integer_quantized=any(kind.values > 1 for kind in kinds))

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of the config.json that such a model has."""
        return self._architecture.settings(self._metadata, self._stored)

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """All tensors by their names in transformers; others by their own."""
        return {name: Stored(view.shape, view.block_type) for name, view in self._views.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write one tensor, or a part of it, into `out`; blocks are dequantized a few rows at a time."""
        self._views[name].read(out, shard)

    def read_quantized(self, name: str, expert: int | None = None) -> QuantizedWeight | None:
        """Return a matrix as it is stored; None if it is not in blocks."""
        view, block_type = self._views[name], self.tensors[name].dtype
        return GgufBlocks(view.blocks, block_type) if block_type in BLOCKS_ON_CPU and view.keeps_blocks else None

    def _further_layers(self) -> tuple[str, ...]:
        """Return the prefixes of tensors behind the decoder's last layer."""
        with errors_name(self.path):
            metadata = Metadata(self._metadata)
            further = range(0)
            if metadata.has("nextn_predict_layers"):
                further = range(metadata.num_layers, metadata.count("block_count"))
        return tuple(f"blk.{layer}." for layer in further)

    @cached_property
    def _architecture(self) -> Architecture:
        with errors_name(self.path):
            return architecture_of(self._metadata)

    @cached_property
    def _views(self) -> Mapping[str, TensorView | JoinedView]:
        return self._architecture.views(self._metadata, self._stored)
