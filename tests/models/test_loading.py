"""What a folder must hold, and how the rest is refused: by name, and all at once."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf_checkpoints
import pytest
import torch
from compiled_kernels import compiled
from family_checkpoints import edit_config, edited_tensors, save_checkpoint
from gguf_checkpoints import quantized_file
from greedy_tokens import greedy_tokens
from quantized_checkpoints import FORMS, write_pair
from safetensors.torch import load_file, save_file

from graphdecode import LLM, SamplingParams
from graphdecode.engine.loading import load_runner
from graphdecode.engine.prompts import PromptChunk, Prompts
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import Instructions, instructions
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.quantized_linear import PanelLinear
from graphdecode.linear.unquantized import Panels
from graphdecode.models import (
    CheckpointError,
    UnsupportedModelError,
    compute,
    describe_model,
    load_model,
    resolve_dtype,
)


def answer(folder: Path) -> list[list[int]]:
    with LLM(folder, max_batch_size=1, max_sequence_length=64, dtype="float32") as llm:
        return greedy_tokens(llm, [[65, 66, 67, 68]], 12)


def test_shards_are_read_like_a_single_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded, single = (load_model(folder, device="cpu").constants for folder in (tmp_path, checkpoint("qwen3")))
    assert all(map(torch.equal, sharded, single))


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_experts_may_be_stored_one_by_one_or_all_in_one_tensor(checkpoint, tmp_path, name):
    save_checkpoint(name, tmp_path, save_original_format=False)
    single, stacked = (load_file(folder / "model.safetensors") for folder in (checkpoint(name), tmp_path))
    assert len(stacked) < len(single)
    actual, expected = (load_model(folder, device="cpu").constants for folder in (tmp_path, checkpoint(name)))
    assert all(map(torch.equal, actual, expected))


def test_names_may_lack_what_those_of_a_decoder_with_a_head_begin_with(checkpoint, tmp_path):
    """As a model of embeddings has them, such as Qwen3-Embedding."""
    save_checkpoint("qwen3-tied", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    assert "embed_tokens.weight" in tensors
    save_file(tensors, file)
    assert answer(tmp_path) == answer(checkpoint("qwen3-tied"))


ACTIVATIONS = "hidden_act 'gelu' .*silu, swish"
REFUSED = [
    ("granite-4-mamba", {"layer_types": ["mamba", "conv", "mamba"]}, "layer_types .* 3 .*conv"),
    ("granite-4-experts", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 .*6"),
    *((name, {"hidden_act": "gelu"}, ACTIVATIONS) for name in ("bamba", "qwen3.5", "olmo-hybrid")),
    ("falcon-h1", {"mamba_d_ssm": 100}, "mamba_n_heads 8 .*mamba_d_head 16 .*100"),
    ("falcon-h1", {"ssm_multipliers": [1.0]}, r"ssm_multipliers .* 5 .*\[1\.0\]"),
    ("falcon-h1", {"ssm_in_multiplier": "a"}, "ssm_in_multiplier .*'a'"),
    ("nemotron-h", {"layers_block_type": ["mlp", "moe"]}, "layers_block_type .*moe"),
    ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M-E*"}, "hybrid_override_pattern .*M-E"),
    ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' .*relu2"),
    ("olmo-hybrid", {"layer_types": ["full_attention"]}, "layer_types .* 3 .*full_attention"),
    ("gemma4-inputs", {"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
    ("gemma4", {"per_layer_config": {"2": {"head_dim": 15}}}, "layer 2 .*num_key_value_heads 2 and head_dim 15"),
    ("gemma4", {"per_layer_config": [16]}, r"per_layer_config .*\[16\]"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("llama4", {"moe_layers": 3}, "moe_layers .*3"),
    ("llama4", {"layer_types": [[1]]}, r"layer_types .* 3 .*\[\[1\]\]"),
    ("bamba", {"attn_layer_indices": 3}, "attn_layer_indices .*3"),
    ("bamba", {"attn_layer_indices": ["1"]}, r"attn_layer_indices .*\['1'\]"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs .*3"),
    ("llama4", {"no_rope_layers": [2]}, r"no_rope_layers .* 3 .*\[2\]"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_a_model_cannot_have_is_refused_by_name(tmp_path, name, changes, message):
    save_checkpoint(name, tmp_path)
    edit_config(tmp_path, lambda settings: settings.update(changes))
    with pytest.raises(UnsupportedModelError, match=message):
        describe_model(tmp_path)


def test_sizes_of_gemma_4_as_its_first_files_have_them_mean_the_same(checkpoint, tmp_path) -> None:
    save_checkpoint("gemma4-inputs", tmp_path)

    def age(settings: dict) -> None:
        settings["global_head_dim"] = settings.pop("per_layer_config")["1"]["head_dim"]

    edit_config(tmp_path, age)
    with edited_tensors(tmp_path) as tensors:
        tensors |= {f"model.layers.5.self_attn.{name}_proj.weight": torch.ones(64, 64) for name in "kv"}
    assert answer(tmp_path) == answer(checkpoint("gemma4-inputs"))


def test_older_names_of_nemotron_h_mean_the_same(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    save_checkpoint("nemotron-h", tmp_path)

    def age(settings: dict) -> None:
        settings |= {"mamba_n_groups": settings.pop("n_groups"), "mamba_d_conv": settings.pop("conv_kernel")}
        settings |= {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 52}
        del settings["layers_block_type"]

    edit_config(tmp_path, age)
    assert answer(tmp_path) == answer(checkpoint("nemotron-h"))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert answer(tmp_path) == answer(checkpoint("nemotron-h"))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shards {shard.name}"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("name", ["llama-3.1", "llama-yarn", "llama-linear", "qwen2", "mistral-window"])
def test_older_configurations_mean_the_same(checkpoint: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    def to_older(settings: dict) -> None:
        parameters = settings.pop("rope_parameters")
        settings["rope_theta"] = parameters.pop("rope_theta")
        kind = parameters.pop("rope_type")
        if kind != "default":
            settings["rope_scaling"] = {"type": kind, **parameters}
        settings["torch_dtype"] = settings.pop("dtype")
        settings.pop("layer_types", None)

    save_checkpoint(name, tmp_path)
    edit_config(tmp_path, to_older)
    assert describe_model(tmp_path) == describe_model(checkpoint(name))
    assert answer(tmp_path) == answer(checkpoint(name))


def test_all_faults_of_a_checkpoint_are_named_in_one_error(tmp_path: Path) -> None:
    save_checkpoint("llama-3", tmp_path)
    with edited_tensors(tmp_path) as tensors:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(3, 64)
        tensors["model.layers.9.extra.weight"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path, device="cpu")
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.9.extra.weight" in message
    assert "model.layers.0.self_attn.k_proj.weight is [3, 64] and should be [32, 64]" in message


def test_layers_with_the_same_fault_are_named_together_and_none_is_left_out(tmp_path: Path) -> None:
    save_checkpoint("llama-3", tmp_path)
    with edited_tensors(tmp_path) as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight") and ".1." not in name]:
            del tensors[name]
        tensors |= {f"model.layers.{layer}.input_layernorm.weight": torch.zeros(64) for layer in range(3, 9)}
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path, device="cpu")
    message = str(caught.value)
    for product in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
        assert f"model.layers.{{0,2}}.{product}_proj.weight" in message
    assert "unexpected: model.layers.{3-8}.input_layernorm.weight" in message


def test_a_tensor_that_is_derived_from_the_configuration_may_be_there(checkpoint, tmp_path):
    save_checkpoint("llama-3.2", tmp_path)
    with edited_tensors(tmp_path) as tensors:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    actual, expected = (load_model(folder, device="cpu").constants for folder in (tmp_path, checkpoint("llama-3.2")))
    assert all(map(torch.equal, actual, expected))


def test_quantized_tensors_are_not_taken_for_weights(tmp_path: Path) -> None:
    save_checkpoint("llama-3", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    with edited_tensors(tmp_path) as tensors:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight is F8_E4M3 .*F64, F32"):
        load_model(tmp_path, device="cpu")


def test_a_loaded_model_does_not_change_with_its_file(tmp_path: Path) -> None:
    save_checkpoint("llama-3", tmp_path)
    model = load_model(tmp_path, device="cpu", dtype="float32")
    before = [tensor.clone() for tensor in model.constants]
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert all(map(torch.equal, model.constants, before))


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    save_checkpoint("llama-3", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*safe_serialization=True"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel .*LlamaForCausalLM"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' .*silu"),
    ],
)
def test_an_unsupported_configuration_names_its_file_and_what_is_supported(tmp_path, change, message):
    save_checkpoint("llama-3", tmp_path)
    edit_config(tmp_path, lambda settings: settings.update(change))
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: .*{message}"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("options", [{"dtype": "int3"}, {"quantize": "int3"}])
def test_unknown_options_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        load_model("demo", device="cpu", **options)


@pytest.mark.parametrize(
    ("avx512_bf16", "amx", "expected"),
    [(True, False, torch.bfloat16), (False, True, torch.bfloat16), (False, False, torch.float32)],
)
@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_without_compiled_kernels_auto_keeps_bf16_where_torch_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, machine: str, avx512_bf16: bool, amx: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    cpu = torch.device("cpu")
    with native.switched_off():
        assert resolve_dtype("auto", torch.bfloat16, cpu) == expected
        assert resolve_dtype("auto", torch.float16, cpu) == torch.float32
        assert resolve_dtype("bfloat16", torch.float32, cpu) == torch.bfloat16


@compiled
@pytest.mark.parametrize(
    ("name", "is_kept"), [("portable", False), ("avx2", True), ("avx512_vnni", True), ("avx512_bf16", True)]
)
def test_auto_takes_the_dtype_of_the_checkpoint_where_the_chosen_instructions_are_fast_at_it(
    monkeypatch: pytest.MonkeyPatch, name: str, is_kept: bool
) -> None:
    monkeypatch.setattr(compute, "instructions", lambda: Instructions(name, ()))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert resolve_dtype("auto", dtype, cpu) == (dtype if is_kept else torch.float32)
        assert resolve_dtype(dtype, torch.float32, cpu) == dtype  # what is asked for by its name is had
        assert resolve_dtype("auto", dtype, gpu) == dtype


def test_int8_weights_answer_like_full_ones() -> None:
    with LLM("demo", max_batch_size=1, max_sequence_length=64, quantize="int8") as llm:
        assert llm.generate("417+385=", SamplingParams(temperature=0.0))[0].outputs[0].text == "802"
        assert llm.model.weight_bytes < 1.2e6


def test_bf16_weights_answer_like_full_ones() -> None:
    with LLM("demo", max_batch_size=1, max_sequence_length=64, dtype="bfloat16") as llm:
        assert llm.generate("rev graph=", SamplingParams(temperature=0.0))[0].outputs[0].text == "hparg"


def test_a_shape_is_loaded_with_random_weights() -> None:
    model = load_model("shape:llama-100m", device="cpu", max_sequence_length=16)
    assert model.num_layers == 12
    with pytest.raises(ValueError, match="'shape:llama-10m'.*'shape:llama-100m'"):
        load_model("shape:llama-10m", device="cpu")


SMALL: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 64, "device": "cpu"}
PROMPTS = [[5, 6, 7], [100, 30]]


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    return quantized_file(tmp_path / "small.gguf", "llama", {"weight": "Q8_0"})


@pytest.fixture
def beyond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model whose gated activations go beyond what float16 holds."""
    random_model = gguf_checkpoints.random_model

    def planted(name: str) -> Any:
        model = random_model(name)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight *= 1e5
        return model

    monkeypatch.setattr(gguf_checkpoints, "random_model", planted)
    return quantized_file(tmp_path / "beyond.gguf", "llama", {"weight": "Q8_0"})


@compiled
def test_a_gguf_files_blocks_stay_and_none_expands_them(blocks: Path) -> None:
    quantized, expanded = (load_model(blocks, device="cpu", quantize=quantize) for quantize in (None, "none"))
    assert {type(form) for form in quantized.layers[0].linears.values()} == {PanelLinear}
    assert {type(form) for form in expanded.layers[0].linears.values()} == {Panels}
    assert quantized.dtype == expanded.dtype == (torch.float32 if instructions().name == "portable" else torch.float16)


@compiled
def test_a_gguf_files_blocks_stay_without_timing_a_product(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(*_: Any) -> float:
        raise AssertionError("a product was timed")

    monkeypatch.setattr(LinearTuner, "choose_small", times)
    with closing(load_runner(blocks, **SMALL)) as runner:
        assert {type(form) for form in runner.model.layers[0].linears.values()} == {PanelLinear}


@compiled
def test_groups_of_a_checkpoint_stay_and_none_expands_them(tmp_path: Path) -> None:
    packed, _ = write_pair(FORMS["gptq"], tmp_path)
    assert Panels not in {type(form) for form in load_model(packed, device="cpu").layers[0].linears.values()}
    expanded = load_model(packed, device="cpu", quantize="none").layers[0].linears
    assert {type(form) for form in expanded.values()} == {Panels}


def test_without_compiled_kernels_few_bits_are_expanded_in_float32(blocks: Path) -> None:
    with native.switched_off():
        model = load_model(blocks, device="cpu")
    assert model.dtype == torch.float32
    assert PanelLinear not in {type(form) for form in model.layers[0].linears.values()}


@compiled
def test_what_was_chosen_is_in_the_report(blocks: Path) -> None:
    with closing(load_runner(blocks, **SMALL)) as runner:
        report = runner.graphs.report()
        dtype = str(runner.model.dtype).removeprefix("torch.")
    assert report.computed_in == f"{dtype} over blocks weights, {instructions().name}"
    assert report.computed_in in str(report).splitlines()[0]
    assert report.as_dict()["computed_in"] == report.computed_in


@compiled
@pytest.mark.skipif(instructions().name == "portable", reason="it is float32 in any case")
@pytest.mark.parametrize("ranks", [1, 2])
def test_activations_beyond_float16_are_warned_of_and_computed_in_float32(beyond: Path, ranks: int) -> None:
    with pytest.warns(RuntimeWarning, match="exceed 65504.*computed in float32"):
        llm = LLM(beyond, skip_tokenizer_init=True, tensor_parallel_size=ranks, **SMALL)
    with llm, LLM(beyond, skip_tokenizer_init=True, dtype="float32", **SMALL) as wide:
        assert llm.model.dtype == torch.float32
        assert greedy_tokens(llm, PROMPTS, 8) == greedy_tokens(wide, PROMPTS, 8)


@compiled
@pytest.mark.skipif(instructions().name == "portable", reason="it is float32 in any case")
def test_finite_logits_are_remembered_until_the_file_changes(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[bool] = []

    def probed(prompts: Prompts) -> bool:
        probes.append(has_finite_logits(prompts))
        return probes[-1]

    has_finite_logits = Prompts.has_finite_logits
    monkeypatch.setattr(Prompts, "has_finite_logits", probed)
    for expected in (1, 1, 2):
        if expected == 2:
            os.utime(blocks)
        with closing(load_runner(blocks, **SMALL)) as runner:
            assert runner.model.dtype == torch.float16
        assert probes == [True] * expected


@compiled
@pytest.mark.skipif(instructions().name == "portable", reason="it is float32 in any case")
def test_logits_are_probed_at_positions_that_the_model_has(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its longest sequence there are no rotary angles, and what is in memory there is no query."""
    probed: list[int] = []

    def stage(prompts: Prompts, chunks: list[PromptChunk]) -> None:
        probed.extend(chunk.end for chunk in chunks)
        staged(prompts, chunks)

    staged = Prompts.stage
    monkeypatch.setattr(Prompts, "stage", stage)
    with closing(load_runner(blocks, **SMALL | {"max_sequence_length": 11, "page_size": 16})) as runner:
        assert runner.model.dtype == torch.float16
    assert probed == [11]


@compiled
def test_activations_beyond_float16_are_an_error_where_it_is_asked_for_and_never_an_answer(beyond: Path) -> None:
    with LLM(beyond, skip_tokenizer_init=True, dtype="float16", **SMALL) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=8)):
            assert "dtype='float32' computes what goes beyond" in str(output.error)


@pytest.mark.parametrize("name", FORMS)
def test_checkpoints_say_whether_they_are_integers_of_few_bits(tmp_path: Path, name: str) -> None:
    packed, plain = write_pair(FORMS[name], tmp_path)
    assert describe_model(packed).integer_quantized == name.startswith(("int", "gptq", "awq"))
    assert not describe_model(plain).integer_quantized
