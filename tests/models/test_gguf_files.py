"""Which file a name leads to, shards of one model, and what is wrong with a file: named, with the field."""

import os
import re
import shutil
import struct
import tracemalloc
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from gguf_checkpoints import ARCHITECTURES, RECURRENT, finish, quantized_file, random_model, write
from greedy_tokens import greedy_tokens
from huggingface_hub.utils import filter_repo_objects

from graphdecode import LLM, GraphdecodeError
from graphdecode.convert import quantized_copy
from graphdecode.errors import ArgumentError
from graphdecode.linear.quantization.gguf import BLOCK_TYPES, BlockType
from graphdecode.linear.weight_form import Shard
from graphdecode.models import ModelSourceError, check_model, load_model, resolve_model_path
from graphdecode.models.gguf.container import GgufTensor, TensorView, read_header
from graphdecode.models.gguf.source import Gguf
from graphdecode.text import load_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in one file; not to be changed."""
    return write(random_model("llama"), "llama", tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture
def file(whole: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return Path(shutil.copy(whole, tmp_path / "small.gguf"))


def refusal(model: Path) -> str:
    with pytest.raises(GraphdecodeError) as caught:
        check_model(model)
    assert isinstance(caught.value, ValueError)
    assert str(model) in str(caught.value)
    return str(caught.value)


def replaced(file: Path, old: bytes, new: bytes) -> Path:
    """Put bytes in the place of others, which there are once, in the header."""
    content = file.read_bytes()
    assert len(old) == len(new)
    assert content.count(old) == 1
    file.write_bytes(content.replace(old, new))
    return file


def key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def u32(name: str, value: int) -> bytes:
    return key(name) + struct.pack("<II", 4, value)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0) -> bytes:
    return key(name) + struct.pack(f"<I{len(shape)}QI", len(shape), *shape[::-1], kind)


def test_a_folder_with_one_file_is_that_file(whole: Path) -> None:
    assert resolve_model_path(whole.parent) == resolve_model_path(whole) == whole
    assert check_model(whole.parent) == check_model(whole)


def test_a_folder_with_two_models_names_both(file: Path) -> None:
    shutil.copy(file, file.with_name("other.gguf"))
    with pytest.raises(ModelSourceError, match=r"holds 2 models, other\.gguf, small\.gguf: give the path of one"):
        resolve_model_path(file.parent)


def test_what_turns_pictures_into_tokens_is_no_second_model(file: Path) -> None:
    shutil.copy(file, file.with_name("mmproj-f16.gguf"))
    assert resolve_model_path(file.parent) == file


def split(file: Path) -> list[Path]:
    """Write the tensors of a file into three shards, the metadata into the first."""
    model, shards = read_header(file), []
    names = list(model.tensors)
    for number in (1, 2, 3):
        shards.append(file.with_name(f"m-{number:05}-of-00003.gguf"))
        writer = gguf.GGUFWriter(shards[-1], "llama")
        for name, value in model.fields.items() if number == 1 else ():
            if name != "general.architecture":
                (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
        for name in names[number - 1 :: 3]:
            entry = model.tensors[name]
            writer.add_tensor(
                name,
                entry.read(0, int(np.prod(entry.shape))).view(np.float32).reshape(entry.shape),
            )
        finish(writer)
    return shards


def test_shards_are_one_model_whichever_is_named(file: Path) -> None:
    shards = split(file)
    assert check_model(shards[0]) == check_model(shards[2]) == check_model(file)
    assert Gguf(shards[1]).tensors == {name: Gguf(file).tensors[name] for name in Gguf(shards[1]).tensors}
    file.unlink()
    assert resolve_model_path(file.parent) == shards[0]
    before = shards[1].read_bytes()
    for shard in shards:
        with pytest.raises(ArgumentError, match="contains the model itself"):
            quantized_copy(shards[0], shard, "q8_0", overwrite=True)
    assert shards[1].read_bytes() == before
    shards[1].unlink()
    with pytest.raises(GraphdecodeError, match="m-00002-of-00003.gguf"):
        check_model(shards[0])


@pytest.mark.parametrize(
    ("name", "fetched"),
    [
        ("owner/one", ["a.gguf"]),
        ("owner/many:q4_k_m", ["m-Q4_K_M.gguf"]),
        ("owner/many:Q8_0", ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]),
        ("owner/many:Q2_K", "'Q2_K'; .* m-Q4_K_M.gguf, m-Q8_0-00001-of-00002.gguf"),
        ("owner/many", "2 models, m-Q4_K_M.gguf, m-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_of_a_repository_one_model_is_fetched(monkeypatch, tmp_path, name, fetched):
    many = ["m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "mmproj.gguf"]
    holds = {"owner/one": ["a.gguf"], "owner/many": many}
    requested: list[str] = []

    def snapshot_download(repository: str, **options: list[str]) -> str:
        requested.extend(filter_repo_objects([*holds[repository], "config.json"], **options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", holds.__getitem__)
    if isinstance(fetched, str):
        with pytest.raises(ModelSourceError, match=fetched):
            resolve_model_path(name)
        return
    assert resolve_model_path(name) == tmp_path / fetched[0]
    assert requested == ["config.json", *fetched]


@pytest.mark.parametrize("content", [b"", b"GG", b"\x80\x04\x95 a pickle of Python", b"GGML" + bytes(60)])
def test_another_file_is_no_gguf(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert "is not a GGUF file" in refusal(file)


def test_a_file_cut_off_anywhere_is_truncated(file: Path) -> None:
    content = file.read_bytes()
    ends = [*range(4, 1200, 37), *(len(content) * part // 100 for part in (30, 60, 99)), len(content) - 1]
    for end in ends:
        file.write_bytes(content[:end])
        assert "is truncated" in refusal(file) or "bytes must follow" in refusal(file), end


BLOCKS, HEADS = "llama.block_count", "llama.attention.head_count"
LLAMA = struct.pack("<IQ", 8, 5) + b"llama"  # its type, length and text
NORM, DOWN = "output_norm.weight", "blk.0.ffn_down.weight"
WRONG: dict[str, tuple[bytes, bytes, str]] = {  # bytes of the header, those in their place, and what is said
    "version": (b"GGUF\3\0\0\0", b"GGUF\1\0\0\0", "version 1 "),
    "big-endian": (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "big-endian"),
    "string length": (key("general.architecture"), struct.pack("<Q", 1 << 62) + b"general.architecture", "field 0"),
    "value type": (u32(BLOCKS, 2), key(BLOCKS) + struct.pack("<II", 77, 2), f"{BLOCKS} .*77"),
    "layers": (u32(BLOCKS, 2), u32(BLOCKS, 1 << 31), f"{BLOCKS} is 2147483648, .* 2$"),
    "heads": (u32(HEADS, 4), u32(HEADS, 0), f"{HEADS} .*0$"),
    "a field": (key("llama.embedding_length"), key("llama.embedding_lengtX"), "llama.embedding_length "),
    "architecture": (LLAMA, LLAMA[:-5] + b"bloom", "general.architecture 'bloom' .*llama"),
    "tensor type": (tensor(NORM, (64,)), tensor(NORM, (64,), kind=4), f"{NORM} .*4"),
    "tensor shape": (tensor(NORM, (64,)), tensor(NORM, (1 << 60,)), "truncated: "),
    "rows of blocks": (tensor(DOWN, (64, 96)), tensor(DOWN, (64, 96), kind=12), f"{DOWN} .*96 .*256 .*Q4_K"),
    "architecture's type": (LLAMA, struct.pack("<IIQ", 9, 0, 1) + b"l", "general.architecture must be str"),
    "missing tensor": (
        *(key("blk.1.ffn_down.weight"), key("blk.1.ffn_dowX.weight")),
        r"model\.layers\.1\.mlp\.down_proj\.weight; .*blk\.1\.ffn_dowX\.weight",
    ),
    "tensor twice": (key("blk.1.ffn_gate.weight"), key("blk.0.ffn_gate.weight"), "blk.0.ffn_gate.weight .*twice"),
}


def assert_refused_in_little_memory(file: Path, says: str) -> None:
    tracemalloc.start()
    assert re.search(says, refusal(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * file.stat().st_size + 2_000_000


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_named_and_no_memory_is_taken_for_it(file: Path, fault: str) -> None:
    old, new, says = WRONG[fault]
    assert_refused_in_little_memory(replaced(file, old, new), says)


def test_a_count_of_tensors_beyond_the_file_is_named(file: Path) -> None:
    replaced(file, file.read_bytes()[:16], b"GGUF\3\0\0\0" + b"\xff" * 8)
    assert_refused_in_little_memory(file, "tensor_count is 18446744073709551615")


def test_tokens_that_are_no_list_are_for_the_tokenizer_to_name(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("tokenizer.ggml.tokens", 5)
        writer.add_array("tokenizer.ggml.token_type", [3, 3])
        writer.add_string("tokenizer.ggml.model", "gpt2")

    file = write(random_model("llama"), "llama", tmp_path / "model.gguf", edit)
    assert check_model(file).eos_token_ids == ()
    with pytest.raises(GraphdecodeError, match=r"tokenizer\.ggml\.tokens must be a list of str, got 5"):
        load_tokenizer(file)


def test_a_pattern_of_no_layers_is_named(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("gemma2.attention.sliding_window_pattern", 0)

    file = write(random_model("gemma2"), "gemma2", tmp_path / "model.gguf", edit)
    assert "gemma2.attention.sliding_window_pattern must be an integer >= 1, got 0" in refusal(file)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.0.ffn_down_exps.weight", (4, 64 * 96), "should have 3 dimensions"),
        ("blk.0.ffn_gate_exps.bias", (4 * 96,), "should have 2 dimensions"),
        ("blk.0.ffn_up_exps.weight", (4, 64, 96), r"has the shape \[4, 64, 96\], and its gate \[4, 96, 64\]"),
    ],
)
def test_experts_that_cannot_be_taken_apart_are_named(tmp_path, monkeypatch, name, shape, message):
    add = gguf.GGUFWriter.add_tensor
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_tensor",
        lambda writer, each, tensor: add(writer, each, tensor.reshape(shape) if each == name else tensor),
    )
    file = write(random_model("gpt-oss"), "gpt-oss", tmp_path / "model.gguf")
    refused = refusal(file)
    assert re.search(message, refused)


def test_numbers_of_shards_that_cannot_be_are_part_of_a_name(file: Path) -> None:
    for name in ("m-00001-of-00000.gguf", "m-00003-of-00002.gguf", "m-00000-of-00002.gguf"):
        file = file.rename(file.with_name(name))
        assert resolve_model_path(file.parent) == file
        assert check_model(file).vocab_size == 259


def test_what_is_no_file_is_no_model_and_is_not_waited_for(file: Path) -> None:
    os.mkfifo(file.with_name("pipe.gguf"))
    file.with_name("folder.gguf").mkdir()
    assert resolve_model_path(file.parent) == file


def test_tensors_that_share_bytes_are_refused(file: Path) -> None:
    content, model = file.read_bytes(), read_header(file)
    names = sorted(model.tensors, key=lambda name: model.tensors[name].offset)
    at = content.index(key(names[3])) + len(tensor(names[3], model.tensors[names[3]].shape))
    first = struct.pack("<Q", 0)
    file.write_bytes(content[:at] + first + content[at + 8 :])
    assert "overlap those of" in refusal(file)


def test_the_table_of_types_is_the_librarys() -> None:
    sizes = {(kind.value, kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {(number, *block) for number, block in BLOCK_TYPES.items()} <= sizes
    left = {kind.name for kind in gguf.GGMLQuantizationType} - {block.name for block in BLOCK_TYPES.values()}
    assert left == {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64"}


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
    with LLM(model, max_batch_size=3, max_sequence_length=128, dtype="float32", skip_tokenizer_init=True) as llm:
        return greedy_tokens(llm, prompts, 16)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *RECURRENT])
def test_weights_and_tokens_are_those_of_the_same_checkpoint_in_safetensors(tmp_path: Path, name: str) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path / "folder")
    paths = write(model, name, tmp_path / "model.gguf"), tmp_path / "folder"
    file, folder = (load_model(path, device="cpu", dtype="float32") for path in paths)
    if name != "falcon-h1":  # whose file has the multipliers in its weights
        for ours, theirs in zip(file.constants, folder.constants, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert (file.config.experts, file.config.windows) == (folder.config.experts, folder.config.windows)
    assert tokens(paths[0]) == tokens(paths[1])


def test_a_file_of_blocks_is_the_model_of_their_values(tmp_path: Path) -> None:
    """The whole way: quantized by the library, read by us, and by transformers as the values that the library gives."""
    kind, model = gguf.GGMLQuantizationType.Q8_0, random_model("qwen3")
    file = quantized_file(tmp_path / "model.gguf", "qwen3", {"weight": "Q8_0"})
    source = Gguf(file)
    assert {each.dtype for each in source.tensors.values()} == {"F32", "Q8_0"}
    for name, parameter in model.named_parameters():
        if source.tensors[name].dtype == "Q8_0":
            rounded = gguf.quants.quantize(parameter.detach().numpy(), kind)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(rounded, kind))
    model.save_pretrained(tmp_path / "folder")
    assert tokens(file) == tokens(tmp_path / "folder")
