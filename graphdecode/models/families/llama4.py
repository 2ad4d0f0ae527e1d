"""Llama 4 (Meta, 2025), text: chunked attention, layers without positions, experts with scaled inputs.

Tensor names and formulas are those of transformers' `modeling_llama4.py`.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphdecode.linear.experts import StackLayout
from graphdecode.models.blocks import Attention, Norm, Routing, SparseMlp
from graphdecode.models.config import ModelConfig, count, flag, layer_windows, number
from graphdecode.models.families.hybrid import renamed
from graphdecode.models.families.llama import ATTENTION_BIASES
from graphdecode.models.families.smollm3 import has_rope, ropes_or_none
from graphdecode.models.families.sparse import Sparse
from graphdecode.models.fields import layer_numbers
from graphdecode.models.forward_context import ForwardContext, Hidden
from graphdecode.models.recurrent_blocks import reordered
from graphdecode.models.weight_map import WeightMap
from graphdecode.models.weights import Weights

_KINDS = {"chunked_attention": "sliding_attention", "full_attention": "full_attention"}


@dataclass(frozen=True, kw_only=True)
class Llama4Config(ModelConfig):
    """The configuration of Llama 4."""

    norms_heads: bool  # queries and keys are normed in layers with a rotary embedding
    temperature: tuple[float, float] | None  # of layers without one: scale and tokens of `_scales`


@dataclass(frozen=True)
class Llama4Attention(Attention):
    """Attention whose rotated channel pairs are adjacent in the product, or whose queries are scaled by position."""

    order: Tensor | None  # int64 [(heads + 2 kv_heads) * head_dim], columns of the product; None: without rotation
    query_scales: Tensor | None  # float32 [positions]

    def project(self, x: Hidden, context: ForwardContext) -> Tensor:
        qkv = reordered(super().project(x, context), self.order, "qkv", context)
        if self.query_scales is not None:
            last = len(self.query_scales) - 1
            for span, part in context.parts():
                scales = self.query_scales.index_select(0, part.positions.clamp(0, last))
                qkv[span, : self.o.in_features].mul_(scales[:, None])
        return qkv


@dataclass(frozen=True)
class InputScaledMlp(SparseMlp):
    """Experts whose inputs, not outputs, are multiplied by the sigmoid of their logit."""

    def outputs(self, hidden: Tensor, logits: Tensor, routing: Routing, context: ForwardContext) -> Tensor:
        """Return the experts' outputs of all pairs; their weights become 1."""
        # torch's vectorized and scalar code differ in the last bit, which float64 rounds away
        scales = torch.sigmoid(logits.gather(1, routing.ids.clamp(min=0).long()).double())
        routing.weights.fill_(1.0)
        scaled = (hidden[:, None] * scales.to(hidden.dtype)[:, :, None]).flatten(0, 1)
        return replace(self.experts, top_k=1)(scaled, routing, context)


class Llama4(Sparse):
    """Llama 4's decoder."""

    architecture = "Llama4ForCausalLM"
    biases = ATTENTION_BIASES
    mlp = stacked_mlp = "feed_forward."
    router = "router"
    stack_layout = StackLayout(transposed=True)
    gates_shared_expert = False
    block = InputScaledMlp
    defaults: ClassVar[dict[str, Any]] = {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "head_dim": 128,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 1,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }

    def config(self, settings: dict[str, Any]) -> Llama4Config:
        width, layers = settings["intermediate_size"], count(settings, "num_hidden_layers")
        kinds, step = settings.get("layer_types"), settings.get("interleave_moe_layer_step")
        sparse = layer_numbers(settings, "moe_layers")
        overrides = {
            "intermediate_size": settings["intermediate_size_mlp"],
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": width,
            "decoder_sparse_step": step if sparse is None else 1,
            "mlp_only_layers": [] if sparse is None else [layer for layer in range(layers) if layer not in sparse],
            "sliding_window": settings["attention_chunk_size"],
            "layer_types": [_KINDS.get(str(kind), kind) for kind in kinds] if isinstance(kinds, list) else kinds,
        }
        scale = number(settings, "attn_scale"), number(settings, "floor_scale")
        return Llama4Config(
            **vars(super().config(settings | overrides)),
            norms_heads=flag(settings, "use_qk_norm", True),
            temperature=scale if settings["attn_temperature_tuning"] else None,
        )

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        return layer_windows(settings, has_rope(settings, layers))

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        further = {"layer_ropes": ropes_or_none(settings, fields), "is_chunked": True}
        return super().options(settings, fields) | further

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        return renamed(super().layer_weights(config, at, name), name, {"mlp": "feed_forward"})

    def attention(self, config: ModelConfig, weights: Weights, index: int) -> Attention:
        assert isinstance(config, Llama4Config)
        attention = super().attention(config, weights, index)
        if config.layer_ropes[index] is None:
            scales = None if config.temperature is None else _scales(len(attention.cos_sin), *config.temperature)
            on_device = None if scales is None else scales.to(weights.device)
            return Llama4Attention(**vars(attention), order=None, query_scales=on_device)
        if config.norms_heads:
            norm = Norm(torch.ones(config.head_dim, device=weights.device), config.rms_norm_eps)
            attention = replace(attention, q_norm=norm, k_norm=norm)
        heads = torch.arange(attention.qkv.out_features).view(-1, config.head_dim)
        rotated = config.num_attention_heads + config.num_key_value_heads
        half_split = torch.cat((heads[:rotated, ::2], heads[:rotated, 1::2]), dim=1)
        order = torch.cat((half_split, heads[rotated:])).flatten().to(weights.device)
        return Llama4Attention(**vars(attention), order=order, query_scales=None)


def _scales(positions: int, scale: float, tokens: float) -> Tensor:
    """Return the factors of queries by position, `1 + scale * log(1 + floor((position + 1) / tokens))`."""
    steps = torch.floor((torch.arange(positions, dtype=torch.float32) + 1.0) / tokens)
    return torch.log1p(steps) * scale + 1.0
