"""A quantization format is one file and one line: `ternary_format.py`, which no file of ours knows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import compiled
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.convert import quantized_copy
from graphdecode.errors import ArgumentError, UnsupportedModelError
from graphdecode.extensions import LOADED, load_modules
from graphdecode.kernels.linear.weight_tiles import dequantized
from graphdecode.linear import FormOptions, Shard, Stored, load_linear
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.quantization import FORMATS, QuantizedWeight, register_format
from graphdecode.linear.quantization.format import PackedTensor
from graphdecode.linear.quantization.groups import Groups
from graphdecode.linear.quantization.registry import format_of, online_quantizations
from graphdecode.linear.weight_form import LinearNames
from graphdecode.models import resolve_model_path

FILE = Path(__file__).with_name("ternary_format.py")
OPTIONS = FormOptions(torch.device("cpu"), torch.float32, LinearTuner())
CONFIG = BucketConfig(max_batch_size=2, max_sequence_length=64)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    load_modules([FILE])
    yield
    del FORMATS["ternary"], LOADED[FILE]


def rounded(weight: Tensor) -> QuantizedWeight:
    return online_quantizations()["ternary"].quantized(weight, "TERNARY")


class Source:
    def __init__(self, shard: Shard | None = None) -> None:
        draw = torch.Generator().manual_seed(3)
        self.weights = {name: rounded(torch.randn(40, 96, generator=draw)) for name in "qk"}
        if shard is not None:
            self.weights = {name: weight.part(shard) for name, weight in self.weights.items()}
        self.tensors = {name: Stored(weight.shape, "TERNARY") for name, weight in self.weights.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        raise AssertionError("a quantized weight is dequantized")

    def read_quantized(self, name: str, expert: int | None = None) -> QuantizedWeight:
        return self.weights[name]


@compiled
@pytest.mark.parametrize("shard", [None, Shard(1, 2, 0), Shard(2, 3, 1)], ids=str)
def test_weights_are_fused_cut_and_multiplied(shard: Shard | None) -> None:
    source = Source(shard)
    form = load_linear(source, LinearNames(("q", "k")), OPTIONS)
    assert form.choice(1).path == "ternary"
    assert form.nbytes < form.out_features * form.in_features  # two bits, and whole panels
    weight = torch.cat([source.weights[name].dequantized() for name in "qk"])
    x, out = torch.randn(3, form.in_features), torch.empty(3, form.out_features)
    form.apply(out, x)
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-5, atol=1e-5)


@compiled
def test_a_gpu_has_the_same_values() -> None:
    weight = Source().weights["q"]
    tiles = weight.tiles()
    assert tiles is not None
    torch.testing.assert_close(dequantized(tiles)[:, :96], weight.dequantized())


def tokens_of(model: str | Path, path: str, quantize: str | None = None) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(model, config=CONFIG, dtype="float32", quantize=quantize, load_modules=[FILE]) as llm:
        assert path in {choice["path"] for choice in llm.model.linear_choices(1).values()}
        return [list(output.outputs[0].token_ids) for output in llm.generate(["417+385=", "rev oceanic="], params)]


@compiled
def test_a_model_is_rounded_on_load_written_read_and_served(tmp_path: Path) -> None:
    demo, base = resolve_model_path("demo"), tmp_path / "plain"
    shutil.copytree(demo, base)
    weights = {name: tensor.float() for name, tensor in load_file(demo / "model.safetensors").items()}
    of_layers = {name for name, tensor in weights.items() if "layers" in name and tensor.ndim == 2}
    save_file(
        {name: rounded(tensor).dequantized() if name in of_layers else tensor for name, tensor in weights.items()},
        base / "model.safetensors",
        {"format": "pt"},
    )
    expected = tokens_of(base, "native")
    assert tokens_of("demo", "ternary", quantize="ternary") == expected
    copy = quantized_copy("demo", tmp_path / "copy", "ternary")
    assert {f"{name}_codes" for name in of_layers} <= load_file(copy / "model.safetensors").keys()
    assert tokens_of(copy, "ternary") == tokens_of(copy, "ternary", quantize="ternary") == expected
    with pytest.raises(ArgumentError, match="'fp8'"):
        tokens_of(copy, "groups", quantize="fp8")


def test_a_checkpoint_of_a_format_that_is_not_registered_says_where_one_comes_from() -> None:
    with pytest.raises(UnsupportedModelError, match=r"quaternary.*ternary.*load_modules"):
        format_of({"quantization_config": {"quant_method": "quaternary"}})


def test_a_group_size_is_refused_by_a_format_without_groups() -> None:
    with pytest.raises(ArgumentError, match="group size"):
        LLM("demo", config=CONFIG, quantize="ternary", quantize_group_size=32)


@pytest.mark.parametrize(("code", "bits"), [("nf3", 4), ("integer", 3), ("e2m1", 8), ("e4m3", 4)])
def test_groups_of_codes_that_nothing_multiplies_are_refused(code: Any, bits: int) -> None:
    with pytest.raises(ValueError, match=code):
        Groups(code, bits, torch.zeros(4, 48, dtype=torch.uint8), torch.ones(4, 1), None, 96)


def test_a_format_without_kernels_needs_no_layout_of_kernels() -> None:
    class Ones(QuantizedWeight):
        shape = (4, 32)

        def rows(self, rows: slice) -> Ones:
            return self

        def part(self, shard: Shard) -> Ones:
            return self

        @classmethod
        def joined(cls, parts: Sequence[Ones]) -> Ones:
            return parts[0]

        def dequantized(self) -> Tensor:
            return torch.ones(self.shape)

    out = torch.empty(4, 32)
    PackedTensor(Stored((4, 32), "ONES"), {}, Ones).write(lambda name, part: torch.empty(0), out, None)
    assert bool((out == 1).all())
    with pytest.raises(NotImplementedError, match="Ones"):
        Ones().panels()


def test_a_registered_format_is_refused_unless_it_is_replaced() -> None:
    with pytest.raises(ArgumentError, match="ternary"):
        register_format(FORMATS["ternary"])
    register_format(FORMATS["ternary"], replace=True)
