"""Defaults and older names of GGUF's fields mean what they mean in llama.cpp."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family_checkpoints import edit_config, save_checkpoint
from gguf_checkpoints import copy_file, random_model, write
from greedy_tokens import greedy_tokens, reference_tokens

from graphdecode import LLM
from graphdecode.models import check_model, load_model
from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.gguf.architectures import architecture_of
from graphdecode.models.gguf.container import read_header
from graphdecode.models.gguf.source import Gguf
from graphdecode.models.rope import cos_sin_table


def rope_of(folder: Path, **fields: Any) -> Any:
    changes = {f"rope__{name}": value for name, value in fields.items()}
    return check_model(edited(file_of("llama", folder), "roped", **changes)).rope


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


def file_of(name: str, folder: Path) -> Path:
    return write(random_model(name), name, folder / "model.gguf")


def test_a_factor_of_cosines_scales_any_rope(tmp_path):
    linear = rope_of(tmp_path, scaling__factor=4.0)
    scaled = rope_of(tmp_path, scaling__factor=4.0, scaling__attn_factor=1.25)
    tables = [cos_sin_table(rope, 16, 32, torch.device("cpu")) for rope in (linear, scaled)]
    torch.testing.assert_close(tables[1], 1.25 * tables[0])
    yarn = rope_of(tmp_path, scaling__type="yarn", scaling__factor=4.0, scaling__attn_factor=1.25)
    assert yarn.attention_factor == pytest.approx(1.25 * (0.1 * np.log(4.0) + 1.0))


def edited(path: Path, name: str, *, predicts: bool = False, **fields: Any) -> Path:
    """Copy a file with other fields of its architecture (None: without it; `__` is a dot), and other tensors.

    `predicts`: a layer behind the last predicts further tokens.
    """
    reader, options = gguf.GGUFReader(path), {name: fields.pop(name) for name in ("drop", "more") if name in fields}
    architecture = reader.fields["general.architecture"].contents()
    layers = reader.fields[f"{architecture}.block_count"].contents()
    changes = {f"{architecture}.{key.replace('__', '.')}": value for key, value in fields.items()}
    if predicts:
        lists = {name: field.contents() for name, field in reader.fields.items() if len(field.types) > 1}
        changes |= {name: [*values, 0] for name, values in lists.items() if len(values) == layers}
        changes |= {f"{architecture}.block_count": layers + 1, f"{architecture}.nextn_predict_layers": 1}
        parts = ("attn_norm", "nextn.eh_proj", "nextn.enorm")
        options["more"] = {f"blk.{layers}.{part}.weight": np.ones((4, 4), np.float32) for part in parts}
    return copy_file(path, path.with_name(f"{name}.gguf"), changes=changes, **options)


@pytest.mark.parametrize("name", ["qwen35", "qwen3next", "nemotron-h", "deepseek2"])
def test_layers_that_predict_further_tokens_are_skipped_and_said(tmp_path, name, caplog):
    path = file_of(name, tmp_path)
    more = edited(path, "more", predicts=True)
    assert check_model(more) == check_model(path)
    pairs = zip(*(load_model(each, device="cpu").constants for each in (path, more)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert any("3 of blk." in line for line in caplog.messages)
    assert len(Gguf(more).skipped) == 3


@pytest.mark.parametrize("value", [3, [0.0], "wide", [0.0, 1.0, 2.0]])
def test_limits_of_time_steps_that_are_no_pair_are_named(tmp_path, value):
    save_checkpoint("mamba2", tmp_path)
    edit_config(tmp_path, lambda settings: settings.update(time_step_limit=value))
    with pytest.raises(UnsupportedModelError, match="time_step_limit"):
        check_model(tmp_path)


def tokens_of(path: Path, prompt: list[int]) -> list[int]:
    with LLM(path, skip_tokenizer_init=True, max_batch_size=1, max_sequence_length=64, device="cpu") as llm:
        return greedy_tokens(llm, [prompt], 6)[0]


def test_a_hybrid_granite_rotates_unless_its_file_denies_it(tmp_path):
    plain = random_model("granitehybrid")
    plain.config.position_embedding_type = "rope"
    model = type(plain)(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    path = write(model, "granitehybrid", tmp_path / "model.gguf")
    rotated = edited(path, "rotated", rope__scaling__finetuned=None)
    prompt = list(range(5, 45))
    assert tokens_of(rotated, prompt) == reference_tokens(model, prompt, 6)
    without, config = map(check_model, (path, rotated))
    assert set(without.layer_ropes) == {None}
    assert (config.embedding_scale, config.residual_scale) == (without.embedding_scale, without.residual_scale)
    with pytest.raises(UnsupportedModelError, match=r"granite\.rope\.scaling\.finetuned False"):
        check_model(edited(file_of("granite", tmp_path), "granite", rope__scaling__finetuned=False))


def test_all_channels_are_rotated_where_a_file_names_no_other_number(tmp_path):
    path = file_of("bamba", tmp_path)
    whole = check_model(edited(path, "whole", rope__dimension_count=None))
    assert (whole.architecture, whole.rope.rotary_factor) == ("BambaForCausalLM", 1.0)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("granite", ["embedding_scale", "residual_scale"], ["embedding_scale", "residual_scale"]),
        ("granitehybrid", ["residual_scale", "logit_scale"], ["residual_scale", "logits_scale"]),
    ],
)
def test_a_factor_of_0_is_none(tmp_path, name, fields, expected):
    path = file_of(name, tmp_path)
    zero = check_model(edited(path, "zero", **dict.fromkeys(fields, 0.0)))
    assert zero == replace(check_model(path), **dict.fromkeys(expected, 1.0))


def test_a_factor_of_0_is_none_for_experts(tmp_path):
    path = file_of("deepseek2", tmp_path)
    zero, one = (check_model(edited(path, f"{scale}", expert_weights_scale=scale)) for scale in (0.0, 1.0))
    assert zero == one != check_model(path)


@pytest.mark.parametrize("name", ["qwen2moe", "qwen3moe", "qwen3next"])
def test_widths_of_experts_follow_from_the_layers(tmp_path, name):
    path = file_of(name, tmp_path)
    config = check_model(path)
    width, chosen = config.experts.intermediate_size, config.experts.top_k
    fields = {"feed_forward_length": width * chosen, "expert_feed_forward_length": None}
    stated = edited(path, "stated", feed_forward_length=width * chosen)
    assert check_model(edited(path, "without", **fields)) == check_model(stated)
    if name != "qwen3moe":
        shared = {"feed_forward_length": config.experts.shared_intermediate_size}
        without = edited(path, "without", expert_shared_feed_forward_length=0, **shared)
        assert check_model(without) == check_model(edited(path, "stated", **shared))


def test_windows_of_lfm2_are_refused(tmp_path):
    path = file_of("lfm2", tmp_path)
    assert check_model(edited(path, "none", attention__sliding_window=0)) == check_model(path)
    with pytest.raises(UnsupportedModelError, match=r"lfm2\.attention\.sliding_window 16"):
        check_model(edited(path, "windowed", attention__sliding_window=16))


def test_the_other_name_of_nemotrons_epsilon_is_read(tmp_path):
    path = file_of("nemotron-h", tmp_path)
    named = {"attention__layer_norm_rms_epsilon": None, "attention__layer_norm_epsilon": 0.25}
    assert check_model(edited(path, "named", **named)).rms_norm_eps == 0.25
    assert check_model(edited(path, "both", attention__layer_norm_epsilon=0.25)) == check_model(path)


def test_nemotrons_embedding_is_its_output_layer_where_there_is_no_other(tmp_path):
    path = file_of("nemotron-h", tmp_path)
    source = Gguf(edited(path, "without", drop={"output.weight"}))
    read = [torch.empty(source.tensors[name].shape) for name in ("backbone.embeddings.weight", "lm_head.weight")]
    for name, out in zip(("backbone.embeddings.weight", "lm_head.weight"), read, strict=True):
        source.read(name, out)
    assert torch.equal(*read)
    assert tokens_of(source.path, [1, 2, 3]) != tokens_of(path, [1, 2, 3])


FACTORS = np.linspace(1.0, 3.0, 8, dtype=np.float32)  # of the pairs of a head of 16 channels


def test_a_factor_stretches_factors_of_pairs_too(tmp_path):
    path = file_of("llama", tmp_path)
    stated = {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}
    rope = check_model(edited(path, "pairs", more={"rope_freqs.weight": FACTORS}, **stated)).rope
    assert (rope.short_factors, rope.long_factors) == (tuple(2 * FACTORS), tuple(2 * FACTORS))
    both = {"rope_factors_short.weight": FACTORS, "rope_factors_long.weight": 3 * FACTORS}
    rope = check_model(edited(path, "both", more=both, **stated)).rope
    assert (rope.short_factors, rope.long_factors) == (tuple(2 * FACTORS), tuple(6 * FACTORS))


@pytest.mark.parametrize(
    ("name", "tensors", "fields", "message"),
    [
        ("llama", ["rope_factors_long.weight"], {}, "longrope .*rope_factors_short"),
        ("llama", ["rope_factors_short.weight"], {}, "longrope .*rope_factors_long"),
        ("llama", [], {"rope__scaling__type": "longrope"}, "longrope .*rope_factors_long"),
        ("llama", ["rope_freqs.weight"], {"rope__scaling__type": "yarn"}, "'yarn' .*rope_freqs.weight"),
        ("llama", [], {"rope__scaling__type": "dynamic"}, r"rope\.scaling\.type 'dynamic'"),
        ("gemma2", [], {"rope__freq_base_swa": 123.0}, "rope.freq_base_swa .*10000.0.*123.0"),
        ("llama", [], {"attention__temperature_scale": 0.5}, "attention.temperature_scale 0.5"),
        ("llama", [], {"attention__causal": False}, "attention.causal False"),
        ("granite", [], {"logit_scale": 0.0}, "granite.logit_scale .*0"),
        ("deepseek3", [], {"expert_gating_func": 3}, "expert_gating_func .*3"),
    ],
)
def test_what_no_decoder_does_is_refused(tmp_path, name, tensors, fields, message):
    path = edited(file_of(name, tmp_path), "edited", more=dict.fromkeys(tensors, FACTORS), **fields)
    with pytest.raises(UnsupportedModelError, match=message):
        check_model(path)


def test_windows_of_files_without_a_size(tmp_path):
    gemma2 = check_model(edited(file_of("gemma2", tmp_path), "default", attention__sliding_window=None))
    assert set(gemma2.windows) == {4095, -1}  # keys to the left of the query's
    path = file_of("gemma3", tmp_path)
    for size in (None, 0):
        assert set(check_model(edited(path, str(size), attention__sliding_window=size)).windows) <= {-1}
    path = file_of("llama4", tmp_path)
    plain = check_model(edited(path, "plain", attention__sliding_window=0))
    assert set(check_model(path).windows) > {-1}
    assert set(plain.windows) == {-1}
    assert None not in plain.layer_ropes


def test_a_file_may_say_which_layers_are_recurrent(tmp_path):
    path = file_of("qwen35", tmp_path)
    kinds = [False, True, True, False]
    config = check_model(path)
    assert [state is not None for state in config.recurrent] == [True, True, True, False]
    stated = Gguf(edited(path, "stated", attention__recurrent_layers=kinds)).config()
    assert [state is not None for state in stated.recurrent] == kinds


@pytest.mark.parametrize("scale", [None, 0.0])
def test_granites_attention_is_scaled_by_its_channels_by_default(tmp_path, scale):
    path = file_of("granite", tmp_path)
    assert check_model(path).sm_scale == pytest.approx(0.1)
    assert check_model(edited(path, "default", attention__scale=scale)).sm_scale == 16**-0.5


def test_first_files_of_glm_state_no_function_of_the_router(tmp_path):
    fields = dict(read_header(file_of("glm-4.7-flash", tmp_path)).fields)
    del fields["deepseek2.expert_gating_func"]
    assert architecture_of(fields).name == "DeepseekV2"
    fields |= {"deepseek2.block_count": 47, "deepseek2.vocab_size": 154880}
    assert architecture_of(fields).name == "DeepseekV3"
