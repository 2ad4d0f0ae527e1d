"""The state of one layer: keys and values in pages, or recurrent states, one for each sequence."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from graphdecode.kernels.cache.kv_format import PageScales, format_of

_HUGE_FROM = 2 * 2**20  # bytes of a tensor to back by huge pages: the size of one


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros; on a CPU, anonymous memory that becomes resident when it is written. No size of the shape is 0.

    Large tensors are backed by huge pages, which saves TLB misses of scattered reads. The memory is overcommitted: a
    write may end the process if none is left.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)
    if len(mapped) >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # not supported by the kernel
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(dtype).view(tuple(shape))


Zeros: TypeAlias = Callable[[Sequence[int], torch.dtype, Any], Tensor]  # `untouched_zeros`, or others of its kind


class CacheScales(NamedTuple):
    """Scales of an 8-bit cache."""

    key: float = 1.0  # scale of all keys of the layer, for fp8
    value: float = 1.0  # scale of all values, for fp8
    pages: PageScales | None = None  # scales per token and head, for int8


class _State:
    """Iterates over its `tensors`."""

    tensors: dict[str, Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.tensors.values()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self)


@dataclass(frozen=True)
class LayerCache(_State):
    """Keys and values of one layer; the last page is the null page."""

    keys: Tensor  # [pages + 1, page_size, num_kv_heads, head_dim]
    values: Tensor  # the same shape; of latent keys their last channels, in the same memory
    scales: CacheScales = CacheScales()  # noqa: RUF009 (immutable)
    is_rolling: bool = False  # whether `rolling_table` has its pages, in place of `page_table`
    is_latent: bool = False  # whether values are a part of the keys

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
        zeros: Zeros = untouched_zeros,
        latent_rank: int = 0,
    ) -> "LayerCache":
        """Return a cache of zeros, each tensor of which `zeros` makes.

        `shape` is that of keys, and of values unless they are latent (see `Keys`). Scales divide keys and values of
        fp8; int8 has its own in addition.
        """
        kv_format, keys = format_of(dtype), zeros(shape, dtype, device)
        if latent_rank:
            return cls(keys, keys[..., -latent_rank:], is_rolling=is_rolling, is_latent=True)
        values = zeros(shape, dtype, device)
        pages = kv_format.page_scales(shape, lambda size, kind: zeros(size, kind, device))
        units = (key_scale, value_scale) if kv_format.has_layer_scales else (1.0, 1.0)
        return cls(keys, values, CacheScales(*units, pages), is_rolling)

    @property
    def tensors(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Keys, values and the scales of pages, by name; each has the page as its first dimension."""
        pages = {} if self.scales.pages is None else self.scales.pages._asdict()
        values = {} if self.is_latent else {"v_cache": self.values}
        return {"k_cache": self.keys, **values, **pages}


@dataclass(frozen=True)
class Keys:
    """Declares a layer's keys and values."""

    heads: int
    head_dim: int  # channels of a head
    shared_with: int | None = None  # the earlier layer that keeps them; None: the layer itself
    latent_rank: int = 0  # > 0: values are the last so many channels of the keys, and no tensor of their own

    @classmethod
    def latent(cls, rank: int, rope_dim: int) -> "Keys":
        """Declare what latent attention keeps: rotated channels, and a latent vector, once for all heads."""
        return cls(1, rope_dim + rank, latent_rank=rank)

    @property
    def entries(self) -> int:
        """Entries of `head_dim` channels that a token takes."""
        return self.heads if self.latent_rank else 2 * self.heads


@dataclass(frozen=True)
class Recurrent:
    """Declares a layer's recurrent state."""

    # name -> shape of the float32 tensors of one sequence's state; empty: the layer has no state
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    beside_keys: bool = False  # whether the layer has keys and values too

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(4 * torch.Size(shape).numel() for _, shape in self.shapes)


@dataclass(frozen=True)
class RecurrentState(_State):
    """A layer's recurrent states, which never move: rows of sequences, one for padding, checkpoints, and drafts."""

    tensors: dict[str, Tensor]  # float32 [rows + 1 + checkpoints + drafts, ...] each, by name
    null_row: int = 0  # the row for padding


@dataclass(frozen=True)
class KeysAndState(_State):
    """Keys, values and recurrent states of a layer with attention and a recurrent mixer."""

    pages: LayerCache
    states: RecurrentState

    @property
    def tensors(self) -> dict[str, Tensor]:  # type: ignore[override]
        """All tensors, by name."""
        return self.pages.tensors | self.states.tensors


LayerState: TypeAlias = LayerCache | RecurrentState | KeysAndState


def layer_state(
    recurrent: Recurrent | None,
    pages: Callable[[], LayerCache],
    rows: int,
    device: torch.device,
    others: int = 0,
    zeros: Zeros = untouched_zeros,
) -> LayerState:
    """Return a layer's state: what `pages` makes, and zeros for its recurrent state, if it declares one.

    There is a recurrent state for each of `rows` sequences, for padding, and for `others`: checkpoints and drafts.
    """
    if recurrent is None:
        return pages()
    count = rows + 1 + others
    tensors = {name: zeros((count, *shape), torch.float32, device) for name, shape in recurrent.shapes}
    states = RecurrentState(tensors, rows)
    return KeysAndState(pages(), states) if recurrent.beside_keys else states


def paged(layers: Iterable[LayerState]) -> list[LayerCache]:
    """Return the keys and values of layers that have them."""
    return [part for part in _parts(layers) if isinstance(part, LayerCache)]


def stateful(layers: Iterable[LayerState]) -> list[RecurrentState]:
    """Return the recurrent states of layers that have them."""
    return [part for part in _parts(layers) if isinstance(part, RecurrentState)]


def _parts(layers: Iterable[LayerState]) -> Iterator[LayerState]:
    for layer in layers:
        yield from (layer.pages, layer.states) if isinstance(layer, KeysAndState) else (layer,)
