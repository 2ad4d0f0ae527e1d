"""A pass through the layers: its tokens, attention and adapters, the memory that layers share, and their products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.attention import AttentionOptions, QKNormRope
from graphdecode.cache import LayerCache, LayerState, RecurrentState, stateful
from graphdecode.kernels.cache.rope_append import rope_append
from graphdecode.kernels.model.act_mul import act_mul
from graphdecode.kernels.moe.expert_linear import Routed
from graphdecode.kernels.norm.rms_norm import rms_norm
from graphdecode.kernels.recurrent.state_tokens import StateTokens
from graphdecode.linear.composite import ScaledLinear
from graphdecode.linear.experts import ExpertForm
from graphdecode.linear.lora import AdapterSpan, LoRAExperts, LoRALinear
from graphdecode.linear.weight_form import FusedProduct, WeightForm

Attend = Callable[[Tensor, Tensor, LayerCache, AttentionOptions], None]  # out, q, cache, options
AppendAndAttend = Callable[[Tensor, Tensor, LayerCache, QKNormRope, AttentionOptions], None]  # out, qkv, cache, ...
_NO_EXPERTS = -(1 << 30)  # negative with any expert's number added: no adapter


class StateStep(NamedTuple):
    """Some tokens of a pass, at most one of each row, by which recurrent states advance that are written in torch."""

    at: slice  # among the pass's tokens
    before: Tensor  # int64 [n], rows of the states before the tokens
    after: Tensor  # int64 [n], rows of the states after them
    is_new: Tensor  # bool [n], whether the token is its sequence's first, or padding

    def load(self, state: Tensor) -> Tensor:
        """Return the states before the tokens, float32 [n, ...], given those of all rows; zeros before new ones."""
        is_new = self.is_new.view(-1, *[1] * (state.dim() - 1))
        return state.index_select(0, self.before).masked_fill(is_new, 0.0)

    def store(self, state: Tensor, values: Tensor) -> None:
        """Write the states after the tokens, [n, ...], into those of all rows."""
        state.index_copy_(0, self.after, values.to(state.dtype))


class Tokens(NamedTuple):
    """The tokens of a pass."""

    ids: Tensor  # int64 [t]
    rows: Tensor  # int32 [t]
    positions: Tensor  # int32 [t]
    live: Tensor  # int32 [1]
    page_table: Tensor  # int32 [b, pages per row]
    state_rows: Tensor | None = None  # int32 [b], rows of the recurrent states
    rolling_table: Tensor | None = None  # int32 [b, pages per row], for layers with rolling pages
    adapters: Tensor | None = None  # int32 [b], adapter slots; None: no row has one
    # set when drafts are verified, each in its own row; see `StateTokens`
    scan_rows: Tensor | None = None  # int32 [t], index into `state_rows`; None: `rows`
    output_state_rows: Tensor | None = None  # int32 [t], state row for the state after each token
    in_chunks: bool | None = None  # whether these are prompt chunks: many tokens per row

    def page_table_of(self, cache: LayerCache) -> Tensor:
        """Return the page table for a layer's cache."""
        table = self.rolling_table if cache.is_rolling else self.page_table
        assert table is not None  # the engine gives rolling pages to models that have such layers
        return table

    def steps(self, states: RecurrentState, begin: int = 0) -> Iterator[StateStep]:
        """Yield the tokens in the order in which they advance a layer's states; `begin` tokens are before them.

        All tokens of a decode step are one step, the queries of a row that are verified one after another, and each
        token of a prompt is a step of its own: how many of them belong to a row is known on the device alone.
        """
        assert self.state_rows is not None  # the engine gives them to a model that has states
        count, rows = self.ids.shape[0], self.rows if self.scan_rows is None else self.scan_rows
        is_dead = torch.arange(count, dtype=torch.int32, device=rows.device) >= self.live  # may have any values
        current = self.state_rows.index_select(0, rows.clamp(0, self.state_rows.shape[0] - 1))
        before, after = (
            torch.where(is_dead, states.null_row, each).to(torch.int64)
            for each in (current, current if self.output_state_rows is None else self.output_state_rows)
        )
        is_new = (self.positions == 0) | is_dead
        queries = 1 if self.output_state_rows is None else count // self.state_rows.shape[0]
        width = count if self.in_chunks else queries
        for first in range(width):
            at = slice(first, count, width)
            before_step = after[first - 1 :: width] if first and self.output_state_rows is not None else before[at]
            yield StateStep(slice(begin + first, begin + count, width), before_step, after[at], is_new[at])

    def adapter_span(self, begin: int) -> AdapterSpan | None:
        """Return the tokens, at `begin` of the pass, with their adapters; None if no row has one."""
        if self.adapters is None:
            return None
        return AdapterSpan(slice(begin, begin + self.ids.shape[0]), self.rows, self.live, self.adapters)


def append_tokens(q: Tensor, cache: LayerCache, qkv: Tensor, tokens: Tokens, rope: QKNormRope) -> None:
    """Write rotated queries into `q`, and rotated keys and values into a layer's cache; see `rope_append`."""
    key, value, pages = cache.scales
    placement = (tokens.rows, tokens.positions, tokens.live, tokens.page_table_of(cache))
    rope_append(q, cache.keys, cache.values, qkv, *placement, rope, k_scale=key, v_scale=value, scales=pages)


class Unnormed(NamedTuple):
    """The residual stream before a norm that a product has in its launch."""

    residual: Tensor  # [t, hidden]
    weight: Tensor  # float32 [hidden]
    eps: float


Hidden = Tensor | Unnormed  # [t, hidden], the input of a block


class ForwardContext:
    """A pass through the layers, without the residual stream.

    Attributes:
        num_tokens: t, of all parts.
        hidden: memory [t, hidden] for the input of a block, in the model's dtype; each norm writes it.

    Args:
        parts: the tokens of the pass; in mixed steps, the second part's follow the first's in all tensors.
        like: [any, hidden], of the model's dtype.
        attend: attention over a layer's cache, which has the tokens' keys and values.
        append_and_attend: append and attention, fused if possible.
    """

    def __init__(
        self,
        parts: Sequence[Tokens],
        like: Tensor,
        attend: Attend,
        append_and_attend: AppendAndAttend | None = None,
    ) -> None:
        self._parts = parts
        self.attend, self.append_and_attend = attend, append_and_attend
        self.num_tokens = sum(part.ids.shape[0] for part in parts)
        self.hidden = like.new_empty((self.num_tokens, like.shape[1]))
        spans = [part.adapter_span(span.start) for span, part in self.parts()]
        self._adapters = [span for span in spans if span is not None]
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._by_head: dict[int, Routed] = {}
        self._live: Tensor | None = None
        # of pairs of tokens and experts, by their number and that of experts, and the first of each token's
        self._pairs: dict[tuple[int, int], tuple[AdapterSpan, Tensor]] = {}
        self._head_adapters: dict[int, AdapterSpan] = {}

    def narrow(self, begin: int, end: int) -> ForwardContext:
        """Return the context of a span of tokens, for blocks that read neither rows nor pages."""
        part = copy(self)
        part.num_tokens, part.hidden = end - begin, self.hidden[begin:end]
        spans = [span.narrow(begin, end) for span in self._adapters]
        part._adapters = [span for span in spans if span is not None]
        part._by_head, part._buffers, part._pairs, part._head_adapters = {}, {}, {}, {}
        return part

    def widened(self, like: Tensor) -> ForwardContext:
        """Return the context with memory of another dtype for the input of a block; `like`: [t, hidden]."""
        part = copy(self)
        part.hidden = torch.empty_like(like)
        return part

    @property
    def tokens(self) -> Tokens:
        """The tokens of a pass with one part."""
        if len(self._parts) > 1:
            raise NotImplementedError("a block reads rows and pages of its tokens: it cannot run in a mixed step")
        return self._parts[0]

    def parts(self) -> Iterator[tuple[slice, Tokens]]:
        """Yield the span of each part's tokens, and the tokens."""
        begin = 0
        for part in self._parts:
            end = begin + part.ids.shape[0]
            yield slice(begin, end), part
            begin = end

    def state_parts(self) -> Iterator[tuple[slice, StateTokens]]:
        """Yield the span of each part's tokens, and their recurrent states."""
        for span, part in self.parts():
            assert part.state_rows is not None  # the engine sets them for models with states
            rows = part.rows if part.scan_rows is None else part.scan_rows
            yield span, StateTokens(rows, part.positions, part.live, part.state_rows, part.output_state_rows)

    def state_steps(self, cache: LayerState) -> Iterator[StateStep]:
        """Yield the tokens in the order in which they advance a layer's recurrent states; see `Tokens.steps`."""
        (states,) = stateful([cache])
        for span, part in self.parts():
            yield from part.steps(states, span.start)

    def live(self) -> Tensor:
        """Return the number of live tokens, int32 [1]; all with two parts: the first part's padding is not last."""
        if len(self._parts) == 1:
            return self._parts[0].live
        if self._live is None:
            self._live = torch.full((1,), self.num_tokens, dtype=torch.int32, device=self.hidden.device)
        return self._live

    def normed(self, x: Hidden) -> Tensor:
        """Return the input of a block, for what is not a product."""
        if isinstance(x, Unnormed):
            rms_norm(self.hidden, *x)
            return self.hidden
        return x

    def fused(self, linear: WeightForm) -> FusedProduct | None:
        """Return the product that has norm, gate or residual sum in its launch; None if there is none here."""
        return None if self._adapters and isinstance(linear, LoRALinear) else linear.fused(self.num_tokens)

    def linear(self, linear: WeightForm, x: Hidden, use: str = "") -> Tensor:
        """Return the product for `x`, [t, out_features], in a `buffer`, float32 if that is free."""
        out = self.buffer(linear.out_features, torch.float32 if linear.gives_floats else None, use)
        self.multiply(linear, out, x)
        return out

    def multiply(self, linear: WeightForm, out: Tensor, x: Hidden) -> None:
        """Write the product for `x` into `out` [t, out_features], with the rows' adapters."""
        if isinstance(x, Unnormed):
            fused = self.fused(linear)
            if fused is not None:
                fused.normed(out, *x)
                return
            x = self.normed(x)
        scaled = linear if isinstance(linear, ScaledLinear) else None
        form = linear if scaled is None else scaled.form
        if not self._adapters or not isinstance(form, LoRALinear):
            linear.apply(out, x)
            return
        form.adapt(out, x, self.buffer(form.inner_size, torch.float32, "adapters"), self._adapters)
        if scaled is not None:
            scaled.transform(out)

    def gated_linear(self, linear: WeightForm, x: Hidden, activation: str) -> Tensor:
        """Return `activation(gate) * up` of the product for `x`, [t, out_features / 2]."""
        activated, fused = self.buffer(linear.out_features // 2), self.fused(linear)
        gated = linear.gated
        if gated is not None:
            gated(activated, self.normed(x), activation)
        elif fused is None:
            act_mul(activated, self.linear(linear, x), activation)
        elif isinstance(x, Unnormed):
            fused.gated(activated, *x, activation)
        else:
            fused.gated(activated, x, None, 0.0, activation)
        return activated

    def multiply_by_head(self, form: ExpertForm, out: Tensor, x: Tensor) -> None:
        """Write each head's own product for `x` [t * heads, in_features] into `out`, with the rows' adapters."""
        heads = form.shape[0]
        adapters = self.adapters_by_head(heads) if isinstance(form, LoRAExperts) else None
        if adapters is None or not isinstance(form, LoRAExperts):
            form.apply(out, x, self.by_head(heads))
        else:
            form.adapt(out, x, self.by_head(heads), adapters)

    def adapted_pairs(self, ids: Tensor, count: int) -> AdapterSpan | None:
        """Return the pairs of tokens and experts, for `LoRAExperts`; None: no row has an adapter.

        Args:
            ids: int32 [t, top_k], the experts of each token.
            count: of experts.
        """
        if not self._adapters:
            return None
        number, device = ids.numel(), ids.device
        if (number, count) not in self._pairs:
            firsts = torch.full((len(ids), 1), _NO_EXPERTS, dtype=torch.int32, device=device)
            for span in self._adapters:
                slots = span.adapters.index_select(0, span.rows.clamp(0, len(span.adapters) - 1))
                has_one = (slots >= 0) & (torch.arange(len(slots), device=device) < span.live)
                firsts[span.tokens, 0] = torch.where(has_one, slots * count, _NO_EXPERTS)
            rows = torch.arange(number, dtype=torch.int32, device=device)
            live = torch.full((1,), number, dtype=torch.int32, device=device)
            self._pairs[number, count] = AdapterSpan(slice(0, number), rows, live, rows), firsts
        span, firsts = self._pairs[number, count]
        return span._replace(adapters=(firsts + ids).flatten())

    def adapters_by_head(self, heads: int) -> AdapterSpan | None:
        """Return all pairs of tokens and heads, for `LoRAExperts`; None: no row has an adapter."""
        if self._adapters and heads not in self._head_adapters:
            ids = torch.arange(heads, dtype=torch.int32, device=self.hidden.device).expand(len(self.hidden), -1)
            pairs = self.adapted_pairs(ids, heads)
            assert pairs is not None
            self._head_adapters[heads] = pairs
        return self._head_adapters.get(heads)

    def buffer(self, columns: int, dtype: torch.dtype | None = None, use: str = "") -> Tensor:
        """Return memory [t, columns] that layers share; buffers in use together differ in `use`."""
        key = (use, columns, dtype or self.hidden.dtype)
        if key not in self._buffers:
            self._buffers[key] = self.empty(*key[1:])
        return self._buffers[key]

    def output_buffer(self, *, in_floats: bool) -> Tensor:
        """Return memory [t, hidden] for a block's output, in float32 or the model's dtype."""
        return self.buffer(self.hidden.shape[1], torch.float32 if in_floats else None, "output")

    def buffer_of_heads(self, columns: int, head_dim: int) -> Tensor:
        """Return the memory of `buffer(columns)` as [t, heads, head_dim]."""
        key = (f"heads of {head_dim}", columns, self.hidden.dtype)
        if key not in self._buffers:
            self._buffers[key] = self.buffer(columns).view(self.hidden.shape[0], -1, head_dim)
        return self._buffers[key]

    def by_head(self, heads: int) -> Routed:
        """Return all pairs of tokens and heads, by head, for a product that each head has of its own."""
        if heads not in self._by_head:
            pairs = torch.arange(self.hidden.shape[0] * heads, dtype=torch.int32, device=self.hidden.device)
            offsets = torch.arange(heads + 1, dtype=torch.int32, device=pairs.device) * self.hidden.shape[0]
            self._by_head[heads] = Routed(pairs.view(-1, heads).T.flatten(), offsets, 1)
        return self._by_head[heads]

    def empty(self, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return new memory [t, columns]; None: the model's dtype."""
        return self.hidden.new_empty((self.hidden.shape[0], columns), dtype=dtype)
