"""A model with experts is the same decoder, whether it comes in GGUF or as transformers writes it."""

from pathlib import Path

import pytest
import torch
from gguf_checkpoints import random_model, write

from graphdecode.models import load_model


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
