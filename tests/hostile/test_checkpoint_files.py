"""A checkpoint's folder is a stranger's: what its files name, link to, or ask to be run, stays inside it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from graphdecode import LLM, GraphdecodeError, SamplingParams
from graphdecode.models import check_model, describe_model, resolve_model_path
from graphdecode.text import load_tokenizer

DEMO = resolve_model_path("demo")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo's folder, to be spoilt."""
    return Path(shutil.copytree(DEMO, tmp_path / "repo" / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The demo in two shards."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    write_index(folder, {name: file for file, held in halves.items() for name in held})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(GraphdecodeError) as caught:
        action()
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "{absolute}", "..", "", "sub/a.safetensors", "a\0b", "a\\b"]
)
def test_an_index_names_plain_files_of_its_folder_alone(sharded: Path, name: str) -> None:
    outside = sharded.parent / "outside.safetensors"
    shutil.copy(sharded / "a.safetensors", outside)
    (sharded / "sub").mkdir()
    shutil.copy(sharded / "a.safetensors", sharded / "sub")
    tensors = json.loads((sharded / INDEX).read_text())["weight_map"]
    hostile = name.format(absolute=outside)
    write_index(sharded, {key: hostile if file == "a.safetensors" else file for key, file in tensors.items()})
    message = refusal(lambda: check_model(sharded))
    assert message.startswith(f"{sharded / INDEX}: a shard is a file of the folder, got ")
    assert repr(hostile) in message


@pytest.mark.parametrize("weight_map", [None, [], {}, "a", {"x": 5}, {"x": ["a"]}, {"x": None}])
def test_an_index_without_files_is_named(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    assert str(sharded / INDEX) in refusal(lambda: check_model(sharded))


def test_a_link_that_leaves_the_folder_is_not_followed(sharded: Path) -> None:
    outside = sharded.parent / "outside.safetensors"
    (sharded / "a.safetensors").rename(outside)
    (sharded / "a.safetensors").symlink_to("../outside.safetensors")
    message = refusal(lambda: check_model(sharded))
    assert message.startswith(f"{sharded / 'a.safetensors'} is a link to {outside}, outside of its folder")


def test_links_of_the_hubs_cache_and_links_inside_the_folder_are_followed(sharded: Path) -> None:
    """The hub's cache keeps a file once, in `blobs`, and links to it from each revision's folder."""
    repository = sharded.parent.parent / "models--some--model"
    (repository / "blobs").mkdir(parents=True)
    revision = repository / "snapshots" / "0123abcd"
    revision.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (revision / file.name).symlink_to(f"../../blobs/{number}")
    assert check_model(revision) == describe_model(sharded)
    (sharded / "a.safetensors").rename(sharded / "kept")
    (sharded / "a.safetensors").symlink_to("kept")
    through = sharded.parent / "another"
    through.symlink_to(sharded)  # the user's own link to a folder is the user's own affair
    assert check_model(through) == describe_model(sharded)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "a.safetensors", INDEX, "tokenizer.json", "tokenizer_config.json"]
)
def test_a_pipe_is_refused_and_never_waited_for(sharded: Path, name: str) -> None:
    (sharded / name).unlink()
    os.mkfifo(sharded / name)
    assert refusal(lambda: LLM(sharded)) == f"{sharded / name} is not a regular file"
    if name.startswith("tokenizer"):
        assert refusal(lambda: load_tokenizer(sharded)) == f"{sharded / name} is not a regular file"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_checkpoint_is_run_where_it_is_trusted_and_nowhere_else(folder, file, tmp_path, monkeypatch):
    """transformers would ask on standard input, and run it after "y"."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\n"
        f"Path({str(ran)!r}).touch()\n\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    changes = {"config.json": {}, "tokenizer_config.json": {"tokenizer_class": "Own"}}
    changes[file]["auto_map"] = {"AutoTokenizer": ["own.Own", "own.Own"]}
    for name, change in changes.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    if file == "config.json":  # it is not where a tokenizer's code is looked for
        load_tokenizer(folder)
    else:
        message = refusal(lambda: load_tokenizer(folder))
        assert "run only with trust_remote_code=True" in message
        assert "own.Own" in message
        assert refusal(lambda: LLM(folder)) == message
    assert not ran.exists()
    if file == "tokenizer_config.json":
        with LLM(folder, trust_remote_code=True) as llm:
            assert ran.exists()
            answer = llm.generate("417+385=", SamplingParams(temperature=0.0), use_tqdm=False)[0]
            assert answer.outputs[0].text.strip() == "802"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff\xfe\x00", b'{"added_tokens": 5, "model": 7}'])
def test_a_damaged_tokenizer_is_refused_by_name(folder: Path, name: str, content: bytes) -> None:
    if name == "tokenizer_config.json" and content.startswith(b"{"):
        content = b'{"tokenizer_class": {"a": 5}}'
    (folder / name).write_bytes(content)
    assert refusal(lambda: load_tokenizer(folder)).startswith(f"{folder} has no tokenizer that can be read")
