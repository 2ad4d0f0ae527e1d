"""Experts are rounded while they are read: as each one's own matrices are, however a checkpoint stores them."""

from __future__ import annotations

import gguf
import pytest
import torch
from driven_decoder import DrivenDecoder
from gguf_checkpoints import random_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphdecode.kernels.native import library as native
from graphdecode.linear.experts import ExpertPanels, PlainExperts
from graphdecode.models import Decoder, load_model
from graphdecode.models.quantized.on_load import GROUP_SCHEMES, rounded

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs compiled kernels")
TEXTS = [[65, 66, 67], [68] * 37]


@torch.no_grad()
def logits(model: Decoder) -> Tensor:
    """Return the logits of a step behind two prompts."""
    driven = DrivenDecoder(model, rows=2)
    driven.prefill(TEXTS, [0, 0])
    return driven.decode([70, 71], [len(text) for text in TEXTS])


def undone(weight: Tensor, quantize: str) -> Tensor:
    """Return what a matrix [out_features, in_features] is once it is rounded."""
    if quantize == "q8_0":
        blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
        return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    return rounded(weight, GROUP_SCHEMES[quantize].sized(32 if quantize == "int4" else None, [32])).dequantized()


def with_rounded(name: str, tensor: Tensor, quantize: str) -> Tensor:
    """Return a tensor of a checkpoint whose products, one by one or in stacks, are rounded."""
    edges = ("embed_tokens.weight", "lm_head.weight")
    if tensor.ndim < 2 or name.endswith(("bias", ".gate.weight", "router.weight", "shared_expert_gate.weight")):
        return tensor
    if name.endswith(edges) and quantize != "q8_0":
        return tensor
    if tensor.ndim == 2:
        return undone(tensor, quantize)
    if not name.startswith("gpt-oss "):
        return torch.stack([undone(own, quantize) for own in tensor])
    return torch.stack([undone(own.T.contiguous(), quantize).T for own in tensor])  # rows are rounded each by itself


@pytest.mark.parametrize(
    ("name", "quantize", "is_stacked"),
    [
        *(("mixtral", quantize, False) for quantize in ("int8", "int4", "fp8", "q8_0")),
        *(("mixtral", quantize, True) for quantize in ("int4", "q8_0")),
        ("qwen2moe", "int8", True),
        ("qwen3moe", "int4", False),
        *(("gpt-oss", quantize, True) for quantize in ("int8", "int4", "q8_0")),
    ],
)
def test_a_model_is_the_one_whose_matrices_were_rounded_before(tmp_path, name, quantize, is_stacked):
    model = random_model(name)
    for folder in ("plain", "rounded"):
        model.save_pretrained(tmp_path / folder, save_original_format=not is_stacked)
    file = tmp_path / "rounded" / "model.safetensors"
    tensors = load_file(file)
    assert any(tensor.ndim == 3 for tensor in tensors.values()) == is_stacked
    family = f"{name} " if name == "gpt-oss" else ""
    save_file(
        {each: with_rounded(f"{family}{each}", tensor, quantize).contiguous() for each, tensor in tensors.items()}, file
    )
    kept = load_model(tmp_path / "plain", device="cpu", dtype="float32", quantize=quantize)
    expected = load_model(tmp_path / "rounded", device="cpu", dtype="float32")
    assert all(
        type(each) is ExpertPanels
        for layer in kept.layers
        for each in (layer.mlp.experts.gate_up, layer.mlp.experts.down)
    )
    torch.testing.assert_close(logits(kept), logits(expected), rtol=3e-4, atol=3e-4)
    plain = load_model(tmp_path / "plain", device="cpu", dtype="float32")
    assert isinstance(plain.layers[0].mlp.experts.down, PlainExperts)
    assert (logits(plain) - logits(expected)).abs().max() > 1e-3  # and it is another than the plain one
