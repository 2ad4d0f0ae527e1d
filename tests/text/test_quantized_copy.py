"""A model is written anew in few bits: as it is read with them, whole, at once, and for other programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from graphdecode import LLM, SamplingParams
from graphdecode.convert import converted_copy, copies
from graphdecode.convert import quantized_copy as copy
from graphdecode.errors import ArgumentError
from graphdecode.models import UnsupportedModelError
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.text import load_tokenizer

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SMALL = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15, "eos_token_id": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TEXT = "Hello, world!  12 + 345 = x\n\n\tdef f(): 'naïve' 你好"


MERGES = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("o", "r")]


def tokenizer(merges: list[tuple[str, str]] = MERGES) -> PreTrainedTokenizerFast:
    """Return byte-level BPE with a few merges, which cuts texts as GPT-2's does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, "<|end|>", *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def checkpoint(folder: Path, **changes: object) -> Path:
    """Write a small Llama with a tokenizer."""
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**(SMALL | changes))).bfloat16().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "NOTICE").write_text("kept")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), attention_bias=True)


def sparse_checkpoint(kind: str, folder: Path, **options: object) -> Path:
    """Write a small model with experts, and a tokenizer."""
    torch.manual_seed(4)
    sizes = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = getattr(transformers, f"{kind}Config")(**(SMALL | sizes | {"head_dim": 32, "norm_topk_prob": True}))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.bfloat16().save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder


def answers(folder: Path, **options: object) -> list[list[int]]:
    with LLM(folder, dtype="float32", max_batch_size=2, max_sequence_length=64, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(["he", TEXT], GREEDY)]


@pytest.mark.parametrize(("quantize", "size"), [("int4", None), ("int8", 32), ("fp8", None)])
def test_a_copy_answers_as_the_model_rounded_while_it_is_read(model, tmp_path, quantize, size):
    made = copy(model, tmp_path / "copy", quantize, group_size=size)
    assert (made / "NOTICE").read_text() == "kept"
    assert load_tokenizer(made)(TEXT).input_ids == load_tokenizer(model)(TEXT).input_ids
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    assert answers(made) == answers(model, quantize=quantize, quantize_group_size=size)


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_transformers_reads_the_copy_as_it_is_read_here(model: Path, tmp_path: Path, quantize: str) -> None:
    made = copy(model, tmp_path / "copy", quantize)
    theirs = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    plain = checkpoint(tmp_path / "plain", attention_bias=True)
    source, tensors = Checkpoint(made), load_file(plain / "model.safetensors")
    for name in tensors:
        tensors[name] = torch.empty(tensors[name].shape)
        source.read(name, tensors[name])
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    ours = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    ids = torch.tensor([[1, 7, 3, 250, 9]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True}], ids=["plain", "tied"])
def test_a_file_of_gguf_answers_as_the_model_rounded_while_it_is_read(tmp_path: Path, changes: dict) -> None:
    model = checkpoint(tmp_path / "model", **changes)
    made = copy(model, tmp_path / "copy.gguf", "q8_0")
    assert load_tokenizer(made)(TEXT).input_ids == load_tokenizer(model)(TEXT).input_ids
    assert answers(made, quantize="gguf") == answers(model, quantize="q8_0")


def test_a_tokenizer_without_merges_is_written_and_read_back(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    tokenizer([]).save_pretrained(model)
    made = copy(model, tmp_path / "copy.gguf", "q8_0")
    assert load_tokenizer(made)(TEXT).input_ids == load_tokenizer(model)(TEXT).input_ids


SPARSE = [("Mixtral", True), ("Mixtral", False), ("Qwen3Moe", True), ("GptOss", True)]


@pytest.mark.parametrize(("kind", "one_by_one"), SPARSE)
def test_copies_of_models_with_experts_answer_as_these_rounded_while_they_are_read(tmp_path, kind, one_by_one):
    model = sparse_checkpoint(kind, tmp_path / "model", save_original_format=one_by_one)
    assert answers(copy(model, tmp_path / "copy", "int4")) == answers(model, quantize="int4")
    made = copy(model, tmp_path / "copy.gguf", "q8_0")
    assert answers(made, quantize="gguf") == answers(model, quantize="q8_0")


def test_gguf_reads_all_experts_of_a_written_file(tmp_path: Path) -> None:
    model = sparse_checkpoint("GptOss", tmp_path / "model")
    plain = load_file(model / "model.safetensors")
    stored = {each.name: each for each in gguf.GGUFReader(copy(model, tmp_path / "copy.gguf", "q8_0")).tensors}
    gate_up = plain["model.layers.1.mlp.experts.gate_up_proj"].float()  # [experts, in_features, by turns]
    bias = plain["model.layers.1.mlp.experts.gate_up_proj_bias"].float()
    for place, name in enumerate(("blk.1.ffn_gate_exps", "blk.1.ffn_up_exps")):
        found = gguf.quants.dequantize(stored[f"{name}.weight"].data, gguf.GGMLQuantizationType.Q8_0)
        expected = gate_up[:, :, place::2].transpose(1, 2)
        assert found.shape == expected.shape == (4, 96, 64)
        assert float((torch.from_numpy(found) - expected).norm() / expected.norm()) < 0.01
        assert torch.equal(torch.from_numpy(np.array(stored[f"{name}.bias"].data)), bias[:, place::2])


def test_transformers_reads_a_copy_of_a_model_with_experts(tmp_path: Path) -> None:
    model = sparse_checkpoint("Qwen3Moe", tmp_path / "model")
    made = copy(model, tmp_path / "copy", "int8")
    theirs, plain = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in (made, model))
    ids = torch.tensor([[1, 7, 3, 250, 9]])
    with torch.no_grad():
        assert float((theirs(ids).logits - plain(ids).logits).norm() / plain(ids).logits.norm()) < 0.05


def test_a_gguf_file_has_llamas_rope(tmp_path: Path) -> None:
    rope = LLAMA3 | {"original_max_position_embeddings": 8192}
    model = checkpoint(tmp_path / "model", rope_parameters=rope, max_position_embeddings=65536)
    made = copy(model, tmp_path / "copy.gguf", "q4_k")  # of 64 columns: blocks of 32, with five bits
    assert answers(made, quantize="gguf") == answers(model, quantize="q4_k")


def test_a_model_that_gguf_cannot_describe_is_refused_before_writing(tmp_path: Path) -> None:
    rope = LLAMA3 | {"original_max_position_embeddings": 32}
    model = checkpoint(tmp_path / "model", rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="rope"):
        copy(model, tmp_path / "copy.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_large_model_is_written_in_files_with_an_index(model, tmp_path, monkeypatch):
    monkeypatch.setattr("graphdecode.convert.folders._SHARD_BYTES", 40_000)
    made = copy(model, tmp_path / "copy", "int4")
    files = sorted(path.name for path in made.glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert answers(made) == answers(model, quantize="int4")


def test_an_interrupted_copy_leaves_nothing_and_what_was_there(model, tmp_path, monkeypatch):
    made = copy(model, tmp_path / "copy", "int4")
    before = (made / "model.safetensors").read_bytes()

    def interrupted(names: list[str], progress: bool) -> Iterator[str]:
        yield from names[:5]
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "counted", interrupted)
    for out in ("copy", "other"):
        with pytest.raises(KeyboardInterrupt):
            copy(model, tmp_path / out, "int8", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    assert (made / "model.safetensors").read_bytes() == before


def test_overwrite_replaces_a_copy(model: Path, tmp_path: Path) -> None:
    made = copy(model, tmp_path / "copy", "int4")
    with pytest.raises(ArgumentError, match="--overwrite"):
        copy(model, made, "int8")
    copy(model, made, "int8", overwrite=True)
    stored = json.loads((made / "config.json").read_text())["quantization_config"]
    assert stored["config_groups"]["group_0"]["weights"]["num_bits"] == 8
    with pytest.raises(ArgumentError, match="INT8"):
        copy(made, tmp_path / "again", "int4")
    (tmp_path / "holiday").mkdir()
    with pytest.raises(ArgumentError, match="holiday"):
        copy(model, tmp_path / "holiday", "int4", overwrite=True)


def test_a_gguf_file_is_expanded_and_rounded_anew(tmp_path: Path) -> None:
    file = copy(checkpoint(tmp_path / "model"), tmp_path / "copy.gguf", "q8_0")
    expanded = converted_copy(file, tmp_path / "expanded")
    for made, quantize, own in (("again", "int4", None), ("again.gguf", "q4_k", "gguf")):
        found = answers(copy(file, tmp_path / made, quantize), quantize=own)
        assert found == answers(expanded, quantize=quantize)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert theirs.config.quantization_config.quantization_config.config_groups["group_0"].weights.num_bits == 4
    with pytest.raises(ArgumentError, match="contains the model itself"):
        copy(file, file, "q4_k", overwrite=True)


def test_quantize_gguf_needs_a_gguf_file(model: Path) -> None:
    with pytest.raises(ArgumentError, match="quantize='gguf'"):
        LLM(model, quantize="gguf")


REFUSED = {
    "no name": ("int4", "..", {}, "the copy needs a name"),
    "a word for nothing": ("int3", "copy", {}, "quantize must be int8, int4, fp8, q8_0, q4_k, got 'int3'"),
    "a format that there is not": ("int4", "copy", {"file_format": "onnx"}, "must be one of safetensors, gguf"),
    "a format of others": ("int4", "copy.gguf", {"file_format": "gguf"}, "int4 cannot be written as gguf, only"),
    "a folder for a file": ("q8_0", "copy", {}, "must end in .gguf"),
    "a file for a folder": ("int8", "copy.gguf", {}, "must be a folder"),
    "a folder in none": ("int8", "no/copy", {}, "is not a folder, so copy cannot be made"),
    "a group that does not fit": ("int4", "copy", {"group_size": 48}, "divide all weights' columns"),
}


@pytest.mark.parametrize(("quantize", "out", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_and_nothing_written(model, tmp_path, quantize, out, options, message):
    with pytest.raises(ArgumentError, match=message):
        copy(model, tmp_path / out, quantize, **options)
    assert not list(tmp_path.iterdir())


def test_the_model_itself_is_not_written_over(model: Path) -> None:
    for out in (model, model.parent):
        with pytest.raises(ArgumentError, match="contains the model itself"):
            copy(model, out, "int4", overwrite=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a terminal, and sends a signal")
def test_ctrl_c_at_the_shell_takes_the_bar_away_and_leaves_nothing(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=10)
    terminal, its_end = os.openpty()
    termios.tcsetwinsize(terminal, (24, 120))
    command = [sys.executable, "-m", "graphdecode", "quantize", str(model), str(tmp_path / "copy")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=its_end, env=environment) as process:
        os.close(its_end)
        seen = ""
        while not re.search(r"quantizing: +\d+%\|.*\| [1-9]\d*/93 ", seen):
            seen += os.read(terminal, 65536).decode(errors="replace")
        assert len(list(tmp_path.iterdir())) == 2  # the model, and what is being written
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        seen += os.read(terminal, 65536).decode(errors="replace")
        os.close(terminal)
    assert (process.returncode, out) == (130, b""), seen
    assert "Traceback" not in seen
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
