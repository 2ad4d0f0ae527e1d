"""Gemma 4 (2026), text: two head sizes, keys shared between layers, per-layer embeddings, MLPs beside experts.

Tensor names and formulas are those of transformers' `modeling_gemma4.py`.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphdecode.attention import QKNormRope
from graphdecode.cache import Keys, LayerState
from graphdecode.errors import shown
from graphdecode.kernels.model.act_mul import act_mul
from graphdecode.kernels.model.embedding import embedding
from graphdecode.kernels.moe.moe_route import moe_combine
from graphdecode.kernels.norm.rms_norm import add_rms_norm, rms_norm
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.blocks import (
    Addend,
    Attention,
    Block,
    BlockOutput,
    DecoderLayer,
    Embedded,
    FeedForward,
    GatedMlp,
    Identity,
    Layer,
    Norm,
    SparseMlp,
)
from graphdecode.models.config import (
    ExpertsConfig,
    ModelConfig,
    UnsupportedModelError,
    all_but_every,
    count,
    flag,
    is_windowed,
)
from graphdecode.models.families.gemma import Gemma2
from graphdecode.models.families.llama import Llama, norms_at
from graphdecode.models.families.sparse import Sparse, experts_of
from graphdecode.models.forward_context import ForwardContext, Hidden
from graphdecode.models.rope import ropes_by_layer_type
from graphdecode.models.weight_map import Part, WeightMap, product
from graphdecode.models.weights import Weights

_SUM = Identity()  # adds without a norm
_OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")  # modules that layers with shared keys do not need


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """The configuration of Gemma 4."""

    input_size: int  # channels of per-layer embeddings; 0: none
    input_vocab_size: int  # vocabulary of per-layer embeddings
    values_are_keys: bool  # in layers without a window, values use the keys' weight
    has_wide_mlp: bool  # MLPs of layers with shared keys are twice as wide

    def of_layer(self, layer: int) -> "Gemma4Config":
        """Return the configuration with a layer's sizes."""
        keys = self.layer_keys[layer]
        width = self.intermediate_size * (2 if self.has_wide_mlp and keys.shared_with is not None else 1)
        return replace(self, num_key_value_heads=keys.heads, head_dim=keys.head_dim, intermediate_size=width)


class SharedKeysAttention(Attention):
    """Attention over an earlier layer's keys and values."""

    has_keys = False


@dataclass(frozen=True)
class NormedValues(Attention):
    """Attention whose values are also normed, without a weight."""

    def rotation(self, qkv: Tensor) -> QKNormRope:
        """Norm the values in place."""
        begin = (qkv.shape[1] + self.o.in_features) // 2
        values = qkv[:, begin:].unflatten(1, (-1, self.head_dim))
        wide, rope = values.float(), super().rotation(qkv)
        values.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + rope.eps))
        return rope


@dataclass(frozen=True)
class MlpBesideExperts(FeedForward):
    """`after_mlp(mlp(x)) + after_experts(experts(before_experts(residual)))`."""

    mlp: GatedMlp
    sparse: SparseMlp
    before_router: Norm
    before_experts: Norm
    after_mlp: Norm
    after_experts: Norm
    expert_scales: Tensor  # float32 [experts], multiply the routing weights

    @property
    def input_linear(self) -> WeightForm:
        return self.mlp.gate_up

    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext) -> BlockOutput:
        of_mlp = self.mlp.product(x, context)
        total, hidden = torch.empty_like(of_mlp), context.buffer(of_mlp.shape[1], use="of experts")
        rms_norm(total, of_mlp, self.after_mlp.weight, self.after_mlp.eps)
        rms_norm(hidden, residual, self.before_router.weight, self.before_router.eps)
        routing = self.sparse.route(context.linear(self.sparse.router, hidden, "router"), context.live())
        ids, weights = routing.ids, routing.weights
        weights.mul_(self.expert_scales.index_select(0, ids.flatten().clamp(min=0)).view_as(weights))
        rms_norm(hidden, residual, self.before_experts.weight, self.before_experts.eps)
        parts = self.sparse.experts(hidden, routing, context)
        sums = torch.empty_like(parts[: len(hidden)])
        moe_combine(sums, parts, ids, weights)
        if self.sparse.collectives is not None:
            self.sparse.collectives.all_reduce(sums, self.sparse.param_name)
        after, out = self.after_experts, context.output_buffer(in_floats=total.dtype == torch.float32)
        add_rms_norm(out, total, sums, None, 0.0, after.weight, after.eps)
        return self.output(out), residual


@dataclass(frozen=True)
class PerLayerEmbedding(Block):
    """Computes the per-layer inputs: per-layer embeddings plus a projection of the model's embedding."""

    table: Tensor  # [vocab, layers * channels]
    scale: float
    per_layer_in: WeightForm  # [layers * channels, hidden]
    norm: Norm  # over a layer's channels

    def __call__(self, residual: Tensor, context: ForwardContext) -> None:
        """Write the inputs into the buffer `layer inputs`, [t, layers * channels]."""
        width, channels = self.table.shape[1], len(self.norm.weight)
        tokens = context.buffer(width, torch.float32, "embedded")
        for span, part in context.parts():
            embedding(tokens[span], part.ids, self.table, part.live, self.scale)
        projected = context.linear(self.per_layer_in, residual.to(self.table.dtype))
        shape, out = (-1, channels), context.buffer(width, use="layer inputs")
        of_norm = (None, 0.0, self.norm.weight, self.norm.eps)
        add_rms_norm(out.view(shape), tokens.view(shape), projected.view(shape), *of_norm)


@dataclass(frozen=True)
class PerLayerInput(FeedForward):
    """`project(activation(gate(x)) * input)` for a layer's input."""

    input_gate: WeightForm  # [channels, hidden]
    input_out: WeightForm  # [hidden, channels]
    begin: int  # the layer's first channel
    width: int  # channels of all layers
    activation: str

    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext) -> BlockOutput:
        channels = self.input_gate.out_features
        gate, inputs = context.linear(self.input_gate, x, "input gate"), context.buffer(self.width, use="layer inputs")
        activated = context.buffer(channels, use="gated input")
        joined = torch.cat((gate, inputs[:, self.begin : self.begin + channels]), dim=1)
        act_mul(activated, joined, self.activation)
        return self.output_linear(self.input_out, activated, residual, context)


@dataclass(frozen=True, kw_only=True)
class Gemma4Layer(DecoderLayer):
    """A layer whose result, with the residual, is scaled; its last norm includes the scale."""

    inputs: PerLayerEmbedding | None  # set in the first layer
    input_block: PerLayerInput | None
    scale: Tensor  # float32 [1]

    def __call__(self, x: Addend, residual: Tensor, context: ForwardContext, cache: LayerState) -> BlockOutput:
        if self.inputs is not None:
            if isinstance(x, Embedded):
                x.write(residual)
                x = None
            self.inputs(residual, context)
        x, residual = super().__call__(x, residual, context, cache)
        if self.input_block is not None:
            hidden, residual = _SUM(x, residual, context)
            x, residual = self.input_block(hidden, residual, context)
        return x, residual.mul_(self.scale)


class Gemma4(Sparse, Gemma2):
    """Gemma 4's decoder."""

    architecture = "Gemma4ForCausalLM"
    has_window_rope = True
    experts_separate = False
    norm_offset = 0.0
    mlp = stacked_mlp = ""
    router = "router.proj"
    defaults: ClassVar[dict[str, Any]] = Gemma2.defaults | {
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
    }

    def config(self, settings: dict[str, Any]) -> Gemma4Config:
        if settings.get("use_bidirectional_attention") == "vision":  # for text, attention is causal
            settings["use_bidirectional_attention"] = None
        if isinstance(settings.get("layer_types"), list):  # the last layer never has a window
            settings["layer_types"] = [*settings["layer_types"][:-1], "full_attention"]
        pattern = self.has_window(settings, count(settings, "num_hidden_layers"))
        keys = _layer_keys(settings, is_windowed(settings, pattern))
        largest = max(keys, key=lambda each: each.head_dim)
        sizes = {"head_dim": largest.head_dim, "num_key_value_heads": largest.heads}
        ropes = ropes_by_layer_type(settings, 1e6, 1e4)
        if not settings.get("rope_parameters"):
            ropes["rope_parameters"] |= {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        config = super().config(settings | sizes | ropes)
        return Gemma4Config(
            **vars(replace(config, layer_keys=keys)),
            input_size=count(settings, "hidden_size_per_layer_input", least=0),
            input_vocab_size=count(settings, "vocab_size_per_layer_input"),
            values_are_keys=flag(settings, "attention_k_eq_v", False),
            has_wide_mlp=flag(settings, "use_double_wide_mlp", False),
        )

    def has_window(self, settings: dict[str, Any], layers: int) -> list[bool]:
        return [*all_but_every(6, layers)[:-1], False]

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return super().options(settings, fields) | {"sm_scale": 1.0}

    def experts(self, settings: dict[str, Any], fields: dict[str, Any]) -> ExpertsConfig | None:
        if not flag(settings, "enable_moe_block", False):
            return None
        return ExpertsConfig(
            count=count(settings, "num_experts"),
            top_k=count(settings, "top_k_experts"),
            intermediate_size=count(settings, "moe_intermediate_size"),
            renormalize=True,
            layers=(True,) * fields["num_hidden_layers"],
        )

    def sparse_weights(self, config: ModelConfig, *, is_stacked: bool) -> WeightMap:
        assert isinstance(config, Gemma4Config)
        weight_map, width = Llama.weights(self, config), config.num_hidden_layers * config.input_size
        if width:
            weight_map["input_table"] = (Part("model.embed_tokens_per_layer.weight", (config.input_vocab_size, width)),)
            weight_map["input_norm"] = (Part("model.per_layer_projection_norm.weight", (config.input_size,)),)
            module = {"model.per_layer_model_projection": width}
            weight_map |= product("per_layer_in", module, config.hidden_size, split=None)
        for index in range(config.num_hidden_layers if config.experts is not None else 0):
            at, name = f"layers.{index}.", f"model.layers.{index}."
            weight_map |= self.expert_weights(config, at, name, is_stacked=is_stacked)
        return weight_map

    def unread(self, config: ModelConfig, tensors: Collection[str]) -> list[str]:
        """Return names of unread tensors, also those of keys in layers that share another's."""
        shared = [index for index, keys in enumerate(config.layer_keys) if keys.shared_with is not None]
        of_keys = tuple(f"model.layers.{index}.self_attn.{module}." for index in shared for module in _OF_KEYS)
        return super().unread(config, tensors) + [name for name in tensors if name.startswith(of_keys)]

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        assert isinstance(config, Gemma4Config)
        index, attention, hidden = int(at.split(".")[1]), f"{name}self_attn.", config.hidden_size
        config = config.of_layer(index)
        weight_map = Llama.layer_weights(self, config, at, name)
        q, k, _ = weight_map[f"{at}qkv"]
        biases = weight_map.get(f"{at}qkv.bias", ())
        if config.layer_keys[index].shared_with is not None:
            weight_map[f"{at}qkv"], biases = (q,), biases[:1]
        elif config.values_are_keys and config.windows[index] < 0:
            weight_map[f"{at}qkv"], biases = (q, k, k), (*biases[:2], *biases[1:2])
        if biases:
            weight_map[f"{at}qkv.bias"] = biases
        weight_map[f"{at}scale"] = (Part(f"{name}layer_scalar", (1,)),)
        weight_map[f"{at}q_norm"] = (Part(f"{attention}q_norm.weight", (config.head_dim,)),)
        if config.layer_keys[index].shared_with is None:
            weight_map[f"{at}k_norm"] = (Part(f"{attention}k_norm.weight", (config.head_dim,)),)
        if config.input_size:
            weight_map |= norms_at({"after_input": "post_per_layer_input_norm"}, config, at, name)
            gate, out = {f"{name}per_layer_input_gate": config.input_size}, {f"{name}per_layer_projection": hidden}
            weight_map |= product(f"{at}input_gate", gate, hidden, split=None)
            weight_map |= product(f"{at}input_out", out, config.input_size, split=None)
        return weight_map

    def expert_weights(self, config: ModelConfig, at: str, name: str, *, is_stacked: bool) -> WeightMap:
        """Return the weight map of one layer's router, experts and norms; the MLP is the usual one."""
        modules = {
            "after_dense": "post_feedforward_layernorm_1",
            "after_experts": "post_feedforward_layernorm_2",
            "before_experts": "pre_feedforward_layernorm_2",
        }
        return {
            **super().expert_weights(config, at, name, is_stacked=is_stacked),
            **norms_at(modules, config, at, name),
            f"{at}router_norm": (Part(f"{name}router.scale", (config.hidden_size,)),),
            f"{at}expert_scales": (Part(f"{name}router.per_expert_scale", (experts_of(config).count,)),),
        }

    def attention(self, config: ModelConfig, weights: Weights, index: int) -> Attention:
        assert isinstance(config, Gemma4Config)
        attention = super().attention(config.of_layer(index), weights, index)
        if config.layer_keys[index].shared_with is None:
            return NormedValues(**vars(attention))
        return SharedKeysAttention(**vars(replace(attention, k_norm=attention.q_norm)))  # without keys

    def feed_forward(self, config: ModelConfig, weights: Weights, index: int) -> FeedForward:
        mlp, at = Llama.feed_forward(self, config, weights, index), f"layers.{index}."
        if config.experts is None:
            return mlp
        assert isinstance(mlp, GatedMlp)
        router = weights.norm(f"{at}router_norm", config.rms_norm_eps)
        of_ranks: dict[str, Any] = {"collectives": weights.collectives, "param_name": f"{at}experts"}
        experts = self.expert_block(config, weights, at)
        return MlpBesideExperts(
            mlp=mlp,
            sparse=SparseMlp(weights.linear(f"{at}router"), experts, None, True, **of_ranks),
            before_router=replace(router, weight=router.weight * config.hidden_size**-0.5),
            before_experts=weights.norm(f"{at}before_experts", config.rms_norm_eps),
            after_mlp=weights.norm(f"{at}after_dense", config.rms_norm_eps),
            after_experts=weights.norm(f"{at}after_experts", config.rms_norm_eps),
            expert_scales=weights.tensor(f"{at}expert_scales", torch.float32),
        )

    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        assert isinstance(config, Gemma4Config)
        at, size = f"layers.{index}.", config.input_size
        layer, scale = super().layer(config, weights, index), weights.tensor(f"{at}scale", torch.float32)
        assert isinstance(layer, DecoderLayer)
        input_block, mlp = None, layer.mlp
        if size:
            gate, out = weights.linear(f"{at}input_gate"), weights.linear(f"{at}input_out")
            after_input = _scaled(weights.norm(f"{at}after_input", config.rms_norm_eps), scale)
            input_block = PerLayerInput(
                gate,
                out,
                index * size,
                config.num_hidden_layers * size,
                config.activation,
                output_norm=after_input,
            )
        elif mlp.output_norm is not None:
            mlp = replace(mlp, output_norm=_scaled(mlp.output_norm, scale))
        inputs = _per_layer_embedding(config, weights) if size and index == 0 else None
        return Gemma4Layer(**vars(layer) | {"mlp": mlp}, inputs=inputs, input_block=input_block, scale=scale)


def _per_layer_embedding(config: Gemma4Config, weights: Weights) -> PerLayerEmbedding:
    """Return the per-layer inputs; both summands are scaled by sqrt(1/2)."""
    half = 0.5**0.5
    table = weights.tensor("input_table")
    scale = float(torch.tensor(config.input_size**0.5, dtype=table.dtype))  # rounded to the dtype, as in training
    norm = weights.norm("input_norm", config.rms_norm_eps * config.hidden_size)  # the product is over sqrt(hidden_size)
    return PerLayerEmbedding(table, scale * half, weights.linear("per_layer_in"), _scaled(norm, half))


def _scaled(norm: Norm, scale: Tensor | float) -> Norm:
    return replace(norm, weight=norm.weight * scale)


def _layer_keys(settings: dict[str, Any], windowed: list[bool]) -> tuple[Keys, ...]:
    """Return `ModelShape.layer_keys`; layers without a window, or single layers, may have other sizes."""
    layers, heads = len(windowed), count(settings, "num_attention_heads")
    overrides = settings.get("per_layer_config")
    if overrides is None:
        full = {"head_dim": settings.get("global_head_dim", 512)}
        if flag(settings, "attention_k_eq_v", False) and settings.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = settings["num_global_key_value_heads"]
        overrides = {str(layer): full for layer in range(layers) if not windowed[layer]}
    if not isinstance(overrides, dict) or not all(isinstance(of_layer, dict) for of_layer in overrides.values()):
        raise UnsupportedModelError(f"per_layer_config must be an object of objects by layer, got {shown(overrides)}")
    first_shared = layers - count(settings, "num_kv_shared_layers", least=0)
    keys = []
    for layer in range(layers):
        of_layer = settings | overrides.get(str(layer), {})
        kv_heads, head_dim = count(of_layer, "num_key_value_heads"), count(of_layer, "head_dim")
        if heads % kv_heads or head_dim % 2:
            sizes = f"num_key_value_heads {kv_heads} and head_dim {head_dim}"
            raise UnsupportedModelError(f"layer {layer} has {sizes}, for {heads} query heads")
        alike = [earlier for earlier in range(first_shared) if windowed[earlier] == windowed[layer]]
        if layer >= first_shared and not alike:
            raise UnsupportedModelError(
                f"num_kv_shared_layers: no earlier layer of its kind has keys for layer {layer}"
            )
        keys.append(Keys(kv_heads, head_dim, alike[-1] if layer >= first_shared else None))
    return tuple(keys)
