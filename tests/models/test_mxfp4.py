"""A gpt-oss whose experts' weights have four bits is loaded as what they stand for."""

from pathlib import Path

import pytest
import torch
from family_checkpoints import edit_config, save_checkpoint
from gguf import GGMLQuantizationType, quants
from greedy_tokens import greedy_tokens
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from graphdecode import LLM
from graphdecode.kernels.native import library as native
from graphdecode.linear.quantization.groups import Groups
from graphdecode.linear.weight_form import Shard
from graphdecode.models import CheckpointError, load_model
from graphdecode.models.checkpoint import Checkpoint

NAME = "model.layers.1.mlp.experts.gate_up_proj"


def random_blocks(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same checkpoint in four bits, and with the floats that transformers makes of them."""
    packed, plain = (save_checkpoint("gpt-oss", tmp_path_factory.mktemp(name)) for name in ("packed", "plain"))
    tensors = load_file(plain / "model.safetensors")
    in_blocks = dict(tensors)
    for seed, name in enumerate(
        name for name in sorted(tensors) if name.endswith(("gate_up_proj", "experts.down_proj"))
    ):
        experts, depth, width = tensors[name].shape
        blocks, scales = random_blocks(experts, width, depth // 32, seed=seed)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del in_blocks[name]
        in_blocks |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors")
    save_file(in_blocks, packed / "model.safetensors")
    edit_config(packed, lambda settings: settings.update(quantization_config={"quant_method": "mxfp4"}))
    return packed, plain


def test_the_weights_are_those_that_transformers_makes_of_the_blocks(folders: tuple[Path, Path]) -> None:
    with native.switched_off():
        packed, plain = (load_model(folder, device="cpu", dtype="float32").constants for folder in folders)
    assert len(packed) == len(plain)
    for ours, right in zip(packed, plain, strict=True):  # some are packed by oneDNN
        assert torch.equal(*(each.to_dense() if each.is_mkldnn else each for each in (ours, right)))


def test_it_answers_through_captured_graphs(folders: tuple[Path, Path]) -> None:
    answers = []
    for folder in folders:
        with LLM(folder, dtype="float32", max_batch_size=2, max_sequence_length=64) as llm:
            answers.append(greedy_tokens(llm, [[65, 66], [67] * 9], 8))
    assert answers[0] == answers[1]


def test_a_block_is_what_ggml_takes_it_for() -> None:
    blocks, scales = random_blocks(7, 2, seed=3)
    low, high = blocks & 15, blocks >> 4  # ggml has the first half of the values in the lower halves of the bytes
    order = torch.stack([low, high], -1).flatten(-2)
    ggml = torch.cat([scales[..., None], order[..., :16] | order[..., 16:] << 4], -1).flatten(-2)
    expected = torch.from_numpy(quants.dequantize(ggml.numpy(), GGMLQuantizationType.MXFP4))
    groups = Groups("e2m1", 4, blocks.flatten(1), scales.view(torch.float8_e8m0fnu), None, 32)
    assert torch.equal(groups.dequantized(), expected)


def test_any_part_is_that_of_the_whole(folders: tuple[Path, Path]) -> None:
    packed, plain = map(Checkpoint, folders)
    for shard in (Shard(2, 6, 0), Shard(1, 2, 1), Shard(0, 2, 2)):
        expected = load_file(folders[1] / "model.safetensors")[NAME][shard.slices(plain.tensors[NAME].shape)]
        out = torch.empty(expected.shape)
        packed.read(NAME, out, shard)
        assert torch.equal(out, expected)


def test_blocks_whose_scales_do_not_fit_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    save_checkpoint("gpt-oss", tmp_path)
    edit_config(tmp_path, lambda settings: settings.update(quantization_config={"quant_method": "mxfp4"}))
    tensors = load_file(folders[0] / "model.safetensors")
    tensors[f"{NAME}_scales"] = tensors[f"{NAME}_scales"][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: .*gate_up_proj; unexpected: .*gate_up_proj_blocks"):
        load_model(tmp_path, device="cpu")
