"""Building blocks of layers: norms, attention, MLPs and experts, and the residual stream through them.

A block is a frozen dataclass of weight forms, tensors, inner blocks and plain values; a model's tensors are found by
walking its blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from graphdecode.attention import AttentionOptions, QKNormRope
from graphdecode.cache import LayerCache, LayerState, RecurrentState, stateful
from graphdecode.kernels.cache.rope_append import rope_append
from graphdecode.kernels.model.act_mul import act_mul
from graphdecode.kernels.model.cap_logits import cap_logits
from graphdecode.kernels.model.embedding import embedding, embedding_norm
from graphdecode.kernels.moe.expert_linear import Routed
from graphdecode.kernels.moe.moe_route import moe_combine, moe_route
from graphdecode.kernels.norm.rms_norm import add_rms_norm, rms_norm
from graphdecode.kernels.recurrent.state_tokens import StateTokens
from graphdecode.linear.adapted import Adapted, AdaptedEmbedding, AdaptedExperts, AdapterSpan
from graphdecode.linear.experts import ExpertForm, Gate
from graphdecode.linear.weight_form import FusedProduct, RowTable, StoredForm, WeightForm, tensors_in
from graphdecode.linear.wrapped import Scaled

Attend = Callable[[Tensor, Tensor, LayerCache, AttentionOptions], None]  # out, q, cache, options
AppendAndAttend = Callable[[Tensor, Tensor, LayerCache, QKNormRope, AttentionOptions], None]  # out, qkv, cache, ...
_OPEN_GATE = 100.0  # sigmoid(100) is 1 in float32
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
    kept_states: Tensor | None = None  # int32 [t], state row for the state after each token
    in_chunks: bool | None = None  # whether these are prompt chunks: many tokens per row

    def steps(self, states: RecurrentState, begin: int = 0) -> Iterator[StateStep]:
        """Yield the tokens in the order in which they advance a layer's states; `begin` tokens are before them.

        All tokens of a decode step are one step, the queries of a row that are verified one after another, and each
        token of a prompt is a step of its own: how many of them belong to a row is known on the device alone.
        """
        assert self.state_rows is not None  # the engine gives them to a model that has states
        count, rows = self.ids.shape[0], self.rows if self.scan_rows is None else self.scan_rows
        is_dead = torch.arange(count, dtype=torch.int32, device=rows.device) >= self.live  # may have any values
        own = self.state_rows.index_select(0, rows.clamp(0, self.state_rows.shape[0] - 1))
        before, after = (
            torch.where(is_dead, states.null_row, each).to(torch.int64)
            for each in (own, own if self.kept_states is None else self.kept_states)
        )
        is_new = (self.positions == 0) | is_dead
        queries = 1 if self.kept_states is None else count // self.state_rows.shape[0]
        width = count if self.in_chunks else queries
        for first in range(width):
            at = slice(first, count, width)
            known = after[first - 1 :: width] if first and self.kept_states is not None else before[at]
            yield StateStep(slice(begin + first, begin + count, width), known, after[at], is_new[at])

    def adapter_span(self, begin: int) -> AdapterSpan | None:
        """Return the tokens, at `begin` of the pass, with their adapters; None if no row has one."""
        if self.adapters is None:
            return None
        return AdapterSpan(slice(begin, begin + self.ids.shape[0]), self.rows, self.live, self.adapters)


def page_table_of(tokens: Any, cache: LayerCache) -> Tensor:
    """Return the page table for a layer's cache, from `Tokens`, `Chunks` or a step's batch."""
    table: Tensor = tokens.rolling_table if cache.is_rolling else tokens.page_table
    return table


def append_tokens(q: Tensor, cache: LayerCache, qkv: Tensor, tokens: Tokens, rope: QKNormRope) -> None:
    """Write rotated queries into `q`, and rotated keys and values into a layer's cache; see `rope_append`."""
    key, value, pages = cache.scales
    where = (tokens.rows, tokens.positions, tokens.live, page_table_of(tokens, cache))
    rope_append(q, cache.keys, cache.values, qkv, *where, rope, k_scale=key, v_scale=value, scales=pages)


class Block:
    """Part of a model; see the module's docstring."""

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of each field that is not a block, here and in inner blocks."""
        for name, value in vars(self).items():
            if isinstance(value, Block):
                yield from value.leaves()
            else:
                yield name, value

    @property
    def linears(self) -> dict[str, WeightForm]:
        """The products, by name."""
        return {name: value for name, value in self.leaves() if isinstance(value, WeightForm)}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a step only reads."""
        return [tensor for _, value in self.leaves() for tensor in tensors_in(value)]

    def read_bytes(self, rows: int | None = None) -> int:
        """Return the bytes of products and norms that a step of `rows` rows reads; None: with all experts."""
        children = [value for value in vars(self).values() if isinstance(value, (Block, StoredForm))]
        return sum(each.read_bytes(rows) if isinstance(each, Block) else each.nbytes for each in children)


def each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors in order, without duplicates."""
    return list({id(tensor): tensor for tensor in tensors}.values())


@dataclass(frozen=True)
class Norm(Block):
    """RMSNorm (Zhang and Sennrich, 2019)."""

    weight: Tensor  # float32 [channels]
    eps: float

    def read_bytes(self, rows: int | None = None) -> int:
        """Return the bytes of the gain."""
        return self.weight.nbytes


class ResidualStream:
    """A pass through the layers: the residual stream, and the last block's output, not yet added to it.

    Blocks read `hidden`, in the model's dtype. Their output is float32 if products can write that for free, and so is
    the residual (`Stem.residual`). Evaluation is lazy: a norm is computed when `hidden` is read, unless a product fuses
    it, and a block's last product when `output` is read.

    Args:
        parts: the tokens of the pass; in mixed steps, the second part's follow the first's in all tensors.
        stem: the embedding; with one part, fused with the first norm.
        attend: attention over a layer's cache, which has the tokens' keys and values.
        append_and_attend: append and attention, fused if possible.
    """

    def __init__(
        self,
        parts: Sequence[Tokens],
        stem: Stem,
        attend: Attend,
        append_and_attend: AppendAndAttend | None = None,
    ) -> None:
        self._parts = parts
        self.attend = attend
        self.append_and_attend = append_and_attend
        # not None: the residual is not computed yet; stems that override the embedding compute it at once
        is_plain = stem.table is None and type(stem).run is Stem.run and type(stem).embed is Stem.embed
        is_plain &= stem.adapted is None or parts[0].adapters is None
        self._stem: Stem | None = stem if is_plain and len(parts) == 1 else None
        if self._stem is not None:
            self._residual = stem.residual(parts[0])
        else:
            embedded = [stem.run(part) for part in parts]
            self._residual = embedded[0] if len(parts) == 1 else torch.cat(embedded)
        self._all_live: Tensor | None = None
        spans = [part.adapter_span(span.start) for span, part in self.parts()]
        self._adapters = [span for span in spans if span is not None]
        # of pairs of tokens and experts, by their number and that of experts, and the first of each token's
        self._pairs: dict[tuple[int, int], tuple[AdapterSpan, Tensor]] = {}
        self._head_adapters: dict[int, AdapterSpan] = {}
        self._hidden = torch.empty_like(self._residual, dtype=stem.embedding.dtype)
        self._norm: Norm | None = None  # norm of the residual, not computed yet
        self._product: tuple[WeightForm, Tensor] | None = None  # output of a block, not computed yet
        self._output: Tensor | None = None  # output of a block, computed
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}  # intermediates that layers share
        self._by_head: dict[int, Routed] = {}
        self._is_whole = True  # the residual includes all blocks' outputs
        self._post_norm: Norm | None = None
        self._scale = 1.0

    @property
    def tokens(self) -> Tokens:
        """The tokens of a pass with one part."""
        if len(self._parts) > 1:
            raise NotImplementedError("a block reads rows and pages of its tokens: it cannot run in a mixed step")
        return self._parts[0]

    def state_parts(self) -> Iterator[tuple[slice, StateTokens]]:
        """Yield the span of each part's tokens, and their recurrent states."""
        for span, part in self.parts():
            assert part.state_rows is not None  # the engine sets them for models with states
            rows = part.rows if part.scan_rows is None else part.scan_rows
            yield span, StateTokens(rows, part.positions, part.live, part.state_rows, part.kept_states)

    def state_steps(self, cache: LayerState) -> Iterator[StateStep]:
        """Yield the tokens in the order in which they advance a layer's recurrent states; see `Tokens.steps`."""
        (states,) = stateful([cache])
        for span, part in self.parts():
            yield from part.steps(states, span.start)

    def parts(self) -> Iterator[tuple[slice, Tokens]]:
        """Yield the span of each part's tokens, and the tokens."""
        begin = 0
        for part in self._parts:
            end = begin + part.ids.shape[0]
            yield slice(begin, end), part
            begin = end

    @property
    def live(self) -> Tensor:
        """Number of live tokens, int32 [1]; all with two parts, since the first part's padding is not last."""
        if len(self._parts) == 1:
            return self._parts[0].live
        if self._all_live is None:
            self._all_live = torch.full((1,), self._residual.shape[0], dtype=torch.int32, device=self._residual.device)
        return self._all_live

    @property
    def residual(self) -> Tensor:
        """[t, hidden], the sum of the embedding and all outputs."""
        if self._stem is not None:
            stem, self._stem = self._stem, None
            stem.embed(self._residual, self.tokens)
        return self._residual

    @property
    def hidden(self) -> Tensor:
        """[t, hidden], the input of a block, in the model's dtype; valid until the block sets its output."""
        if self._norm is not None:
            norm, self._norm = self._norm, None
            stem, self._stem = self._stem, None
            if stem is None:
                rms_norm(self._hidden, self.residual, norm.weight, norm.eps)
            else:
                rows = (self._residual, self.tokens.ids, stem.embedding, self.tokens.live)
                embedding_norm(self._hidden, *rows, norm.weight, stem.scale, norm.eps)
        return self._hidden

    @property
    def output(self) -> Tensor:
        """[t, hidden], the output of the last block."""
        if self._product is not None:
            linear, x = self._product
            self.multiply(linear, self.output_buffer(in_floats=linear.gives_floats), x)
        assert self._output is not None
        return self._output

    def output_buffer(self, *, in_floats: bool) -> Tensor:
        """Return memory [t, hidden] for a block's output, in float32 or the model's dtype."""
        self._norm = self._product = None
        is_hidden = not in_floats or self._hidden.dtype == torch.float32
        self._output = self._hidden if is_hidden else self.buffer(self._hidden.shape[1], torch.float32)
        return self._output

    def norm(self, norm: Norm | None) -> None:
        """Add the last block's output to the residual; `hidden` becomes the norm of the sum, or with None the sum."""
        self._add_product()
        if not self._is_whole:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            after, after_eps = (None, 0.0) if self._post_norm is None else (self._post_norm.weight, self._post_norm.eps)
            add_rms_norm(self._hidden, self.residual, self.output, weight, eps, after, after_eps, self._scale)
        elif norm is None:
            self._hidden.copy_(self.residual)
        else:
            self._norm = norm
        self._is_whole, self._post_norm, self._scale = False, None, 1.0

    def transform_output(self, norm: Norm | None = None, scale: float = 1.0) -> None:
        """Norm and scale the last block's output when it is added to the residual, fused."""
        self._post_norm, self._scale = norm, scale

    def project(self, linear: WeightForm, out: Tensor) -> None:
        """Write the product for `hidden` into `out` [t, out_features]."""
        fused, norm = self._fused(linear), self._norm
        if fused is None or norm is None:
            self.multiply(linear, out, self.hidden)
        else:
            fused.normed(out, self.residual, norm.weight, norm.eps)

    def project_gated(self, linear: WeightForm, activation: str) -> Tensor:
        """Return `activation(gate) * up` of the product for `hidden`, [t, out_features / 2]."""
        fused, norm, activated = self._fused(linear), self._norm, self.buffer(linear.out_features // 2)
        gated = linear.gated
        if gated is not None:
            gated(activated, self.hidden, activation)
        elif fused is None:
            gate_up = self.buffer_for(linear)
            self.project(linear, gate_up)
            act_mul(activated, gate_up, activation)
        elif norm is None:
            fused.gated(activated, self.hidden, None, 0.0, activation)
        else:
            fused.gated(activated, self.residual, norm.weight, norm.eps, activation)
        return activated

    def set_output(self, linear: WeightForm, x: Tensor) -> None:
        """Make the product for `x` [t, in_features] the block's output."""
        self._norm, self._product = None, (linear, x)

    def narrow(self, begin: int, end: int) -> ResidualStream:
        """Return the stream of a span of tokens, in shared memory, for blocks that read neither rows nor pages."""
        self._add_product()
        part = copy(self)
        part._residual, part._hidden = self.residual[begin:end], self.hidden[begin:end]
        part._output = None if self._is_whole else self.output[begin:end]
        part._stem = part._product = None
        spans = [span.narrow(begin, end) for span in self._adapters]
        part._by_head, part._buffers, part._pairs, part._head_adapters = {}, {}, {}, {}
        part._adapters = [span for span in spans if span is not None]
        return part

    def _add_product(self) -> None:
        """Compute the last block's output and the sum in one launch, if its product supports that."""
        if self._product is None or self._post_norm is not None:
            return
        linear, x = self._product
        fused = self._fused(linear)
        if fused is not None:
            fused.added(self.residual, x, self._scale)
            self._product, self._is_whole = None, True

    def multiply(self, linear: WeightForm, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` into `out`, with the rows' adapters."""
        scaled = linear if isinstance(linear, Scaled) else None
        form = linear if scaled is None else scaled.form
        if not self._adapters or not isinstance(form, Adapted):
            linear.apply(out, x)
            return
        form.adapt(out, x, self.buffer(form.inner_size, torch.float32, "adapters"), self._adapters)
        if scaled is not None:
            scaled.transform(out)

    def multiply_by_head(self, form: ExpertForm, out: Tensor, x: Tensor) -> None:
        """Write each head's own product for `x` [t * heads, in_features] into `out`, with the rows' adapters."""
        heads = form.shape[0]
        adapters = self.adapters_by_head(heads) if isinstance(form, AdaptedExperts) else None
        if adapters is None or not isinstance(form, AdaptedExperts):
            form.apply(out, x, self.by_head(heads))
        else:
            form.adapt(out, x, self.by_head(heads), adapters)

    def adapted_pairs(self, ids: Tensor, count: int) -> AdapterSpan | None:
        """Return the pairs of tokens and experts, for `AdaptedExperts`; None: no row has an adapter.

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
        """Return all pairs of tokens and heads, for `AdaptedExperts`; None: no row has an adapter."""
        if self._adapters and heads not in self._head_adapters:
            ids = torch.arange(heads, dtype=torch.int32, device=self._hidden.device).expand(len(self._hidden), -1)
            pairs = self.adapted_pairs(ids, heads)
            assert pairs is not None
            self._head_adapters[heads] = pairs
        return self._head_adapters.get(heads)

    def _fused(self, linear: WeightForm) -> FusedProduct | None:
        if self._adapters and isinstance(linear, Adapted):
            return None
        return linear.fused(self._residual.shape[0])

    def buffer_for(self, linear: WeightForm, use: str = "") -> Tensor:
        """Return a `buffer` for a product, float32 if that is free."""
        return self.buffer(linear.out_features, torch.float32 if linear.gives_floats else None, use)

    def buffer(self, columns: int, dtype: torch.dtype | None = None, use: str = "") -> Tensor:
        """Return memory [t, columns] that layers share; buffers in use together differ in `use`."""
        key = (use, columns, dtype or self._hidden.dtype)
        if key not in self._buffers:
            self._buffers[key] = self.empty(*key[1:])
        return self._buffers[key]

    def buffer_of_heads(self, columns: int, head_dim: int) -> Tensor:
        """Return the memory of `buffer(columns)` as [t, heads, head_dim]."""
        key = (f"heads of {head_dim}", columns, self._hidden.dtype)
        if key not in self._buffers:
            self._buffers[key] = self.buffer(columns).view(self._hidden.shape[0], -1, head_dim)
        return self._buffers[key]

    def by_head(self, heads: int) -> Routed:
        """Return all pairs of tokens and heads, by head, for a product that each head has of its own."""
        if heads not in self._by_head:
            pairs = torch.arange(self._hidden.shape[0] * heads, dtype=torch.int32, device=self._hidden.device)
            offsets = torch.arange(heads + 1, dtype=torch.int32, device=pairs.device) * self._hidden.shape[0]
            self._by_head[heads] = Routed(pairs.view(-1, heads).T.flatten(), offsets, 1)
        return self._by_head[heads]

    def empty(self, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return new memory [t, columns]; None: the model's dtype."""
        return self._hidden.new_empty((self._hidden.shape[0], columns), dtype=dtype)


class Mixer(Block):
    """Mixes tokens: attention, or an operator over a recurrent state."""

    @abstractmethod
    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        """Read `hidden` and the layer's cache, and set the output."""


@dataclass(frozen=True)
class Attention(Mixer):
    """Rotary grouped-query attention over the layer's cache."""

    has_keys: ClassVar[bool] = True  # False: the product gives only queries, and an earlier layer has the keys
    qkv: WeightForm  # [(heads + 2 kv_heads) * head_dim, hidden]
    q_norm: Norm | None  # per query head
    k_norm: Norm | None  # per key head
    o: WeightForm  # [hidden, heads * head_dim]
    head_dim: int  # channels of a head
    cos_sin: Tensor  # float32 [positions, 2, pairs], for a head's first channels
    options: AttentionOptions  # scale, window, soft cap, sinks

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        """Append the tokens' keys and values to the cache, and attend."""
        assert isinstance(cache, LayerCache)
        qkv = self.project(stream)
        attended = stream.buffer_of_heads(self.o.in_features, self.head_dim)
        rope = self.rotation(qkv)
        if stream.append_and_attend is not None and self.has_keys:
            stream.append_and_attend(attended, qkv, cache, rope, self.options)
        else:
            own, q = cache, torch.empty_like(attended)
            if not self.has_keys:
                own = replace(cache, keys=cache.keys[:, :, :0], values=cache.values[:, :, :0])
            for span, part in stream.parts():
                append_tokens(q[span], own, qkv[span], part, rope)
            stream.attend(attended, q, cache, self.options)
        self.finish(stream, stream.buffer(self.o.in_features))

    def project(self, stream: ResidualStream) -> Tensor:
        """Return queries, keys and values of the tokens, [t, (heads + 2 kv_heads) * head_dim], contiguous."""
        qkv = stream.buffer_for(self.qkv)
        stream.project(self.qkv, qkv)
        return qkv

    def finish(self, stream: ResidualStream, attended: Tensor) -> None:
        """Make the output projection of `attended` [t, heads * head_dim] the output."""
        stream.set_output(self.o, attended)

    def rotation(self, qkv: Tensor) -> QKNormRope:
        """Return norm and rotation of queries and keys; a subclass may norm them here, in place."""
        return QKNormRope(
            self.cos_sin,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            0.0 if self.q_norm is None else self.q_norm.eps,
        )


class FeedForward(Block):
    """The feed-forward part of a layer."""

    @abstractmethod
    def run(self, stream: ResidualStream) -> None:
        """Read `hidden` and set the output."""


@dataclass(frozen=True)
class GatedMlp(FeedForward):
    """`down(activation(gate(x)) * up(x))` (Shazeer, 2020)."""

    gate_up: WeightForm  # [2 * intermediate, hidden]
    down: WeightForm  # [hidden, intermediate]
    activation: str

    def run(self, stream: ResidualStream) -> None:
        """Read `hidden` and set the output."""
        stream.set_output(self.down, stream.project_gated(self.gate_up, self.activation))


class Layer(Block):
    """A decoder layer: a sequence of blocks."""

    @abstractmethod
    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        """Run the blocks; the output of the last one is not added yet."""


@dataclass(frozen=True)
class Stem(Block):
    """The embedding, scaled."""

    embedding: Tensor  # [vocab, hidden]; [0, hidden] if it is quantized
    scale: float = 1.0
    adapted: AdaptedEmbedding | None = None  # adapter slots
    table: RowTable | None = None  # the quantized embedding, shared with a tied output layer

    def run(self, tokens: Tokens) -> Tensor:
        """Return the embedded tokens [t, hidden]; a stem with more operators overrides it."""
        residual, span = self.residual(tokens), tokens.adapter_span(0)
        self.embed(residual, tokens)
        if self.adapted is not None and span is not None:
            self.adapted.adapt(residual, tokens.ids, span, self.scale)
        return residual

    def embed(self, residual: Tensor, tokens: Tokens) -> None:
        """Write the embedded tokens into `residual`."""
        if self.table is None:
            embedding(residual, tokens.ids, self.embedding, tokens.live, self.scale)
        else:
            self.table.gather(residual, tokens.ids, tokens.live, self.scale)

    def residual(self, tokens: Tokens) -> Tensor:
        """Return memory [t, hidden]: float32 on a CPU; the model's dtype on a GPU, whose normed products read it."""
        dtype = self.embedding.dtype if self.embedding.is_cuda else torch.float32
        return self.embedding.new_empty((tokens.ids.shape[0], self.embedding.shape[1]), dtype=dtype)


@dataclass(frozen=True)
class Head(Block):
    """Final norm, output layer, and an optional soft cap."""

    final_norm: Norm
    lm_head: WeightForm  # [vocab, hidden]
    soft_cap: float = 0.0

    def run(self, stream: ResidualStream) -> Tensor:
        """Return the logits, float32 [t, vocab]."""
        stream.norm(self.final_norm)
        logits = stream.empty(self.lm_head.out_features, torch.float32)
        stream.project(self.lm_head, logits)
        if self.soft_cap > 0.0:
            cap_logits(logits, self.soft_cap)
        return logits


class Routing(NamedTuple):
    """The experts of each token; a pair is a token and one of its experts. See `moe_route`."""

    ids: Tensor  # int32 [t, top_k]
    weights: Tensor  # float32 [t, top_k]
    order: Tensor  # int32 [t * top_k], the pairs by expert
    offsets: Tensor  # int32 [experts + 1]


@dataclass(frozen=True)
class Experts(Block):
    """The gated MLPs of a layer's experts; each expert's weights are read once for all its tokens."""

    gate_up: ExpertForm  # [experts, 2 * width, hidden], gate first
    down: ExpertForm  # [experts, hidden, width]
    count: int  # number of experts
    top_k: int  # experts per token
    width: int  # intermediate size of an expert
    gate: Gate  # activation of `gate_up`'s halves

    def run(self, stream: ResidualStream, hidden: Tensor, routing: Routing) -> Tensor:
        """Return the outputs of all pairs, [tokens * top_k, hidden], for the inputs `hidden`."""
        adapters = stream.adapted_pairs(routing.ids, self.count) if isinstance(self.down, AdaptedExperts) else None
        pairs, dtype = hidden.shape[0] * self.top_k, torch.float32 if self.down.gives_floats else None
        inner, out = hidden.new_empty((pairs, self.width)), hidden.new_empty((pairs, hidden.shape[1]), dtype=dtype)
        for form, to, x, routed in (
            (self.gate_up, inner, hidden, Routed(routing.order, routing.offsets, self.top_k, *self.gate)),
            (self.down, out, inner, Routed(routing.order, routing.offsets, 1)),
        ):
            if adapters is None or not isinstance(form, AdaptedExperts):
                form.apply(to, x, routed)
            else:
                form.adapt(to, x, routed, adapters)
        return out

    def read_bytes(self, rows: int | None = None) -> int:
        """Return the bytes of the experts that `rows` tokens can be routed to."""
        nbytes = self.gate_up.nbytes + self.down.nbytes
        return nbytes if rows is None else nbytes * min(rows * self.top_k, self.count) // self.count


@dataclass(frozen=True)
class SparseMlp(FeedForward):
    """Router, experts, and an optional shared expert."""

    router: WeightForm  # [experts, hidden], plus one row if the shared expert is gated
    experts: Experts
    shared: GatedMlp | None
    renormalize: bool  # whether the weights of a token's experts sum to 1

    def run(self, stream: ResidualStream) -> None:
        """Read `hidden` and set the output."""
        rows, count = stream.hidden.shape[0], self.experts.count
        logits = stream.buffer_for(self.router, "router")
        stream.project(self.router, logits)
        routing = self.route(logits[:, :count], stream.live)
        outputs, ids, weights = self.outputs(stream, logits, routing), routing.ids, routing.weights
        if self.shared is None:
            moe_combine(stream.output_buffer(in_floats=self.experts.down.gives_floats), outputs, ids, weights)
        else:
            self.shared.run(stream)
            is_gated = logits.shape[1] > count
            gate = logits[:, count:] if is_gated else logits.new_full((rows, 1), _OPEN_GATE)
            moe_combine(stream.output, outputs, ids, weights, gate)

    def outputs(self, stream: ResidualStream, logits: Tensor, routing: Routing) -> Tensor:
        """Return the experts' outputs of all pairs, not yet weighted."""
        return self.experts.run(stream, stream.hidden, routing)

    def route(self, logits: Tensor, live: Tensor) -> Routing:
        """Return each token's experts, given the logits [t, experts]."""
        rows, count, top_k = logits.shape[0], self.experts.count, self.experts.top_k
        ids, order = (logits.new_empty(size, dtype=torch.int32) for size in ((rows, top_k), (rows * top_k,)))
        offsets = logits.new_empty((count + 1,), dtype=torch.int32)
        weights = logits.new_empty((rows, top_k), dtype=torch.float32)
        moe_route(ids, weights, order, offsets, logits, live, self.renormalize)
        return Routing(ids, weights, order, offsets)


@dataclass(frozen=True)
class DecoderLayer(Layer):
    """A mixer, then an MLP, with norms before or after each: `x + scale * after(block(before(x)))`."""

    before_attention: Norm | None
    mixer: Mixer
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: FeedForward
    after_mlp: Norm | None
    residual_scale: float = 1.0

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        """Run the layer."""
        stream.norm(self.before_attention)
        self.mixer.run(stream, cache)
        stream.transform_output(self.after_attention, self.residual_scale)
        stream.norm(self.before_mlp)
        self.mlp.run(stream)
        stream.transform_output(self.after_mlp, self.residual_scale)
