"""A GGUF file is the checkpoint that it was made from: transformers, given what we read, computes the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_checkpoints import ARCHITECTURES, random_model, write

from graphdecode.models import load_model
from graphdecode.models.gguf.source import Gguf


def read_all(source: Gguf) -> dict[str, torch.Tensor]:
    found = {}
    for name, stored in source.tensors.items():
        found[name] = torch.full(stored.shape, torch.nan)
        source.read(name, found[name])
    return found


def in_stacks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all experts of a layer in one tensor, outputs last and those of two products by turns."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for place in {name.rpartition(".experts.")[0] for name in tensors.keys() - found.keys()}:
        experts = range(sum(name.startswith(f"{place}.experts.") for name in tensors) // 6)
        for end, kind in (("", "weight"), ("_bias", "bias")):
            gate, up, down = (
                torch.stack([tensors[f"{place}.experts.{expert}.{part}_proj.{kind}"] for expert in experts])
                for part in ("gate", "up", "down")
            )
            by_turns = torch.stack((gate, up), dim=2).flatten(1, 2)
            found[f"{place}.experts.gate_up_proj{end}"] = by_turns.mT.contiguous() if kind == "weight" else by_turns
            found[f"{place}.experts.down_proj{end}"] = down.mT.contiguous() if kind == "weight" else down
    return found


def as_transformers_reads_it(source: Gguf, folder: Path, kind: str) -> Any:
    """Return transformers' model of our configuration and tensors."""
    from safetensors.torch import save_file

    family = {"Gemma3": "Gemma3Text"}.get(kind, kind)
    config = getattr(transformers, f"{family}Config")(**source.settings | {"pad_token_id": None})
    tensors = in_stacks(read_all(source)) if kind == "GptOss" else read_all(source)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    model, told = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_computes_the_same_from_what_is_read(tmp_path: Path, name: str) -> None:
    model = random_model(name)
    source = Gguf(write(model, name, tmp_path / "model.gguf"))
    ours = as_transformers_reads_it(source, tmp_path, ARCHITECTURES[name][1])
    tokens = torch.randint(0, 259, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "qwen3moe", "gpt-oss"])
def test_a_file_with_experts_is_the_folder_that_it_was_made_from(tmp_path: Path, name: str) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path / "folder")
    file, folder = (
        load_model(path, device="cpu", dtype="float32")
        for path in (write(model, name, tmp_path / "model.gguf"), tmp_path / "folder")
    )
    assert file.config.experts == folder.config.experts
    assert file.config.windows == folder.config.windows
    assert len(file.constants) == len(folder.constants)
    for ours, theirs in zip(file.constants, folder.constants, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
