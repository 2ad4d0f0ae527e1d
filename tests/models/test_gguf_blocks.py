"""A GGUF file's blocks are multiplied as they are: which layers, with whose values, in how much memory."""

from pathlib import Path

import pytest
import torch
from compiled_kernels import compiled
from gguf_checkpoints import quantized_file
from products import product

from graphdecode.linear.composite import MergedLinear
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.quantized_linear import PanelLinear
from graphdecode.linear.unquantized import Panels
from graphdecode.linear.weight_form import FormOptions, LinearNames, WeightForm
from graphdecode.models import load_model
from graphdecode.models.forward_context import Tokens
from graphdecode.models.gguf.source import Gguf
from graphdecode.models.source import SOURCES
from graphdecode.models.split import SplitSource
from graphdecode.models.weight_map import Part

pytestmark = compiled


TYPES = {"attn_v.weight": "Q4_0", "ffn_up.weight": "F32", "ffn_down.weight": "Q8_0", "embd.weight": "Q8_0"}
TYPES["weight"] = "Q4_1"


def values(source: Gguf, name: str) -> torch.Tensor:
    out = torch.empty(source.tensors[name].shape)
    source.read(name, out)
    return out


def product_values(source: Gguf, name: str, layer: int) -> torch.Tensor:
    """Return the weight of one of a layer's products, [out_features, in_features]."""
    block, parts = {"qkv": ("self_attn", "qkv"), "o": ("self_attn", "o")}.get(name, ("mlp", name.split("_")))
    return torch.cat([values(source, f"model.layers.{layer}.{block}.{part}_proj.weight") for part in parts])


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases"])
def test_layers_keep_the_values_of_each_type_and_those_with_none_are_undone(tmp_path: Path, name: str) -> None:
    path = quantized_file(tmp_path / "small.gguf", name, TYPES)
    model, source = load_model(path, device="cpu", dtype="float32", quantize="gguf"), Gguf(path)
    linears = model.layers[1].linears
    assert [type(linears[linear]) for linear in ("qkv", "o", "gate_up", "down")] == [
        *(PanelLinear, PanelLinear, Panels, PanelLinear)
    ]
    for linear, form in linears.items():
        weight = product_values(source, linear, layer=1)
        bias = 0 if form.bias is None else form.bias
        torch.testing.assert_close(product(form), weight.T + bias, rtol=1e-5, atol=1e-6)


def test_the_rotary_pairs_of_blocks_are_put_as_transformers_has_them(tmp_path: Path) -> None:
    path = quantized_file(tmp_path / "small.gguf", "llama", {"weight": "Q8_0"})
    form = load_model(path, device="cpu", dtype="float32", quantize="gguf").layers[0].linears["qkv"]
    assert isinstance(form, PanelLinear)
    torch.testing.assert_close(product(form), product_values(Gguf(path), "qkv", layer=0).T, rtol=1e-5, atol=1e-6)


def test_a_delta_net_keeps_blocks_beside_plain_decays_and_strengths(tmp_path: Path) -> None:
    plain = dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_conv1d.weight"), "F32")
    path = quantized_file(tmp_path / "small.gguf", "qwen35", plain | {"weight": "Q8_0"})
    form = load_model(path, device="cpu", dtype="float32", quantize="gguf").layers[0].linears["in_proj"]
    assert isinstance(form, MergedLinear)
    assert [type(part) for part in form.forms] == [PanelLinear, Panels]
    names = (f"model.layers.0.linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "a", "b"))
    weight = torch.cat([values(Gguf(path), name) for name in names])
    torch.testing.assert_close(product(form), weight.T, rtol=1e-5, atol=1e-6)
    expanded = load_model(path, device="cpu", dtype="float32", quantize="none").layers[0].linears["in_proj"]
    assert isinstance(expanded, Panels), "nothing stays quantized, so one product does"


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases"])
def test_the_output_layer_has_blocks_too_where_it_is_the_embedding(tmp_path: Path, name: str) -> None:
    path = quantized_file(tmp_path / "small.gguf", name, {"embd.weight": "Q8_0", "output.weight": "Q8_0"})
    form = load_model(path, device="cpu", dtype="bfloat16", quantize="gguf").head.lm_head
    assert isinstance(form, PanelLinear)
    assert form.nbytes <= 34 / 32 * 64 * (form.out_features + 31)


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases"])
def test_the_embedding_stays_in_blocks_and_a_tied_output_layer_shares_them(tmp_path: Path, name: str) -> None:
    path = quantized_file(tmp_path / "small.gguf", name, {"embd.weight": "Q5_1", "output.weight": "Q8_0"})
    model = load_model(path, device="cpu", dtype="float32", quantize="gguf")
    stem, lm_head = model.stem, model.head.lm_head
    assert stem.table is not None
    assert isinstance(lm_head, PanelLinear)
    assert (lm_head.parts[0] is stem.table.weight) == (name == "llama-tied-biases")
    assert any(tensor is stem.table.weight.panels for tensor in model.constants)
    table = values(Gguf(path), "model.embed_tokens.weight")
    assert not any(tensor.shape == table.shape for tensor in model.constants)
    nothing = torch.zeros(0, dtype=torch.int32)
    tokens = Tokens(torch.tensor([3, 1, 4]), nothing, nothing, torch.tensor([3], dtype=torch.int32), nothing)
    torch.testing.assert_close(stem.run(tokens), table[[3, 1, 4]] * stem.scale)


@pytest.mark.parametrize(("axis", "half"), [(0, (slice(32, 64),)), (1, (slice(None), slice(32, 64)))])
def test_a_part_is_read_in_blocks_where_the_cut_falls_between_them(tmp_path: Path, axis: int, half: tuple) -> None:
    path = quantized_file(tmp_path / "small.gguf", "llama", {"weight": "Q4_0"})
    source, names = Gguf(path), LinearNames(("model.layers.0.self_attn.o_proj.weight",))
    options = FormOptions(torch.device("cpu"), torch.float32, LinearTuner(), quantize="gguf")

    def part(rank: int, count: int, axis: int) -> WeightForm:
        weight_map = {"o": (Part(names.weights[0], (64, 64), axis),)}
        return PanelLinear.load(SplitSource(source, weight_map, rank, count), names, options)

    form = part(1, 2, axis)
    weight = values(source, *names.weights)
    assert weight.shape == (64, 64)
    assert isinstance(form, PanelLinear)
    torch.testing.assert_close(product(form), weight[half].T)
    assert not isinstance(part(1, 4, 1), PanelLinear)  # a cut within blocks


@compiled
def test_a_source_from_outside_keeps_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = quantized_file(tmp_path / "model.gguf", "llama", {"weight": "Q8_0"})

    class Blocks:
        quant_method = "gguf"

        def __init__(self, model: str | Path) -> None:
            source = Gguf(file)
            self.name, self.tensors, self.config = "blocks:", source.tensors, source.config
            self.read, self.read_quantized = source.read, source.read_quantized

        @classmethod
        def opens(cls, model: str | Path) -> bool:
            return model == "blocks:"

    monkeypatch.setattr("graphdecode.models.source.SOURCES", [Blocks, *SOURCES])
    cases = (("blocks:", "gguf"), (file, "gguf"), (file, "none"))
    default, gguf, expanded = (load_model(model, device="cpu", quantize=each).weight_bytes for model, each in cases)
    assert default == gguf < expanded
