"""What a GGUF file's bytes stand for: every block type, a part as well as the whole, in any order of rows."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_checkpoints import ARCHITECTURES, random_model, write

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.linear.gguf_blocks import BLOCK_TYPES, BlockType
from graphdecode.linear.weight_form import Shard
from graphdecode.models.gguf.container import GgufFile, GgufTensor, TensorView
from graphdecode.models.gguf.source import Gguf

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
ROWS, COLUMNS = 1100, 512  # more than is read at once


def stored(path: Path, block: BlockType, rows: int = ROWS) -> tuple[GgufTensor, np.ndarray]:
    """Return a tensor of random bytes that are no NaN and not infinite, and its bytes."""
    rng = np.random.default_rng(block.nbytes)
    content = rng.integers(0, 256, (rows, block.size(COLUMNS)), np.uint8)
    if block.name in FLOATS:
        content = rng.normal(size=(rows, COLUMNS)).astype(FLOATS[block.name]).view(np.uint8)
    else:
        content[:, 1::2] &= 0xBF  # no exponent of all ones in any half that is a scale, wherever it stands
        content[:, 0::2] &= 0xBF
    path.write_bytes(b"header" + content.tobytes())
    return GgufTensor(path, (rows, COLUMNS), block, 6), content


def values_of(content: np.ndarray, block: BlockType) -> torch.Tensor:
    """Return what bytes stand for by the library, or by hand where it does not know the type."""
    if block.name in FLOATS:
        return torch.from_numpy(content.view(FLOATS[block.name]).astype(np.float32))
    if block.name == "Q1_0":
        blocks = content.reshape(-1, 18)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        bits = np.stack([blocks[:, 2 + bit // 8] >> bit % 8 & 1 for bit in range(128)], axis=1)
        return torch.from_numpy(np.where(bits == 1, scale, -scale)).view(len(content), -1)
    return torch.from_numpy(gguf.quants.dequantize(content, gguf.GGMLQuantizationType[block.name]))


def read(view: TensorView, shard: Shard | None = None) -> torch.Tensor:
    shape = view.shape if shard is None else torch.empty(view.shape)[shard.slices(view.shape)].shape
    out = torch.full(shape, torch.nan)
    view.read(out, shard)
    return out


@pytest.mark.parametrize("block", BLOCK_TYPES.values(), ids=lambda block: block.name)
def test_every_type_is_read_whole_and_in_parts(tmp_path: Path, block: BlockType) -> None:
    tensor, content = stored(tmp_path / "tensor", block)
    expected = values_of(content, block)
    assert expected.isfinite().all()
    assert expected.unique().numel() > 2
    view = TensorView(tensor, tensor.shape)
    assert torch.equal(read(view), expected)
    for axis in (0, 1):
        parts = [read(view, Shard(rank, 3, axis)) for rank in range(3)]
        assert torch.equal(torch.cat(parts, dim=axis), expected)
    assert torch.equal(read(TensorView(tensor, (100, COLUMNS), first_row=7)), expected[7:107])


@pytest.mark.parametrize("shard", [None, Shard(0, 2, 0), Shard(2, 3, 0), Shard(1, 2, 1)])
def test_rotary_pairs_that_are_neighbours_are_taken_apart(tmp_path: Path, shard: Shard | None) -> None:
    tensor, content = stored(tmp_path / "tensor", BLOCK_TYPES[8])
    pairs = values_of(content, tensor.block).view(11, 50, 2, COLUMNS)  # eleven heads of a hundred channels
    expected = pairs.transpose(1, 2).reshape(ROWS, COLUMNS)
    view = TensorView(tensor, tensor.shape, head_dim=100)
    assert torch.equal(read(view, shard), expected if shard is None else expected[shard.slices(expected.shape)])


def tokens(model: Path) -> list[list[int]]:
    prompts = [[5, 9, 77], list(range(3, 90)), [200] * 17]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    config = BucketConfig(max_batch_size=3, max_sequence_length=128)
    with LLM(model, config=config, dtype="float32", tokenizer=bytes_alone()) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def bytes_alone() -> object:
    from graphdecode.models import resolve_model_path
    from graphdecode.text import load_tokenizer

    return load_tokenizer(resolve_model_path("demo"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_those_of_the_same_checkpoint_in_safetensors(tmp_path: Path, name: str) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path)
    assert tokens(write(model, name, tmp_path / "model.gguf")) == tokens(tmp_path)


def test_a_file_of_blocks_is_the_model_of_their_values(tmp_path: Path) -> None:
    """The whole way: quantized by the library, read by us, and by transformers as the values that the library gives."""
    model = random_model("qwen3")
    kind = gguf.GGMLQuantizationType.Q8_0
    writer_of = gguf.GGUFWriter.add_tensor

    def quantized(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray) -> None:
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            writer_of(writer, name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer_of(writer, name, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", quantized)
        file = write(model, "qwen3", tmp_path / "model.gguf")
    source = Gguf(file)
    assert {each.dtype for each in source.tensors.values()} == {"F32", "Q8_0"}
    for name, parameter in model.named_parameters():
        if source.tensors[name].dtype == "Q8_0":
            rounded = gguf.quants.quantize(parameter.detach().numpy(), kind)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(rounded, kind))
    model.save_pretrained(tmp_path / "folder")
    assert tokens(file) == tokens(tmp_path / "folder")
    assert len(GgufFile(file).tensors) == len(source.tensors)
