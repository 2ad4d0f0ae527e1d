"""Small random checkpoints written as GGUF, by the names that the gguf library has for transformers' tensors."""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import family_checkpoints
import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

SMALL: dict[str, Any] = family_checkpoints.SMALL | {"num_hidden_layers": 2, "tie_word_embeddings": False}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + 0.5 * i for i in range(8)]}
WINDOWED = {"sliding_window": 12, "head_dim": 32, "num_hidden_layers": 7, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

LLAMA4 = {  # the last of four layers has no positions
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "intermediate_size_mlp": 80,
    "interleave_moe_layer_step": 2,
}
LATENT = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 40,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


def rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0} | fields}


# name: GGUF's architecture, transformers' class without "ForCausalLM", what its config has beside SMALL
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama-tied-biases": ("llama", "Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", "Llama", rope("linear", factor=3.0) | {"head_dim": 24}),
    "llama-3.1": ("llama", "Llama", rope("llama3", rope_theta=5e5, factor=8.0, **LLAMA3)),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen2-yarn": ("qwen2", "Qwen2", {"rope_parameters": YARN}),
    "qwen2moe": ("qwen2moe", "Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32}),
    "qwen3moe": ("qwen3moe", "Qwen3Moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "gemma2": ("gemma2", "Gemma2", WINDOWED | {"query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3", "Gemma3", WINDOWED | {"query_pre_attn_scalar": 32}),
    "phi3": ("phi3", "Phi3", {"sliding_window": None}),
    "phi3-long": (
        "phi3",
        "Phi3",
        rope("longrope", original_max_position_embeddings=64, **LONG) | {"original_max_position_embeddings": 64},
    ),
    "olmo2": ("olmo2", "Olmo2", {}),
    "olmo3": ("olmo2", "Olmo3", WINDOWED | {"head_dim": 16, "tie_word_embeddings": False}),
    "smollm3": ("smollm3", "SmolLM3", {"num_hidden_layers": 5}),
    "granite": (
        "granite",
        "Granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 4.0},
    ),
    "gpt-oss": (
        "gpt-oss",
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12, "head_dim": 32}
        | {"rope_parameters": YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}},
    ),
    "gemma4": ("gemma4", "Gemma4", family_checkpoints.GEMMA4),
    "gemma4-inputs": ("gemma4", "Gemma4", family_checkpoints.GEMMA4 | family_checkpoints.GEMMA4_INPUTS),
    "gemma4-experts": (
        "gemma4",
        "Gemma4",
        family_checkpoints.GEMMA4
        | family_checkpoints.GEMMA4_EXPERTS
        | {"num_hidden_layers": 3, "attention_bias": False, "rope_parameters": None},
    ),
    "llama4": ("llama4", "Llama4", LLAMA4),
    "llama4-rope": ("llama4", "Llama4", LLAMA4 | rope("llama3", rope_theta=5e5, factor=16.0, **LLAMA3)),
    "deepseek2": (
        "deepseek2",
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 2.0},
    ),
    "deepseek3": (
        "deepseek2",
        "DeepseekV3",
        LATENT
        | {"q_lora_rank": 24, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
        | {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}},
    ),
    "glm-4.7-flash": ("deepseek2", "Glm4MoeLite", LATENT | {"q_lora_rank": 24}),
}
# the same of architectures with recurrent states
_FAMILIES = {name: changes for name, (_, changes) in family_checkpoints.FAMILIES.items()}
RECURRENT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "granitehybrid": ("granitehybrid", "GraniteMoeHybrid", _FAMILIES["granite-4-mamba"]),
    "falcon-h1": ("falcon-h1", "FalconH1", _FAMILIES["falcon-h1-multipliers"] | {"mamba_norm_before_gate": False}),
    "mamba2": ("mamba2", "Mamba2", _FAMILIES["mamba2"]),
    "nemotron-h": ("nemotron_h", "NemotronH", _FAMILIES["nemotron-h"]),
    "lfm2": ("lfm2", "Lfm2", _FAMILIES["lfm2"] | {"tie_word_embeddings": True}),
    "qwen35": (
        "qwen35",
        "Qwen3_5",
        family_checkpoints.DELTA_NET | {"num_hidden_layers": 4, "layer_types": None},
    ),
    "qwen3next": (
        "qwen3next",
        "Qwen3Next",
        _FAMILIES["qwen3-next"] | {"num_hidden_layers": 4, "layer_types": None, "mlp_only_layers": []},
    ),
    "bamba": ("granitehybrid", "Bamba", _FAMILIES["bamba"]),
}
_NEIGHBOURS = ("Llama", "Mixtral", "SmolLM3", "Granite")
_NUMBERS = {  # transformers' name -> how the writer calls it
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "sliding_window",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that the writer was given, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_model(name: str) -> Any:
    """Return an architecture's random model of transformers, in float32."""
    _, kind, changes = (ARCHITECTURES | RECURRENT)[name]
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    config = model_class.config_class(**(SMALL | {"num_hidden_layers": 3 if name in RECURRENT else 2} | changes))
    torch.manual_seed(sum(map(ord, name)))
    model = model_class(config).eval()
    scales = family_checkpoints.SCALES
    for tensor_name, tensor in model.state_dict().items():
        if tensor_name.endswith(("bias", "norm.weight", "norm_1.weight", "norm_2.weight", "sinks", "A_log", *scales)):
            is_gain = "norm" in tensor_name or tensor_name.endswith(scales)
            torch.nn.init.normal_(tensor, 1.0 if is_gain else 0.0, 0.2)
    return model


def write(model: Any, name: str, path: Path, edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:
    """Write a model of transformers as GGUF, in float32.

    Args:
        model: of transformers.
        name: of its architecture.
        path: of the file.
        edit: adds to the metadata.
    """
    architecture, kind, _ = (ARCHITECTURES | RECURRENT)[name]
    writer = gguf.GGUFWriter(path, architecture)
    config = copy.deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose own sizes are written behind them
    if name in RECURRENT:
        _write_recurrent(writer, config, kind)
    else:
        _write_numbers(writer, config, architecture)
        _write_own(writer, config, kind)
    edit(writer)
    layers = len(config.layers_block_type) if kind == "NemotronH" else config.num_hidden_layers
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, layers)
    for tensor_name, tensor in (_recurrent_tensors if name in RECURRENT else _tensors)(model, kind):
        gguf_name = names.get_name(tensor_name, try_suffixes=(".weight", ".bias", ".scale"))
        writer.add_tensor(gguf_name or tensor_name, np.ascontiguousarray(tensor.numpy()))
    finish(writer)
    return path


def copy_file(
    path: Path,
    copied: Path,
    *,
    changes: Mapping[str, Any] = MappingProxyType({}),
    types: Mapping[str, str] = MappingProxyType({}),
    drop: Collection[str] = (),
    more: Mapping[str, np.ndarray] = MappingProxyType({}),
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Copy a GGUF file.

    Args:
        path: of the file.
        copied: of the copy.
        changes: fields; None: without it.
        types: block types of matrices, by the ends of their names.
        drop: tensors to leave out.
        more: further tensors.
        edit: adds to the metadata.
    """
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(copied, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in {"general.architecture", *changes}:
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type)
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in changes.items():
        if value is not None:
            adds.get(type(value), writer.add_array)(name, value)
    edit(writer)
    for tensor in reader.tensors:
        block_type = next((kind for end, kind in types.items() if tensor.name.endswith(end)), None)
        if tensor.name in drop:
            continue
        if block_type is None or tensor.data.ndim < 2:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        else:
            kind = gguf.GGMLQuantizationType[block_type]
            writer.add_tensor(tensor.name, gguf.quants.quantize(np.array(tensor.data), kind), raw_dtype=kind)
    for name, values in more.items():
        writer.add_tensor(name, values)
    finish(writer)
    return copied


def quantized_file(path: Path, name: str, types: dict[str, str]) -> Path:
    """Write a random model whose matrices have block types, by the ends of their names."""
    return copy_file(write(random_model(name), name, path.with_name("plain.gguf")), path, types=types)


def _write_numbers(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    for theirs, ours in _NUMBERS.items():
        value = getattr(config, theirs, None)
        if value is not None:
            getattr(writer, f"add_{ours}")(value)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture == "olmo2" and getattr(config, "layer_types", None):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    ropes = config.rope_parameters
    parameters = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(parameters["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * parameters.get("partial_rotary_factor", 1.0)))
    if parameters["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(parameters["rope_type"]))
        writer.add_rope_scaling_factor(parameters["factor"])
    if parameters["rope_type"] == "longrope":  # as llama.cpp's conversion writes it
        grown = config.max_position_embeddings / parameters["original_max_position_embeddings"]
        trained = math.log(parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(grown) / trained))
    if parameters["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])


def _write_own(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    """Write the fields of one architecture alone, some in place of those that all have."""
    if kind == "Gemma4":
        windowed = [kind == "sliding_attention" for kind in config.layer_types]
        head_dim, heads = _full_sizes(config)
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        writer.add_sliding_window_pattern(windowed)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_key_length_swa(config.head_dim)
        writer.add_value_length_swa(config.head_dim)
        if config.enable_moe_block:
            writer.add_expert_used_count(config.top_k_experts)
        if config.use_double_wide_mlp:
            first = config.num_hidden_layers - config.num_kv_shared_layers
            widths = [config.intermediate_size * (1 + (layer >= first)) for layer in range(config.num_hidden_layers)]
            writer.add_feed_forward_length(widths)
        if heads is not None:
            writer.add_head_count_kv([config.num_key_value_heads if each else heads for each in windowed])
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_dimension_count_swa(config.head_dim)
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    elif kind == "Llama4":
        writer.add_feed_forward_length(config.intermediate_size_mlp)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    elif hasattr(config, "kv_lora_rank"):
        writer.add_head_count_kv(1)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        if config.q_lora_rank is not None:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        if "mscale_all_dim" in config.rope_parameters:
            writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
        if kind != "DeepseekV2":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)


def _full_sizes(config: Any) -> tuple[int, int | None]:
    """Return channels and heads of keys in Gemma 4's layers without a window; no heads: as in the others."""
    sizes = next(iter(config.to_dict()["per_layer_config"].values()))
    return sizes["head_dim"], sizes.get("num_key_value_heads")


def _tensors(model: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as llama.cpp's conversion leaves them: permuted, shifted, stacked, split."""
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part_name, part in _split(config, name, tensor, kind):
            converted = part
            if kind in _NEIGHBOURS and part_name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if "q_proj" in part_name else config.num_key_value_heads
                converted = part.view(heads, 2, -1, *part.shape[1:]).transpose(1, 2).reshape(part.shape)
            if kind in ("Gemma2", "Gemma3") and part_name.endswith("norm.weight"):
                converted = part + 1
            if part_name.endswith("shared_expert_gate.weight"):
                converted = part[0]
            yield part_name, converted
    parameters = config.rope_parameters
    if kind == "Gemma4":
        pairs = _full_sizes(config)[0] // 2
        rotated = int(parameters["full_attention"]["partial_rotary_factor"] * pairs)
        yield "rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (pairs - rotated))
    if parameters.get("rope_type") == "longrope":
        for long_or_short in ("long", "short"):
            yield f"rope_factors_{long_or_short}.weight", torch.tensor(parameters[f"{long_or_short}_factor"])
    if parameters.get("rope_type") == "llama3":
        plain = 1.0 / parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
        yield "rope_freqs.weight", plain / model.model.rotary_emb.inv_freq


def _split(config: Any, name: str, tensor: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor as the ones that a file has: products of experts, outputs first; latent keys and values."""
    module, _, last = name.rpartition(".")
    if name.endswith("kv_b_proj.weight"):
        heads = tensor.unflatten(0, (config.num_attention_heads, -1))
        keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
        return
    if last == "e_score_correction_bias":
        yield f"{module}.e_score_correction.bias", tensor
        return
    if kind == "Gemma4" and last in ("scale", "per_expert_scale"):
        layer = module.rpartition(".router")[0]
        yield (f"{layer}.router.proj.scale" if last == "scale" else f"{layer}.experts.down_proj.scale"), tensor
        return
    if last in ("sinks", "layer_scalar") or (kind == "Gemma4" and module.endswith("experts")):
        yield f"{name}.weight", tensor
        return
    if "experts" not in module or last in ("weight", "bias"):
        yield name, tensor
        return
    product, _, bias = last.partition("_proj")
    ending = "bias" if bias else "weight"
    outputs_last = kind in ("GptOss", "Llama4")
    if outputs_last and not bias:
        tensor = tensor.transpose(1, 2)
    if product == "gate_up":  # gpt-oss deals gate and up out in turn
        gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if kind == "GptOss" else tensor.chunk(2, dim=1)
        yield f"{module}.gate_proj.{ending}", gate
        yield f"{module}.up_proj.{ending}", up
    else:
        yield f"{module}.down_proj.{ending}", tensor


def _write_recurrent(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    """Write the fields of a model with recurrent states, by the rules of llama.cpp's conversion."""
    writer.add_block_count(len(config.layers_block_type) if kind == "NemotronH" else config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_context_length(getattr(config, "max_position_embeddings", None) or 2**20)
    names = ("layer_norm_epsilon", "norm_eps", "rms_norm_eps")
    writer.add_layer_norm_rms_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
    _write_attention(writer, config, kind)
    if kind == "Qwen3Next":
        for field in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
            getattr(writer, f"add_{_NUMBERS[field]}")(getattr(config, field))
    _write_states(writer, config, kind)


def _write_attention(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    if kind == "Mamba2":
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
        return
    kinds = config.layers_block_type if kind == "NemotronH" else getattr(config, "layer_types", None)
    attends = [each in ("full_attention", "attention") for each in kinds or ()]
    kv_heads = config.num_key_value_heads
    if kind == "Bamba":
        attends = [layer in config.attn_layer_indices for layer in range(config.num_hidden_layers)]
    is_counted = kind in ("GraniteMoeHybrid", "NemotronH", "Lfm2", "Bamba")
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([kv_heads * each for each in attends] if is_counted else kv_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind != "GraniteMoeHybrid":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    width = config.shared_intermediate_size if kind == "GraniteMoeHybrid" else config.intermediate_size
    if kind == "Lfm2":
        width = model_width(config)
    writer.add_feed_forward_length([width * (each == "mlp") for each in kinds] if kind == "NemotronH" else width)
    rope = getattr(config, "rope_parameters", None)
    if rope and kind != "NemotronH":
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if kind in ("GraniteMoeHybrid", "Bamba"):
        writer.add_rope_scaling_finetuned(kind == "Bamba")
    if kind == "GraniteMoeHybrid":
        for field in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"):
            getattr(writer, f"add_{_NUMBERS[field]}")(getattr(config, field))


def model_width(config: Any) -> int:
    """Return the channels of LFM2's MLPs, as llama.cpp computes them."""
    if not config.block_auto_adjust_ff_dim:
        return config.intermediate_size
    width = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
    return -(-width // config.block_multiple_of) * config.block_multiple_of


def _write_states(writer: gguf.GGUFWriter, config: Any, kind: str) -> None:
    if kind == "Lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
        return
    if kind in ("Qwen3_5", "Qwen3Next"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        return

    def size(*names: str) -> int:
        return next(getattr(config, name) for name in names if hasattr(config, name))

    heads, head_dim = (
        size("mamba_n_heads", "mamba_num_heads", "num_heads"),
        size("mamba_d_head", "mamba_head_dim", "head_dim"),
    )
    writer.add_ssm_conv_kernel(size("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(size("mamba_d_state", "ssm_state_size", "state_size"))
    writer.add_ssm_group_count(size("mamba_n_groups", "n_groups"))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * head_dim)


def _recurrent_tensors(model: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by the names of transformers, converted."""
    config = model.config
    for name, stored in model.state_dict().items():
        tensor = tiled(config, name, stored) if kind == "Qwen3_5" else stored
        module, _, last = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings and kind != "NemotronH":
            continue
        if kind == "NemotronH":
            module, name = module.replace("model.", "backbone.", 1), name.replace("model.", "backbone.", 1)
        if last == "dt_bias":
            yield f"{module}.dt_proj.bias" if kind != "NemotronH" else f"{module}.dt.bias", tensor
        elif last == "A_log":
            yield name, -torch.exp(tensor) if kind in ("Qwen3_5", "Qwen3Next") else -torch.exp(tensor)[:, None]
        elif last == "D":
            yield name, tensor[:, None]
        elif "conv1d.weight" in name or "conv.conv.weight" in name:
            yield name, tensor.squeeze(1)
        elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            groups = config.mamba_n_groups if hasattr(config, "mamba_n_groups") else config.n_groups
            yield name, tensor.view(groups, -1)
        elif name.endswith("shared_mlp.input_linear.weight"):
            layer = module.rpartition(".shared_mlp")[0]
            for half, part in zip(tensor.chunk(2), ("gate", "up"), strict=True):
                yield f"{layer}.mlp.{part}_proj.weight", half
        elif name.endswith("shared_mlp.output_linear.weight"):
            yield f"{module.rpartition('.shared_mlp')[0]}.mlp.down_proj.weight", tensor
        elif kind in ("GraniteMoeHybrid", "Bamba") and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
            yield name, tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        elif kind == "Qwen3Next" and "in_proj_qkvz" in name:
            yield from _by_use(config, module, tensor)
        elif kind == "Qwen3Next" and ("experts" in module or "shared_expert_gate" in name):
            for part_name, part in _split(config, name, tensor, kind):
                yield part_name, part[0] if "shared_expert_gate" in name else part
        elif (
            kind in ("Qwen3_5", "Qwen3Next")
            and name.endswith("norm.weight")
            and not name.endswith("linear_attn.norm.weight")
        ):
            yield name, tensor + 1
        elif kind == "FalconH1":
            yield name, _multiplied(config, name, tensor)
        else:
            yield name, tensor


def _by_use(config: Any, module: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield Qwen3-Next's queries, keys and values of all heads, and their gates."""
    values = config.linear_value_head_dim * config.linear_num_value_heads // config.linear_num_key_heads
    heads = tensor.unflatten(0, (config.linear_num_key_heads, -1))
    *qkv, gates = heads.split((config.linear_key_head_dim, config.linear_key_head_dim, values, values), 1)
    layer = module.rpartition(".")[0]
    yield f"{layer}.in_proj_qkv.weight", torch.cat([part.flatten(0, 1) for part in qkv])
    yield f"{layer}.in_proj_z.weight", gates.flatten(0, 1)


def tiled(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of Qwen3.5 with the first head of values of each head of keys, then the second of each."""
    parts = ("in_proj_qkv", "conv1d", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "A_log", "dt_bias")
    if "linear_attn." not in name or not any(part in name for part in parts):
        return tensor
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    before = keys if "in_proj_qkv" in name or "conv1d" in name else 0
    axis = 1 if "out_proj" in name else 0
    keys_part, values = tensor.split((before, tensor.shape[axis] - before), axis)
    shape = (config.linear_num_key_heads, -1, values.shape[axis] // config.linear_num_value_heads)
    tiled = values.unflatten(axis, shape).transpose(axis, axis + 1).flatten(axis, axis + 2)
    return torch.cat((keys_part, tiled), axis)


def _multiplied(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of Falcon-H1 with its multipliers."""
    module = name.split(".")[-2]
    if module == "in_proj":
        channels, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        widths = (channels, channels, states, states, config.mamba_n_heads)
        parts = zip(tensor.split(widths), config.ssm_multipliers, strict=True)
        return config.ssm_in_multiplier * torch.cat([part * multiplier for part, multiplier in parts])
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return tensor * factors.get(module, 1.0)
