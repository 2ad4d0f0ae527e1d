"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, sinks in attention, a window in every other layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphdecode.models.blocks import Attention
from graphdecode.models.config import ExpertsConfig, ModelConfig, UnsupportedModelError, count, layer_windows
from graphdecode.models.experts import Experts, stacked
from graphdecode.models.families.sparse import Sparse, experts_of
from graphdecode.models.weight_map import Part, WeightMap
from graphdecode.models.weights import Weights


class GptOss(Sparse):
    """gpt-oss, computed with 16 or 32 bits a weight, also where its checkpoint has four."""

    architecture = "GptOssForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "attention_bias": True,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }

    def biases(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return whether the products of attention have a bias; the router and the experts have one."""
        return {name: bool(settings["attention_bias"]) for name in ("qkv_bias", "o_bias")}

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of each layer: every other one has one."""
        return layer_windows(settings, [layer % 2 == 0 for layer in range(layers)])

    def experts(self, settings: dict[str, Any], fields: dict[str, Any]) -> ExpertsConfig:
        """Return what the experts look like: the intermediate size is that of each."""
        clamp = [settings[name] for name in ("swiglu_alpha", "swiglu_limit")]
        if not all(isinstance(value, (int, float)) and value > 0 for value in clamp):
            raise UnsupportedModelError(f"swiglu_alpha and swiglu_limit must be numbers > 0, got {clamp!r}")
        return ExpertsConfig(
            count=count(settings, "num_local_experts"),
            slots=count(settings, "num_experts_per_tok"),
            intermediate_size=fields["intermediate_size"],
            renormalise=True,
            layers=(True,) * fields["num_hidden_layers"],
            alpha=float(clamp[0]),
            limit=float(clamp[1]),
        )

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        """Return the places of one layer; see `Llama.layer_weights`."""
        sinks = Part(f"{name}self_attn.sinks", (config.num_attention_heads,), 0)
        return super().layer_weights(config, at, name) | {f"{at}sinks": (sinks,)}

    def expert_weights(self, config: ModelConfig, at: str, name: str, *, is_stacked: bool) -> WeightMap:
        """Return the places of one layer's router and experts, always stacked: [experts, in_features, out_features]."""
        experts, hidden, mlp = experts_of(config), config.hidden_size, f"{name}mlp."
        all_of, width = experts.count, experts.intermediate_size
        return {
            f"{at}router": (Part(f"{mlp}router.weight", (all_of, hidden)),),
            f"{at}router.bias": (Part(f"{mlp}router.bias", (all_of,)),),
            f"{at}experts.gate_up": (Part(f"{mlp}experts.gate_up_proj", (all_of, hidden, 2 * width), 2),),
            f"{at}experts.gate_up.bias": (Part(f"{mlp}experts.gate_up_proj_bias", (all_of, 2 * width), 1),),
            f"{at}experts.down": (Part(f"{mlp}experts.down_proj", (all_of, width, hidden), 1),),
            f"{at}experts.down.bias": (Part(f"{mlp}experts.down_proj_bias", (all_of, hidden), is_added=True),),
        }

    def attention(self, config: ModelConfig, weights: Weights, index: int) -> Attention:
        """Return a layer's attention, with its sinks."""
        return replace(super().attention(config, weights, index), sinks=weights.tensor(f"layers.{index}.sinks").float())

    def expert_block(self, config: ModelConfig, weights: Weights, at: str) -> Experts:
        """Return the experts of a layer, whose gates and inputs stand by turns in the checkpoint."""
        experts, gate_up, down = experts_of(config), f"{at}experts.gate_up", f"{at}experts.down"
        return Experts(
            gate_up=stacked(_apart(weights.experts(gate_up, experts.count)), experts.count, is_gated=True),
            gate_up_bias=torch.cat(_turns(weights.tensor(f"{gate_up}.bias").T)).T.contiguous(),
            down=stacked((own.T for own in weights.experts(down, experts.count)), experts.count, is_gated=False),
            down_bias=weights.tensor(f"{down}.bias"),
            count=experts.count,
            slots=experts.slots,
            width=experts.intermediate_size,
            gate="swiglu_clamped",
            alpha=experts.alpha,
            limit=experts.limit,
            batch_invariant=weights.batch_invariant,
        )


def _turns(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the even rows and the odd ones."""
    return rows[::2], rows[1::2]


def _apart(weights: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield each [in_features, out_features] as [out_features, in_features], all gates before what they are for."""
    for own in weights:
        yield torch.cat(_turns(own.T))
