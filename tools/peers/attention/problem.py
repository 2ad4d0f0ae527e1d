"""One point of a comparison of decode attention: queries, caches that no other cache holds, and the right answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PAGE_SIZE = 16

_COLD_BYTES = {
    "cuda": 256 << 20,
    "cpu": 128 << 20,
}  # more than a last-level cache; rotated caches are at least so large
_MOST_COPIES = 64
_FILLED_AT_ONCE = 4096  # pages
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a model and dtypes of its queries and cache."""

    name: str
    qo_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """How far an output may be from the right one, in root mean squares of that one."""
        return _TOLERANCE[self.dtype]


SHAPES = (
    AttentionShape("llama-8b", 32, 8, 128, torch.float16, torch.float16),
    AttentionShape("mha", 32, 32, 128, torch.float16, torch.float16),
    AttentionShape("qwen3", 32, 8, 128, torch.bfloat16, torch.bfloat16),
    AttentionShape("llama-8b-fp8", 32, 8, 128, torch.float16, torch.float8_e4m3fn),
)


class AttentionProblem:
    """A batch of one context over rotated caches; pages in random order.

    Attributes:
        shape: heads and dtypes.
        batch: rows, each with one query.
        context: keys that each query sees.
        device: where.
        pages_of_row: that a row's keys take.
        kv_bytes: that one call has to read.
        caches: keys and values, each [pages, page_size, kv_heads, head_dim].
        table: [batch, pages_of_row], int32: the pages of each row.
        q: [batch, qo_heads, head_dim].
        out: the same; for those that write where they are told.
    """

    def __init__(self, shape: AttentionShape, batch: int, context: int, device: torch.device) -> None:
        self.shape, self.batch, self.context, self.device = shape, batch, context, device
        self.pages_of_row = -(-context // PAGE_SIZE)
        pages = batch * self.pages_of_row
        self.kv_bytes = 2 * batch * context * shape.kv_heads * shape.head_dim * shape.kv_dtype.itemsize
        copies = max(min(-(-_COLD_BYTES[device.type] // self.kv_bytes), _MOST_COPIES), 1)
        sizes = (pages + 1, PAGE_SIZE, shape.kv_heads, shape.head_dim)
        self.caches = [(self._random(sizes), self._random(sizes)) for _ in range(copies)]
        self.table = torch.randperm(pages, device=device).to(torch.int32).view(batch, self.pages_of_row)
        self.q = torch.randn(batch, shape.qo_heads, shape.head_dim, device=device).to(shape.dtype)
        self.out = torch.empty_like(self.q)

    def _random(self, sizes: tuple[int, ...]) -> Tensor:
        cache = torch.empty(sizes, dtype=self.shape.kv_dtype, device=self.device)
        for page in cache.split(_FILLED_AT_ONCE):  # a piece at a time: fp8 has to be made from something wider
            page.copy_(torch.randn(page.shape, dtype=torch.float16, device=self.device))
        return cache

    def gathered(self, cache: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return a cache's keys and values, each [batch, kv_heads, context, head_dim]."""
        index = self.table.long()
        return [part[index].flatten(1, 2)[:, : self.context].transpose(1, 2) for part in cache]

    @cached_property
    def contiguous(self) -> list[list[Tensor]]:
        """All caches gathered, [batch, kv_heads, context, head_dim] in memory too; for those that read no pages."""
        return [[part.contiguous() for part in self.gathered(cache)] for cache in self.caches]

    def error(self, out: Tensor, copy: int) -> float:
        """Return how far an output is from attention in float64, in root mean squares of that one.

        Args:
            out: of the size of `q`, in any view of it.
            copy: the cache that it was computed from.
        """
        shape, group = self.shape, self.shape.qo_heads // self.shape.kv_heads
        out = out.reshape(self.q.shape)
        worst = 0.0
        for row in sorted({0, self.batch // 2, self.batch - 1}):  # all rows of a large batch would take gigabytes
            pages = self.table[row].long()
            k, v = (part[pages].flatten(0, 1)[: self.context].double() for part in self.caches[copy])
            q = self.q[row].double().view(shape.kv_heads, group, shape.head_dim)
            weights = torch.softmax(torch.einsum("hgd,chd->hgc", q, k) * shape.head_dim**-0.5, dim=-1)
            right = torch.einsum("hgc,chd->hgd", weights, v).view(shape.qo_heads, shape.head_dim)
            distance = (out[row].double() - right).abs().amax() / right.square().mean().sqrt()
            worst = max(worst, distance.nan_to_num(torch.inf).item())
        return worst
