"""The decoder; decode and prefill share its layers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.attention import (
    AttentionOptions,
    PagedDecodeAttention,
    QKNormRope,
    TokenByTokenAttention,
    extend_over,
)
from graphdecode.cache import LayerCache, LayerState
from graphdecode.linear.experts import ExpertForm
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.adapters import AdapterSlots
from graphdecode.models.blocks import Addend, Block, Head, Layer, Output, Stem, unique_tensors
from graphdecode.models.config import ModelConfig
from graphdecode.models.forward_context import AppendAndAttend, Attend, ForwardContext, Tokens, append_tokens
from graphdecode.models.model import Chunks, DecodeInputs, Model

_UNIT_VECTORS = 128  # logits in memory at a time


def tokens_of(batch: DecodeInputs | Chunks) -> Tokens:
    """Return the tokens of a decode step or of prompt chunks."""
    if isinstance(batch, Chunks):
        return Tokens(*batch[:4], *batch[6:], in_chunks=True)
    fields = (batch.rows, batch.pre_step_seqlens, batch.live_rows, batch.page_table)
    states = (batch.scan_rows, batch.output_state_rows)
    return Tokens(batch.tokens, *fields, batch.state_rows, batch.rolling_table, batch.adapters, *states)


def attend_step(tokens: Tokens, attention: PagedDecodeAttention) -> Attend:
    """Return the attention of decode steps."""

    def attend(out: Tensor, q: Tensor, cache: LayerCache, options: AttentionOptions) -> None:
        attention.run(out, q, cache.keys, cache.values, tokens.page_table_of(cache), options, cache.scales)

    return attend


def append_and_attend_step(tokens: Tokens, attention: PagedDecodeAttention) -> AppendAndAttend:
    """Return the append and attention of decode steps, in one launch."""

    def append(out: Tensor, qkv: Tensor, cache: LayerCache, rope: QKNormRope, options: AttentionOptions) -> None:
        pages = (cache.keys, cache.values, tokens.page_table_of(cache))
        attention.append_and_run(out, qkv, *pages, rope, options, cache.scales)

    return append


def attend_chunks(chunks: Chunks, attention: TokenByTokenAttention | None) -> Attend:
    """Return the attention of prompt chunks; `attention` computes token by token, None many queries at once."""
    tokens = tokens_of(chunks)

    def attend(out: Tensor, q: Tensor, cache: LayerCache, options: AttentionOptions) -> None:
        pages = tokens.page_table_of(cache)
        if attention is not None:
            attention.run(out, q, cache, tokens.rows, tokens.positions, tokens.live, pages, options)
        else:
            extend_over(cache, out, q, chunks.cu_seqlens_q, chunks.cu_seqlens_kv, pages, options)

    return attend


class HiddenStates(NamedTuple):
    """The residual stream behind the last layer: what `Decoder.prefill` returns for `logits`."""

    x: Addend  # the last block's output, not added yet
    residual: Tensor  # [t, hidden]
    context: ForwardContext

    def narrow(self, begin: int, end: int) -> HiddenStates:
        """Return those of a span of tokens, in shared memory."""
        x = self.x._replace(tensor=self.x.tensor[begin:end]) if isinstance(self.x, Output) else self.x
        return HiddenStates(x, self.residual[begin:end], self.context.narrow(begin, end))


class Decoder(Model):
    """A decoder-only model of blocks."""

    config: ModelConfig
    supports_mix = takes_rolling_pages = True

    def __init__(
        self,
        config: ModelConfig,
        stem: Stem,
        layers: list[Layer],
        head: Head,
        cache_scales: list[tuple[float, float]] | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.config = config
        self.stem = stem
        self.layers = layers
        self.head = head
        self.adapters = adapters
        self.cache_scales = cache_scales or [(1.0, 1.0)] * len(layers)
        self.dtype = stem.embedding.dtype
        self.device = stem.embedding.device
        self.hidden_size = config.hidden_size

    @property
    def blocks(self) -> list[Block]:
        """Stem, layers and head."""
        return [self.stem, *self.layers, self.head]

    @property
    def constants(self) -> list[Tensor]:
        """All tensors that a step only reads, without duplicates."""
        return unique_tensors([tensor for block in self.blocks for tensor in block.tensors])

    def products(self) -> Iterator[tuple[str, WeightForm | ExpertForm]]:
        """Yield name and form of each product of a step."""
        fields = (field for block in self.blocks for field in block.leaves())
        yield from ((name, form) for name, form in fields if isinstance(form, (WeightForm, ExpertForm)))

    def read_bytes(self, rows: int | None) -> int:
        """Return the bytes of weights that a step of `rows` rows reads; see `Model.read_bytes`."""
        return sum(block.read_bytes(rows) for block in self.blocks)

    def decode(self, batch: DecodeInputs, caches: Sequence[LayerState], attention: PagedDecodeAttention) -> Tensor:
        """Run one decode step and return the logits, float32 [b, vocab]; see `Model.decode`."""
        attention.plan(batch.pre_step_seqlens, batch.live_rows)
        tokens = tokens_of(batch)
        # batch-invariant: the newest key is read from the cache, as a prompt's are
        append = None if attention.is_invariant else append_and_attend_step(tokens, attention)
        return self.head(*self._run_layers([tokens], caches, attend_step(tokens, attention), append))

    def mix(
        self, batch: DecodeInputs, chunks: Chunks, caches: Sequence[LayerState], attention: PagedDecodeAttention
    ) -> Tensor:
        """Run one decode step and prompt chunks in one pass; see `Model.mix`.

        Operators other than attention take all tokens in one launch, the chunks' first.
        """
        attention.plan(batch.pre_step_seqlens, batch.live_rows)
        of_chunks, of_rows, count = tokens_of(chunks), tokens_of(batch), chunks.token_ids.shape[0]
        attend_to_chunks, attend_to_rows = attend_chunks(chunks, None), attend_step(of_rows, attention)
        append_rows = append_and_attend_step(of_rows, attention)

        # layers share most tensors
        parts = functools.cache(lambda x: (x[:count], x[count:]))
        queries_for = functools.cache(torch.empty_like)

        def attend(out: Tensor, q: Tensor, cache: LayerCache, options: AttentionOptions) -> None:
            attend_to_chunks(out[:count], q[:count], cache, options)
            attend_to_rows(out[count:], q[count:], cache, options)

        def append(out: Tensor, qkv: Tensor, cache: LayerCache, rope: QKNormRope, options: AttentionOptions) -> None:
            (to_chunks, to_rows), (qkv_of_chunks, qkv_of_rows) = parts(out), parts(qkv)
            q = queries_for(to_chunks)
            append_tokens(q, cache, qkv_of_chunks, of_chunks, rope)
            attend_to_chunks(to_chunks, q, cache, options)
            # last: a row whose prompt ends in this pass attends to its chunk's keys
            append_rows(to_rows, qkv_of_rows, cache, rope, options)

        passed = self._run_layers([of_chunks, of_rows], caches, attend, append)
        return self.head(*passed.narrow(count, count + batch.size))

    def prefill(
        self,
        chunks: Chunks,
        caches: Sequence[LayerState],
        attention: TokenByTokenAttention | None = None,
        *,
        with_logits: bool = True,
    ) -> HiddenStates:
        """Append keys and values of prompt chunks, and return the last layer's hidden states; see `Model.prefill`."""
        with torch.no_grad():
            attend = attend_chunks(chunks, attention)
            return self._run_layers([tokens_of(chunks)], caches, attend, with_logits=with_logits)

    def logits(self, passed: HiddenStates, begin: int, end: int) -> Tensor:
        """Return the logits of a span of tokens; only once, since they are computed in place. See `Model.logits`."""
        with torch.no_grad():
            return self.head(*passed.narrow(begin, end))

    def hidden_states(self, passed: HiddenStates) -> Tensor:
        """Return the hidden states behind the final norm, in the residual's dtype; see `Model.hidden_states`."""
        x, residual, context = passed
        with torch.no_grad():
            hidden, _ = self.head.final_norm(x, residual, context.widened(residual))
            scale = self.config.logits_scale  # a factor of the norm's weight, which transformers gives the logits
            return context.normed(hidden) if scale == 1.0 else context.normed(hidden) / scale

    def output_rows(self, token_ids: Sequence[int]) -> Tensor:
        """Return rows of the output layer, also of a quantized or split one: products with unit vectors."""
        head, hidden, scale = self.head.lm_head, self.config.hidden_size, self.config.logits_scale
        rows = torch.empty(len(token_ids), hidden, dtype=torch.float32, device=self.device)
        for begin in range(0, hidden, _UNIT_VECTORS):
            units = torch.eye(hidden, dtype=self.dtype, device=self.device)[begin : begin + _UNIT_VECTORS]
            logits = torch.empty(len(units), head.out_features, dtype=torch.float32, device=self.device)
            with torch.no_grad():
                head.apply(logits, units)
            rows[:, begin : begin + len(units)] = logits[:, list(token_ids)].T
        return rows.mul_(scale)

    def _run_layers(
        self,
        parts: Sequence[Tokens],
        caches: Sequence[LayerState],
        attend: Attend,
        append: AppendAndAttend | None = None,
        *,
        with_logits: bool = True,
    ) -> HiddenStates:
        context = ForwardContext(parts, self.stem.embedding, attend, append)
        last = None if with_logits else self.layers[-1]
        x, residual = self.stem(context)
        for index, layer in enumerate(self.layers):
            cache = caches[self.config.layer_of_keys(index)]
            if layer is last:
                layer.append(x, residual, context, cache)
            else:
                x, residual = layer(x, residual, context, cache)
        return HiddenStates(x, residual, context)
