"""Quantized weights as stored: the interface of all layouts of codes and scales.

Each layout is one class, which converts its weights to panels for a CPU and to tiles for a GPU. Sources and forms are
independent of the layouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from graphdecode.kernels.linear.quantized_linear import QuantizedPanels, dequantized_panels, joined_panels
from graphdecode.kernels.linear.weight_tiles import WeightTiles, joined_tiles
from graphdecode.linear.weight_form import LinearNames, Shard, TensorSource

_PANEL_ROWS, _TILE_ROWS = 1024, 4096  # rows converted at a time, in tens of MB of scratch memory


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread: the many small operators that pack weights wait long for threads on a busy machine."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


class WeightType(NamedTuple):
    """An encoding of weights, which `Stored.dtype` names."""

    name: str
    bits: float  # of a weight
    devices: tuple[str, ...] = ("cpu", "cuda")  # those whose kernels multiply it; others dequantize it on load


class QuantizedWeight(ABC):
    """A quantized weight [out_features, in_features]: a frozen dataclass whose tensors may be views of a file."""

    path: ClassVar[str]  # name in reports
    order: Tensor | None = None  # int32 [in_features], the input feature of each column; None: in order

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""

    @property
    def kind(self) -> str:
        """Fused weights of the same kind are joined."""
        return self.path

    @abstractmethod
    def rows(self, rows: slice) -> Self:
        """Return some rows (the slice may have a step), in shared memory."""

    @abstractmethod
    def part(self, shard: Shard) -> Self:
        """Return a shard of the rows or columns, in shared memory if possible.

        Raises:
            ValueError: columns begin or end within a group, or are reordered.
        """

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """Join weights of one kind along their rows; None if they do not match."""

    def dequantized(self) -> Tensor:
        """Return the weight in float32 [out_features, in_features]."""
        panels = self.panels()
        if panels is None or self.order is not None:
            raise NotImplementedError(f"{type(self).__name__} must say how it is dequantized")
        return dequantized_panels(panels)[: self.shape[0]]

    def _split(self, count: int) -> Iterator[Self]:
        for begin in range(0, self.shape[0], count):
            yield self.rows(slice(begin, min(begin + count, self.shape[0])))

    def panels(self, *, by_values: bool = True) -> QuantizedPanels | None:
        """Return the weight in panels for a CPU; None if that is not supported.

        `by_values`: the layout may depend on the values; False: all panels of one kind have the same layout.
        """
        regrouped = self.for_panels(by_values=by_values)
        return (
            None if regrouped is None else joined_panels([some.some_panels() for some in regrouped._split(_PANEL_ROWS)])
        )

    def tiles(self) -> WeightTiles | None:
        """Return the weight in tiles for a GPU, columns not reordered; None if that is not supported."""
        regrouped = self.for_tiles()
        return None if regrouped is None else joined_tiles([some.some_tiles() for some in regrouped._split(_TILE_ROWS)])

    def for_panels(self, *, by_values: bool) -> Self | None:
        """Return the weight in groups that panels support, or None."""
        return self

    def for_tiles(self) -> Self | None:
        """Return the weight in groups that tiles support, or None."""
        return None

    def some_panels(self) -> QuantizedPanels:
        """Return some rows of `for_panels` in panels."""
        raise NotImplementedError(f"{type(self).__name__} has no panels")

    def some_tiles(self) -> WeightTiles:
        """Return some rows of `for_tiles` in tiles."""
        raise NotImplementedError(f"{type(self).__name__} has no tiles")


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """A source whose tensors may be quantized; their `Stored.dtype` is then the layout's name."""

    def read_quantized(self, name: str, expert: int | None = None) -> QuantizedWeight | None:
        """Return a matrix as stored; None if it is not quantized.

        `expert`: return that expert's matrix [out_features, in_features] of a stack, which is listed as [experts,
        in_features, out_features]. Tensors may be views of a mapped file: copy what is kept.
        """


def read_parts(source: TensorSource, names: LinearNames) -> list[QuantizedWeight] | None:
    """Return a layer's tensors, adjacent ones of one kind joined; None if one is not quantized or cannot be joined."""
    if not isinstance(source, QuantizedSource):
        return None
    weights = [source.read_quantized(name) for name in names.weights]
    quantized = [each for each in weights if each is not None]
    kinds = [[*group] for _, group in groupby(quantized, lambda each: each.kind)]
    parts = [each[0] if len(each) == 1 else type(each[0]).joined(each) for each in kinds]
    whole = [part for part in parts if part is not None]
    return whole if len(quantized) == len(weights) and len(whole) == len(parts) else None
