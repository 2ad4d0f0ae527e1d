"""States of fixed size: what a layer keeps of a sequence in place of keys and values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .layer_cache import LayerCache, untouched_zeros


@dataclass(frozen=True)
class Recurrent:
    """A layer's declaration that it keeps a state of fixed size for each sequence.

    Attributes:
        shapes: of the tensors that make up one sequence's state, by name; they are float32.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(4 * torch.Size(shape).numel() for _, shape in self.shapes)


@dataclass(frozen=True)
class RecurrentState:
    """The states of one layer, a row for each sequence and a last one for padding; rows never move.

    Attributes:
        tensors: float32 [rows + 1, ...] each, by name.
    """

    tensors: dict[str, Tensor]

    @classmethod
    def zeros(cls, layer: Recurrent, rows: int, device: torch.device | str) -> "RecurrentState":
        """Return states of zeros for so many sequences."""
        made = {name: untouched_zeros((rows + 1, *shape), torch.float32, device) for name, shape in layer.shapes}
        return cls(made)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the tensors."""
        yield from self.tensors.values()

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.nbytes for tensor in self)


LayerState: TypeAlias = LayerCache | RecurrentState
