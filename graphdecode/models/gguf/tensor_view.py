"""A tensor as transformers has it, in terms of a file's: which rows, in which order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphdecode.linear.weight_form import Shard
from graphdecode.models.gguf.container import GgufTensor
from graphdecode.models.gguf.quantize import dequantize

_VALUES_AT_ONCE = 1 << 19  # are undone together: what that needs beside the result is a few MB


@dataclass(frozen=True)
class TensorView:
    """Rows of a stored tensor.

    Attributes:
        stored: where they are.
        shape: as transformers has it.
        first_row: of the stored ones.
        head_dim: 0, or the channels of each head whose rotary pairs (i, i + head_dim / 2) are stored as neighbours.
        shift: added to each value.
    """

    stored: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0
    head_dim: int = 0
    shift: float = 0.0

    @property
    def block_type(self) -> str:
        """What the values are stored as."""
        return self.stored.block.name

    def read(self, out: Tensor, shard: Shard | None) -> None:
        """Write the values, or a part of them, into `out`, converted to its dtype, a few rows at a time."""
        # a vector is a column of rows of one value, unless it is stored in blocks
        leading = self.shape if len(self.shape) == 1 and self.stored.block.values == 1 else self.shape[:-1]
        row_length = math.prod(self.shape[len(leading) :])
        slices = () if shard is None else shard.slices(self.shape)
        rows = np.arange(math.prod(leading)).reshape(leading)[slices[: len(leading)]].ravel()
        columns = slices[len(leading)] if len(slices) > len(leading) else slice(None)
        target, step = out.view(len(rows), -1), max(1, _VALUES_AT_ONCE // row_length)
        for begin in range(0, len(rows), step):
            values = self._read_rows(self._stored_rows(rows[begin : begin + step]), row_length)[:, columns]
            target[begin : begin + step].copy_(values.add(self.shift) if self.shift else values)

    @property
    def blocks(self) -> Tensor:
        """Return the rows of a matrix as they are stored, uint8 [rows, bytes of a row]."""
        rows, row_length = self.shape
        order = self._stored_rows(np.arange(rows))
        stored = self.stored.read(self.first_row * row_length, rows * row_length).reshape(rows, -1)
        return torch.from_numpy(stored[order - self.first_row] if self.head_dim else stored)

    def _stored_rows(self, rows: np.ndarray) -> np.ndarray:
        if self.head_dim:
            head, row = np.divmod(rows, self.head_dim)
            half, pair = np.divmod(row, self.head_dim // 2)
            rows = head * self.head_dim + 2 * pair + half
        return self.first_row + rows

    def _read_rows(self, rows: np.ndarray, row_length: int) -> Tensor:
        """Return stored rows, by their numbers, which lie close together."""
        low, count = int(rows.min()), int(rows.max() - rows.min()) + 1
        found = dequantize(self.stored.read(low * row_length, count * row_length).reshape(count, -1), self.stored.block)
        return found if count == len(rows) and (np.diff(rows) == 1).all() else found[rows - low]
