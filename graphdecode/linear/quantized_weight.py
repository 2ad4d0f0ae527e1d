"""A quantized weight as its source has it: what all layouts of codes and scales have in common.

A layout is one class, which puts its values in panels for a CPU and in tiles for a GPU. Sources give such weights and
forms keep them; neither knows which layouts there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from graphdecode.kernels.linear.quantized_linear import QuantizedPanels, joined_panels
from graphdecode.kernels.linear.weight_tiles import WeightTiles, joined_tiles
from graphdecode.linear.weight_form import LinearNames, Shard, TensorSource

_PANEL_ROWS, _TILE_ROWS = 1024, 4096  # are put in order together: what that needs beside the result is tens of MB


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operators of this thread without others: while weights are put in order these are small, many, and
    on a busy machine wait for each other ten times as long as they work.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


class QuantizedWeight(ABC):
    """A quantized weight [out_features, in_features]: a frozen dataclass, whose tensors may be views of a file.

    Attributes:
        path: what reports call it.
        order: int32 [in_features], the input feature of each column; None: as they stand.
    """

    path: ClassVar[str]
    order: Tensor | None = None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""

    @property
    def kind(self) -> str:
        """What weights below one another have in common that are put in one; all of a layer where it is not a type."""
        return self.path

    @abstractmethod
    def rows(self, rows: slice) -> Self:
        """Return some rows, perhaps every so many, in memory that is shared."""

    @abstractmethod
    def part(self, shard: Shard | None) -> Self:
        """Return some rows, or some columns, in memory that is shared where that can be.

        Raises:
            ValueError: columns begin or end within a group, or are not in the order of the input features.
        """

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """Return weights of one kind, one below another, as one; None where they are not alike."""

    def _split(self, count: int) -> Iterator[Self]:
        for begin in range(0, self.shape[0], count):
            yield self.rows(slice(begin, min(begin + count, self.shape[0])))

    def panels(self, *, by_values: bool = True) -> QuantizedPanels | None:
        """Return the weight as a CPU multiplies it; None where it cannot be put so.

        Args:
            by_values: numbers may be kept in fewer bits where the values allow it; else weights of one kind are alike.
        """
        ready = self.for_panels(by_values=by_values)
        return None if ready is None else joined_panels([some.some_panels() for some in ready._split(_PANEL_ROWS)])

    def tiles(self) -> WeightTiles | None:
        """Return the weight, its columns as they stand, as a GPU multiplies it; None where it cannot be put so."""
        ready = self.for_tiles()
        return None if ready is None else joined_tiles([some.some_tiles() for some in ready._split(_TILE_ROWS)])

    @abstractmethod
    def for_panels(self, *, by_values: bool) -> Self | None:
        """Return the weight in groups that panels have; None: there are none."""

    @abstractmethod
    def for_tiles(self) -> Self | None:
        """Return the weight in groups that tiles have; None: there are none."""

    @abstractmethod
    def some_panels(self) -> QuantizedPanels:
        """Return some rows of `for_panels` in panels."""

    @abstractmethod
    def some_tiles(self) -> WeightTiles:
        """Return some rows of `for_tiles` in tiles."""


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """A source whose tensors may stand in few bits; the dtype of such a tensor is the layout's word for it."""

    def read_quantized(
        self, name: str, shard: Shard | None = None, expert: int | None = None
    ) -> QuantizedWeight | None:
        """Return a matrix, or a part of it and no more, as it is stored; None where it, or that part, is none.

        With an expert that expert's matrix [out_features, in_features] of a stack, which is listed as [experts,
        in_features, out_features].
        Where this is None, `read` gives its values. Tensors may be views of a mapped file: what is kept must be copied.
        """


def part_of(whole: QuantizedWeight | None, shard: Shard | None) -> QuantizedWeight | None:
    """Return a part of a weight; None where there is none, or it begins or ends within a group."""
    with suppress(ValueError):
        return None if whole is None else whole.part(shard)
    return None


def read_parts(source: TensorSource, names: LinearNames, shard: Shard | None = None) -> list[QuantizedWeight] | None:
    """Return a layer's tensors, or a part of each: those of one kind that are neighbours as one weight.

    None if one is not quantized, or those of one kind are not alike.
    """
    if not isinstance(source, QuantizedSource):
        return None
    found = [source.read_quantized(name, shard) for name in names.weights]
    held = [each for each in found if each is not None]
    kinds = [[*group] for _, group in groupby(held, lambda each: each.kind)]
    parts = [each[0] if len(each) == 1 else type(each[0]).joined(each) for each in kinds]
    whole = [part for part in parts if part is not None]
    return whole if len(held) == len(found) and len(whole) == len(parts) else None
