"""Door 3: a source of weights is one class. This one reads a folder whose weights are NumPy's arrays."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.linear.weight_form import Shard, Stored
from graphdecode.models import CheckpointError, ModelConfig, config_of, register_source, resolve_model_path
from graphdecode.models.source import SOURCES

PROMPTS = ["417+385=", "rev oceanic=", "sort zebra="]
CONFIG = BucketConfig(max_batch_size=2, max_sequence_length=64)


class ArrayFolder:
    def __init__(self, model: str | Path) -> None:
        self.name = str(model)
        self._folder = Path(model)
        self._arrays = np.load(self._folder / "weights.npz")

    @classmethod
    def opens(cls, model: str | Path) -> bool:
        return (Path(model) / "weights.npz").exists()

    def config(self) -> ModelConfig:
        return config_of(json.loads((self._folder / "config.json").read_text()))

    @property
    def tensors(self) -> dict[str, Stored]:
        return {name: Stored(array.shape, "F32") for name, array in self._arrays.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        array = self._arrays[name]
        out.copy_(torch.from_numpy(array if shard is None else array[shard.slices(array.shape)]))


@pytest.fixture
def registered() -> Iterator[None]:
    register_source(ArrayFolder)
    yield
    SOURCES.remove(ArrayFolder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    demo = resolve_model_path("demo")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / file, tmp_path / file)
    arrays = {name: tensor.float().numpy() for name, tensor in load_file(demo / "model.safetensors").items()}
    np.savez(tmp_path / "weights.npz", **arrays)
    return tmp_path


def tokens(model: str | Path) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(model, config=CONFIG, dtype="float32") as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.mark.usefixtures("registered")
def test_a_source_from_outside_gives_the_tokens_of_safetensors(folder: Path) -> None:
    assert tokens(folder) == tokens("demo")


@pytest.mark.usefixtures("registered")
def test_missing_tensors_are_reported_as_of_a_checkpoint(folder: Path) -> None:
    arrays = dict(np.load(folder / "weights.npz"))
    del arrays["model.layers.1.mlp.up_proj.weight"], arrays["model.norm.weight"]
    np.savez(folder / "weights.npz", **arrays)
    with pytest.raises(CheckpointError) as caught:
        LLM(folder)
    assert "missing: model.norm.weight, model.layers.1.mlp.up_proj.weight" in str(caught.value)


def test_without_its_line_in_the_registry_the_folder_holds_no_model(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(folder)
