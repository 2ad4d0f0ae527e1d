"""Keys and values of one layer, and what they are multiplied with where they have 8 bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.kernels.cache.kv_format import PageScales, format_of

from .untouched import untouched_zeros


class CacheScales(NamedTuple):
    """What the entries of a cache of 8 bits are multiplied with.

    Attributes:
        key: of all keys of the layer, which fp8 holds divided by it.
        value: the same of values.
        pages: of each token and head; of int8 alone.
    """

    key: float = 1.0
    value: float = 1.0
    pages: PageScales | None = None


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer; the last page is the trash page. Its tensors are found by going through it.

    Attributes:
        keys: [pages + 1, page_size, num_kv_heads, head_dim].
        values: the same shape.
        scales: of their entries.
    """

    keys: Tensor
    values: Tensor
    scales: CacheScales = CacheScales()  # noqa: RUF009 (immutable)

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> "LayerCache":
        """Return a cache of zeros, which on a CPU takes memory as it is written.

        Args:
            shape: of keys, and of values.
            dtype: of both; int8 has scales of its own, whatever the other two say.
            device: where it is.
            key_scale: divides keys, where they are fp8.
            value_scale: divides values, likewise.
        """
        held = format_of(dtype)
        keys, values = untouched_zeros(shape, dtype, device), untouched_zeros(shape, dtype, device)
        pages = held.page_scales(shape, lambda size, kind: untouched_zeros(size, kind, device))
        units = (key_scale, value_scale) if held.has_layer_scales else (1.0, 1.0)
        return cls(keys, values, CacheScales(*units, pages))

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
