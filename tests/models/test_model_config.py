"""A configuration means what it means to transformers: defaults, biases, windows; what makes no sense is refused."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import run_python

from graphdecode import LLM, GraphdecodeError
from graphdecode.linear.weight_form import Stored
from graphdecode.models import UnsupportedModelError, config_of, resolve_model_path
from graphdecode.models.family import family_of
from graphdecode.models.weight_map import parts
from graphdecode.text import load_tokenizer

KINDS = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss", "Gemma2", "Gemma3", "Phi3"),
    *("Olmo2", "Olmo3", "SmolLM3", "Granite"),
)
CLASSES = {f"{kind}ForCausalLM": getattr(transformers, f"{kind}ForCausalLM") for kind in KINDS}
_ACTIVATIONS = {"silu": ("silu", "swiglu_clamped"), "gelu_pytorch_tanh": ("gelu_tanh",)}
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
    model_class = CLASSES[architecture]
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict({**settings, "pad_token_id": None}))
    tensors = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    config = config_of({"architectures": [architecture], **settings})
    stored = {name: Stored(shape, "F32") for name, shape in tensors.items()}
    assert {part.name: part.shape for part in parts(family_of(architecture).weights_in(config, stored))} == tensors


@pytest.mark.parametrize("architecture", CLASSES)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(architecture: str) -> None:
    ours = config_of({"architectures": [architecture], **NEEDED})
    theirs = CLASSES[architecture].config_class.from_dict(dict(NEEDED))
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.activation in _ACTIVATIONS[getattr(theirs, "hidden_activation", None) or theirs.hidden_act]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    window = (getattr(theirs, "sliding_window", None) or 0) - 1
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    assert ours.windows == tuple(window if kind == "sliding_attention" else -1 for kind in kinds)
    for layer, kind in enumerate(kinds):
        has_rope = getattr(theirs, "no_rope_layers", [1] * 4)[layer]
        rope = ours.layer_ropes[layer] if ours.layer_ropes else ours.rope
        theta = theirs.rope_parameters.get(kind, theirs.rope_parameters)["rope_theta"]
        assert (None if rope is None else rope.theta) == (theta if has_rope else None)
    if ours.experts is not None:
        assert ours.experts.count == theirs.num_experts
        assert ours.experts.top_k == theirs.num_experts_per_tok
        assert ours.experts.renormalize == getattr(theirs, "norm_topk_prob", True)
        assert ours.experts.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.experts.shared_intermediate_size == getattr(theirs, "shared_expert_intermediate_size", 0)


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
    theirs = CLASSES[architecture].config_class.from_dict({**NEEDED, **changes})
    windowed = [kind == "sliding_attention" and theirs.sliding_window is not None for kind in theirs.layer_types]
    assert ours.windows == tuple(theirs.sliding_window - 1 if windows else -1 for windows in windowed)


def test_some_layers_may_have_no_experts() -> None:
    changes = {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    config = config_of({"architectures": ["Qwen3MoeForCausalLM"], **NEEDED, **changes})
    assert config.experts is not None
    assert config.experts.layers == (False, False, False, True)


@pytest.mark.parametrize("changes", [{}, {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}])
@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_gemma_scales_and_caps_what_transformers_does(architecture: str, changes: dict[str, Any]) -> None:
    ours = config_of({"architectures": [architecture], **NEEDED, **changes, "query_pre_attn_scalar": 144})
    theirs = CLASSES[architecture].config_class.from_dict({**NEEDED, **changes})
    assert (ours.sm_scale, ours.embedding_scale) == (144**-0.5, 4096**0.5)
    assert ours.head_dim == theirs.head_dim
    assert ours.attention_soft_cap == (theirs.attn_logit_softcapping or 0.0)
    assert ours.logits_soft_cap == (theirs.final_logit_softcapping or 0.0)


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Olmo3ForCausalLM"])
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 3e5, "rope_local_base_freq": 2e4},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7e5}}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 7e5}}},
    ],
)
def test_two_kinds_of_layers_have_the_ropes_that_transformers_gives_them(architecture, changes):
    kinds = ["sliding_attention", "full_attention"] * 2
    ours = config_of({"architectures": [architecture], **NEEDED, **copy.deepcopy(changes), "layer_types": kinds})
    theirs = CLASSES[architecture].config_class.from_dict({**NEEDED, **copy.deepcopy(changes), "layer_types": kinds})
    for kind, rope in zip(kinds, ours.layer_ropes, strict=True):
        expected = theirs.rope_parameters[kind]
        assert rope is not None
        actual = (rope.rope_type, rope.theta, rope.factor)
        assert actual == (expected["rope_type"], expected["rope_theta"], expected.get("factor", 1.0))


def test_granites_multipliers_are_scales() -> None:
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    stated = dict(zip(names, (12.0, 0.5, 0.25, 8.0), strict=True))
    config = config_of({"architectures": ["GraniteForCausalLM"], **NEEDED, **stated})
    scales = (config.embedding_scale, config.sm_scale, config.residual_scale, config.logits_scale)
    assert scales == (12.0, 0.5, 0.25, 0.125)


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
        ({"architectures": None}, "architecture None"),
        ({"architectures": []}, "architecture "),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size .*'4096'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .*0"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 .*num_key_value_heads 5"),
        ({"head_dim": 65}, "head_dim 65"),
        ({"hidden_act": None}, "hidden_act .*silu"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' .*silu"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps .*0"),
        ({"eos_token_id": "</s>"}, "eos_token_id .*'</s>'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window .*-1"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, "num_experts_per_tok 9 .*8"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "mlp_only_layers": 3}, "mlp_only_layers .*3"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": "7"}, "swiglu_limit .*'7'"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_act": "silu", "hidden_activation": "relu"}, "'relu'"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0}, "query_pre_attn_scalar .*0"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling .*0"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, r"no_rope_layers .*\[1, 0\]"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["a"]},
            "layer_types .* 4 ",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of({"architectures": ["LlamaForCausalLM"], **NEEDED, **changes})


DEMO = resolve_model_path("demo")
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 1638400\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo's folder, to be spoilt."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def refusal(model: str | Path) -> str:
    with pytest.raises(GraphdecodeError) as caught:
        LLM(model)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_a_file_of_weights_is_answered_by_the_folder_to_give(folder: Path) -> None:
    assert repr(str(folder)) in refusal(folder / "model.safetensors")
    assert "tokenizer.json" in refusal(folder / "tokenizer.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_not_taken_for_the_file(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    message = refusal(folder)
    assert message == f"{folder / name} is a Git LFS pointer and not the file itself: run `git lfs pull` in {folder}"


def test_pointers_for_shards_are_not_taken_for_the_files(folder: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    (folder / shard).write_text(POINTER)
    assert f"{shard} is a Git LFS pointer" in refusal(folder)


@pytest.mark.parametrize("share", [0.5, 0.001])
def test_truncated_weights_are_recognized_by_their_sizes(folder: Path, share: float) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    size = int(len(whole) * share)
    file.write_bytes(whole[:size])
    message = refusal(folder)
    assert f"{file}: it was cut: at least " in message
    assert message.endswith(f"and it has {size}")
    if share == 0.5:
        assert f"{len(whole)} bytes are expected" in message


def test_a_folder_without_a_configuration_is_named_with_what_it_holds(tmp_path: Path) -> None:
    assert f"{tmp_path} is empty" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("none")
    assert "config.json but notes.txt" in refusal(tmp_path)


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    refused = refusal(tmp_path)
    assert "is an adapter (LoRA) of some/base and no whole model: run that model with it" in refused
    assert all(name in refused for name in ("lora_request", "--lora ", "--lora-modules"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON: Expecting value"),
        (b'{"architectures": ["LlamaForCausalLM"],', "is not JSON: Expecting property name"),
        (b"\xff\xfe", "is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[1]", "is not a JSON object"),
        (b"{}", "architecture None is not supported"),
    ],
)
def test_a_broken_configuration_is_named_with_what_is_wrong(folder: Path, content: bytes, said: str) -> None:
    (folder / "config.json").write_bytes(content)
    message = refusal(folder)
    assert message.startswith(str(folder / "config.json"))
    assert said in message


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))
    assert resolve_model_path("~/model") == folder
    assert resolve_model_path(Path("~/model")) == folder
    assert "model '~/none' is not a folder" in refusal("~/none")
    assert "model '~nobody-of-that-name/m' is not a folder" in refusal("~nobody-of-that-name/m")


def test_the_weights_are_looked_at_before_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("broken")
    assert "tokenizer" in refusal(folder)
    (folder / "model.safetensors").write_bytes(b"broken")
    assert str(folder / "model.safetensors") in refusal(folder)
    (folder / "config.json").write_text("broken")
    assert str(folder / "config.json") in refusal(folder)


def test_a_wrong_model_costs_no_import_of_transformers(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom graphdecode import LLM\n"
        f"try:\n    LLM({str(tmp_path)!r})\nexcept ValueError:\n    print('transformers' in sys.modules)\n"
    )
    assert run_python(script) == "False\n"


def test_a_tokenizer_that_is_broken_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(GraphdecodeError, match="has no tokenizer that can be read"):
        load_tokenizer(folder)
