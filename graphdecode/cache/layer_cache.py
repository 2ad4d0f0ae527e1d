"""What one layer keeps: keys and values in pages, or a state of fixed size for each sequence."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from graphdecode.kernels.cache.kv_format import PageScales, format_of

_HUGE_FROM = 32 * 2**20  # bytes from which on a huge page, 2 MiB, is a small part


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros; on a CPU, pages of the system that are zero until they are used.

    `torch.zeros` writes each byte, so that all of it is resident at once. Anonymous memory is zero by the system's
    promise, and takes room page by page as it is written; much of it huge pages, for each scattered read takes a walk
    through the page table. Like all overcommitted memory, it ends the process that writes where no room is left.

    Args:
        shape: no size is 0.
        dtype: of the tensor.
        device: on any but a CPU this is `torch.zeros`.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)  # no other process sees what we write
    if len(mapped) >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system that was built without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(dtype).view(tuple(shape))


class CacheScales(NamedTuple):
    """What the entries of a cache of 8 bits are multiplied with."""

    key: float = 1.0  # of all keys of the layer, which fp8 holds divided by it
    value: float = 1.0  # the same of values
    pages: PageScales | None = None  # of each token and head; of int8 alone


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer; the last page is the trash page. Its tensors are found by going through it."""

    keys: Tensor  # [pages + 1, page_size, num_kv_heads, head_dim]
    values: Tensor  # the same shape
    scales: CacheScales = CacheScales()  # noqa: RUF009 (immutable)
    is_rolling: bool = False  # whether its pages are those of a `rolling_table`, and not of the `page_table`

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        is_rolling: bool = False,
    ) -> "LayerCache":
        """Return a cache of zeros, which on a CPU takes memory as it is written.

        Args:
            shape: of keys, and of values.
            dtype: of both; int8 has scales of its own.
            device: where it is.
            key_scale: divides keys, where they are fp8.
            value_scale: divides values, likewise.
            is_rolling: whether its pages roll; see `RollingPages`.
        """
        held = format_of(dtype)
        keys, values = untouched_zeros(shape, dtype, device), untouched_zeros(shape, dtype, device)
        pages = held.page_scales(shape, lambda size, kind: untouched_zeros(size, kind, device))
        units = (key_scale, value_scale) if held.has_layer_scales else (1.0, 1.0)
        return cls(keys, values, CacheScales(*units, pages), is_rolling)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield keys, values, and the scales of pages, where there are any."""
        yield from self.tensors.values()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is written, by name; each has the page as its first dimension."""
        pages = {} if self.scales.pages is None else self.scales.pages._asdict()
        return {"k_cache": self.keys, "v_cache": self.values, **pages}

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.nbytes for tensor in self)


@dataclass(frozen=True)
class Recurrent:
    """A layer's declaration that it keeps a state of fixed size for each sequence.

    Attributes:
        shapes: of the tensors that make up one sequence's state, by name; they are float32. Empty: the layer keeps
            nothing.
        beside_keys: whether the layer keeps keys and values too.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    beside_keys: bool = False

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


@dataclass(frozen=True)
class KeysAndState:
    """Keys and values of one layer, and its states: of a layer that has attention and a recurrent mixer."""

    pages: LayerCache
    states: RecurrentState

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the tensors of both."""
        yield from self.tensors.values()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is written, by name."""
        return self.pages.tensors | self.states.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.pages.nbytes + self.states.nbytes


LayerState: TypeAlias = LayerCache | RecurrentState | KeysAndState


def layer_state(kept: Recurrent | None, pages: Callable[[], LayerCache], rows: int, device: torch.device) -> LayerState:
    """Return what a layer keeps of all sequences.

    Args:
        kept: the layer's declaration; None: keys and values alone.
        pages: makes keys and values.
        rows: sequences that can have a state at a time.
        device: where states are.
    """
    if kept is None:
        return pages()
    states = RecurrentState.zeros(kept, rows, device)
    return KeysAndState(pages(), states) if kept.beside_keys else states


def paged(layers: Iterable[LayerState]) -> Iterator[LayerCache]:
    """Yield the keys and values of the layers that have some."""
    for layer in layers:
        pages = layer.pages if isinstance(layer, KeysAndState) else layer
        if isinstance(pages, LayerCache):
            yield pages
