"""On a CPU with compiled kernels: a weight in the blocks of few bits in which its source has it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.kernels.linear.quantised_linear import QuantisedPanels, quantised_linear
from graphdecode.kernels.model.quantised_embedding import quantised_embedding
from graphdecode.linear.gguf_blocks import GGUF_BLOCKS, block_values, gguf_panels
from graphdecode.linear.panels import Panels
from graphdecode.linear.weight_form import (
    BlockSource,
    FormOptions,
    LinearNames,
    RowTable,
    Shard,
    TensorSource,
    WeightForm,
    fused_shape,
    read_bias,
)


class PanelRows(NamedTuple):
    """An embedding in panels."""

    weight: QuantisedPanels
    vocab_size: int

    def gather(self, out: Tensor, tokens: Tensor, live: Tensor, scale: float) -> None:
        """Write the tokens' rows; see `RowTable`."""
        quantised_embedding(out, tokens, self.weight, live, self.vocab_size, scale)


@dataclass(frozen=True)
class Blocks(WeightForm):
    """A weight in panels of blocks, whose values are the source's own, not rounded; others are put in plain panels.

    Tensors that are fused and differ in type are parts, each with a product of its own.
    """

    path = "blocks"
    quantize = "gguf"
    parts: tuple[QuantisedPanels, ...]
    sizes: tuple[int, ...]  # output features of the parts
    batch_invariant: bool

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
        """Whether all of a layer's tensors are blocks that can be multiplied as they are."""
        return {source.tensors[name].dtype for name in names.weights} <= GGUF_BLOCKS

    @classmethod
    def load(cls, source: TensorSource, names: LinearNames, shard: Shard | None, options: FormOptions) -> WeightForm:
        """Read a layer's blocks, or a part of them; a part whose columns are no whole blocks is put in plain panels."""
        stored = stored_blocks(source, names, shard) if cls.keeps(source, names) else None
        if stored is None:
            return Panels.load(source, names, shard, options)
        parts, sizes = [], []
        for block_type, of_type in groupby(stored, lambda each: each[0]):
            rows = [blocks for _, blocks in of_type]
            parts.append(gguf_panels(torch.cat(rows) if len(rows) > 1 else rows[0], block_type))
            sizes.append(sum(map(len, rows)))
        shape = fused_shape(source, names.weights, shard)
        bias = read_bias(source, names, shard, options)
        return cls(shape, bias, tuple(parts), tuple(sizes), options.batch_invariant)

    @property
    def row_table(self) -> RowTable | None:
        """The weight where it is in one part."""
        return PanelRows(self.parts[0], self.out_features) if len(self.parts) == 1 else None

    @property
    def gives_floats(self) -> bool:
        """Sums are written as they are."""
        return True

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        biases = [None] * len(self.sizes) if self.bias is None else self.bias.split(self.sizes)
        for part, bias, columns in zip(self.parts, biases, out.split(self.sizes, dim=1), strict=True):
            quantised_linear(columns, x, part, bias, batch_invariant=self.batch_invariant)


def stored_blocks(source: TensorSource, names: LinearNames, shard: Shard | None) -> list[tuple[str, Tensor]] | None:
    """Return types and blocks of a layer's tensors, or of a part; None where one has none, or is cut in a block."""
    if not isinstance(source, BlockSource):
        return None
    found = []
    for name in names.weights:
        (rows, columns), block_type = source.tensors[name].shape, source.tensors[name].dtype
        blocks = source.read_blocks(name)
        if blocks is None:
            return None
        if shard is not None:
            kept_rows, *kept_columns = shard.slices((rows, columns))
            cuts = [cut for kept in kept_columns for cut in (kept.start, kept.stop)]
            if any(cut % block_values(block_type) for cut in cuts):
                return None
            within = [slice(*(cut * blocks.shape[1] // columns for cut in cuts))] if cuts else []
            blocks = blocks[(kept_rows, *within)].contiguous()
        found.append((block_type, blocks))
    return found
