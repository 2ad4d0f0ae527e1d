"""A configuration means what it means to transformers: defaults, biases, windows; what makes no sense is refused."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from graphdecode.models import UnsupportedModelError, config_of
from graphdecode.models.family import family_of
from graphdecode.models.weight_map import parts

CLASSES = {
    "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM),
    "MistralForCausalLM": (MistralConfig, MistralForCausalLM),
    "Qwen2ForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3ForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
}
NEEDED = {
    "vocab_size": 100,
    "hidden_size": 4096,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
BIASES: list[dict[str, Any]] = [{}, {"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": True}]


@pytest.mark.parametrize("changes", BIASES)
@pytest.mark.parametrize("architecture", CLASSES)
def test_a_model_has_the_tensors_that_it_has_in_transformers(architecture: str, changes: dict[str, Any]) -> None:
    settings = {**NEEDED, **changes}
    config_class, model_class = CLASSES[architecture]
    with torch.device("meta"):
        model = model_class(config_class.from_dict(dict(settings)))
    tensors = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    config = config_of({"architectures": [architecture], **settings})
    assert {part.name: part.shape for part in parts(family_of(architecture).weights(config))} == tensors


@pytest.mark.parametrize("architecture", CLASSES)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(architecture: str) -> None:
    ours = config_of({"architectures": [architecture], **NEEDED})
    theirs = CLASSES[architecture][0].from_dict(dict(NEEDED))
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.windows == (-1 if getattr(theirs, "sliding_window", None) is None else theirs.sliding_window - 1,) * 4


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 8},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"use_sliding_window": False, "sliding_window": 8, "layer_types": ["sliding_attention"] * 4},
    ],
)
def test_qwen_windows_only_the_layers_that_transformers_windows(architecture: str, changes: dict[str, Any]) -> None:
    ours = config_of({"architectures": [architecture], **NEEDED, **changes})
    theirs = CLASSES[architecture][0].from_dict({**NEEDED, **changes})
    windowed = [kind == "sliding_attention" and theirs.sliding_window is not None for kind in theirs.layer_types]
    assert ours.windows == tuple(theirs.sliding_window - 1 if windows else -1 for windows in windowed)


@pytest.mark.parametrize(("window", "expected"), [(None, -1), (1, 0), (4096, 4095)])
def test_mistral_windows_every_layer(window: int | None, expected: int) -> None:
    config = config_of({"architectures": ["MistralForCausalLM"], **NEEDED, "sliding_window": window})
    assert config.windows == (expected,) * 4


@pytest.mark.parametrize(
    ("field", "value", "expected"), [("dtype", "bfloat16", torch.bfloat16), ("torch_dtype", "float16", torch.float16)]
)
def test_the_dtype_has_an_old_and_a_new_name(field: str, value: str, expected: torch.dtype) -> None:
    assert config_of({"architectures": ["LlamaForCausalLM"], **NEEDED, field: value}).dtype == expected


@pytest.mark.parametrize(
    ("eos", "expected"), [(None, ()), (2, (2,)), ([128001, 128008, 128009], (128001, 128008, 128009))]
)
def test_an_answer_may_end_in_several_ways(eos: object, expected: tuple[int, ...]) -> None:
    config = config_of({"architectures": ["LlamaForCausalLM"], **NEEDED, "eos_token_id": eos})
    assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architecture None is not supported; supported are LlamaForCausalLM, Mistral"),
        ({"architectures": []}, "architecture .* is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size must be an integer >= 1, got '4096'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 must be a multiple of num_key_value_heads 5"),
        ({"head_dim": 65}, "head_dim 65 is odd"),
        ({"hidden_act": None}, "hidden_act is missing; supported are silu"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; supported are silu"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number > 0, got 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, got '</s>'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\) is not supported"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window must be an integer >= 1"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types must name 4 layers",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of({"architectures": ["LlamaForCausalLM"], **NEEDED, **changes})
