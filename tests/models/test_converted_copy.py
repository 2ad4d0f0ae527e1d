"""A GGUF file is written as a checkpoint folder that transformers, and we, read as the same model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from command_line import run_command
from gguf_checkpoints import ARCHITECTURES, copy_file, quantized_file, random_model, write
from greedy_tokens import greedy_tokens
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM

from graphdecode import LLM
from graphdecode.convert import converted_copy, quantized_copy
from graphdecode.errors import ArgumentError
from graphdecode.models import ModelSourceError
from graphdecode.text.tokenizer import load_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def with_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Add a tokenizer whose tokens are bytes, and a template."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|a|>", "<|b|>", "<|end|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 3)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)


def answer(model: Path, **options: Any) -> list[list[int]]:
    with LLM(model, max_batch_size=1, max_sequence_length=64, **options) as llm:
        return greedy_tokens(llm, [[5, 6, 7, 8]], 12)


OTHERWISE = {"gpt-oss", "gemma4-experts", "llama4", "llama4-rope"}  # stored in folders


@pytest.mark.parametrize("name", sorted(OTHERWISE))
def test_experts_with_another_layout_in_folders_are_refused(tmp_path: Path, name: str) -> None:
    file = write(random_model(name), name, tmp_path / "model.gguf", with_vocabulary)
    with pytest.raises(ArgumentError, match="the experts of .* have another layout in folders"):
        converted_copy(file, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - OTHERWISE))
def test_transformers_reads_the_folder_as_the_same_model(tmp_path: Path, name: str) -> None:
    model = random_model(name)
    file = write(model, name, tmp_path / "model.gguf", with_vocabulary)
    folder = converted_copy(file, tmp_path / "folder")
    copied, loading_info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    is_glm = name == "glm-4.7-flash"  # whose files are called DeepSeek's, as they compute the same
    assert type(copied) is (DeepseekV3ForCausalLM if is_glm else type(model))
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    tokens = torch.randint(0, 259, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(copied.eval()(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert answer(folder, dtype="float32") == answer(file, dtype="float32")


def test_tokenizer_template_and_ends_come_along(tmp_path: Path) -> None:
    file = write(random_model("llama"), "llama", tmp_path / "model.gguf", with_vocabulary)
    folder = converted_copy(file, tmp_path / "folder")
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(file)
    text = "Hello, 12 + 345!\n\tnaïve<|end|>"
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.chat_template == TEMPLATE
    assert theirs.eos_token == "<|end|>"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 258
    assert not (folder / "generation_config.json").exists(), "the file says nothing of sampling"


def test_blocks_are_expanded_into_the_type_that_is_asked_for(tmp_path: Path) -> None:
    types = {"attn_q.weight": "Q8_0", "ffn_down.weight": "Q4_0", "token_embd.weight": "Q8_0"}
    plain = quantized_file(tmp_path / "model.gguf", "llama", types)
    copy_file(plain, tmp_path / "whole.gguf", edit=with_vocabulary)
    for requested, dtype in (("auto", torch.bfloat16), ("float32", torch.float32)):
        folder = converted_copy(tmp_path / "whole.gguf", tmp_path / requested, dtype=requested)
        assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {dtype}
    expanded = answer(tmp_path / "whole.gguf", quantize="none", dtype="float32")
    assert answer(tmp_path / "float32", dtype="float32") == expanded


def test_what_cannot_be_converted_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="model 'demo' is not a GGUF file"):
        converted_copy("demo", tmp_path / "folder")
    file = write(random_model("llama"), "llama", tmp_path / "other.gguf", with_vocabulary)
    with pytest.raises(ArgumentError, match="dtype must be auto, float32, bfloat16, float16, got 'int8'"):
        converted_copy(file, tmp_path / "folder", dtype="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]
    converted_copy(file, tmp_path / "folder")
    with pytest.raises(ArgumentError, match="is there already; --overwrite"):
        converted_copy(file, tmp_path / "folder")


def test_a_tokenizer_that_cannot_be_read_is_said_before_weights_are_written(tmp_path, monkeypatch):
    def with_another(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("unheard-of")
        writer.add_token_list(["a"])
        writer.add_token_types([gguf.TokenType.NORMAL])

    def too_late(*_: object) -> None:
        raise AssertionError("weights are written first")

    file = write(random_model("llama"), "llama", tmp_path / "model.gguf", with_another)
    monkeypatch.setattr("graphdecode.convert.copies.write_weights", too_late)
    says = "tokenizer.ggml.pre 'unheard-of' is not supported; supported are"
    copies: list[Callable[[], Path]] = [
        lambda: converted_copy(file, tmp_path / "folder"),
        lambda: quantized_copy(file, tmp_path / "folder", "int8"),
        lambda: quantized_copy(file, tmp_path / "copy.gguf", "q8_0"),
    ]
    for copy in copies:
        with pytest.raises(ModelSourceError, match=says) as refused:
            copy()
        assert "--tokenizer" not in str(refused.value)
    with pytest.raises(ModelSourceError, match="--tokenizer"):
        load_tokenizer(file)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_the_command_says_where_it_is(tmp_path: Path) -> None:
    write(random_model("llama"), "llama", tmp_path / "model.gguf", with_vocabulary)
    ran = run_command("convert", "model.gguf", "folder", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "folder"
    assert "MiB" in ran.stderr
