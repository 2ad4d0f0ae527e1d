"""Products with adapter slots in fixed tensors; each batch row names a slot, or none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from graphdecode.kernels.linear.add_adapters import AdapterTokens, add_adapters, add_embedding_adapters
from graphdecode.kernels.moe.expert_linear import Routed
from graphdecode.linear.composite import LinearWrapper, RowParallelLinear
from graphdecode.linear.experts import ExpertForm
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FusedProduct, WeightForm

Halves: TypeAlias = tuple[Tensor, Tensor]  # A and B of an adapter's product, scaled, as slots have them


class AdapterSpan(NamedTuple):
    """Tokens of a pass whose batch rows are of one part of it."""

    tokens: slice
    rows: Tensor  # int32 [t], the batch row of each
    live: Tensor  # int32 [1]
    adapters: Tensor  # int32 [b], the slot of each batch row's adapter; below 0: none

    def narrow(self, begin: int, end: int) -> AdapterSpan | None:
        """Return the span among the tokens [begin, end) of the pass; None if none of its tokens is there."""
        first, last = max(begin, self.tokens.start), min(end, self.tokens.stop)
        if first >= last:
            return None
        skipped = first - self.tokens.start
        live = self.live - skipped if skipped else self.live
        return AdapterSpan(
            slice(first - begin, last - begin), self.rows[skipped : skipped + last - first], live, self.adapters
        )


class LoRAEmbedding(NamedTuple):
    """Adapter slots of the token embedding."""

    down: Tensor  # [slots, vocab, rank], of the activations' dtype
    up: Tensor  # [slots, rank, hidden]
    ranks: Tensor  # int32 [slots], of the adapters

    def adapt(self, out: Tensor, ids: Tensor, span: AdapterSpan, scale: float) -> None:
        """Add to `out` [t, hidden], which holds embedded tokens, what the adapters of their rows give, scaled."""
        tokens = AdapterTokens(span.rows, span.live, span.adapters, self.ranks)
        add_embedding_adapters(out, ids, self.down, self.up, tokens, scale)


@dataclass(frozen=True)
class LoRALinear(LinearWrapper):
    """A product with adapter slots; `apply` ignores them."""

    path = "lora"
    down: Tensor  # [slots, parts, rank, in_features], of the activations' dtype
    up: Tensor  # [slots, rank, out_features]
    ends: Tensor  # int32 [parts], the output feature behind each part
    ranks: Tensor  # int32 [slots], of the adapters in this product; 0: an adapter does not change it

    @classmethod
    def wrap(
        cls, form: WeightForm, sizes: Iterable[int], ranks: Tensor, max_rank: int, dtype: torch.dtype
    ) -> LoRALinear:
        """Return a product with empty slots, given the output features of its parts, and the activations' dtype."""
        ends = torch.tensor(list(sizes), dtype=torch.int32, device=ranks.device).cumsum(0, dtype=torch.int32)
        down = torch.zeros(len(ranks), len(ends), max_rank, form.in_features, dtype=dtype, device=ranks.device)
        up = torch.zeros(len(ranks), max_rank, form.out_features, dtype=dtype, device=ranks.device)
        return cls(form.shape, None, form, down, up, ends, ranks)

    def apply(self, out: Tensor, x: Tensor) -> None:
        self.form.apply(out, x)

    def adapt(self, out: Tensor, x: Tensor, inner: Tensor, spans: Iterable[AdapterSpan]) -> None:
        """Write the product, plus what the adapters of the tokens' rows add, into `out`.

        `inner`: workspace, float32 [t, parts * rank]. If ranks sum the product, each adds its part before the sum.
        """
        summed = self.form if isinstance(self.form, RowParallelLinear) else None
        (self.form if summed is None else summed.form).apply(out, x)
        inner = inner.view(len(x), *self.down.shape[1:3])
        for span in spans:
            token_slice, tokens = span.tokens, AdapterTokens(span.rows, span.live, span.adapters, self.ranks)
            add_adapters(out[token_slice], x[token_slice], self.down, self.up, inner[token_slice], self.ends, tokens)
        if summed is not None:
            summed.sum(out)

    def fused(self, rows: int) -> FusedProduct | None:
        """Return the form's fused product, for steps without adapters."""
        return self.form.fused(rows)

    @property
    def inner_size(self) -> int:
        """Values of workspace that a token needs."""
        return self.down.shape[1] * self.down.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the form: every step reads them."""
        return self.form.nbytes


@dataclass(frozen=True)
class LoRAExperts(ExpertForm):
    """A product of experts with adapter slots; `apply` ignores them."""

    path = "lora"
    form: ExpertForm
    down: Tensor  # [slots, experts, parts, rank, in_features], of the activations' dtype
    up: Tensor  # [slots, experts, rank, out_features]
    ends: Tensor  # int32 [parts], the output feature behind each part
    ranks: Tensor  # int32 [slots, experts], of the adapters in this product

    @classmethod
    def wrap(cls, form: ExpertForm, parts: int, ranks: Tensor, max_rank: int, dtype: torch.dtype) -> LoRAExperts:
        """Return a product of `parts` equal parts with empty slots; see `LoRALinear.wrap`."""
        _, outputs, inputs = form.shape
        down = torch.zeros(*ranks.shape, parts, max_rank, inputs, dtype=dtype, device=ranks.device)
        up = torch.zeros(*ranks.shape, max_rank, outputs, dtype=dtype, device=ranks.device)
        ends = torch.arange(1, parts + 1, dtype=torch.int32, device=ranks.device) * (outputs // parts)
        return cls(form.shape, None, form, down, up, ends, ranks)

    def apply(self, out: Tensor, x: Tensor, pairs: Routed) -> None:
        self.form.apply(out, x, pairs)

    def adapt(self, out: Tensor, x: Tensor, pairs: Routed, span: AdapterSpan) -> None:
        """Write the products, plus what the adapters of the pairs add before the gate, into `out`.

        `span`: all pairs; its adapters are `slot * experts + expert`.
        """
        count = len(span.adapters)
        added = x.new_zeros((count, self.shape[1]), dtype=torch.float32)
        inner = x.new_empty((count, *self.down.shape[2:4]), dtype=torch.float32)
        of_pairs = x if pairs.slots == 1 else x.repeat_interleave(pairs.slots, dim=0)
        tokens = AdapterTokens(span.rows, span.live, span.adapters, self.ranks.flatten())
        add_adapters(added, of_pairs, self.down.flatten(0, 1), self.up.flatten(0, 1), inner, self.ends, tokens)
        self.form.apply(out, x, pairs._replace(added=added))

    @property
    def gives_floats(self) -> bool:
        return self.form.gives_floats

    def choice(self, rows: int) -> LinearChoice:
        return self.form.choice(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the form: every step reads them."""
        return self.form.nbytes


def keys_by_head(product: ExpertForm, halves: Halves) -> Halves:
    """Return an adapter of absorbed queries, given that of a weight [heads * (keys + values), rank] of latents.

    `product`: of each head [rope_dim + rank, keys + rope_dim], its rows of keys transposed, beside rotated channels.
    """
    down, up = halves
    heads, outputs, inputs = product.shape
    rope_dim = outputs - down.shape[-1]
    rows = up.unflatten(1, (heads, -1)).transpose(0, 1)[..., : inputs - rope_dim]  # [heads, r, keys]
    return rows.unsqueeze(1), torch.nn.functional.pad(down, (rope_dim, 0)).expand(heads, -1, -1)


def values_by_head(product: ExpertForm, halves: Halves) -> Halves:
    """Return the adapter of values, `product` [heads, values, rank], of the same; see `keys_by_head`."""
    down, up = halves
    heads, outputs, _ = product.shape
    return down.expand(heads, 1, -1, -1), up.unflatten(1, (heads, -1)).transpose(0, 1)[..., -outputs:]
