"""On a CPU with compiled kernels: a weight in the blocks of few bits in which its source has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.kernels.linear.quantised_linear import BLOCK_TYPES, quantised_linear, quantised_panels
from graphdecode.linear.panels import Panels
from graphdecode.linear.weight_form import (
    BlockSource,
    FormOptions,
    LinearNames,
    Shard,
    TensorSource,
    WeightForm,
    fused_shape,
    read_bias,
)


@dataclass(frozen=True)
class Blocks(WeightForm):
    """A weight in panels of blocks, whose values are the source's own, not rounded; others are put in plain panels."""

    path = "blocks"
    quantize = "gguf"
    panels: Tensor  # int16, as `quantised_panels` has them, as are
    scales: Tensor  # float16
    mins: Tensor | None  # likewise

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: as for plain panels."""
        return Panels.why_not(options)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return a weight that has no blocks in plain panels."""
        return Panels.of(weight, bias, options)

    @classmethod
    def keeps(cls, source: TensorSource, names: LinearNames) -> bool:
        """Whether all of a layer's tensors are blocks of one type that can be multiplied as it is."""
        return _common_block_type(source, names) is not None

    @classmethod
    def load(cls, source: TensorSource, names: LinearNames, shard: Shard | None, options: FormOptions) -> WeightForm:
        """Read a layer's blocks; a part of a layer, and one whose tensors differ in type, is put in plain panels."""
        block_type = _common_block_type(source, names)
        if shard is not None or block_type is None or not isinstance(source, BlockSource):
            return Panels.load(source, names, shard, options)
        stored = [blocks for name in names.weights if (blocks := source.read_blocks(name)) is not None]
        if len(stored) < len(names.weights):
            return Panels.load(source, names, shard, options)
        shape = fused_shape(source, names.weights, None)
        held = quantised_panels(torch.cat(stored) if len(stored) > 1 else stored[0], block_type)
        return cls(shape, read_bias(source, names, None, options), *held)

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        quantised_linear(out, x, self.panels, self.scales, self.mins, self.bias)


def _common_block_type(source: TensorSource, names: LinearNames) -> str | None:
    """Return the type of block that a layer's tensors all have, if it can be multiplied as it is; None otherwise."""
    types = {source.tensors[name].dtype for name in names.weights}
    return types.pop() if len(types) == 1 and types <= BLOCK_TYPES else None
