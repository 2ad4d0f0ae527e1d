"""What is given for a model and is none is named for what it is, before anything large is read or imported."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graphdecode import LLM, GraphdecodeError
from graphdecode.models import resolve_model_path
from graphdecode.text import load_tokenizer

DEMO = resolve_model_path("demo")
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 1638400\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo's folder, to be spoilt."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def refusal(model: str | Path) -> str:
    with pytest.raises(GraphdecodeError) as caught:
        LLM(model)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_a_file_of_weights_is_answered_by_the_folder_to_give(folder: Path) -> None:
    assert f"give {str(folder)!r}, the one that holds it" in refusal(folder / "model.safetensors")


def test_another_file_is_no_folder(folder: Path) -> None:
    assert "is no folder but a file" in refusal(folder / "tokenizer.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_not_taken_for_the_file(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    said = refusal(folder)
    assert said == f"{folder / name} is a Git LFS pointer and not the file itself: run `git lfs pull` in {folder}"


def test_pointers_for_shards_are_not_taken_for_the_files(folder: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    (folder / shard).write_text(POINTER)
    assert f"{shard} is a Git LFS pointer" in refusal(folder)


@pytest.mark.parametrize("share", [0.5, 0.001])
def test_weights_that_were_cut_are_told_by_their_sizes(folder: Path, share: float) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    held = int(len(whole) * share)
    file.write_bytes(whole[:held])
    said = refusal(folder)
    assert f"{file}: it was cut: at least " in said
    assert said.endswith(f"and it has {held}")
    if share == 0.5:
        assert f"{len(whole)} bytes are expected" in said


def test_an_empty_folder_is_called_empty(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        f"{tmp_path} is empty; a checkpoint folder holds config.json, safetensors and a tokenizer"
    )


def test_a_folder_of_other_things_is_named_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    assert "holds no config.json but notes.txt" in refusal(tmp_path)


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "is an adapter (LoRA) of some/base and no whole model: adapter_config.json says" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no JSON: Expecting value"),
        (b'{"architectures": ["LlamaForCausalLM"],', "is no JSON: Expecting property name"),
        (b"\xff\xfe", "is no JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[1]", "is no JSON object"),
        (b"{}", "architecture None is not supported"),
    ],
)
def test_a_broken_configuration_is_named_with_what_is_wrong(folder: Path, content: bytes, said: str) -> None:
    (folder / "config.json").write_bytes(content)
    message = refusal(folder)
    assert message.startswith(str(folder / "config.json"))
    assert said in message


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))
    assert resolve_model_path("~/model") == folder
    assert resolve_model_path(Path("~/model")) == folder
    assert "model '~/none' is no folder" in refusal("~/none")
    assert "model '~nobody-of-that-name/m' is no folder" in refusal("~nobody-of-that-name/m")


def test_the_weights_are_looked_at_before_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("broken")
    assert "tokenizer" in refusal(folder)
    (folder / "model.safetensors").write_bytes(b"broken")
    assert str(folder / "model.safetensors") in refusal(folder)
    (folder / "config.json").write_text("broken")
    assert str(folder / "config.json") in refusal(folder)


def test_a_wrong_model_costs_no_import_of_transformers(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom graphdecode import LLM\n"
        f"try:\n    LLM({str(tmp_path)!r})\nexcept ValueError:\n    print('transformers' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_a_tokenizer_that_is_broken_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(GraphdecodeError, match="holds no tokenizer that can be read"):
        load_tokenizer(folder)
