"""What GGUF calls an architecture, its fields and its tensors, in the words of a config.json and of safetensors.

What a file does not say, such as which layers of Gemma see a window, is what the architecture's models all have.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.gguf.container import GgufTensor, Metadata, TensorView
from graphdecode.models.gguf.ropes import ROPE_TENSORS, rope_settings
from graphdecode.models.gguf.tokenizer import stop_token_ids

_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # these alone scale queries by other than their heads' channels
EDGES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROTATED = ("attn_q", "attn_k")
ONE_ROW = ("ffn_gate_inp_shexp",)  # a vector in the file
_NAMESAKES = {"Mistral": "Llama"}  # models of transformers that are called another one's in GGUF
_CONVS = ("ssm_conv1d.weight", "shortconv.conv.weight")  # [channels, width] in the file
_VECTORS = ("ssm_a", "ssm_d", "ssm_norm.weight")  # in rows in some files

Settings = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF."""

    name: str  # as the names of classes in transformers begin, such as "Llama"
    layer: Mapping[str, str]  # GGUF's names of a layer's tensors -> those of transformers; {expert} is each of a stack
    prefix: str = "model.layers"  # what the names of a layer's tensors begin with
    edges: Mapping[str, str] = field(default_factory=lambda: EDGES)  # names of the tensors that no layer has
    neighbours: bool = False  # the two halves of a rotary pair are neighbours among the rows of q and k
    bare: tuple[str, ...] = ()  # tensors whose names have no ending in transformers
    norm_shift: float = 0.0  # what is added to the norms' stored gains
    tiles_values: bool = False  # heads of values are in another order; see `_tiled`
    more: Callable[[Metadata], Settings] = field(default=lambda metadata: {})  # fields beside those that all have

    @property
    def has_states(self) -> bool:
        """Whether layers have recurrent states."""
        return any(part.startswith(("ssm_", "shortconv")) for part in self.layer)

    def settings(self, fields: Mapping[str, Any], stored: Mapping[str, GgufTensor]) -> Settings:
        """Return the fields of the config.json that a model has, given the metadata of its file and its tensors."""
        metadata = Metadata(fields)
        layers, hidden = metadata.count("block_count"), metadata.count("embedding_length")
        counted = metadata.most if self.has_states else metadata.count  # some of its layers may have none
        heads = counted("attention.head_count") or 1
        head_dim = metadata.count("attention.key_length", hidden // heads)
        if metadata.count("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{metadata.architecture}.attention.value_length must be {head_dim} like the keys'"
            )
        _check_counts(metadata, stored)
        _check_experts(stored)
        return {
            "architectures": [f"{self.name}ForCausalLM"],
            "vocab_size": stored["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": counted("feed_forward_length") or 1,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": counted("attention.head_count_kv", heads) or heads,
            "head_dim": head_dim,
            "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": metadata.count("context_length"),
            "tie_word_embeddings": "output.weight" not in stored,
            "attention_bias": "blk.0.attn_q.bias" in stored,
            "mlp_bias": "blk.0.ffn_up.bias" in stored,
            "mamba_rms_norm": "blk.0.ssm_norm.weight" in stored,
            "eos_token_id": stop_token_ids(fields),
            "dtype": _dtype(stored),
            **rope_settings(metadata, stored, head_dim),
            **self.more(metadata),
        }

    def views(self, fields: Mapping[str, Any], stored: Mapping[str, GgufTensor]) -> Iterator[tuple[str, TensorView]]:
        """Yield the tensors as transformers has them, with its names; one that it has no name for has its own."""
        metadata = Metadata(fields)
        for name, tensor in stored.items():
            place, _, kind = name.rpartition(".")
            layer, _, part = place.removeprefix("blk.").partition(".")
            if place.startswith("blk.") and not part:  # without an ending
                part, kind = kind, ""
            if name.startswith("blk.") and layer.isdecimal() and part in self.layer:
                whole = f"{self.prefix}.{layer}.{self.layer[part]}"
                yield from self._of_layer(metadata, tensor, (part, kind), whole)
            elif place in self.edges:
                yield f"{self.edges[place]}.{kind}", TensorView(tensor, tensor.shape, shift=self._shift(place))
            elif name not in ROPE_TENSORS:
                yield name, TensorView(tensor, tensor.shape)

    def _of_layer(
        self, metadata: Metadata, tensor: GgufTensor, place: tuple[str, str], name: str
    ) -> Iterator[tuple[str, TensorView]]:
        part, kind = place
        order = _tiled(metadata, part) if self.tiles_values else {}
        ending = f".{kind}" if kind else ""
        if part + ending in _VECTORS:
            yield name + ending, TensorView(tensor, (math.prod(tensor.shape),), is_log=part == "ssm_a", **order)
        elif part + ending in _CONVS:
            yield f"{name}.{kind}", TensorView(tensor, (*tensor.shape[:-1], 1, tensor.shape[-1]), **order)
        elif part in ONE_ROW:
            yield f"{name}.{kind}", TensorView(tensor, (1, tensor.shape[-1]))
        elif part in self.bare:
            yield name, TensorView(tensor, tensor.shape, **order)
        elif "{expert}" in name:
            rows = tensor.shape[1]
            for expert in range(tensor.shape[0]):
                own = TensorView(tensor, tensor.shape[1:], first_row=expert * rows)
                yield f"{name}.{kind}".format(expert=expert), own
        else:
            head_rows = 0
            if self.neighbours and part in ROTATED:
                heads = metadata.count("attention.head_count")
                kv_heads = metadata.most("attention.head_count_kv", heads) or heads
                head_rows = tensor.shape[0] // (kv_heads if part == "attn_k" else heads)
            view = TensorView(tensor, tensor.shape, head_dim=head_rows, shift=self._shift(part), **order)
            yield f"{name}.{kind or 'weight'}", view  # Falcon-H1 has norms without an ending

    def _shift(self, part: str) -> float:
        return self.norm_shift if part.endswith("norm") else 0.0


def _check_counts(metadata: Metadata, stored: Mapping[str, GgufTensor]) -> None:
    """Refuse counts that do not fit the tensors, before anything is allocated for them."""
    if "token_embd.weight" not in stored:
        raise UnsupportedModelError("the tensor token_embd.weight is missing")
    held = len({name.split(".")[1] for name in stored if name.startswith("blk.")})
    stacks = {tensor.shape[0] for name, tensor in stored.items() if name.endswith("_exps.weight")}
    for name, found in (("block_count", {held}), ("expert_count", stacks)):
        stated = metadata.count(name) if metadata.number(name, 0) or found == {held} else 0
        if stated and found != {stated}:
            there = " and ".join(map(str, sorted(found))) or "none"
            raise UnsupportedModelError(f"{metadata.architecture}.{name} is {stated}, and the tensors are of {there}")


def _check_experts(stored: Mapping[str, GgufTensor]) -> None:
    """Refuse stacks without an axis of experts, and those of one product in transformers that are not alike."""
    for name, tensor in stored.items():
        place, _, kind = name.rpartition(".")
        if not place.endswith("_exps"):
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


def _mixtral(metadata: Metadata) -> Settings:
    return {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "sliding_window": None,
    }


def _qwen3_moe(metadata: Metadata) -> Settings:
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(metadata: Metadata) -> Settings:
    shared = {"shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length")}
    return _qwen3_moe(metadata) | {"norm_topk_prob": False} | shared


def _gemma(metadata: Metadata, period: int, attention_cap: float | None, logits_cap: float) -> Settings:
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    scalar = metadata.count("attention.key_length", hidden // heads)
    if metadata.count("block_count") == _GEMMA_27B_LAYERS[metadata.architecture]:
        scalar = hidden // heads
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        **_windows(metadata, period),
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": attention_cap and metadata.number("attn_logit_softcapping", attention_cap),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", logits_cap) or None,
    }


def _phi3(metadata: Metadata) -> Settings:
    trained = metadata.count("context_length")
    return {
        "sliding_window": metadata.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length", trained),
    }


def _smollm3(metadata: Metadata) -> Settings:
    layers = metadata.count("block_count")
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)], "use_sliding_window": False}


def _granite(metadata: Metadata) -> Settings:
    head_dim = metadata.count("embedding_length") / metadata.count("attention.head_count")
    return {
        "attention_multiplier": metadata.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _gpt_oss(metadata: Metadata) -> Settings:
    return {**_mixtral(metadata), **_windows(metadata, period=2), "swiglu_limit": 7.0}


def _mamba2(metadata: Metadata) -> Settings:
    """Return the sizes of Mamba2's mixers."""
    heads, channels = metadata.count("ssm.time_step_rank"), metadata.count("ssm.inner_size")
    return {
        "mamba_d_conv": metadata.count("ssm.conv_kernel"),
        "mamba_d_head": channels // heads,
        "mamba_d_ssm": channels,
        "mamba_d_state": metadata.count("ssm.state_size"),
        "mamba_expand": 1,
        "mamba_n_groups": metadata.count("ssm.group_count"),
        "mamba_n_heads": heads,
    }


def _kinds(metadata: Metadata, recurrent: str) -> list[str]:
    """Return the kinds of layers: those that have no heads of keys are recurrent."""
    heads = metadata.layers("attention.head_count_kv") or [0] * metadata.count("block_count")
    return ["full_attention" if count else recurrent for count in heads]


def _mamba2_alone(metadata: Metadata) -> Settings:
    sizes, eps = _mamba2(metadata), metadata.number("attention.layer_norm_rms_epsilon")
    names = {"conv_kernel": "d_conv", "head_dim": "d_head", "n_groups": "n_groups", "state_size": "d_state"}
    renamed = {theirs: sizes[f"mamba_{ours}"] for theirs, ours in names.items()}
    own = {"mamba_d_ssm": sizes["mamba_d_ssm"], "num_heads": sizes["mamba_n_heads"]}
    return renamed | own | {"layer_norm_epsilon": eps, "num_key_value_heads": 1, "num_attention_heads": 1}


def _falcon_h1(metadata: Metadata) -> Settings:
    """Return its sizes; its multipliers are part of the weights."""
    return _mamba2(metadata) | {"mamba_norm_before_gate": False}


def _granite_hybrid(metadata: Metadata) -> Settings:
    if metadata.whole("granitehybrid.rope.scaling.finetuned", bool, False):
        raise UnsupportedModelError(
            "granitehybrid with a rotary embedding, which is Bamba, is read from safetensors alone"
        )
    sizes = _mamba2(metadata) | {"layer_types": _kinds(metadata, "mamba"), "num_local_experts": 0}
    return _granite(metadata) | sizes | {"shared_intermediate_size": metadata.most("feed_forward_length")}


def _nemotron_h(metadata: Metadata) -> Settings:
    sizes, kinds = _mamba2(metadata), _kinds(metadata, "mamba")
    widths = metadata.layers("feed_forward_length") or [0] * len(kinds)
    kinds = ["mlp" if width else kind for kind, width in zip(kinds, widths, strict=False)]
    return {
        "conv_kernel": sizes["mamba_d_conv"],
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "layers_block_type": kinds,
        "mamba_head_dim": sizes["mamba_d_head"],
        "mamba_num_heads": sizes["mamba_n_heads"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
    }


def _lfm2(metadata: Metadata) -> Settings:
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "layer_types": _kinds(metadata, "conv"),
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _qwen35(metadata: Metadata) -> Settings:
    heads = metadata.count("ssm.time_step_rank")
    return {
        "full_attention_interval": metadata.count("full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.count("ssm.state_size"),
        "linear_num_key_heads": metadata.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": metadata.count("ssm.inner_size") // heads,
    }


def _tiled(metadata: Metadata, part: str) -> dict[str, Any]:
    """Return rows or columns of a delta net's tensor, whose heads of values are not ordered by their heads of keys."""
    heads, key_heads = metadata.count("ssm.time_step_rank"), metadata.count("ssm.group_count")
    if part not in _VALUE_PARTS or heads % key_heads or heads == key_heads:
        return {}
    is_whole = part not in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
    width = metadata.count("ssm.inner_size") // heads if is_whole else 1
    before = 2 * key_heads * metadata.count("ssm.state_size") if part in ("attn_qkv", "ssm_conv1d") else 0
    values = np.arange(heads * width).reshape(-1, key_heads, width).swapaxes(0, 1).ravel()
    return {"columns" if part == "ssm_out" else "rows": np.concatenate((np.arange(before), before + values))}


def _windows(metadata: Metadata, period: int) -> Settings:
    """Return which layers see a window: those that the file names, else all but the last of each period."""
    layers = metadata.count("block_count")
    stated = metadata.layers("attention.sliding_window_pattern")
    if not stated:
        period = metadata.count("attention.sliding_window_pattern", period)
        stated = [(layer + 1) % period != 0 for layer in range(layers)]
    return {
        "sliding_window": metadata.number("attention.sliding_window"),
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in stated],
    }


_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_NORMS_AROUND = _NORMS_AFTER | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_DENSE = _ATTENTION | _NORMS_BEFORE | _MLP
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
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


_BARE_SSM = ("ssm_dt",)
_MAMBA2_EDGES = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_FALCON_H1 = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_NEMOTRON_H = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "post_attention_norm": "post_attention_layernorm",
}
_VALUE_PARTS = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt", "ssm_conv1d", "ssm_out")
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama", _DENSE, neighbours=True),
    "mixtral": Architecture("Mixtral", _ATTENTION | _NORMS_BEFORE | _MIXTRAL_EXPERTS, neighbours=True, more=_mixtral),
    "qwen2": Architecture("Qwen2", _DENSE),
    "qwen2moe": Architecture("Qwen2Moe", _ATTENTION | _NORMS_BEFORE | _EXPERTS | _SHARED_EXPERT, more=_qwen2_moe),
    "qwen3": Architecture("Qwen3", _DENSE | _QK_NORMS),
    "qwen3moe": Architecture("Qwen3Moe", _ATTENTION | _QK_NORMS | _NORMS_BEFORE | _EXPERTS, more=_qwen3_moe),
    "gemma2": Architecture(
        "Gemma2",
        _ATTENTION | _NORMS_AROUND | _MLP,
        norm_shift=-1.0,
        more=partial(_gemma, period=2, attention_cap=50.0, logits_cap=30.0),
    ),
    "gemma3": Architecture(
        "Gemma3",
        _ATTENTION | _QK_NORMS | _NORMS_AROUND | _MLP,
        norm_shift=-1.0,
        more=partial(_gemma, period=6, attention_cap=None, logits_cap=0.0),
    ),
    "phi3": Architecture("Phi3", _FUSED | _NORMS_BEFORE | _FUSED_MLP, more=_phi3),
    "olmo2": Architecture("Olmo2", _ATTENTION | _QK_NORMS | _NORMS_AFTER | _MLP),
    "olmo3": Architecture("Olmo3", _ATTENTION | _QK_NORMS | _NORMS_AFTER | _MLP, more=partial(_windows, period=4)),
    "smollm3": Architecture("SmolLM3", _DENSE, neighbours=True, more=_smollm3),
    "gpt-oss": Architecture(
        "GptOss",
        _ATTENTION | _GPT_OSS | _EXPERTS | {"ffn_gate_inp": "mlp.router"},
        bare=("attn_sinks",),
        more=_gpt_oss,
    ),
    "granite": Architecture("Granite", _DENSE, neighbours=True, more=_granite),
    "granitehybrid": Architecture(
        "GraniteMoeHybrid", _DENSE | _ssm("mamba"), neighbours=True, bare=_BARE_SSM, more=_granite_hybrid
    ),
    "falcon-h1": Architecture(
        "FalconH1",
        _ATTENTION | _FALCON_H1 | _ssm("mamba"),
        edges=EDGES | {"output_norm": "model.final_layernorm"},
        bare=_BARE_SSM,
        more=_falcon_h1,
    ),
    "mamba2": Architecture(
        "Mamba2",
        {"attn_norm": "norm"} | _ssm("mixer"),
        prefix="backbone.layers",
        edges=_MAMBA2_EDGES,
        bare=_BARE_SSM,
        more=_mamba2_alone,
    ),
    "nemotron_h": Architecture(
        "NemotronH",
        _NEMOTRON_H | _ssm("mixer"),
        prefix="backbone.layers",
        edges=_MAMBA2_EDGES,
        bare=_BARE_SSM,
        more=_nemotron_h,
    ),
    "lfm2": Architecture(
        "Lfm2",
        _ATTENTION | _LFM2,
        edges=EDGES | {"token_embd_norm": "model.embedding_norm"},
        more=_lfm2,
    ),
    "qwen35": Architecture(
        "Qwen3_5",
        _ATTENTION | _QK_NORMS | {"attn_norm": "input_layernorm"} | _MLP | _ssm("linear_attn") | _DELTA_NET,
        norm_shift=-1.0,
        bare=_BARE_SSM,
        tiles_values=True,
        more=_qwen35,
    ),
}


def architecture_of(fields: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a file, whose metadata are given."""
    metadata = Metadata(fields)
    name = metadata.architecture
    if name == "llama" and metadata.number("expert_count", 0):
        name = "mixtral"
    if name == "olmo2" and metadata.number("attention.sliding_window", 0):
        name = "olmo3"
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"the general.architecture {name!r:.80} is not supported; supported are {known}")
    return ARCHITECTURES[name]


def architecture_for(model: str) -> tuple[str, Architecture]:
    """Return GGUF's name of the architecture of a model, by its class in transformers, with the architecture."""
    kind = model.removesuffix("ForCausalLM")
    for name, found in ARCHITECTURES.items():
        if found.name == _NAMESAKES.get(kind, kind):
            return {"mixtral": "llama", "olmo3": "olmo2"}.get(name, name), found
    raise UnsupportedModelError(f"it cannot be an adapter of {model}, whose tensors in GGUF are not known")
