"""Experts stay in the few bits of their checkpoint, and a model with them is the dequantized one."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from compiled_kernels import compiled
from driven_decoder import DrivenDecoder
from gguf_checkpoints import quantized_file, random_model
from greedy_tokens import greedy_tokens
from quantized_checkpoints import FORMS, write_pair
from safetensors.torch import load_file, save_file
from test_mxfp4 import folders  # noqa: F401 (a fixture)
from torch import Tensor

from graphdecode import LLM
from graphdecode.linear.experts import ExpertPanels, UnquantizedExperts
from graphdecode.linear.quantization.compressed_tensors import GROUP_QUANTIZATIONS, quantized_groups
from graphdecode.models import Decoder, load_model
from graphdecode.models.blocks import Experts, SparseMlp

pytestmark = compiled
TEXTS = [[65, 66, 67], [68] * 37]
BITS = {"Q4_0": 4.5, "Q5_0": 5.5, "Q8_0": 8.5, "MXFP4": 4.5}


def experts_in(model: Decoder) -> list[Experts]:
    """Return the experts of those layers that have some."""
    return [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, SparseMlp)]


def bytes_of(form: ExpertPanels) -> int:
    return sum(part.nbytes for part in form.weight if isinstance(part, Tensor))


@torch.no_grad()
def logits(model: Decoder) -> Tensor:
    """Return the logits of a step behind two prompts."""
    driven = DrivenDecoder(model, rows=2)
    driven.prefill(TEXTS, [0, 0])
    return driven.decode([70, 71], [len(text) for text in TEXTS])


def models_of_file(path: Path, name: str, gate: str, up: str, down: str) -> tuple[Decoder, Decoder]:
    """Write a GGUF file of experts; return its model with blocks and the one without, which have the same logits."""
    quantized_file(path, name, {"gate_exps.weight": gate, "up_exps.weight": up, "down_exps.weight": down})
    packed, plain = (load_model(path, device="cpu", dtype="float32", quantize=mode) for mode in ("gguf", None))
    torch.testing.assert_close(logits(packed), logits(plain), rtol=1e-4, atol=1e-4)
    return packed, plain


@pytest.mark.parametrize(
    ("name", "gate_up", "down"),
    [
        ("mixtral", "Q4_0", "Q8_0"),
        ("qwen2moe", "Q5_0", "Q4_0"),
        ("qwen3moe", "Q8_0", "Q4_0"),
        ("gpt-oss", "MXFP4", "MXFP4"),
    ],
)
def test_those_of_a_gguf_file_keep_their_blocks(tmp_path: Path, name: str, gate_up: str, down: str) -> None:
    packed, plain = models_of_file(tmp_path / "model.gguf", name, gate_up, gate_up, down)
    hidden = packed.config.hidden_size
    for experts in experts_in(packed):
        values = experts.count * experts.width * hidden
        for form, block_type, count in ((experts.gate_up, gate_up, 2 * values), (experts.down, down, values)):
            assert isinstance(form, ExpertPanels)
            assert form.layout == "blocks"
            assert bytes_of(form) <= BITS[block_type] / 8 * count + 32
    beside = []
    for model in (packed, plain):
        of_experts = sum(tensor.nbytes for experts in experts_in(model) for tensor in experts.tensors)
        beside.append(sum(tensor.nbytes for tensor in model.constants) - of_experts)
    assert beside[0] == beside[1]  # no copy of the experts


def test_a_gate_in_another_type_is_undone_with_what_it_is_for(tmp_path: Path) -> None:
    for name in ("mixtral", "gpt-oss"):
        packed, _ = models_of_file(tmp_path / f"{name}.gguf", name, "Q4_0", "Q8_0", "Q8_0")
        assert all(isinstance(experts.gate_up, UnquantizedExperts) for experts in experts_in(packed))
        assert all(isinstance(experts.down, ExpertPanels) for experts in experts_in(packed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_those_of_gpt_oss_keep_four_bits(folders: tuple[Path, Path], dtype: str) -> None:  # noqa: F811
    packed, plain = (load_model(folder, device="cpu", dtype=dtype) for folder in folders)
    near = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(logits(packed), logits(plain), rtol=near, atol=near)
    for experts in experts_in(packed):
        values = experts.count * experts.width * packed.config.hidden_size
        for form, count in ((experts.gate_up, 2 * values), (experts.down, values)):
            assert isinstance(form, ExpertPanels)
            assert form.layout == "groups"
            assert bytes_of(form) <= 4.5 / 8 * count + 32


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("mixtral", form) for form in ("int4 group", "int4 group with zeros", "gptq desc_act", "gptq v2 int8")),
        *(("mixtral", form) for form in ("awq", "fp8 blocks with tails")),
        *(("qwen3-moe", form) for form in ("gptq", "awq")),
    ],
)
def test_those_of_hugging_faces_forms_keep_their_groups(tmp_path: Path, family: str, form: str) -> None:
    packed, plain = (
        load_model(folder, device="cpu", dtype="float32") for folder in write_pair(FORMS[form], tmp_path, family)
    )
    torch.testing.assert_close(logits(packed), logits(plain), rtol=3e-4, atol=3e-4)
    has_plain_layer = family == "qwen3-moe"  # and 40 columns, which are no whole blocks
    for index, experts in enumerate(experts_in(packed)):
        is_plain = has_plain_layer and index == 1
        assert type(experts.gate_up) is (UnquantizedExperts if is_plain else ExpertPanels)
        assert type(experts.down) is (UnquantizedExperts if has_plain_layer else ExpertPanels)


def test_they_answer_through_captured_graphs(tmp_path: Path) -> None:
    answers = []
    for folder in write_pair(FORMS["int4 group"], tmp_path, "mixtral"):
        with LLM(folder, dtype="float32", max_batch_size=4, max_sequence_length=64, batch_invariant=True) as llm:
            assert llm.graphs.backend == "recorded"
            answers.append(greedy_tokens(llm, [[65, 66], [67] * 9, [70]], 12) + greedy_tokens(llm, [[67] * 9], 12))
    assert answers[0] == answers[1]
    assert answers[0][1] == answers[0][3]


def undone(weight: Tensor, quantize: str) -> Tensor:
    """Return what a matrix [out_features, in_features] is once it is rounded."""
    if quantize == "q8_0":
        blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
        return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    return quantized_groups(
        weight, GROUP_QUANTIZATIONS[quantize].sized(32 if quantize == "int4" else None, [32])
    ).dequantized()


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
        return torch.stack([undone(each, quantize) for each in tensor])
    return torch.stack([undone(each.T.contiguous(), quantize).T for each in tensor])  # rows are rounded each by itself


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
    packed = load_model(tmp_path / "plain", device="cpu", dtype="float32", quantize=quantize)
    expected = load_model(tmp_path / "rounded", device="cpu", dtype="float32")
    assert all(type(each) is ExpertPanels for block in experts_in(packed) for each in (block.gate_up, block.down))
    torch.testing.assert_close(logits(packed), logits(expected), rtol=3e-4, atol=3e-4)
    plain = load_model(tmp_path / "plain", device="cpu", dtype="float32")
    assert isinstance(plain.layers[0].mlp.experts.down, UnquantizedExperts)
    assert (logits(plain) - logits(expected)).abs().max() > 1e-3  # and it is another than the plain one
