"""DeepSeek V2 and V3 (2024), and GLM-4.7-Flash: latent attention, and experts chosen within groups.

Latent attention (DeepSeek-V2, section 2.1) keeps one latent vector and one rotated key a token, for all heads. It is
computed absorbed: queries are multiplied by what would make keys of latents, and results by what would make values, so
that attention runs over what is kept, in prompts and steps alike.

Names of tensors and formulas are those of transformers' `modeling_deepseek_v2.py`, `modeling_deepseek_v3.py` and
`modeling_glm4_moe_lite.py`.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphdecode.attention import AttentionOptions, QKNormRope
from graphdecode.cache import Keys, LayerCache, LayerState
from graphdecode.errors import shown
from graphdecode.kernels.norm.rms_norm import rms_norm
from graphdecode.linear.experts import ExpertForm
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.blocks import BlockOutput, GatedMlp, Mixer, Norm, Routing, SparseMlp
from graphdecode.models.config import (
    ExpertsConfig,
    ModelConfig,
    UnsupportedModelError,
    choice,
    count,
    flag,
    layer_kinds,
    number,
)
from graphdecode.models.families.llama import ATTENTION_BIASES
from graphdecode.models.families.sparse import Sparse, experts_of
from graphdecode.models.forward_context import ForwardContext, Hidden, append_tokens
from graphdecode.models.rope import RopeConfig
from graphdecode.models.weight_map import Part, WeightMap, product
from graphdecode.models.weights import Weights

_EPS = 1e-6  # of the norms inside attention, whatever a config.json says


@dataclass(frozen=True, kw_only=True)
class LatentConfig(ModelConfig):
    """The configuration; `head_dim` is what is kept of a token, `rope_dim + rank`."""

    q_rank: int  # channels of the latents of queries; 0: queries are a product of the residual stream
    rank: int  # channels of the latents of keys and values
    rope_dim: int  # rotated channels
    nope_dim: int  # channels of a head's queries that are not
    value_channels: int  # channels of a head's result
    is_interleaved: bool  # pairs of rotated channels are neighbours
    groups: int  # of experts; a token takes some of `topk_group`
    topk_group: int
    routed_scale: float  # multiplies the weights of a token's experts


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """Absorbed latent attention: one key a token, `rope_dim` rotated channels before a latent, which is its value."""

    qkv_a: WeightForm  # [q_rank + rank + rope_dim, hidden]: latents of queries, of keys and values, and rotated keys
    q_norm: Norm | None  # of the latents of queries, if any
    q_b: WeightForm  # [heads * (nope_dim + rope_dim), q_rank or hidden]
    kv_norm: Norm  # of the latents of keys and values
    to_keys: ExpertForm  # of each head [rope_dim + rank, nope_dim + rope_dim]: makes its query one for kept keys
    to_values: ExpertForm  # of each head [value_channels, rank]
    o: WeightForm  # [hidden, heads * value_channels]
    order: Tensor  # int64 [rope_dim + rank], the channels of `qkv_a` that make a key
    cos_sin: Tensor  # float32 [positions, 2, rope_dim / 2]
    options: AttentionOptions

    @property
    def input_linear(self) -> WeightForm:
        return self.qkv_a

    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext, cache: LayerState) -> BlockOutput:
        """Append the tokens' keys to the cache, and attend."""
        assert isinstance(cache, LayerCache)
        heads, value_channels, rank = self.to_values.shape
        latents = context.linear(self.qkv_a, x, "latents")
        queries = context.buffer(self.q_b.out_features, use="queries")
        if self.q_norm is None:
            context.multiply(self.q_b, queries, x)
        else:
            normed = context.buffer(self.q_b.in_features, use="normed queries")
            rms_norm(normed, latents[:, : self.q_b.in_features], self.q_norm.weight, self.q_norm.eps)
            context.multiply(self.q_b, queries, normed)
        tokens, in_floats = len(latents), self.to_keys.gives_floats
        keys = self._keys(latents, context)
        absorbed = context.buffer(heads * keys.shape[1], torch.float32 if in_floats else None, "absorbed")
        context.multiply_by_head(self.to_keys, absorbed.view(tokens * heads, -1), queries.view(tokens * heads, -1))
        q = context.buffer(absorbed.shape[1], use="rotated").view(tokens, heads, -1)
        no_heads, rope = cache.keys[:, :, :0], QKNormRope(self.cos_sin)
        for span, part in context.parts():
            append_tokens(q[span], replace(cache, keys=no_heads, values=no_heads), absorbed[span], part, rope)
            append_tokens(q[span, :0], replace(cache, values=no_heads), keys[span], part, rope)
        attended = context.buffer(heads * rank, use="attended").view(tokens, heads, rank)
        context.attend(attended, q, cache, self.options)
        values = context.buffer(heads * value_channels, use="values")
        context.multiply_by_head(self.to_values, values.view(tokens * heads, -1), attended.view(tokens * heads, -1))
        return self.output_linear(self.o, values, residual, context)

    def append(self, x: Hidden, residual: Tensor, context: ForwardContext, cache: LayerState) -> None:
        assert isinstance(cache, LayerCache)
        keys = self._keys(context.linear(self.qkv_a, x, "latents"), context)
        cache, rope = replace(cache, values=cache.keys[:, :, :0]), QKNormRope(self.cos_sin)
        for span, part in context.parts():
            append_tokens(keys[span, None][:, :0], cache, keys[span], part, rope)

    def _keys(self, latents: Tensor, context: ForwardContext) -> Tensor:
        """Return the tokens' keys, not rotated yet, [t, rope_dim + rank]."""
        rank = self.to_values.shape[2]
        keys, normed = latents.index_select(1, self.order), context.buffer(rank, use="normed latents")
        rms_norm(normed, keys[:, -rank:], self.kv_norm.weight, self.kv_norm.eps)
        keys[:, -rank:] = normed
        return keys


@dataclass(frozen=True, kw_only=True)
class GroupedMlp(SparseMlp):
    """Experts of a token's best groups, weighted by scores: softmax, or with a bias sigmoid (DeepSeek-V3, 2.1.2)."""

    bias: Tensor | None  # float32 [experts], added to the scores that experts are chosen by
    groups: int
    topk_group: int
    scale: float

    def route(self, logits: Tensor, live: Tensor) -> Routing:
        # torch's vectors and their remainders differ in the last bit, which float64 rounds away
        wide = logits.double()
        scores = torch.softmax(wide, 1) if self.bias is None else torch.sigmoid(wide)
        chosen_by = scores if self.bias is None else scores + self.bias
        if self.groups > 1:
            grouped = chosen_by.unflatten(1, (self.groups, -1))
            best = grouped.amax(2) if self.bias is None else grouped.topk(2, dim=2).values.sum(2)
            in_best = torch.zeros_like(best, dtype=torch.bool)
            in_best.scatter_(1, best.topk(self.topk_group, dim=1, sorted=False).indices, True)
            chosen_by = grouped.masked_fill(~in_best[:, :, None], -math.inf).flatten(1)
        routing = super().route(chosen_by.float(), live)
        chosen = scores.gather(1, routing.ids.clamp(min=0).long())
        if self.renormalize:
            chosen = chosen / chosen.sum(1, keepdim=True)
        routing.weights.copy_(chosen * self.scale)
        return routing


class DeepseekV3(Sparse):
    """DeepSeek V3's decoder; the layers that predict further tokens are not read."""

    architecture = "DeepseekV3ForCausalLM"
    biases = ATTENTION_BIASES
    shared_expert = "shared_experts"
    gates_shared_expert = False
    has_router_bias: ClassVar[bool] = True  # then scores are sigmoids
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "rope_interleave": True,
    }

    def config(self, settings: dict[str, Any]) -> LatentConfig:
        rank, rope_dim = count(settings, "kv_lora_rank"), count(settings, "qk_rope_head_dim")
        nope_dim = count(settings, "qk_nope_head_dim")
        config = super().config(settings | {"head_dim": rope_dim, "num_key_value_heads": 1})
        groups, topk = count(settings, "n_group", 1), count(settings, "topk_group", 1)
        experts = experts_of(config)
        size = experts.count // groups
        is_scored_by_two = self.has_router_bias and groups > 1
        if experts.count % groups or topk > groups or experts.top_k > topk * size or size < 1 + is_scored_by_two:
            raise UnsupportedModelError(
                f"{experts.top_k} of {experts.count} experts cannot be chosen in topk_group {topk} of n_group {groups}"
            )
        scale = (nope_dim + rope_dim) ** -0.5 * _yarn_scale(settings, config.rope) ** 2
        layers = config.num_hidden_layers
        fields = vars(config) | {
            "head_dim": rope_dim + rank,
            "layer_keys": (Keys.latent(rank, rope_dim),) * layers,
            "sm_scale": scale,
        }
        return LatentConfig(
            **fields,
            q_rank=0 if settings.get("q_lora_rank") is None else count(settings, "q_lora_rank"),
            rank=rank,
            rope_dim=rope_dim,
            nope_dim=nope_dim,
            value_channels=count(settings, "v_head_dim"),
            is_interleaved=flag(settings, "rope_interleave", True),
            groups=groups,
            topk_group=topk,
            routed_scale=number(settings, "routed_scaling_factor", 1.0),
        )

    def experts(self, settings: dict[str, Any], fields: dict[str, Any]) -> ExpertsConfig | None:
        width = count(settings, "moe_intermediate_size")
        return ExpertsConfig(
            count=count(settings, "n_routed_experts"),
            top_k=count(settings, "num_experts_per_tok"),
            intermediate_size=width,
            renormalize=flag(settings, "norm_topk_prob", False),
            shared_intermediate_size=count(settings, "n_shared_experts", 0, least=0) * width,
            layers=self.sparse_layers(settings, fields["num_hidden_layers"]),
        )

    def sparse_layers(self, settings: dict[str, Any], layers: int) -> tuple[bool, ...]:
        """Return for each layer whether it has experts."""
        dense = count(settings, "first_k_dense_replace", 0, least=0)
        return tuple(layer >= dense for layer in range(layers))

    def unread(self, config: ModelConfig, tensors: Collection[str]) -> list[str]:
        """Return names of unread tensors, also those of layers behind the last, which predict further tokens."""
        layer_of = {name: match[1] for name in tensors if (match := re.match(r"model\.layers\.(\d+)\.", name))}
        further = [name for name, layer in layer_of.items() if int(layer) >= config.num_hidden_layers]
        return super().unread(config, tensors) + further

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        assert isinstance(config, LatentConfig)
        weight_map, attention = super().layer_weights(config, at, name), f"{name}self_attn."
        for unused in (f"{at}qkv", f"{at}qkv.bias"):
            weight_map.pop(unused, None)
        hidden, heads, q_rank, rank = config.hidden_size, config.num_attention_heads, config.q_rank, config.rank
        of_queries, of_values = config.nope_dim + config.rope_dim, config.value_channels
        latents: dict[str, Any] = {f"{attention}q_a_proj": q_rank} if q_rank else {}
        latents[f"{attention}kv_a_proj_with_mqa"] = rank + config.rope_dim
        queries = {f"{attention}{'q_b_proj' if q_rank else 'q_proj'}": heads * of_queries}
        kv_b = (heads * (config.nope_dim + of_values), rank)
        if q_rank:
            weight_map[f"{at}q_norm"] = (Part(f"{attention}q_a_layernorm.weight", (q_rank,)),)
        return {
            **weight_map,
            **product(f"{at}qkv_a", latents, hidden, split=None, bias=config.qkv_bias),
            **product(f"{at}q_b", queries, q_rank or hidden, split=0),
            f"{at}kv_norm": (Part(f"{attention}kv_a_layernorm.weight", (rank,)),),
            f"{at}kv_b": (Part(f"{attention}kv_b_proj.weight", kv_b, 0),),
            **product(f"{at}o", {f"{attention}o_proj": hidden}, heads * of_values, split=1, bias=config.o_bias),
        }

    def adapted_features(self, config: ModelConfig, param_name: str, parts: tuple[Part, ...]) -> int:
        if not param_name.endswith(".kv_b"):
            return super().adapted_features(config, param_name, parts)
        assert isinstance(config, LatentConfig)
        per_head = config.nope_dim + 2 * config.rope_dim + 2 * config.rank + config.value_channels
        return config.num_attention_heads * per_head  # A and B of each head's two products

    def expert_weights(self, config: ModelConfig, at: str, name: str, *, is_stacked: bool) -> WeightMap:
        weight_map = super().expert_weights(config, at, name, is_stacked=is_stacked)
        if self.has_router_bias:
            shape = (experts_of(config).count,)
            weight_map[f"{at}router_bias"] = (Part(f"{name}mlp.gate.e_score_correction_bias", shape),)
        return weight_map

    def mixer(self, config: ModelConfig, weights: Weights, index: int) -> Mixer:
        """Return a layer's latent attention; what makes keys and values of latents is dequantized."""
        assert isinstance(config, LatentConfig)
        at, heads, rope_dim, nope_dim = f"layers.{index}.", config.num_attention_heads, config.rope_dim, config.nope_dim
        channels = torch.arange(rope_dim)
        half_split = torch.cat((channels[::2], channels[1::2])) if config.is_interleaved else channels
        kv_b = weights.tensor(f"{at}kv_b").view(heads, -1, config.rank)
        to_keys = kv_b.new_zeros(heads, rope_dim + config.rank, nope_dim + rope_dim)
        to_keys[:, channels, nope_dim + half_split] = 1.0
        to_keys[:, rope_dim:, :nope_dim] = kv_b[:, :nope_dim].mT
        order = torch.cat((config.rank + half_split, torch.arange(config.rank))) + config.q_rank
        of_heads = weights.by_head(to_keys), weights.by_head(kv_b[:, nope_dim:].contiguous())
        absorbed, of_values = weights.adapted_heads(f"{at}kv_b", *of_heads)
        return LatentAttention(
            qkv_a=weights.linear(f"{at}qkv_a"),
            q_norm=weights.optional_norm(f"{at}q_norm", _EPS),
            q_b=weights.linear(f"{at}q_b"),
            kv_norm=weights.norm(f"{at}kv_norm", _EPS),
            to_keys=absorbed,
            to_values=of_values,
            o=weights.linear(f"{at}o"),
            order=order.to(weights.device),
            cos_sin=weights.cos_sin(config.rope, rope_dim),
            options=config.attention_options(index),
        )

    def sparse_mlp(self, config: ModelConfig, weights: Weights, at: str, shared: GatedMlp | None) -> SparseMlp:
        assert isinstance(config, LatentConfig)
        return GroupedMlp(
            **vars(super().sparse_mlp(config, weights, at, shared)),
            bias=weights.tensor(f"{at}router_bias", torch.float32) if self.has_router_bias else None,
            groups=config.groups,
            topk_group=config.topk_group,
            scale=config.routed_scale,
        )


class DeepseekV2(DeepseekV3):
    """DeepSeek V2's decoder."""

    architecture = "DeepseekV2ForCausalLM"
    has_router_bias = False
    defaults: ClassVar[dict[str, Any]] = {
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_method": "greedy",
    }

    def config(self, settings: dict[str, Any]) -> LatentConfig:
        if choice(settings, "topk_method", ("greedy", "group_limited_greedy")) == "greedy":
            settings |= {"n_group": 1, "topk_group": 1}
        if flag(settings, "mlp_bias", False):
            raise UnsupportedModelError(f"mlp_bias {shown(True)} is not supported beside experts")
        return super().config(settings | {"norm_topk_prob": False, "rope_interleave": True})


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash's decoder."""

    architecture = "Glm4MoeLiteForCausalLM"
    defaults: ClassVar[dict[str, Any]] = DeepseekV3.defaults | {
        "max_position_embeddings": 202752,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
    }

    def sparse_layers(self, settings: dict[str, Any], layers: int) -> tuple[bool, ...]:
        kinds = settings.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
        kinds = layer_kinds(kinds, layers, ("dense", "sparse"), "mlp_layer_types")
        return tuple(kind == "sparse" for kind in kinds)


def _yarn_scale(settings: Mapping[str, Any], rope: RopeConfig) -> float:
    """Return by what YaRN multiplies queries, and keys as well; see transformers' `yarn_apply_mscale`."""
    parameters = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if rope.rope_type == "default" or rope.factor <= 1.0 or not parameters.get("mscale_all_dim"):
        return 1.0
    return 0.1 * number(parameters, "mscale_all_dim") * math.log(rope.factor) + 1.0
