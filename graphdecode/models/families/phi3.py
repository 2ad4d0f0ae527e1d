"""Phi-3 (Abdin et al., 2024) and Phi-4-mini: fused products, LongRoPE, partial rotary embedding."""

from typing import Any, ClassVar

from graphdecode.models.config import ModelConfig, layer_windows
from graphdecode.models.families.llama import Biases, Llama, head_run
from graphdecode.models.weight_map import Run, WeightMap, product


class Phi3(Llama):
    """Phi-3 and Phi-4-mini; all layers have the window, if there is one."""

    architecture = "Phi3ForCausalLM"
    biases: ClassVar[Biases] = {}
    has_partial_rotary = True
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        """Return the configuration; `su` and `yarn` mean LongRoPE in older files."""
        for name in ("rope_scaling", "rope_parameters"):
            scaling = settings.get(name)
            if isinstance(scaling, dict) and (scaling.get("rope_type") or scaling.get("type")) in ("su", "yarn"):
                settings = settings | {name: scaling | {"rope_type": "longrope"}}
        return super().config(settings)

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        return layer_windows(settings, [True] * layers)

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        hidden, ff = config.hidden_size, config.intermediate_size
        q, kv = Run(config.num_attention_heads * config.head_dim), head_run(config)
        return super().layer_weights(config, at, name) | {
            **product(f"{at}qkv", {f"{name}self_attn.qkv_proj": (q, kv, kv)}, hidden, split=0),
            **product(f"{at}gate_up", {f"{name}mlp.gate_up_proj": (Run(ff), Run(ff))}, hidden, split=0),
        }
