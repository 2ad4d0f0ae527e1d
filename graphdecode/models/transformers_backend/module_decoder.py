"""A causal decoder of transformers as a `Model`: its module, over our cache and our attention.

Our attention is registered in transformers' `AttentionInterface`, without a mask function: transformers then makes no
mask, and ours needs none, since positions and the layer's window determine which keys are visible. The window is found
before, by a probe; see `masks.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphdecode.attention import AttentionOptions, PagedDecodeAttention, QKNormRope, TokenByTokenAttention
from graphdecode.cache import LayerState, paged
from graphdecode.linear.experts import ExpertForm
from graphdecode.linear.lora import AdapterSpan
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.adapters import AdapterSlots
from graphdecode.models.blocks import unique_tensors
from graphdecode.models.config import ModelShape, UnsupportedModelError
from graphdecode.models.decoder import attend_chunks, attend_step, tokens_of
from graphdecode.models.forward_context import Attend, Tokens, append_tokens
from graphdecode.models.model import Chunks, DecodeInputs, Model
from graphdecode.models.transformers_backend.masks import code_of_mask, visible_of
from graphdecode.models.transformers_backend.states import ModuleStates, inputs_of

NAME = "graphdecode"  # of the function, in transformers' registry
PROBE = f"{NAME}_probe"  # likewise, of the same function while a module is probed
_ATTENTION = "graphdecode_attention"  # the attribute of an attention module that holds the function
_MOST_TOKENS = 32  # of a prompt in a pass of a module with recurrent states: its mixers run once for each
_POSITIONS = ("position_ids", "position_embeddings", "cache_position")  # queries and keys are rotated already


@dataclass(frozen=True, kw_only=True)
class AdoptedConfig(ModelShape):
    """Sizes of a model that transformers runs."""

    chunked: tuple[bool, ...]  # per layer, whether its window is a chunk
    num_parameters: int
    adapted_features: int  # inputs and outputs of the products that adapters can change
    mixers: tuple[str, ...] = ()  # paths of the parts with recurrent states
    unreplaced_linears: frozenset[str] = frozenset()  # paths of linear layers whose weights the module reads by itself

    def check_heads(self, shape: "AttentionShape") -> None:
        """Refuse a layer whose attention does not fit the cache; values of fewer channels than keys are padded."""
        heads, kv_heads, q_dim, k_dim, v_dim = shape
        dim, sizes = self.head_dim, (self.num_attention_heads, self.num_key_value_heads)
        if (heads, kv_heads) != sizes or (q_dim, k_dim) != (dim, dim) or v_dim > dim:
            raise UnsupportedModelError(
                f"a layer of {self.architecture} has {heads} query and {kv_heads} key heads, of {q_dim}, {k_dim} "
                f"(keys) and {v_dim} (values) channels; the cache has {sizes[0]} and {sizes[1]} heads of {dim} channels"
            )


class AttentionShape(NamedTuple):
    """Heads and channels of a layer's attention."""

    heads: int
    kv_heads: int
    q_dim: int  # channels of a query head
    k_dim: int
    v_dim: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> "AttentionShape":
        """Return the shape of queries, keys and values, [t, heads, channels]."""
        return cls(q.shape[1], k.shape[1], q.shape[2], k.shape[2], v.shape[2])


# given a layer's number, q [t, heads, head_dim] of any strides, k and v [t, kv_heads, head_dim], and its options,
# returns the attention, [t, heads, head_dim]
Attending = Callable[[int, Tensor, Tensor, Tensor, AttentionOptions], Tensor]


def register() -> None:
    """Register our attention in transformers, if it is not."""
    from transformers import AttentionInterface, AttentionMaskInterface  # slow imports, which native models do not need

    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(PROBE, _attention)
    AttentionMaskInterface.register(PROBE, code_of_mask)


def set_attention(model: nn.Module, attend: Attending) -> None:
    """Set the function that computes the attention of a model's modules."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _ATTENTION, attend)


def forget_padding(model: nn.Module) -> None:
    """Leave out a warning for ids that may be padding: it reads them on the host, and there is none here."""
    module: Any
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None


def keep_quantiles(model: nn.Module) -> None:
    """Compute the quantile of Gemma 3n's sparse layers once; transformers does so on the host in each step."""
    module: Any
    for module in model.modules():
        if hasattr(module, "_gaussian_topk") and module.activation_sparsity > 0.0:
            share = torch.tensor(module.activation_sparsity, dtype=torch.float32)
            quantile = torch.distributions.Normal(0.0, 1.0).icdf(share).to(next(module.parameters()).device)
            module.register_buffer("graphdecode_quantile", quantile, persistent=False)
            module._gaussian_topk = partial(_above_quantile, quantile)


def _above_quantile(quantile: Tensor, inputs: Tensor) -> Tensor:
    """Return max(inputs - quantile, 0), where inputs are taken as normally distributed."""
    spread = inputs.std(-1, keepdim=True, unbiased=False) * quantile.to(inputs.dtype)
    return nn.functional.relu(inputs - (inputs.mean(-1, keepdim=True) + spread))


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function of transformers' `AttentionInterface`: one row of t tokens, which are those of all our rows.

    Queries are [1, heads, t, head_dim], keys and values [1, kv_heads, t, head_dim], sinks (`s_aux`) [heads]; windows
    are those of the mask that a probe got. Returns [1, t, heads, head_dim], and no weights.
    """
    visible = visible_of(attention_mask)
    tensors = [name for name, value in others.items() if isinstance(value, Tensor) and name not in _POSITIONS]
    if visible is None or is_causal is False or tensors:
        needs = ", ".join(["a mask of its own"] * (visible is None) + tensors) or "no causal order"
        raise UnsupportedModelError(f"{type(module).__name__} asks attention for {needs}, which this runtime has not")
    attend: Attending | None = getattr(module, _ATTENTION, None)
    if attend is None:
        raise UnsupportedModelError(f"{type(module).__name__} asks for attention, but does not say for which layer")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    sinks = None if s_aux is None else s_aux.float()
    options = AttentionOptions(scaling, visible.window_left, softcap or 0.0, sinks, visible.is_chunked)
    return attend(module.layer_idx, q, k, v, options)[None], None


class _Pass(NamedTuple):
    tokens: Tokens
    caches: Sequence[LayerState]
    attend: Attend


class _Passed(NamedTuple):
    output: Any  # of the module's body
    span: AdapterSpan | None  # its tokens, if any may have adapters


class ModuleDecoder(Model):
    """A causal decoder that transformers wrote; see `Model`."""

    config: AdoptedConfig

    def __init__(
        self,
        config: AdoptedConfig,
        module: nn.Module,
        forms: list[tuple[str, WeightForm]],
        adapters: AdapterSlots | None,
        spans: list[AdapterSpan],
    ) -> None:
        self.config = config
        self.module = module
        self.adapters = adapters
        self._forms, self._spans = forms, spans
        self.cache_scales = [(1.0, 1.0)] * config.num_hidden_layers
        first = self._module_tensors()[0]
        self.dtype, self.device = first.dtype, first.device
        self.hidden_size = self._body.get_input_embeddings().weight.shape[1]
        # no channels are rotated here: the module has rotated queries and keys
        self._angles = torch.empty((config.max_position_embeddings, 2, 0), device=self.device)
        self._pass: _Pass | None = None
        self._states = None
        if config.mixers:
            self._states, self.most_prompt_tokens = ModuleStates(module, config.mixers, self.dtype), _MOST_TOKENS
        set_attention(module, self.attend)

    def _module_tensors(self) -> list[Tensor]:
        return [*(parameter.data for parameter in self.module.parameters()), *self.module.buffers()]

    @property
    def constants(self) -> list[Tensor]:
        """Every tensor that a step only reads, each once."""
        of_forms = [tensor for _, form in self._forms for tensor in form.tensors]
        return unique_tensors([*self._module_tensors(), *of_forms, self._angles])

    def products(self) -> Iterator[tuple[str, WeightForm | ExpertForm]]:
        """Yield the products of a step, each with its name within a layer."""
        yield from self._forms

    def read_bytes(self, rows: int | None) -> int:
        """Return the bytes of weights that a step reads: all but embedding tables."""
        tables = {id(each.weight) for each in self.module.modules() if isinstance(each, nn.Embedding)}
        unquantized = sum(each.nbytes for each in self.module.parameters() if id(each) not in tables)
        return unquantized + sum(form.nbytes for _, form in self._forms)

    def decode(self, batch: DecodeInputs, caches: Sequence[LayerState], attention: PagedDecodeAttention) -> Tensor:
        """Run one decode step and return the logits [b, vocab]; see `Model.decode`."""
        attention.plan(batch.pre_step_seqlens, batch.live_rows)
        tokens = tokens_of(batch)
        step = _Pass(tokens, caches, attend_step(tokens, attention))
        return self._run(self.module, step).logits[0].float()

    def prefill(
        self,
        chunks: Chunks,
        caches: Sequence[LayerState],
        attention: TokenByTokenAttention | None = None,
        *,
        with_logits: bool = True,
    ) -> Any:
        """Append the keys and values of tokens, and return what `logits` takes; see `Model.prefill`."""
        step = _Pass(tokens_of(chunks), caches, attend_chunks(chunks, attention))
        with torch.no_grad():
            return _Passed(self._run(self._body, step), step.tokens.adapter_span(0))

    def logits(self, passed: Any, begin: int, end: int) -> Tensor:
        """Return the logits of some tokens of a prefill: the module's, with its body replaced; see `Model.logits`."""
        output, span = passed.output, None if passed.span is None else passed.span.narrow(begin, end)
        part = type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, begin:end]})
        self._spans[:] = [] if span is None else [span]
        body = self._body
        body.forward = lambda *_, **__: part
        try:
            none = torch.zeros(end - begin, dtype=torch.int64, device=self.device)
            with torch.no_grad():
                return self.module(input_ids=none[None], use_cache=False).logits[0].float()
        finally:
            del body.forward

    def hidden_states(self, passed: Any) -> Tensor:
        """Return the hidden states of the module's body; see `Model.hidden_states`."""
        return passed.output.last_hidden_state[0]  # type: ignore[no-any-return]

    @property
    def _body(self) -> Any:
        module: Any = self.module
        decoder = module.get_decoder()  # of ModernBertDecoder the output layer, which has this name there
        return decoder if hasattr(decoder, "get_input_embeddings") else module.base_model

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Append a layer's keys and values, and return the attention of its queries; called by the module."""
        if self._pass is None:
            raise UnsupportedModelError("the module can only be run by its decoder, which knows its cache")
        if self._states is not None:
            layer = self._states.attending(layer)
        tokens, (cache,) = self._pass.tokens, paged([self._pass.caches[layer]])
        options = options._replace(window_left=self.config.windows[layer], is_chunked=self.config.chunked[layer])
        self.config.check_heads(AttentionShape.of(q, k, v))
        v_dim = v.shape[2]
        v = torch.nn.functional.pad(v, (0, q.shape[2] - v_dim))  # a cache has one size for keys and values
        queries = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        append_tokens(queries, cache, torch.cat((q, k, v), dim=1).flatten(1), tokens, QKNormRope(self._angles))
        attended = torch.empty_like(queries)
        self._pass.attend(attended, queries, cache, options)
        return attended[..., :v_dim]

    def _run(self, module: Any, step: _Pass) -> Any:
        """Return a module's output for the tokens of a pass, as one row."""
        span = step.tokens.adapter_span(0)
        self._spans[:] = [] if span is None else [span]
        # padding may have any values
        ids = step.tokens.ids.clamp(0, self.config.vocab_size - 1)
        positions = step.tokens.positions.clamp(0, self.config.max_position_embeddings - 1).long()
        self._pass = step
        if self._states is not None:
            self._states.begin(step.tokens, step.caches)
        try:
            return module(**inputs_of(module, ids, positions, self._states))
        finally:
            self._pass = None
