"""GGUF's architectures: their metadata as fields of a config.json, their tensors by the names of transformers.

What a file does not say, such as which layers of Gemma have a window, is the same in all models of an architecture.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.gguf.container import GgufTensor, JoinedView, Metadata, TensorView
from graphdecode.models.gguf.ropes import ROPE_TENSORS, rope_settings
from graphdecode.models.gguf.settings import (
    Settings,
    bamba_settings,
    deepseek_settings,
    expert_widths,
    gemma4_settings,
    gemma_settings,
    granite_hybrid_settings,
    granite_settings,
    is_bamba,
    lfm2_settings,
    llama4_settings,
    nemotron_h_settings,
    norm_eps,
    phi3_settings,
    qwen35_settings,
    windows,
)
from graphdecode.models.gguf.tokenizer import stop_token_ids

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROTATED = ("attn_q", "attn_k")
ONE_ROW = ("ffn_gate_inp_shexp",)  # a vector in the file
_NAMESAKES = {"Mistral": "Llama"}  # models of transformers that are called another one's in GGUF
_CONVS = ("ssm_conv1d.weight", "shortconv.conv.weight")  # [channels, width] in the file
_VECTORS = ("ssm_a", "ssm_d", "ssm_norm.weight")  # in rows in some files
# without `.weight` in transformers
_WITHOUT_ENDING = (
    "attn_sinks", "exp_probs_b", "ffn_down_exps.scale", "ffn_gate_inp.scale", "layer_output_scale", "ssm_dt",
)  # fmt: skip

View = TensorView | JoinedView


class Join(NamedTuple):
    """A matrix of transformers that GGUF stores as several tensors; see `JoinedView`."""

    parts: tuple[str, ...]  # GGUF's names of them
    join: Callable[..., Tensor]
    keeps_rows: bool


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF."""

    name: str  # as the names of classes in transformers begin, such as "Llama"
    # GGUF's names of a layer's tensors, with an ending where it matters -> those of transformers; {expert} is each of a
    # stack
    layer: Mapping[str, str]
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)  # names of the tensors that no layer has
    interleaved_rope: bool = False  # rows of q and k: rotary pairs are adjacent, not half a head apart
    norm_shift: float = 0.0  # what is added to the norms' stored gains
    reorders_values: bool = False  # value heads are in another order; see `_value_order`
    # transformers' names of matrices in several tensors of a layer -> the parts, given the metadata
    joins: Callable[[Metadata], Mapping[str, Join]] = field(default=lambda metadata: {})
    layers_differ: bool = False  # layers differ in size
    has_latent_keys: bool = False  # latent attention (DeepSeek)
    is_untied: bool = False  # never tied in transformers: the embedding is the output layer, too, in files without one
    # fields of config.json beyond those that all of them have: constants, counts and numbers of the metadata (with
    # a default; None: required), and what `more` computes
    constants: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    window_period: int = 0  # by default each such layer sees all tokens, the others a window; 0: no windows
    more: Callable[[Metadata], Settings] = field(default=lambda metadata: {})

    @property
    def has_states(self) -> bool:
        """Whether layers have recurrent states."""
        return any(part.startswith(("ssm_", "shortconv")) for part in self.layer)

    def settings(self, fields: Mapping[str, Any], stored: Mapping[str, GgufTensor]) -> Settings:
        """Return the fields of config.json, given a file's metadata and tensors."""
        metadata = Metadata(fields)
        layers, hidden = metadata.num_layers, metadata.count("embedding_length")
        counted = metadata.most if self.has_states or self.layers_differ else metadata.count  # some may have none
        heads = counted("attention.head_count") or 1
        stated = "rope.dimension_count" if self.has_latent_keys else "attention.key_length"
        head_dim = metadata.count(stated, hidden // heads)
        if not self.has_latent_keys and metadata.count("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{metadata.architecture}.attention.value_length must be {head_dim} like the keys'"
            )
        _check_values(metadata)
        _check_counts(metadata, stored)
        _check_experts(stored)
        embedding, keys = stored["token_embd.weight"], [name for name in stored if name.endswith(".attn_k.weight")]
        return {
            "architectures": [f"{self.name}ForCausalLM"],
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": counted("feed_forward_length") or 1,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": counted("attention.head_count_kv", heads) or heads,
            "head_dim": head_dim,
            "rms_norm_eps": norm_eps(metadata),
            "max_position_embeddings": metadata.count("context_length"),
            "tie_word_embeddings": "output.weight" not in stored,
            "attention_bias": "blk.0.attn_q.bias" in stored,
            "mlp_bias": "blk.0.ffn_up.bias" in stored,
            "mamba_rms_norm": "blk.0.ssm_norm.weight" in stored,
            "attention_k_eq_v": any(name.replace("attn_k", "attn_v") not in stored for name in keys),
            "vocab_size_per_layer_input": stored.get("per_layer_token_embd.weight", embedding).shape[0],
            "eos_token_id": stop_token_ids(fields),
            "dtype": _dtype(stored),
            **rope_settings(metadata, stored, head_dim),
            **(windows(metadata, self.window_period) if self.window_period else {}),
            **self.constants,
            **{ours: metadata.count(name) for ours, name in self.counts.items()},
            **{ours: metadata.number(*stated) for ours, stated in self.numbers.items()},
            **self.more(metadata),
        }

    def views(self, fields: Mapping[str, Any], stored: Mapping[str, GgufTensor]) -> dict[str, View]:
        """Return all tensors as transformers has them, by its names; those without one by their own."""
        return dict(self._views(Metadata(fields), stored))

    def _views(self, metadata: Metadata, stored: Mapping[str, GgufTensor]) -> Iterator[tuple[str, View]]:
        joins = self.joins(metadata)
        joined = {part for join in joins.values() for part in join.parts}
        layers = f"{self.outer['token_embd'].partition('.')[0]}.layers"  # in transformers, beside the embedding
        for name, tensor in stored.items():
            module, _, kind = name.rpartition(".")
            layer, _, part = module.removeprefix("blk.").partition(".")
            if module.startswith("blk.") and not part:  # without an ending
                part, kind = kind, ""
            key = f"{part}.{kind}" if f"{part}.{kind}" in self.layer else part
            if name.startswith("blk.") and layer.isdecimal() and key in self.layer:
                whole = f"{layers}.{layer}.{self.layer[key]}"
                if key in _WITHOUT_ENDING and key != part:
                    yield whole, TensorView(tensor, tensor.shape)
                else:
                    yield from self._of_layer(metadata, tensor, (part, kind), whole)
            elif part in joined:
                for theirs, join in joins.items():
                    names = [f"blk.{layer}.{piece}.weight" for piece in join.parts]
                    if name == names[0] and all(each in stored for each in names):
                        parts = tuple(TensorView(stored[each], stored[each].shape) for each in names)
                        yield f"{layers}.{layer}.{theirs}.weight", JoinedView(parts, join.join, join.keeps_rows)
            elif module in self.outer:
                if name == "token_embd.weight" and self.is_untied and "output.weight" not in stored:
                    yield f"{self.outer['output']}.{kind}", TensorView(tensor, tensor.shape)
                yield f"{self.outer[module]}.{kind}", TensorView(tensor, tensor.shape, shift=self._shift(module))
            elif name not in ROPE_TENSORS:
                yield name, TensorView(tensor, tensor.shape)

    def _of_layer(
        self, metadata: Metadata, tensor: GgufTensor, key: tuple[str, str], name: str
    ) -> Iterator[tuple[str, TensorView]]:
        part, kind = key
        order = _value_order(metadata, part) if self.reorders_values else {}
        ending = f".{kind}" if kind else ""
        if part + ending in _VECTORS:
            yield name + ending, TensorView(tensor, (math.prod(tensor.shape),), is_log=part == "ssm_a", **order)
        elif part + ending in _CONVS:
            yield f"{name}.{kind}", TensorView(tensor, (*tensor.shape[:-1], 1, tensor.shape[-1]), **order)
        elif part in ONE_ROW:
            yield f"{name}.{kind}", TensorView(tensor, (1, tensor.shape[-1]))
        elif part in _WITHOUT_ENDING:
            yield name, TensorView(tensor, tensor.shape, **order)
        elif "{expert}" in name:
            halves = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("",)
            rows = tensor.shape[1] // len(halves)
            for index in range(tensor.shape[0] * len(halves)):
                expert, half = divmod(index, len(halves))
                whole = name.replace("gate_up_proj", halves[half]) if halves[half] else name
                view = TensorView(tensor, (rows, *tensor.shape[2:]), first_row=index * rows)
                yield f"{whole}.{kind}".format(expert=expert), view
        else:
            head_rows = 0
            if self.interleaved_rope and part in ROTATED:
                heads = metadata.count("attention.head_count")
                kv_heads = metadata.most("attention.head_count_kv", heads) or heads
                head_rows = tensor.shape[0] // (kv_heads if part == "attn_k" else heads)
            view = TensorView(tensor, tensor.shape, head_dim=head_rows, shift=self._shift(part), **order)
            yield f"{name}.{kind or 'weight'}", view  # Falcon-H1 has norms without an ending

    def _shift(self, part: str) -> float:
        return self.norm_shift if part.endswith("norm") else 0.0


_REFUSED = {  # fields that llama.cpp reads and no decoder here has -> their neutral value
    "attention.causal": True,
    "attention.temperature_scale": 0.0,
}


def _check_values(metadata: Metadata) -> None:
    """Refuse values that would change results."""
    for name, neutral in _REFUSED.items():
        value = metadata.whole(f"{metadata.architecture}.{name}", type(neutral), neutral)
        if value != neutral:
            named = f"{metadata.architecture}.{name} {value}"
            raise UnsupportedModelError(f"{named} is not supported; supported is {neutral}")


def _check_counts(metadata: Metadata, stored: Mapping[str, GgufTensor]) -> None:
    """Refuse counts that do not fit the tensors, before memory is allocated for them."""
    if "token_embd.weight" not in stored:
        raise UnsupportedModelError("the tensor token_embd.weight is missing")
    num_blocks = len({name.split(".")[1] for name in stored if name.startswith("blk.")})
    stacks = {tensor.shape[0] for name, tensor in stored.items() if name.endswith("_exps.weight")}
    for name, counts in (("block_count", {num_blocks}), ("expert_count", stacks)):
        stated = metadata.num_layers if name == "block_count" else metadata.number(name, 0) and metadata.count(name)
        if stated and counts != {stated}:
            actual = " and ".join(map(str, sorted(counts))) or "none"
            raise UnsupportedModelError(f"{metadata.architecture}.{name} is {stated}, and the tensors are of {actual}")


def _check_experts(stored: Mapping[str, GgufTensor]) -> None:
    """Refuse stacks without an axis of experts, and gates with another shape than their up projection."""
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith("_exps") or kind == "scale":
            continue
        dims = 3 if kind == "weight" else 2
        if len(tensor.shape) != dims:
            raise UnsupportedModelError(f"{name} has the shape {list(tensor.shape)}, and should have {dims} dimensions")
        gate = stored.get(name.replace("ffn_up_exps", "ffn_gate_exps"), tensor)
        if gate.shape != tensor.shape:
            raise UnsupportedModelError(f"{name} has the shape {list(tensor.shape)}, and its gate {list(gate.shape)}")


def _dtype(stored: Mapping[str, GgufTensor]) -> str:
    """Return the default dtype: float32 or float16 if all matrices are, else bfloat16 for its range."""
    kinds = {tensor.block.name for tensor in stored.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _qwen3_next_joins(metadata: Metadata) -> Mapping[str, Join]:
    """Return the join of queries, keys, values and gates, which transformers groups by key head."""
    key_heads, keys = metadata.count("ssm.group_count"), metadata.count("ssm.state_size")

    def by_head(qkv: Tensor, gates: Tensor) -> Tensor:
        size = key_heads * keys
        parts = *qkv.split((size, size, len(qkv) - 2 * size)), gates
        return torch.cat([part.unflatten(0, (key_heads, -1)) for part in parts], 1).flatten(0, 1)

    return {"linear_attn.in_proj_qkvz": Join(("attn_qkv", "attn_gate"), by_head, keeps_rows=True)}


def _deepseek_joins(metadata: Metadata) -> Mapping[str, Join]:
    """Return the join of what expands latents to keys, transposed in the file, and to values, by head."""

    def by_head(keys: Tensor, values: Tensor) -> Tensor:
        return torch.cat((keys.mT, values), 1).flatten(0, 1)

    return {"self_attn.kv_b_proj": Join(("attn_k_b", "attn_v_b"), by_head, keeps_rows=False)}


def _value_order(metadata: Metadata, part: str) -> dict[str, Any]:
    """Return the order of a delta net's rows or columns: the file does not group value heads by key heads."""
    heads, key_heads = metadata.count("ssm.time_step_rank"), metadata.count("ssm.group_count")
    if part not in _VALUE_PARTS or heads % key_heads or heads == key_heads:
        return {}
    is_whole = part not in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
    width = metadata.count("ssm.inner_size") // heads if is_whole else 1
    before = 2 * key_heads * metadata.count("ssm.state_size") if part in ("attn_qkv", "ssm_conv1d") else 0
    values = np.arange(heads * width).reshape(-1, key_heads, width).swapaxes(0, 1).ravel()
    return {"columns" if part == "ssm_out" else "rows": np.concatenate((np.arange(before), before + values))}


def _attention(module: str, output: str = "o_proj") -> dict[str, str]:
    """Return the tensors of attention, given its module in a layer."""
    return {
        **{f"attn_{part}": f"{module}.{part}_proj" for part in "qkv"},
        "attn_output": f"{module}.{output}",
    }


def _mlp(
    module: str, products: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), suffix: str = ""
) -> dict[str, str]:
    """Return the tensors of a gated MLP or expert, given its module in a layer, and the suffix of their names."""
    parts = ("gate", "up", "down")
    return {f"ffn_{part}{suffix}": f"{module}.{product}" for part, product in zip(parts, products, strict=True)}


_W123 = ("w1", "w3", "w2")  # products of a gated MLP in some models
_ATTENTION = _attention("self_attn")
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_NORMS_AROUND = _NORMS_AFTER | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_MLP = _mlp("mlp")
_DENSE = _ATTENTION | _NORMS_BEFORE | _MLP
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | _mlp("mlp.experts.{expert}", suffix="_exps")
_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | _mlp("mlp.shared_expert", suffix="_shexp")
_MIXTRAL_EXPERTS = {"ffn_gate_inp": "block_sparse_moe.gate"}
_MIXTRAL_EXPERTS |= _mlp("block_sparse_moe.experts.{expert}", _W123, "_exps")
_GPT_OSS = {
    "attn_sinks": "self_attn.sinks",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
_SSM = ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")
_SSM_PARTS = ("ssm_in", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_dt", "ssm_norm", "ssm_out")


def _ssm(module: str) -> dict[str, str]:
    """Return the tensors of a Mamba2 mixer, given its module in a layer."""
    return {part: f"{module}.{name}" for part, name in zip(_SSM_PARTS, _SSM, strict=True)}


_MAMBA2_OUTER = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_FALCON_H1 = {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"} | _mlp("feed_forward")
_NEMOTRON_H = _attention("mixer") | {"attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"}
_LFM2 = {
    **_attention("self_attn", "out_proj"),
    **_mlp("feed_forward", _W123),
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "post_attention_norm": "post_attention_layernorm",
}
_QWEN3_NEXT = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
}
_VALUE_PARTS = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt", "ssm_conv1d", "ssm_out")
_GEMMA4 = {
    **_mlp("experts.{expert}", suffix="_exps"),
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": "experts.{expert}.gate_up_proj",
    "inp_gate": "per_layer_input_gate",
    "layer_output_scale": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "proj": "per_layer_projection",
}
_GEMMA4_OUTER = {
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
}
_LLAMA4 = _mlp("feed_forward") | {"ffn_gate_inp": "feed_forward.router"}
_LLAMA4 |= _mlp("feed_forward.experts.{expert}", suffix="_exps") | _mlp("feed_forward.shared_expert", suffix="_shexp")
_DEEPSEEK = {
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **_mlp("mlp.shared_experts", suffix="_shexp"),
}
_EXPERT_COUNTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_LOCAL_COUNTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_DEEPSEEK_COUNTS = {
    "kv_lora_rank": "attention.kv_lora_rank",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_key_value_heads": "attention.head_count",
    "qk_rope_head_dim": "rope.dimension_count",
}
_LLAMA4_COUNTS = _LOCAL_COUNTS | {
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "intermediate_size": "expert_feed_forward_length",
    "intermediate_size_mlp": "feed_forward_length",
}
_DELTA_NET_COUNTS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_MAMBA2_COUNTS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_ssm": "ssm.inner_size",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}
_STATE_COUNTS = {"conv_kernel": "ssm.conv_kernel", "n_groups": "ssm.group_count"}
_EPS = ("attention.layer_norm_rms_epsilon", None)
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama", _DENSE, interleaved_rope=True),
    "mixtral": Architecture(
        "Mixtral", _ATTENTION | _NORMS_BEFORE | _MIXTRAL_EXPERTS, interleaved_rope=True, counts=_LOCAL_COUNTS
    ),
    "qwen2": Architecture("Qwen2", _DENSE),
    "qwen2moe": Architecture(
        "Qwen2Moe",
        _ATTENTION | _NORMS_BEFORE | _EXPERTS | _SHARED_EXPERT,
        counts=_EXPERT_COUNTS,
        more=expert_widths,
    ),
    "qwen3": Architecture("Qwen3", _DENSE | _QK_NORMS),
    "qwen3moe": Architecture(
        "Qwen3Moe",
        _ATTENTION | _QK_NORMS | _NORMS_BEFORE | _EXPERTS,
        constants={"norm_topk_prob": True},
        counts=_EXPERT_COUNTS,
        more=expert_widths,
    ),
    "gemma2": Architecture(
        "Gemma2",
        _ATTENTION | _NORMS_AROUND | _MLP,
        norm_shift=-1.0,
        window_period=2,
        more=partial(gemma_settings, attention_cap=50.0, logits_cap=30.0),
    ),
    "gemma3": Architecture(
        "Gemma3",
        _ATTENTION | _QK_NORMS | _NORMS_AROUND | _MLP,
        norm_shift=-1.0,
        window_period=6,
        more=partial(gemma_settings, attention_cap=None, logits_cap=0.0),
    ),
    "phi3": Architecture("Phi3", _FUSED | _NORMS_BEFORE | _FUSED_MLP, more=phi3_settings),
    "olmo2": Architecture("Olmo2", _ATTENTION | _QK_NORMS | _NORMS_AFTER | _MLP),
    "olmo3": Architecture("Olmo3", _ATTENTION | _QK_NORMS | _NORMS_AFTER | _MLP, window_period=4),
    "smollm3": Architecture("SmolLM3", _DENSE, interleaved_rope=True),
    "gpt-oss": Architecture(
        "GptOss",
        _ATTENTION | _GPT_OSS | _EXPERTS | {"ffn_gate_inp": "mlp.router"},
        counts=_LOCAL_COUNTS,
        window_period=2,
    ),
    "granite": Architecture("Granite", _DENSE, interleaved_rope=True, more=granite_settings),
    "granitehybrid": Architecture(
        "GraniteMoeHybrid",
        _DENSE | _ssm("mamba"),
        interleaved_rope=True,
        constants={"num_local_experts": 0},
        counts=_MAMBA2_COUNTS,
        more=granite_hybrid_settings,
    ),
    "bamba": Architecture(
        "Bamba",
        _ATTENTION | _FALCON_H1 | _ssm("mamba"),
        outer=OUTER | {"output_norm": "model.final_layernorm"},
        interleaved_rope=True,
        counts=_MAMBA2_COUNTS,
        more=bamba_settings,
    ),
    "falcon-h1": Architecture(
        "FalconH1",
        _ATTENTION | _FALCON_H1 | _ssm("mamba"),
        outer=OUTER | {"output_norm": "model.final_layernorm"},
        constants={"mamba_norm_before_gate": False},  # its multipliers are part of the weights
        counts=_MAMBA2_COUNTS,
    ),
    "mamba2": Architecture(
        "Mamba2",
        {"attn_norm": "norm"} | _ssm("mixer"),
        outer=_MAMBA2_OUTER,
        constants={"head_dim": "auto"},
        counts=_STATE_COUNTS
        | {"mamba_d_ssm": "ssm.inner_size", "num_heads": "ssm.time_step_rank", "state_size": "ssm.state_size"},
        numbers={"layer_norm_epsilon": _EPS},
    ),
    "nemotron_h": Architecture(
        "NemotronH",
        _NEMOTRON_H | _ssm("mixer"),
        outer=_MAMBA2_OUTER,
        counts=_STATE_COUNTS | {"mamba_num_heads": "ssm.time_step_rank", "ssm_state_size": "ssm.state_size"},
        is_untied=True,
        more=nemotron_h_settings,
    ),
    "lfm2": Architecture(
        "Lfm2",
        _LFM2,
        outer=OUTER | {"token_embd_norm": "model.embedding_norm"},
        constants={"block_auto_adjust_ff_dim": False},
        counts={"conv_L_cache": "shortconv.l_cache"},
        numbers={"norm_eps": _EPS},
        more=lfm2_settings,
    ),
    "qwen35": Architecture(
        "Qwen3_5",
        _ATTENTION | _QK_NORMS | {"attn_norm": "input_layernorm"} | _MLP | _ssm("linear_attn") | _DELTA_NET,
        norm_shift=-1.0,
        reorders_values=True,
        counts=_DELTA_NET_COUNTS,
        more=qwen35_settings,
    ),
    "qwen3next": Architecture(
        "Qwen3Next",
        _ATTENTION | _QK_NORMS | _EXPERTS | _SHARED_EXPERT | _ssm("linear_attn") | _QWEN3_NEXT,
        norm_shift=-1.0,
        joins=_qwen3_next_joins,
        counts=_EXPERT_COUNTS | _DELTA_NET_COUNTS,
        more=qwen35_settings,
    ),
    "gemma4": Architecture(
        "Gemma4",
        _ATTENTION | _QK_NORMS | _NORMS_AROUND | _MLP | _GEMMA4,
        outer=OUTER | _GEMMA4_OUTER,
        layers_differ=True,
        counts={"global_head_dim": "attention.key_length", "head_dim": "attention.key_length_swa"},
        window_period=6,
        more=gemma4_settings,
    ),
    "llama4": Architecture("Llama4", _ATTENTION | _NORMS_BEFORE | _LLAMA4, counts=_LLAMA4_COUNTS, more=llama4_settings),
    "deepseek2": Architecture(
        "DeepseekV2",
        _NORMS_BEFORE | _MLP | _EXPERTS | _DEEPSEEK,
        joins=_deepseek_joins,
        has_latent_keys=True,
        counts=_DEEPSEEK_COUNTS,
        more=deepseek_settings,
    ),
}
# GLM-4.7-Flash too
ARCHITECTURES["deepseek3"] = replace(ARCHITECTURES["deepseek2"], name="DeepseekV3")
_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func
_GLM_LAYERS, _GLM_TOKENS = (47, 48), 154880  # of GLM-4.7-Flash, whose first files do not state the function
# architectures that a header calls by another name
_HEADER_NAMES = {"mixtral": "llama", "olmo3": "olmo2", "bamba": "granitehybrid", "deepseek3": "deepseek2"}


def _gating(metadata: Metadata) -> int:
    """Return the function of DeepSeek's router."""
    is_glm = metadata.count("block_count") in _GLM_LAYERS and metadata.number("vocab_size", 0) == _GLM_TOKENS
    value = metadata.number("expert_gating_func", 0) or (_SIGMOID if is_glm else _SOFTMAX)
    if value not in (_SOFTMAX, _SIGMOID):
        raise UnsupportedModelError(f"deepseek2.expert_gating_func must be {_SOFTMAX} or {_SIGMOID}, got {value}")
    return int(value)


def architecture_of(fields: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a file, given its metadata."""
    metadata = Metadata(fields)
    name = metadata.architecture
    if name == "llama" and metadata.number("expert_count", 0):
        name = "mixtral"
    if name == "granitehybrid" and is_bamba(metadata):
        name = "bamba"
    if name == "deepseek2" and _gating(metadata) == _SIGMOID:
        name = "deepseek3"
    if name == "olmo2" and metadata.number("attention.sliding_window", 0):
        name = "olmo3"
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"the general.architecture {name!r:.80} is not supported; supported are {known}")
    return ARCHITECTURES[name]


def architecture_for(model: str) -> tuple[str, Architecture]:
    """Return GGUF's name of an architecture, and the architecture, given its class in transformers."""
    kind = model.removesuffix("ForCausalLM")
    for name, architecture in ARCHITECTURES.items():
        if architecture.name == _NAMESAKES.get(kind, kind):
            return _HEADER_NAMES.get(name, name), architecture
    raise UnsupportedModelError(f"it cannot be an adapter of {model}, whose tensors in GGUF are not known")
