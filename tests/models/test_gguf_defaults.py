"""Defaults and older names of GGUF's fields mean what they mean in llama.cpp."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family_checkpoints import edit_config, save_checkpoint
from gguf_checkpoints import finish, random_model, write, write_recurrent

from graphdecode.models import check_model, load_model
from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.gguf.source import Gguf
from graphdecode.models.rope import cos_sin_table


def rope_of(folder: Path, **fields: Any) -> Any:
    def edit(writer: gguf.GGUFWriter) -> None:
        for name, value in fields.items():
            key = f"llama.rope.{name.replace('__', '.')}"
            writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)

    return check_model(write(random_model("llama"), "llama", folder / "model.gguf", edit)).rope


@pytest.mark.parametrize(
    ("fields", "kind", "factor"),
    [
        ({"scaling__factor": 4.0}, "linear", 4.0),
        ({"scale_linear": 4.0}, "linear", 4.0),
        ({"scaling__factor": 2.0, "scale_linear": 4.0}, "linear", 2.0),
        ({"scaling__type": "linear", "scaling__factor": 0.0}, "default", 1.0),
        ({"scaling__type": "none", "scaling__factor": 4.0}, "default", 1.0),
        ({"scaling__type": "yarn", "scaling__factor": 4.0}, "yarn", 4.0),
    ],
)
def test_a_factor_without_a_type_is_linear(tmp_path, fields, kind, factor):
    rope = rope_of(tmp_path, **fields)
    assert (rope.rope_type, rope.factor) == (kind, factor)
    if kind == "yarn":
        assert rope.original_max_positions == 256  # the context length


def test_a_factor_of_cosines_scales_any_rope(tmp_path):
    linear = rope_of(tmp_path, scaling__factor=4.0)
    scaled = rope_of(tmp_path, scaling__factor=4.0, scaling__attn_factor=1.25)
    tables = [cos_sin_table(rope, 16, 32, torch.device("cpu")) for rope in (linear, scaled)]
    torch.testing.assert_close(tables[1], 1.25 * tables[0])
    yarn = rope_of(tmp_path, scaling__type="yarn", scaling__factor=4.0, scaling__attn_factor=1.25)
    assert yarn.attention_factor == pytest.approx(1.25 * (0.1 * np.log(4.0) + 1.0))


def test_an_unknown_or_bidirectional_field_is_refused(tmp_path):
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_causal_attention(False)

    with pytest.raises(UnsupportedModelError, match="attention.causal False"):
        check_model(write(random_model("llama"), "llama", tmp_path / "model.gguf", edit))
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.type 'dynamic'"):
        rope_of(tmp_path, scaling__type="dynamic")


def with_prediction_layer(path: Path, architecture: str) -> Path:
    """Add a layer behind the last, and say that it predicts further tokens."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("more.gguf"), architecture)
    layers = reader.fields[f"{architecture}.block_count"].contents()
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", f"{architecture}.block_count"):
            continue
        kind, content = field.types[0], field.contents()
        is_array = kind == gguf.GGUFValueType.ARRAY
        content = [*content, 0] if is_array and len(content) == layers else content
        writer.add_key_value(field.name, content, kind, field.types[-1] if is_array else None)
    writer.add_block_count(layers + 1)
    writer.add_nextn_predict_layers(1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for name in ("attn_norm", "nextn.eh_proj", "nextn.enorm"):
        writer.add_tensor(f"blk.{layers}.{name}.weight", np.ones((4, 4), np.float32))
    finish(writer)
    return path.with_name("more.gguf")


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("qwen35", "qwen35"), ("qwen3next", "qwen3next"), ("nemotron-h", "nemotron_h"), ("deepseek2", "deepseek2")],
)
def test_layers_that_predict_further_tokens_are_skipped_and_said(tmp_path, name, architecture, caplog):
    writes = write if name.startswith("deepseek") else write_recurrent
    path = writes(random_model(name), name, tmp_path / "model.gguf")
    more = with_prediction_layer(path, architecture)
    assert check_model(more) == check_model(path)
    pairs = zip(*(load_model(each, device="cpu").constants for each in (path, more)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert any("3 of blk." in line for line in caplog.messages)
    assert len(Gguf(more).skipped) == 3


@pytest.mark.parametrize("value", [3, [0.0], "wide", [0.0, 1.0, 2.0]])
def test_limits_of_time_steps_that_are_no_pair_are_named(tmp_path, value):
    save_checkpoint("mamba2", tmp_path)
    edit_config(tmp_path, lambda settings: settings.update(time_step_limit=value))
    with pytest.raises(UnsupportedModelError, match="time_step_limit must be two numbers"):
        check_model(tmp_path)
