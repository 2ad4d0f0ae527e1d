"""Building blocks of layers: norms, attention, MLPs and experts, and the residual stream that runs through them.

A block is a frozen dataclass of weight forms, tensors, smaller blocks and plain values, so that what a model holds is
found by walking through it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from graphdecode.attention import AttentionOptions, QKNormRope
from graphdecode.cache import LayerCache, LayerState
from graphdecode.kernels.cache.rope_append import rope_append
from graphdecode.kernels.model.act_mul import act_mul
from graphdecode.kernels.model.cap_logits import cap_logits
from graphdecode.kernels.model.embedding import embedding, embedding_norm
from graphdecode.kernels.moe.moe_route import moe_combine, moe_route
from graphdecode.kernels.norm.rms_norm import add_rms_norm, rms_norm
from graphdecode.kernels.recurrent.state_tokens import StateTokens
from graphdecode.linear.adapted import Adapted, AdapterSpan
from graphdecode.linear.experts import ExpertForm, Gate
from graphdecode.linear.weight_form import FusedProduct, WeightForm, tensors_in

Attend = Callable[[Tensor, Tensor, LayerCache, AttentionOptions], None]  # out, q, cache, options
AppendAndAttend = Callable[[Tensor, Tensor, LayerCache, QKNormRope, AttentionOptions], None]  # out, qkv, cache, ...
Vary = Callable[[WeightForm], WeightForm]
_WHOLE_SHARE = 100.0  # whose sigmoid is 1 in float32


class StepOperators(NamedTuple):
    """The operators of a layer besides products and attention; each has the signature of the fused operator.

    With `fuses_products` a product may take the norm before it, and what is done with its result, into its own launch;
    with `fuses_append` attention appends the keys and values that it attends to.
    """

    rms_norm: Callable[..., None] = rms_norm
    add_rms_norm: Callable[..., None] = add_rms_norm
    rope_append: Callable[..., None] = rope_append
    act_mul: Callable[..., None] = act_mul
    fuses_products: bool = True
    fuses_append: bool = True
    embedding_norm: Callable[..., None] | None = embedding_norm  # None: the two are launched one by one

    def append(self, q: Tensor, cache: LayerCache, qkv: Tensor, tokens: Tokens, turn: QKNormRope) -> None:
        """Write rotated queries into `q`, and rotated keys and values into a layer's cache; see `rope_append`."""
        key, value, pages = cache.scales
        where = (tokens.rows, tokens.positions, tokens.live, page_table_of(tokens, cache))
        self.rope_append(q, cache.keys, cache.values, qkv, *where, turn, k_scale=key, v_scale=value, scales=pages)


class Tokens(NamedTuple):
    """The tokens of a pass, and where they belong."""

    ids: Tensor  # int64 [t]
    rows: Tensor  # int32 [t]
    positions: Tensor  # int32 [t]
    live: Tensor  # int32 [1]
    page_table: Tensor  # int32 [b, pages of a row]
    state_rows: Tensor | None = None  # int32 [b], the rows of their recurrent states
    rolling_table: Tensor | None = None  # int32 [b, pages of a row], of layers whose pages roll
    adapters: Tensor | None = None  # int32 [b], the slots of their adapters; None: no row has one


def page_table_of(tokens: Any, cache: LayerCache) -> Tensor:
    """Return the page table of a layer's cache, of the tokens of a pass, of a step's batch, or of chunks."""
    table: Tensor = tokens.rolling_table if cache.is_rolling else tokens.page_table
    return table


class Block:
    """Part of a model; see the file's docstring."""

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of each field, those of smaller blocks in their place."""
        for name, value in vars(self).items():
            if isinstance(value, Block):
                yield from value.parts()
            else:
                yield name, value

    @property
    def linears(self) -> dict[str, WeightForm]:
        """The products, by name."""
        return {name: value for name, value in self.parts() if isinstance(value, WeightForm)}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a step only reads."""
        forms = (WeightForm, ExpertForm)
        held = [value.tensors if isinstance(value, forms) else tensors_in(value) for _, value in self.parts()]
        return [tensor for tensors in held for tensor in tensors]

    def read_bytes(self, rows: int | None = None) -> int:
        """Return the bytes of products and norms that a step of so many rows reads; None: every expert has a token."""
        held = [value for value in vars(self).values() if isinstance(value, (Block, WeightForm))]
        return sum(each.read_bytes(rows) if isinstance(each, Block) else each.nbytes for each in held)

    def varied(self, vary: Vary) -> Self:
        """Return the block with another product of each weight."""
        changed: dict[str, Any] = {
            name: value.varied(vary) if isinstance(value, Block) else vary(value)
            for name, value in vars(self).items()
            if isinstance(value, (Block, WeightForm))
        }
        return replace(self, **changed)  # type: ignore[type-var]


def each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors in their order, without those that are there already."""
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
    """A pass through the layers: the residual stream, and what the last block gave, which is still to be added to it.

    Blocks take `hidden`, of the model's dtype. What they give is float32 where products are written so at no cost, and
    so is the residual where that is free (`Stem.residual`). A norm is computed when something other than a product that
    takes it into its own launch looks at `hidden`, and the product that ends a block when something looks at `given`.

    Args:
        parts: the tokens of the pass; those of a second part stand behind those of the first in all that it holds.
        stem: embeds them, together with the first norm where that is computed by itself and there is one part.
        attend: attention over a layer's cache; None: of two parts, which append where they attend.
        operators: of the layers.
        append_and_attend: the same with the append before it, in one launch, where that can be had.
    """

    def __init__(
        self,
        parts: Sequence[Tokens],
        stem: Stem,
        attend: Attend | None,
        operators: StepOperators,
        append_and_attend: AppendAndAttend | None = None,
    ) -> None:
        self._parts = parts
        self.attend = attend
        self.append_and_attend = append_and_attend if operators.fuses_append else None
        self.operators = operators
        # while the residual is not made; a stem that has its own way of embedding takes it
        is_plain = type(stem).run is Stem.run and type(stem).embed is Stem.embed
        self._stem: Stem | None = stem if is_plain and len(parts) == 1 else None
        if self._stem is not None:
            self._residual = stem.residual(parts[0])
        else:
            embedded = [stem.run(part) for part in parts]
            self._residual = embedded[0] if len(parts) == 1 else torch.cat(embedded)
        self._all_live: Tensor | None = None
        self._adapters = self._adapter_spans()
        self._hidden = torch.empty_like(self._residual, dtype=stem.embedding.dtype)
        self._norm: Norm | None = None  # of the residual, asked for and not computed
        self._product: tuple[WeightForm, Tensor] | None = None  # what a block gave, not computed
        self._given: Tensor | None = None  # and what is computed
        self._rooms: dict[tuple[str, int, torch.dtype], Tensor] = {}  # what layers write and read within themselves
        self._is_whole = True  # nothing is to be added to the residual
        self._post_norm: Norm | None = None
        self._scale = 1.0

    @property
    def tokens(self) -> Tokens:
        """The tokens of a pass of one part; two have rows and a page table of their own each."""
        if len(self._parts) > 1:
            raise NotImplementedError("a block looks for its tokens' rows itself: it cannot be run over two parts")
        return self._parts[0]

    def state_parts(self) -> Iterator[tuple[slice, StateTokens]]:
        """Yield the tokens of each part of the pass, in order, and where their recurrent states are."""
        begin = 0
        for part in self._parts:
            assert part.state_rows is not None  # the engine gives them to a model that has states
            end = begin + part.ids.shape[0]
            yield slice(begin, end), StateTokens(part.rows, part.positions, part.live, part.state_rows)
            begin = end

    def _adapter_spans(self) -> list[AdapterSpan]:
        spans, begin = [], 0
        for part in self._parts:
            end = begin + part.ids.shape[0]
            if part.adapters is not None:
                spans.append(AdapterSpan(slice(begin, end), part.rows, part.live, part.adapters))
            begin = end
        return spans

    @property
    def live(self) -> Tensor:
        """Number of live tokens, int32 [1]; in a pass of two parts all, for padding of the first is not last."""
        if len(self._parts) == 1:
            return self._parts[0].live
        if self._all_live is None:
            self._all_live = torch.full((1,), self._residual.shape[0], dtype=torch.int32, device=self._residual.device)
        return self._all_live

    @property
    def residual(self) -> Tensor:
        """[t, hidden], the embedded tokens and what was added to them."""
        if self._stem is not None:
            stem, self._stem = self._stem, None
            stem.embed(self._residual, self.tokens)
        return self._residual

    @property
    def hidden(self) -> Tensor:
        """[t, hidden], what a block takes, of the model's dtype; good until it gives something."""
        if self._norm is not None:
            norm, self._norm = self._norm, None
            embedded, stem = self.operators.embedding_norm, self._stem
            if stem is None or embedded is None:
                self.operators.rms_norm(self._hidden, self.residual, norm.weight, norm.eps)
            else:
                self._stem = None
                rows = (self._residual, self.tokens.ids, stem.embedding, self.tokens.live)
                embedded(self._hidden, *rows, norm.weight, stem.scale, norm.eps)
        return self._hidden

    @property
    def given(self) -> Tensor:
        """[t, hidden], what the last block gave."""
        if self._product is not None:
            linear, x = self._product
            self._multiply(linear, self.open(in_floats=linear.gives_floats), x)
        assert self._given is not None
        return self._given

    def open(self, *, in_floats: bool) -> Tensor:
        """Return memory for what a block gives, [t, hidden], in float32 or the model's dtype; the block writes it."""
        self._norm = self._product = None
        is_hidden = not in_floats or self._hidden.dtype == torch.float32
        self._given = self._hidden if is_hidden else self.room(self._hidden.shape[1], torch.float32)
        return self._given

    def norm(self, norm: Norm | None) -> None:
        """Add what the last block gave to the residual, and make `hidden` the norm of the sum; None: the sum."""
        self._add_product()
        if not self._is_whole:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            after = self._post_norm
            post = (None, 0.0) if after is None else (after.weight, after.eps)
            self.operators.add_rms_norm(self._hidden, self.residual, self.given, weight, eps, *post, self._scale)
        elif norm is None:
            self._hidden.copy_(self.residual)
        else:
            self._norm = norm
        self._is_whole, self._post_norm, self._scale = False, None, 1.0

    def change(self, norm: Norm | None = None, scale: float = 1.0) -> None:
        """Norm and scale the output of the last block when it is added to the residual, in the same launch."""
        self._post_norm, self._scale = norm, scale

    def feed(self, linear: WeightForm, out: Tensor) -> None:
        """Write the product for `hidden` into `out` [t, out_features]."""
        fused, norm = self._fused(linear), self._norm
        if fused is None or norm is None:
            self._multiply(linear, out, self.hidden)
        else:
            fused.normed(out, self.residual, norm.weight, norm.eps)

    def feed_gated(self, linear: WeightForm, activation: str) -> Tensor:
        """Return `activation(gate) * up` of the product for `hidden`, [t, out_features / 2]."""
        fused, norm = self._fused(linear), self._norm
        if fused is None:
            gate_up = self.room_of(linear)
            self.feed(linear, gate_up)
            activated = self.room(linear.out_features // 2)
            self.operators.act_mul(activated, gate_up, activation)
            return activated
        activated = self.room(linear.out_features // 2)
        if norm is None:
            fused.gated(activated, self.hidden, None, 0.0, activation)
        else:
            fused.gated(activated, self.residual, norm.weight, norm.eps, activation)
        return activated

    def give(self, linear: WeightForm, x: Tensor) -> None:
        """Give the product for `x` [t, in_features]."""
        self._norm, self._product = None, (linear, x)

    def narrowed(self, begin: int, end: int) -> ResidualStream:
        """Return the stream of some tokens of the pass, whose memory it shares, for blocks that look at each alone."""
        self._add_product()
        part = copy(self)
        part._residual, part._hidden = self.residual[begin:end], self.hidden[begin:end]
        part._given = None if self._is_whole else self.given[begin:end]
        part._stem = part._product = None
        part._rooms, part._adapters = {}, []
        return part

    def _add_product(self) -> None:
        """Add what the last block gave to the residual where its product does that itself."""
        if self._product is None or self._post_norm is not None:
            return
        linear, x = self._product
        fused = self._fused(linear)
        if fused is not None:
            fused.added(self.residual, x, self._scale)
            self._product, self._is_whole = None, True

    def _multiply(self, linear: WeightForm, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` into `out`, as the adapters of the tokens' rows change it."""
        linear.apply(out, x)
        if self._adapters and isinstance(linear, Adapted):
            linear.adapt(out, x, self.room(linear.inner_size, torch.float32, "adapters"), self._adapters)

    def _fused(self, linear: WeightForm) -> FusedProduct | None:
        if self._adapters and isinstance(linear, Adapted):
            return None
        return linear.fused(self._residual.shape[0]) if self.operators.fuses_products else None

    def room_of(self, linear: WeightForm, use: str = "") -> Tensor:
        """Return memory for a product of each token, as `room` does: float32 where that costs nothing."""
        return self.room(linear.out_features, torch.float32 if linear.gives_floats else None, use)

    def room(self, columns: int, dtype: torch.dtype | None = None, use: str = "") -> Tensor:
        """Return memory for each token as `empty` does, the same each time for one use: layers share it.

        What is still read while a block asks for more names a use of its own.
        """
        key = (use, columns, dtype or self._hidden.dtype)
        if key not in self._rooms:
            self._rooms[key] = self.empty(*key[1:])
        return self._rooms[key]

    def empty(self, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for each token, [t, columns]; None: of the model's dtype."""
        return self._hidden.new_empty((self._hidden.shape[0], columns), dtype=dtype)


class Mixer(Block):
    """The part of a layer in which tokens see those before them: attention, or an operator over a state."""

    @abstractmethod
    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        """Take `hidden` and what the layer keeps, and give what is to be added to the residual."""


@dataclass(frozen=True)
class Attention(Mixer):
    """Rotary grouped-query attention over the layer's cache; queries and keys may be normed per head."""

    qkv: WeightForm  # [(heads + 2 kv_heads) * head_dim, hidden]
    q_norm: Norm | None  # of each query head, or None
    k_norm: Norm | None  # of each key head, or None
    o: WeightForm  # [hidden, heads * head_dim]
    head_dim: int  # channels of a head
    # float32 [positions, 2, pairs] of a head's first channels, which are rotated by position; others are not
    cos_sin: Tensor
    options: AttentionOptions  # what becomes of the logits, and which keys a query sees

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        """Append the tokens' keys and values to the cache, and give what they attend to."""
        assert isinstance(cache, LayerCache)
        qkv = self.project(stream)
        attended = stream.room(self.o.in_features).view(qkv.shape[0], -1, self.head_dim)
        turn = self.rotation(qkv)
        if stream.append_and_attend is not None:
            stream.append_and_attend(attended, qkv, cache, turn, self.options)
        else:
            q = torch.empty_like(attended)
            stream.operators.append(q, cache, qkv, stream.tokens, turn)
            assert stream.attend is not None  # of a pass of one part
            stream.attend(attended, q, cache, self.options)
        self.finish(stream, attended.view(qkv.shape[0], -1))

    def project(self, stream: ResidualStream) -> Tensor:
        """Return queries, keys and values of the tokens, [t, (heads + 2 kv_heads) * head_dim], contiguous."""
        qkv = stream.room_of(self.qkv)
        stream.feed(self.qkv, qkv)
        return qkv

    def finish(self, stream: ResidualStream, attended: Tensor) -> None:
        """Give the output product of what the tokens attended to, [t, heads * head_dim]."""
        stream.give(self.o, attended)

    def rotation(self, qkv: Tensor) -> QKNormRope:
        """Return how queries and keys are normed and turned; an attention that norms them itself does it here."""
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
        """Take `hidden`, and give what is to be added to the residual."""


@dataclass(frozen=True)
class GatedMlp(FeedForward):
    """`down(activation(gate(x)) * up(x))` (Shazeer, 2020)."""

    gate_up: WeightForm  # [2 * intermediate, hidden]
    down: WeightForm  # [hidden, intermediate]
    activation: str

    def run(self, stream: ResidualStream) -> None:
        """Take `hidden`, and give what is to be added to the residual."""
        stream.give(self.down, stream.feed_gated(self.gate_up, self.activation))


class Layer(Block):
    """A decoder layer: some blocks, and the order in which they and the residual stream meet."""

    @abstractmethod
    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        """Take a stream from the layer before, and give what is to be added to the residual."""


@dataclass(frozen=True)
class Stem(Block):
    """From tokens to the residual stream: the embedding, scaled."""

    embedding: Tensor  # [vocab, hidden]
    scale: float = 1.0

    def run(self, tokens: Tokens) -> Tensor:
        """Return the embedded tokens [t, hidden]; a stem that does more than that overrides it."""
        residual = self.residual(tokens)
        self.embed(residual, tokens)
        return residual

    def embed(self, residual: Tensor, tokens: Tokens) -> None:
        """Write the embedded tokens into `residual`."""
        embedding(residual, tokens.ids, self.embedding, tokens.live, self.scale)

    def residual(self, tokens: Tokens) -> Tensor:
        """Return memory for the embedded tokens, [t, hidden].

        It is float32 on a CPU. On a GPU it has the model's dtype: each program of a normed product reads it again.
        """
        dtype = self.embedding.dtype if self.embedding.is_cuda else torch.float32
        return self.embedding.new_empty((tokens.ids.shape[0], self.embedding.shape[1]), dtype=dtype)


@dataclass(frozen=True)
class Head(Block):
    """From the residual stream to logits: a norm, the output layer, and perhaps a soft cap."""

    final_norm: Norm
    lm_head: WeightForm  # [vocab, hidden]
    soft_cap: float = 0.0

    def run(self, stream: ResidualStream) -> Tensor:
        """Return the logits, float32 [t, vocab]."""
        stream.norm(self.final_norm)
        logits = stream.empty(self.lm_head.out_features, torch.float32)
        stream.feed(self.lm_head, logits)
        if self.soft_cap > 0.0:
            cap_logits(logits, self.soft_cap)
        return logits


@dataclass(frozen=True)
class Experts(Block):
    """The gated MLPs of a layer's experts: `down(gate(x))`, each expert's read once for all tokens that go to it."""

    gate_up: ExpertForm  # of all experts, [hidden] to [2 * width], the gate first
    down: ExpertForm  # of all experts, [width] to [hidden]
    count: int  # how many there are
    top_k: int  # how many of them a token takes
    width: int  # channels inside of one
    gate: Gate  # what is made of the halves of `gate_up`'s products

    def run(self, hidden: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        """Return what the experts give for the pairs that `moe_route` listed, [tokens * top_k, hidden]."""
        pairs, dtype = hidden.shape[0] * self.top_k, torch.float32 if self.down.gives_floats else None
        inner, parts = hidden.new_empty((pairs, self.width)), hidden.new_empty((pairs, hidden.shape[1]), dtype=dtype)
        self.gate_up.apply(inner, hidden, order, offsets, slots=self.top_k, gate=self.gate)
        self.down.apply(parts, inner, order, offsets, slots=1)
        return parts

    def read_bytes(self, rows: int | None = None) -> int:
        """Return the bytes of as many experts as so many tokens can be routed to."""
        held = sum(tensor.nbytes for tensor in self.tensors)
        return held if rows is None else held * min(rows * self.top_k, self.count) // self.count


@dataclass(frozen=True)
class SparseMlp(FeedForward):
    """Experts behind a router, and a shared one that every token takes, where there is one."""

    router: WeightForm  # [experts, hidden], and one row more where the shared expert's share has a gate
    experts: Experts  # of which a token takes those with its largest logits
    shared: GatedMlp | None  # or None
    renormalize: bool  # whether the weights of a token's experts add up to 1

    def run(self, stream: ResidualStream) -> None:
        """Take `hidden`, and give what is to be added to the residual; all of it stays on the device."""
        rows, count, top_k = stream.hidden.shape[0], self.experts.count, self.experts.top_k
        logits = stream.room_of(self.router, "router")
        self.router.apply(logits, stream.hidden)
        ids, order = (logits.new_empty(size, dtype=torch.int32) for size in ((rows, top_k), (rows * top_k,)))
        offsets = logits.new_empty((count + 1,), dtype=torch.int32)
        weights = logits.new_empty((rows, top_k), dtype=torch.float32)
        moe_route(ids, weights, order, offsets, logits[:, :count], stream.live, self.renormalize)
        parts = self.experts.run(stream.hidden, order, offsets)
        if self.shared is None:
            moe_combine(stream.open(in_floats=self.experts.down.gives_floats), parts, ids, weights)
        else:
            self.shared.run(stream)
            is_gated = logits.shape[1] > count
            gate = logits[:, count:] if is_gated else logits.new_full((rows, 1), _WHOLE_SHARE)
            moe_combine(stream.given, parts, ids, weights, gate)


@dataclass(frozen=True)
class DecoderLayer(Layer):
    """A mixer, then an MLP, with norms before or behind each: `x + scale * after(block(before(x)))`."""

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
        stream.change(self.after_attention, self.residual_scale)
        stream.norm(self.before_mlp)
        self.mlp.run(stream)
        stream.change(self.after_mlp, self.residual_scale)
