"""A causal decoder of transformers as one of our models: its own module, over our cache and our attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphdecode.attention import AttentionOptions, PagedDecodeAttention, TokenByTokenAttention, extend_over
from graphdecode.buffers import Batch
from graphdecode.cache import LayerCache
from graphdecode.kernels.cache.kv_format import format_of, mixed, within
from graphdecode.kernels.cache.rope_append import rope_append
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.blocks import Attend, Tokens
from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.transformers_backend.adopted_config import AdoptedConfig
from graphdecode.models.transformers_backend.interface import answer


class _Pass(NamedTuple):
    """One pass of the module over some tokens, and where its attention reads and writes."""

    tokens: Tokens
    caches: list[LayerCache]
    attend: Attend
    is_known: bool = False  # their keys and values are in the caches already


class ModuleDecoder:
    """A causal decoder that transformers wrote; see `Model`.

    Args:
        config: its sizes.
        module: with attention that asks us (`interface`), on its device, in evaluation mode.
        forms: name and form of the products that were replaced.
    """

    def __init__(self, config: AdoptedConfig, module: nn.Module, forms: list[tuple[str, WeightForm]]) -> None:
        self.config = config
        self.module = module
        self._forms = forms
        self.cache_scales = [(1.0, 1.0)] * config.num_hidden_layers
        first = next(self._plain_tensors())
        self.dtype, self.device = first.dtype, first.device
        # no channel is left to be turned: queries and keys come from the module as they are to be compared
        self._angles = torch.empty((config.max_position_embeddings, 2, 0), device=self.device)
        self._pass: _Pass | None = None
        answer(module, self)

    @property
    def num_layers(self) -> int:
        """Layers, each with a cache of its own."""
        return self.config.num_hidden_layers

    def _plain_tensors(self) -> Iterator[Tensor]:
        yield from (parameter.data for parameter in self.module.parameters())
        yield from self.module.buffers()

    @property
    def constants(self) -> list[Tensor]:
        """Every tensor that a step only reads, each once."""
        of_forms = [tensor for _, form in self._forms for tensor in form.tensors]
        return list({id(tensor): tensor for tensor in [*self._plain_tensors(), *of_forms, self._angles]}.values())

    @property
    def workspace(self) -> list[Tensor]:
        """Tensors that products leave as they found them, and write in between."""
        return list({id(tensor): tensor for _, form in self._forms for tensor in form.workspace}.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all but tables, of which it reads a row for each token."""
        tables = {id(each.weight) for each in self.module.modules() if isinstance(each, nn.Embedding)}
        plain = sum(each.nbytes for each in self.module.parameters() if id(each) not in tables)
        return plain + sum(form.nbytes for _, form in self._forms)

    def read_bytes(self, rows: int) -> int:
        """Bytes of weights that one decode step reads: all of them, however many rows there are."""
        return self.weight_bytes

    def linear_choices(self, rows: int) -> dict[str, dict[str, Any]]:
        """Return the path of each product in a step of so many rows, by name and shape, with what was measured."""
        return {
            f"{name} {form.out_features}x{form.in_features}": form.choice(rows).as_report()
            for name, form in self._forms
        }

    def decode(self, batch: Batch, caches: list[LayerCache], attention: PagedDecodeAttention) -> Tensor:
        """Run one decode step and return the logits [b, vocab]; see `Model.decode`."""
        attention.plan(batch.pre_step_seqlens, batch.live_rows)
        tokens = Tokens(batch.tokens, batch.rows, batch.pre_step_seqlens, batch.live_rows, batch.page_table)

        def attend(out: Tensor, q: Tensor, cache: LayerCache, options: AttentionOptions) -> None:
            attention.run(out, q, cache.keys, cache.values, batch.page_table, options, cache.scales)

        return self._logits(_Pass(tokens, caches, attend))

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
    ) -> _Pass:
        """Append the keys and values of many tokens; see `Model.prefill`."""

        def attend(out: Tensor, q: Tensor, cache: LayerCache, options: AttentionOptions) -> None:
            if attention is not None:
                attention.run(out, q, cache, rows, positions, live, page_table, options)
                return
            extend_over(cache, out, q, cu_seqlens_q, cu_seqlens_kv, page_table, options)

        tokens = _Pass(Tokens(token_ids, rows, positions, live, page_table), caches, attend)
        with torch.no_grad():  # what comes after the layers is for logits
            self._run(self.module.base_model, tokens)
        return tokens

    def logits(self, passed: _Pass, begin: int, end: int) -> Tensor:
        """Feed some tokens of a prefill once more, now for their logits; see `Model.logits`."""
        ids, rows, positions, live, table = passed.tokens
        part, count = slice(begin, end), end - begin
        table = table.index_select(0, rows[begin : begin + 1])
        tokens = Tokens(ids[part], torch.zeros_like(rows[part]), positions[part], live.clamp(max=count), table)
        cu_seqlens_q = torch.arange(0, count + 1, count, dtype=torch.int32, device=self.device)
        cu_seqlens_kv = torch.nn.functional.pad(positions[end - 1 : end] + 1, (1, 0))

        def attend(out: Tensor, q: Tensor, cache: LayerCache, options: AttentionOptions) -> None:
            extend_over(cache, out, q, cu_seqlens_q, cu_seqlens_kv, table, options)

        with torch.no_grad():
            return self._logits(_Pass(tokens, passed.caches, attend, is_known=True))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Append a layer's keys and values, and return the attention of its queries; the module asks for this.

        Raises:
            UnsupportedModelError: the module is not what its configuration says, or was called by somebody else.
        """
        if self._pass is None:
            raise UnsupportedModelError("the module can only be run by its decoder, which knows its cache")
        tokens, cache = self._pass.tokens, self._pass.caches[layer]
        self.config.check_heads(q.shape[1], k.shape[1], q.shape[2], k.shape[2], v.shape[2])
        v_dim = v.shape[2]
        v = torch.nn.functional.pad(v, (0, q.shape[2] - v_dim))  # a cache has one size for keys and values
        queries = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._pass.is_known:
            queries.copy_(within(mixed(q), q.dtype) if format_of(cache.keys.dtype).is_mixed else q)
        else:
            joined = torch.cat((q, k, v), dim=1).flatten(1)
            where = (tokens.rows, tokens.positions, tokens.live, tokens.page_table)
            key, value, pages = cache.scales
            rope_append(
                queries,
                cache.keys,
                cache.values,
                joined,
                *where,
                self._angles,
                k_scale=key,
                v_scale=value,
                scales=pages,
            )
        attended = torch.empty_like(queries)
        self._pass.attend(attended, queries, cache, options)
        return attended[..., :v_dim]

    def _logits(self, tokens: _Pass) -> Tensor:
        return self._run(self.module, tokens).logits[0].float()

    def _run(self, module: Any, tokens: _Pass) -> Any:
        """Return what a module gives for the tokens of a pass, which it takes for one row."""
        ids, _, positions, *_ = tokens.tokens
        # padding may hold anything, and a table has no row for it
        ids = ids.clamp(0, self.config.vocab_size - 1)
        positions = positions.clamp(0, self.config.max_position_embeddings - 1).long()
        self._pass = tokens
        try:
            return module(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self._pass = None
