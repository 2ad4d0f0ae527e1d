"""Building blocks of layers: norms, attention, MLPs and experts.

A block is a frozen dataclass of weight forms, tensors, inner blocks and plain values; a model's tensors are found by
walking its blocks. Layers pass `x, residual` on: the residual stream, which changes in place, and what the next norm
adds to it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from graphdecode.attention import AttentionOptions, QKNormRope
from graphdecode.cache import LayerCache, LayerState
from graphdecode.distributed import Collectives
from graphdecode.kernels.model.cap_logits import cap_logits
from graphdecode.kernels.model.embedding import embedding, embedding_norm
from graphdecode.kernels.moe.expert_linear import Routed
from graphdecode.kernels.moe.moe_route import moe_combine, moe_route
from graphdecode.kernels.norm.rms_norm import add_rms_norm, rms_norm
from graphdecode.linear.experts import ExpertForm, Gate
from graphdecode.linear.lora import LoRAEmbedding, LoRAExperts
from graphdecode.linear.weight_form import RowTable, StoredForm, WeightForm, tensors_in
from graphdecode.models.forward_context import ForwardContext, Hidden, Tokens, Unnormed, append_tokens

_OPEN_GATE = 100.0  # sigmoid(100) is 1 in float32


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


def unique_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors in order, without duplicates."""
    return list({id(tensor): tensor for tensor in tensors}.values())


@dataclass(frozen=True)
class Identity(Block):
    """No norm: a block reads the residual stream itself."""

    def __call__(
        self, x: Addend, residual: Tensor, context: ForwardContext, *, into: WeightForm | None = None
    ) -> tuple[Hidden, Tensor]:
        """Add `x` to the residual, and return a block's input and the residual."""
        if isinstance(x, Output):
            x.add_and_norm(context.hidden, residual, None, 0.0)
        else:
            if x is not None:
                x.write(residual)
            context.hidden.copy_(residual)
        return context.hidden, residual


@dataclass(frozen=True)
class Norm(Identity):
    """RMSNorm (Zhang and Sennrich, 2019) of the residual stream."""

    weight: Tensor  # float32 [channels]
    eps: float

    def __call__(
        self, x: Addend, residual: Tensor, context: ForwardContext, *, into: WeightForm | None = None
    ) -> tuple[Hidden, Tensor]:
        """Add `x` to the residual, and return the norm of the sum and the residual.

        `into`: the first product that reads the norm, which has it in its launch if it can.
        """
        if isinstance(x, Output):
            x.add_and_norm(context.hidden, residual, self.weight, self.eps)
        elif into is not None and context.fused(into) is not None:
            if x is not None:
                x.write(residual)
            return Unnormed(residual, self.weight, self.eps), residual
        elif x is not None:
            x.write_norm(context.hidden, residual, self.weight, self.eps)
        else:
            rms_norm(context.hidden, residual, self.weight, self.eps)
        return context.hidden, residual

    def read_bytes(self, rows: int | None = None) -> int:
        """Return the bytes of the gain."""
        return self.weight.nbytes


class Output(NamedTuple):
    """A block's output, not yet added: `residual += scale * norm(output)`."""

    tensor: Tensor  # [t, hidden], in float32 if products can write that for free
    output_norm: Norm | None = None
    scale: float = 1.0

    def add_and_norm(self, out: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> None:
        """Add it to the residual, and write the norm of the sum, or without a weight the sum, into `out`."""
        after, after_eps = (None, 0.0) if self.output_norm is None else (self.output_norm.weight, self.output_norm.eps)
        add_rms_norm(out, residual, self.tensor, weight, eps, after, after_eps, self.scale)


class Embedded(NamedTuple):
    """The embedding of a pass's tokens, with which the residual begins; the first norm looks it up."""

    stem: Stem
    tokens: Tokens

    def write(self, residual: Tensor) -> None:
        """Write it into the residual."""
        self.stem.embed(residual, self.tokens)

    def write_norm(self, out: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """Write it into the residual, and its norm into `out`."""
        table, scale = self.stem.embedding, self.stem.scale
        embedding_norm(out, residual, self.tokens.ids, table, self.tokens.live, weight, scale, eps)


Addend = Output | Embedded | None  # what the next norm adds to the residual; None: nothing, the product has added it
BlockOutput = tuple[Addend, Tensor]  # a block's output, and the residual [t, hidden]


@dataclass(frozen=True)
class ResidualBlock(Block):
    """A block whose output is added to the residual stream: `residual += output_scale * output_norm(output)`."""

    output_norm: Norm | None = field(default=None, kw_only=True)
    output_scale: float = field(default=1.0, kw_only=True)

    @property
    def input_linear(self) -> WeightForm | None:
        """The product that first reads the input, if only products do."""
        return None

    def output(self, tensor: Tensor) -> Output:
        """Return the block's output, [t, hidden], for the next norm."""
        return Output(tensor, self.output_norm, self.output_scale)

    def output_linear(self, linear: WeightForm, x: Tensor, residual: Tensor, context: ForwardContext) -> BlockOutput:
        """Return the product for `x` as the block's output, and the residual: the sum is in its launch if it can be."""
        fused = None if self.output_norm is not None else context.fused(linear)
        if fused is not None:
            fused.added(residual, x, self.output_scale)
            return None, residual
        return self.output(context.linear(linear, x, "output")), residual


class Mixer(ResidualBlock):
    """Mixes tokens: attention, or an operator over a recurrent state."""

    @abstractmethod
    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext, cache: LayerState) -> BlockOutput:
        """Return the output for `x`, given the layer's cache, and the residual."""

    def append(self, x: Hidden, residual: Tensor, context: ForwardContext, cache: LayerState) -> None:
        """Write what later tokens read into the layer's cache; nothing reads the output, nor the residual."""
        self(x, residual, context, cache)


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

    @property
    def input_linear(self) -> WeightForm:
        """The QKV product."""
        return self.qkv

    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext, cache: LayerState) -> BlockOutput:
        """Append the tokens' keys and values to the cache, and attend."""
        attended = self.attend(self.project(x, context), context, cache)
        return self.output_linear(self.o, attended, residual, context)

    def append(self, x: Hidden, residual: Tensor, context: ForwardContext, cache: LayerState) -> None:
        """Append the tokens' keys and values to the cache."""
        if self.has_keys:
            assert isinstance(cache, LayerCache)
            qkv = self.project(x, context)
            self._rotate_and_append(qkv, self.rotation(qkv), context, cache)

    def project(self, x: Hidden, context: ForwardContext) -> Tensor:
        """Return queries, keys and values of the tokens, [t, (heads + 2 kv_heads) * head_dim], contiguous."""
        return context.linear(self.qkv, x)

    def rotation(self, qkv: Tensor) -> QKNormRope:
        """Return norm and rotation of queries and keys; a subclass may norm them here, in place."""
        return QKNormRope(
            self.cos_sin,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            0.0 if self.q_norm is None else self.q_norm.eps,
        )

    def attend(self, qkv: Tensor, context: ForwardContext, cache: LayerState) -> Tensor:
        """Append keys and values, and return the attention of the queries, [t, heads * head_dim]."""
        assert isinstance(cache, LayerCache)
        attended = context.buffer_of_heads(self.o.in_features, self.head_dim)
        rope = self.rotation(qkv)
        if context.append_and_attend is not None and self.has_keys:
            context.append_and_attend(attended, qkv, cache, rope, self.options)
        else:
            q = self._rotate_and_append(qkv, rope, context, cache)
            context.attend(attended, q, cache, self.options)
        return context.buffer(self.o.in_features)

    def _rotate_and_append(self, qkv: Tensor, rope: QKNormRope, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Append keys and values, and return the rotated queries, [t, heads, head_dim]."""
        if not self.has_keys:
            cache = replace(cache, keys=cache.keys[:, :, :0], values=cache.values[:, :, :0])
        q = torch.empty_like(context.buffer_of_heads(self.o.in_features, self.head_dim))
        for span, part in context.parts():
            append_tokens(q[span], cache, qkv[span], part, rope)
        return q


class FeedForward(ResidualBlock):
    """The feed-forward part of a layer."""

    @abstractmethod
    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext) -> BlockOutput:
        """Return the output for `x`, and the residual."""


@dataclass(frozen=True)
class GatedMlp(FeedForward):
    """`down(activation(gate(x)) * up(x))` (Shazeer, 2020)."""

    gate_up: WeightForm  # [2 * intermediate, hidden]
    down: WeightForm  # [hidden, intermediate]
    activation: str

    @property
    def input_linear(self) -> WeightForm:
        """The product of both halves."""
        return self.gate_up

    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext) -> BlockOutput:
        """Return the output for `x`, and the residual."""
        activated = context.gated_linear(self.gate_up, x, self.activation)
        return self.output_linear(self.down, activated, residual, context)

    def product(self, x: Hidden, context: ForwardContext) -> Tensor:
        """Return the output for `x`, [t, hidden], which others are added to before the residual."""
        activated = context.gated_linear(self.gate_up, x, self.activation)
        return context.linear(self.down, activated, "output")


class Layer(Block):
    """A decoder layer: a sequence of blocks."""

    @abstractmethod
    def __call__(self, x: Addend, residual: Tensor, context: ForwardContext, cache: LayerState) -> BlockOutput:
        """Run the blocks; return the output of the last one, which is not added yet, and the residual."""

    def append(self, x: Addend, residual: Tensor, context: ForwardContext, cache: LayerState) -> None:
        """Write what later tokens read into the cache: the last layer of prompts whose logits nobody reads."""
        self(x, residual, context, cache)


@dataclass(frozen=True)
class DecoderLayer(Layer):
    """A mixer, then an MLP, each after a norm."""

    input_norm: Identity
    mixer: Mixer
    mlp_norm: Identity
    mlp: FeedForward

    def __call__(self, x: Addend, residual: Tensor, context: ForwardContext, cache: LayerState) -> BlockOutput:
        """Run the layer."""
        hidden, residual = self.input_norm(x, residual, context, into=self.mixer.input_linear)
        x, residual = self.mixer(hidden, residual, context, cache)
        hidden, residual = self.mlp_norm(x, residual, context, into=self.mlp.input_linear)
        return self.mlp(hidden, residual, context)

    def append(self, x: Addend, residual: Tensor, context: ForwardContext, cache: LayerState) -> None:
        """Run the layer up to what the mixer writes into the cache."""
        hidden, residual = self.input_norm(x, residual, context, into=self.mixer.input_linear)
        self.mixer.append(hidden, residual, context, cache)


@dataclass(frozen=True)
class Stem(Block):
    """The embedding, scaled."""

    embedding: Tensor  # [vocab, hidden]; [0, hidden] if it is quantized
    scale: float = 1.0
    adapted: LoRAEmbedding | None = None  # adapter slots
    table: RowTable | None = None  # the quantized embedding, shared with a tied output layer

    def __call__(self, context: ForwardContext) -> BlockOutput:
        """Return `x, residual` before the first layer; a plain embedding is left to its norm."""
        parts = [part for _, part in context.parts()]
        can_defer = self.table is None and type(self).run is Stem.run and type(self).embed is Stem.embed
        if can_defer and len(parts) == 1 and (self.adapted is None or parts[0].adapters is None):
            return Embedded(self, parts[0]), self.residual(parts[0])
        embedded = [self.run(part) for part in parts]
        return None, embedded[0] if len(parts) == 1 else torch.cat(embedded)

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

    def __call__(self, x: Addend, residual: Tensor, context: ForwardContext) -> Tensor:
        """Return the logits, float32 [t, vocab]."""
        hidden, _ = self.final_norm(x, residual, context, into=self.lm_head)
        logits = context.empty(self.lm_head.out_features, torch.float32)
        context.multiply(self.lm_head, logits, hidden)
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

    def __call__(self, hidden: Tensor, routing: Routing, context: ForwardContext) -> Tensor:
        """Return the outputs of all pairs, [tokens * top_k, hidden], for the inputs `hidden`."""
        adapters = context.adapted_pairs(routing.ids, self.count) if isinstance(self.down, LoRAExperts) else None
        pairs, dtype = hidden.shape[0] * self.top_k, torch.float32 if self.down.gives_floats else None
        inner, out = hidden.new_empty((pairs, self.width)), hidden.new_empty((pairs, hidden.shape[1]), dtype=dtype)
        for form, to, x, routed in (
            (self.gate_up, inner, hidden, Routed(routing.order, routing.offsets, self.top_k, *self.gate)),
            (self.down, out, inner, Routed(routing.order, routing.offsets, 1)),
        ):
            if adapters is None or not isinstance(form, LoRAExperts):
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
    collectives: Collectives | None = field(default=None, kw_only=True)  # if ranks share the experts
    param_name: str = field(default="", kw_only=True)  # of the sum over ranks

    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext) -> BlockOutput:
        """Return the output for `x`, and the residual."""
        hidden, count = context.normed(x), self.experts.count
        logits = context.linear(self.router, hidden, "router")
        routing = self.route(logits[:, :count], context.live())
        outputs, ids, weights = self.outputs(hidden, logits, routing, context), routing.ids, routing.weights
        if self.shared is None:
            out = context.output_buffer(in_floats=self.experts.down.gives_floats)
            moe_combine(out, outputs, ids, weights)
        else:
            out = self.shared.product(hidden, context)
            is_gated = logits.shape[1] > count
            gate = logits[:, count:] if is_gated else logits.new_full((len(hidden), 1), _OPEN_GATE)
            moe_combine(out, outputs, ids, weights, gate)
        if self.collectives is not None:
            self.collectives.all_reduce(out, self.param_name)
        return self.output(out), residual

    def outputs(self, hidden: Tensor, logits: Tensor, routing: Routing, context: ForwardContext) -> Tensor:
        """Return the experts' outputs of all pairs, not yet weighted."""
        return self.experts(hidden, routing, context)

    def route(self, logits: Tensor, live: Tensor) -> Routing:
        """Return each token's experts, given the logits [t, experts]."""
        rows, count, top_k = logits.shape[0], self.experts.count, self.experts.top_k
        ids, order = (logits.new_empty(size, dtype=torch.int32) for size in ((rows, top_k), (rows * top_k,)))
        offsets = logits.new_empty((count + 1,), dtype=torch.int32)
        weights = logits.new_empty((rows, top_k), dtype=torch.float32)
        moe_route(ids, weights, order, offsets, logits, live, self.renormalize)
        return Routing(ids, weights, order, offsets)
