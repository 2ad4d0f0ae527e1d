"""The text model inside a checkpoint of a model that sees: its tokens are those of the whole, given text."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from family_checkpoints import FAMILIES, SMALL, edit_config
from safetensors.torch import load_file
from test_fit import FILE, llm_of, theirs, tokens_of, with_tensors

from graphdecode.models import check_model
from graphdecode.models.multimodal import SIZES

_TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = _TINY | {"image_size": 28, "patch_size": 14}
_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
_LLAMA4 = _PATCHES | {"intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16}
_GEMMA4 = _TINY | {"num_key_value_heads": 2, "head_dim": 8}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
# class: family of its text model, what its text_config has beside that, its vision_config, its other fields
WHOLES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ("gemma3-cap", {}, _PATCHES, {"mm_tokens_per_image": 4}),
    "Gemma4": ("gemma4", {"pad_token_id": 0}, _GEMMA4, {"audio_config": None}),
    "Llama4": ("llama4", {}, _LLAMA4 | {"projector_output_dim": 16}, {}),
    "Llava": (
        "llama-3",
        {"model_type": "llama"},
        _PATCHES | {"model_type": "clip_vision_model"},
        {"image_token_index": 5},
    ),
    "Mistral3": (
        "mistral-full",
        {"model_type": "mistral", "head_dim": 16},
        _PATCHES | {"model_type": "pixtral"},
        {"image_token_index": 5},
    ),
    "Qwen2VL": ("qwen2", _SECTIONS, {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64}, {}),
    "Qwen2_5_VL": ("qwen2", _SECTIONS, _QWEN, {}),
    "Qwen3VL": ("qwen3", {}, _QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, {}),
    "Qwen3_5": ("qwen3.5", {}, _QWEN | {"num_position_embeddings": 16}, {}),
}


def save_whole(name: str, folder: Path) -> Path:
    family, changes, vision, others = WHOLES[name]
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    text = SMALL | FAMILIES[family][1] | changes
    model_class(model_class.config_class(text_config=text, vision_config=vision, **others)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", WHOLES)
def test_tokens_of_the_text_model_are_those_of_the_whole(tmp_path, name, caplog):
    save_whole(name, tmp_path)
    with llm_of(tmp_path) as llm:
        assert tokens_of(llm) == theirs(tmp_path, getattr(transformers, f"{name}ForConditionalGeneration"))
    assert any("skipped" in line and ("vision" in line or "visual" in line) for line in caplog.messages)


def test_tensors_are_updated_by_their_names_in_the_files(tmp_path):
    save_whole("Qwen3_5", tmp_path)
    name = next(name for name in load_file(tmp_path / FILE) if name.endswith("embed_tokens.weight"))
    assert name.startswith("model.language_model.")
    flipped = load_file(tmp_path / FILE)[name].flip(0)
    with llm_of(tmp_path) as llm:
        llm.update_weights({name: flipped})
        tokens = tokens_of(llm)
    whole = transformers.Qwen3_5ForConditionalGeneration
    assert tokens == theirs(with_tensors(tmp_path, {name: flipped}), whole)


def test_the_fields_of_the_text_model_may_be_at_the_top(tmp_path):
    nested = check_model(save_whole("Qwen2_5_VL", tmp_path))

    def to_older(settings: dict[str, Any]) -> None:
        settings |= {**settings.pop("text_config"), "architectures": settings["architectures"]}
        settings["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
        settings["rope_theta"] = settings.pop("rope_parameters")["rope_theta"]

    edit_config(tmp_path, to_older)
    assert check_model(tmp_path) == nested


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_that_a_text_config_leaves_out_are_those_of_transformers(kind):
    default = transformers.CONFIG_MAPPING[kind]()
    assert {name: getattr(default, name) for name in SIZES[kind]} == SIZES[kind]
