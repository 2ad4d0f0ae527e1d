"""The decoder, written as a step over fixed memory: decode and prefill share one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.attention import PagedDecodeAttention, TokenByTokenAttention, extend_attention
from graphdecode.buffers import Batch
from graphdecode.kernels.cache.rope_append import rope_append
from graphdecode.kernels.model.act_mul import act_mul
from graphdecode.kernels.model.embedding import embedding
from graphdecode.kernels.norm.rms_norm import add_rms_norm, rms_norm
from graphdecode.linear.linear_weight import LinearWeight
from graphdecode.models.config import ModelConfig

LayerCache = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer; QKV and gate-up are fused."""

    input_norm: Tensor  # [hidden]
    qkv: LinearWeight  # [(heads + 2 kv_heads) * head_dim, hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: LinearWeight  # [hidden, heads * head_dim]
    post_norm: Tensor  # [hidden]
    gate_up: LinearWeight  # [2 * intermediate, hidden]
    down: LinearWeight  # [hidden, intermediate]

    @property
    def linears(self) -> tuple[LinearWeight, ...]:
        """All products of the layer."""
        return (self.qkv, self.o, self.gate_up, self.down)

    @property
    def norms(self) -> tuple[Tensor, ...]:
        """All norms that the layer has."""
        norms = (self.input_norm, self.post_norm, self.q_norm, self.k_norm)
        return tuple(norm for norm in norms if norm is not None)


@dataclass(frozen=True)
class _Tokens:
    """Where the tokens of a pass belong."""

    rows: Tensor  # int32 [t]
    positions: Tensor  # int32 [t]
    live: Tensor  # int32 [1]
    page_table: Tensor  # int32 [b, pages of a row]


class StepOperators(NamedTuple):
    """What a layer is made of besides products and attention; each has the signature of the fused operator."""

    rms_norm: Callable[..., None] = rms_norm
    add_rms_norm: Callable[..., None] = add_rms_norm
    rope_append: Callable[..., None] = rope_append
    act_mul: Callable[..., None] = act_mul


class Decoder:
    """A decoder-only transformer: RMSNorm, rotary grouped-query attention, gated MLP.

    Args:
        config: shapes and options.
        embedding_weight: [vocab, hidden].
        layers: the weights of each layer.
        final_norm: [hidden].
        lm_head: [vocab, hidden].
        cos_sin: float32 [positions, 2, head_dim / 2].
        operators: of the layers; others than the fused ones are for measuring what fusing is worth.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding_weight: Tensor,
        layers: list[LayerWeights],
        final_norm: Tensor,
        lm_head: LinearWeight,
        cos_sin: Tensor,
        operators: StepOperators | None = None,
    ) -> None:
        self.config = config
        self._operators = operators or StepOperators()
        self.dtype = embedding_weight.dtype
        self.device = embedding_weight.device
        self._embedding = embedding_weight
        self._layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._cos_sin = cos_sin

    def varied(
        self,
        linear: Callable[[LinearWeight], LinearWeight] | None = None,
        operators: StepOperators | None = None,
    ) -> Decoder:
        """Return a decoder over the same weights that takes other paths, to be measured beside this one.

        Args:
            linear: makes the product of each layer's weight; None keeps them.
            operators: of the layers; None keeps them.
        """
        vary = linear or (lambda weight: weight)
        layers = [
            replace(layer, qkv=vary(layer.qkv), o=vary(layer.o), gate_up=vary(layer.gate_up), down=vary(layer.down))
            for layer in self._layers
        ]
        return Decoder(
            self.config,
            self._embedding,
            layers,
            self._final_norm,
            vary(self._lm_head),
            self._cos_sin,
            operators or self._operators,
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with a cache of its own."""
        return len(self._layers)

    @property
    def constants(self) -> list[Tensor]:
        """Every tensor that a step only reads."""
        tensors = [self._embedding, self._final_norm, self._cos_sin, *self._lm_head.tensors]
        for layer in self._layers:
            tensors += layer.norms
            tensors += [tensor for linear in layer.linears for tensor in linear.tensors]
        return tensors

    @property
    def workspace(self) -> list[Tensor]:
        """Tensors that products of few rows leave as they found them, and write in between."""
        counters = (linear.counters for linear in self._linears().values())
        return list({id(tensor): tensor for tensor in counters if tensor is not None}.values())

    def linear_choices(self, rows: int) -> dict[str, dict[str, Any]]:
        """Return the path of each product in a step of so many rows, by name and shape, with what was measured."""
        return {
            f"{name} {linear.out_features}x{linear.in_features}": linear.choice(rows).as_report()
            for name, linear in self._linears().items()
        }

    def _linears(self) -> dict[str, LinearWeight]:
        """The products of the first layer, whose shapes all layers have, and the output layer, by name."""
        first = self._layers[0]
        return {
            "qkv": first.qkv,
            "o": first.o,
            "gate_up": first.gate_up,
            "down": first.down,
            "lm_head": self._lm_head,
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads, whatever the batch: all but the embedding's unused rows."""
        norms = self._final_norm.nbytes + sum(norm.nbytes for layer in self._layers for norm in layer.norms)
        linears = sum(linear.nbytes for layer in self._layers for linear in layer.linears)
        return self._lm_head.nbytes + linears + norms

    def decode(self, batch: Batch, caches: list[LayerCache], attention: PagedDecodeAttention) -> Tensor:
        """Run one decode step: feed each row's token, append its keys and values, and return the logits.

        Args:
            batch: slots tokens int64 [b], pre_step_seqlens int32 [b], rows int32 [b] (0, 1, ...),
                page_table int32 [b, pages], live_rows int32 [1].
            caches: keys and values of each layer.
            attention: its workspaces are planned here, once for all layers.

        Returns:
            Logits [b, vocab], of the model's dtype; those of padding rows are meaningless.
        """
        attention.plan(batch.pre_step_seqlens, batch.live_rows)
        tokens = _Tokens(batch.rows, batch.pre_step_seqlens, batch.live_rows, batch.page_table)

        def attend(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, window: int) -> None:
            attention.run(out, q, keys, values, batch.page_table, window_left=window)

        hidden, residual = self._run_layers(batch.tokens, tokens, caches, attend)
        self._operators.add_rms_norm(hidden, residual, hidden, self._final_norm, self.config.rms_norm_eps)
        logits = self._empty(hidden.shape[0], self.config.vocab_size)
        self._lm_head.apply(logits, hidden)
        return logits

    def prefill(
        self,
        token_ids: Tensor,
        rows: Tensor,
        positions: Tensor,
        live: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        page_table: Tensor,
        caches: list[LayerCache],
        attention: TokenByTokenAttention | None = None,
    ) -> None:
        """Append the keys and values of many tokens; no logits, for a prompt's last token is fed to a decode step.

        Args:
            token_ids: int64 [t], the rows' tokens one after another.
            rows: int32 [t], the row of each token.
            positions: int32 [t].
            live: int32 [1], t.
            cu_seqlens_q: int32 [b + 1], where each row's tokens begin.
            cu_seqlens_kv: int32 [b + 1], cumulative lengths, these tokens included.
            page_table: int32 [b, pages].
            caches: keys and values of each layer.
            attention: gives each token the bits of a decode step; None: the faster way, many queries at once.
        """
        tokens = _Tokens(rows, positions, live, page_table)

        def attend(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, window: int) -> None:
            if attention is not None:
                attention.run(out, q, keys, values, rows, positions, live, page_table, window)
                return
            extend_attention(out, q, keys, values, cu_seqlens_q, cu_seqlens_kv, page_table, window_left=window)

        with torch.no_grad():
            self._run_layers(token_ids, tokens, caches, attend)

    def _run_layers(
        self, token_ids: Tensor, tokens: _Tokens, caches: list[LayerCache], attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return the last layer's output and the residual that it is still to be added to."""
        residual = self._empty(token_ids.shape[0], self.config.hidden_size)
        embedding(residual, token_ids, self._embedding, tokens.live)
        hidden = torch.empty_like(residual)
        eps = self.config.rms_norm_eps
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            if index == 0:
                self._operators.rms_norm(hidden, residual, layer.input_norm, eps)
            else:
                self._operators.add_rms_norm(hidden, residual, hidden, layer.input_norm, eps)
            self._run_layer(layer, hidden, residual, tokens, cache, attend, self.config.windows[index])
        return hidden, residual

    def _run_layer(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        residual: Tensor,
        tokens: _Tokens,
        cache: LayerCache,
        attend: Attend,
        window: int,
    ) -> None:
        """Turn the normed input in `hidden` into the layer's output, and bring the residual up to the MLP's input."""
        config = self.config
        count = hidden.shape[0]
        keys, values = cache
        qkv = self._empty(count, layer.qkv.out_features)
        layer.qkv.apply(qkv, hidden)
        q = torch.empty((count, config.num_attention_heads, config.head_dim), dtype=self.dtype, device=self.device)
        self._operators.rope_append(
            q,
            keys,
            values,
            qkv,
            tokens.rows,
            tokens.positions,
            tokens.live,
            tokens.page_table,
            self._cos_sin,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
        )
        attended = torch.empty_like(q)
        attend(attended, q, keys, values, window)
        layer.o.apply(hidden, attended.view(count, -1))
        self._operators.add_rms_norm(hidden, residual, hidden, layer.post_norm, config.rms_norm_eps)
        gate_up = self._empty(count, layer.gate_up.out_features)
        layer.gate_up.apply(gate_up, hidden)
        activated = self._empty(count, config.intermediate_size)
        self._operators.act_mul(activated, gate_up, config.activation)
        layer.down.apply(hidden, activated)

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty((rows, columns), dtype=self.dtype, device=self.device)
