"""What a checkpoint has beside its configuration is used, skipped as transformers skips it and said, or refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_checkpoints import edit_config, edited_tensors, save_checkpoint
from greedy_tokens import greedy_tokens, reference_tokens
from quantized_checkpoints import FORMS, write_pair
from safetensors.torch import load_file
from torch import Tensor

from graphdecode import LLM
from graphdecode.convert import quantized_copy
from graphdecode.errors import ArgumentError
from graphdecode.models import check_model, load_model
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.weight_map import CheckpointError

FILE = "model.safetensors"
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
PROMPT = list(range(5, 30))
TIED = ("llama-3.2", "qwen3-tied", "gemma3-cap", "granite-4-experts", "lfm2", "llama4-dense", "gemma4")


def llm_of(folder: Path, **options: Any) -> LLM:
    sizes = {"max_batch_size": 1, "max_sequence_length": 64, "page_size": 8, "dtype": "float32", "backend": "eager"}
    return LLM(folder, skip_tokenizer_init=True, **sizes | options)


def tokens_of(llm: LLM) -> list[int]:
    return greedy_tokens(llm, [PROMPT], 6)[0]


def theirs(folder: Path, model_class: Any = transformers.AutoModelForCausalLM) -> list[int]:
    return reference_tokens(model_class.from_pretrained(folder, dtype=torch.float32).eval(), PROMPT, 6)


def with_tensors(folder: Path, more: dict[str, Tensor], *without: str) -> Path:
    with edited_tensors(folder) as tensors:
        for name in without:
            del tensors[name]
        tensors |= more
    return folder


def other_head(seed: int = 1) -> Tensor:
    return torch.randn(259, 64, generator=torch.Generator().manual_seed(seed)) * 0.15


@pytest.mark.parametrize("name", TIED)
def test_a_tied_configuration_beside_another_head_uses_it_as_transformers_does(tmp_path, name, caplog):
    with_tensors(save_checkpoint(name, tmp_path), {HEAD: other_head()})
    with llm_of(tmp_path) as llm:
        assert tokens_of(llm) == theirs(tmp_path)
    assert any(HEAD in line for line in caplog.messages)


def test_a_head_that_is_the_embedding_is_shared_and_needs_no_memory(tmp_path):
    tied = load_model(save_checkpoint("qwen3-tied", tmp_path), device="cpu")
    table = load_file(tmp_path / FILE)[TABLE]
    again = load_model(with_tensors(tmp_path, {HEAD: table.clone()}), device="cpu")
    assert sum(each.nbytes for each in again.constants) == sum(each.nbytes for each in tied.constants)
    assert all(map(torch.equal, again.constants, tied.constants))


def test_a_head_alone_is_the_embedding_of_a_tied_model(tmp_path):
    save_checkpoint("qwen3-tied", tmp_path)
    table = load_file(tmp_path / FILE)[TABLE]
    with llm_of(with_tensors(tmp_path, {HEAD: table.clone()}, TABLE)) as llm:
        assert tokens_of(llm) == theirs(tmp_path)


def test_a_misshapen_head_of_a_tied_model_is_named(tmp_path):
    with_tensors(save_checkpoint("qwen3-tied", tmp_path), {HEAD: torch.zeros(3, 64)})
    with pytest.raises(CheckpointError, match=HEAD):
        check_model(tmp_path)


def test_a_quantized_head_of_a_tied_model_is_used(tmp_path):
    form = FORMS["fp8 128x128"]
    packed, _ = write_pair(form, tmp_path)
    written = form.write(other_head())
    stored = {f"lm_head.{end}": tensor.contiguous() for end, tensor in written.tensors.items()}
    with_tensors(packed, stored)
    edit_config(packed, lambda settings: settings.update(tie_word_embeddings=True))
    assert Checkpoint(packed).tensors[HEAD].dtype == "FP8"
    with llm_of(packed) as llm:
        tokens = tokens_of(llm)
        assert llm.model.config.tie_word_embeddings is False
    with llm_of(with_tensors(packed, {HEAD: written.stands_for.float()}, *stored)) as llm:
        assert tokens_of(llm) == tokens


def test_a_head_of_its_own_is_part_of_a_quantized_copy(tmp_path):
    folder = with_tensors(save_checkpoint("qwen3-tied", tmp_path / "model"), {HEAD: other_head()})
    copy = quantized_copy(folder, tmp_path / "copy", "int8")
    assert torch.equal(load_file(copy / FILE)[HEAD].float(), other_head())


def test_updates_of_a_tied_model_change_its_one_tensor_or_are_refused(tmp_path):
    folder = save_checkpoint("qwen3-tied", tmp_path / "model")
    other = save_checkpoint("qwen3-tied", tmp_path / "other")
    with llm_of(with_tensors(other, {TABLE: other_head()})) as reference:
        expected = tokens_of(reference)
    with_tensors(folder, {HEAD: load_file(folder / FILE)[TABLE].clone()})  # the same values, as some tools write them
    with llm_of(folder) as llm:
        before = tokens_of(llm)
        with pytest.raises(ArgumentError, match=HEAD):
            llm.update_weights({HEAD: other_head()})
        assert tokens_of(llm) == before
        llm.update_weights({TABLE: other_head()})
        assert tokens_of(llm) == expected
        llm.update_weights({TABLE: other_head(), HEAD: other_head()})
        assert tokens_of(llm) == expected


def test_updates_of_a_head_of_its_own_change_it_alone(tmp_path):
    folder = with_tensors(save_checkpoint("qwen3-tied", tmp_path), {HEAD: other_head()})
    with llm_of(folder) as llm:
        llm.update_weights({HEAD: other_head(2)})
        assert tokens_of(llm) == theirs(with_tensors(folder, {HEAD: other_head(2)}))
        llm.update_weights({HEAD: load_file(folder / FILE)[TABLE]})  # the embedding's values, in its own tensor
        assert tokens_of(llm) == theirs(with_tensors(folder, {}, HEAD))


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "olmo-hybrid-nope", "nemotron-h", "qwen3"])
def test_prediction_layers_are_skipped_and_said(tmp_path, name, caplog):
    plain = check_model(save_checkpoint(name, tmp_path))
    further = {"mtp.layers.0.mlp.gate.weight": torch.ones(3, 3), "mtp.fc.weight": torch.ones(2)}
    with_tensors(tmp_path, further)
    assert check_model(tmp_path) == plain
    load_model(tmp_path, device="cpu")
    assert any("1 of mtp.layers" in line and "1 of mtp.fc" in line for line in caplog.messages)


def test_layers_behind_the_last_of_deepseek_are_skipped_and_said(tmp_path, caplog):
    with_tensors(save_checkpoint("deepseek-v3", tmp_path), {"model.layers.3.eh_proj.weight": torch.ones(3, 3)})
    caplog.set_level(logging.WARNING)
    load_model(tmp_path, device="cpu")
    assert any("1 of model.layers" in line for line in caplog.messages)


def test_a_bias_of_a_quantized_layer_that_has_none_is_refused_unless_it_is_zero(tmp_path):
    packed, _ = write_pair(FORMS["gptq"], tmp_path)
    layer = next(name for name, stored in Checkpoint(packed).tensors.items() if stored.dtype.startswith("INT"))
    bias, rows = layer.removesuffix("weight") + "bias", Checkpoint(packed).tensors[layer].shape[0]
    check_model(with_tensors(packed, {bias: torch.zeros(rows)}))
    with pytest.raises(CheckpointError, match=f"unexpected: .*{bias.rpartition('.layers.')[2][2:]}"):
        check_model(with_tensors(packed, {bias: torch.ones(rows)}))
