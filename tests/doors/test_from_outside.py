"""Extensions from outside: entry points of packages, and single files, in every process."""

import json
import os
import shutil
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import pytest
from command_line import ROOT, run_command, spawn_command
from served import serving

from graphdecode import LLM
from graphdecode.config import EngineConfig
from graphdecode.engine import loading
from graphdecode.engine.steps import register_step
from graphdecode.engine.steps.step import STEPS
from graphdecode.errors import ArgumentError
from graphdecode.extensions import EntryPoints, load_modules
from graphdecode.linear import register_form
from graphdecode.linear.forms import FORMS
from graphdecode.linear.quantization.registry import FORMATS, register_format
from graphdecode.linear.quantized_linear import Int8PanelLinear
from graphdecode.linear.unquantized import UnquantizedLinear
from graphdecode.models import register_family, register_source, resolve_model_path
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.families.llama import Llama
from graphdecode.models.family import FAMILIES
from graphdecode.models.source import SOURCES

FAMILY = """
from graphdecode.models.families.llama import Llama

class Plain(Llama):
    architecture = "PlainForCausalLM"
"""
STEP = """
from graphdecode.engine.steps import DecodeStep

class Loud(DecodeStep):
    def __init__(self, setting):
        print("a loud step")
        super().__init__(setting)
"""


def packaged(folder: Path, files: dict[str, str], entry_points: dict[str, str]) -> Path:
    """Write what an installed package looks like: its modules, and its metadata."""
    result = folder / "outside-1.0.dist-info"
    result.mkdir(parents=True)
    (result / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    lines = [f"[graphdecode.{group}]\n{line}\n" for group, line in entry_points.items()]
    (result / "entry_points.txt").write_text("\n".join(lines))
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def with_path(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("demo"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["PlainForCausalLM"]}))
    return str(folder)


def answer_of(address: str) -> str:
    body = json.dumps({"prompt": "417+385=", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"]).strip()


def test_a_server_and_its_ranks_find_the_family_of_a_package(checkpoint: str, tmp_path: Path) -> None:
    site = packaged(tmp_path / "site", {"outside.py": FAMILY}, {"families": "plain = outside:Plain"})
    with serving("--tensor-parallel", "2", model=checkpoint, environment=with_path(site)) as served:
        assert answer_of(served.address) == "802"


def test_a_server_and_its_ranks_load_a_single_file(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(FAMILY + "\nfrom graphdecode.models import register_family\n")
    with (tmp_path / "family.py").open("a") as file:
        file.write("register_family(Plain())\n")
    options = ("--load-module", str(tmp_path / "family.py"), "--tensor-parallel", "2")
    with serving(*options, model=checkpoint) as served:
        assert answer_of(served.address) == "802"


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "--json", "--model", "model"],
        ["profile", "--steps", "1", "--contexts", "8", "--model", "model"],
        ["buckets", "--model", "model"],
        ["models", "--json"],
        ["quantize", "model", "copy", "--to", "int8"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.usefixtures("checkpoint")
def test_every_command_that_takes_a_model_loads_a_single_file(tmp_path: Path, arguments: list[str]) -> None:
    text = FAMILY + "\nfrom graphdecode.models import register_family\nregister_family(Plain())\n"
    (tmp_path / "family.py").write_text(text)
    (tmp_path / "small.toml").write_text("[capacity]\nmax_batch_size = 1\nmax_sequence_length = 64\n")
    options = [] if arguments[0] in ("quantize", "buckets") else ["--config", "small.toml"]
    existing = dict(FAMILIES)
    try:
        ran = run_command(
            *arguments, *options, "--load-module", "family.py", folder=tmp_path, GRAPHDECODE_MODELS=str(tmp_path)
        )
    finally:
        FAMILIES.clear()
        FAMILIES.update(existing)
    assert ran.returncode == 0, ran.stderr
    assert "cannot run" not in ran.stdout
    if arguments[0] == "models":
        assert {each["name"]: each["error"] for each in json.loads(ran.stdout)}["model"] is None


@pytest.mark.slow
def test_replicas_on_ray_find_the_family_of_a_package_and_load_a_single_file(checkpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    site = packaged(tmp_path / "site", {"outside.py": FAMILY}, {"families": "plain = outside:Plain"})
    (tmp_path / "step.py").write_text(STEP + "\nfrom graphdecode.engine.steps import register_step\n")
    with (tmp_path / "step.py").open("a") as file:
        file.write("register_step('loud', Loud)\n")
    (tmp_path / "settings.toml").write_text('[model]\nstep_kind = "loud"\n')
    options = ("--load-module", str(tmp_path / "step.py"), "--config", str(tmp_path / "settings.toml"))
    with tempfile.TemporaryDirectory(prefix="gd", ignore_cleanup_errors=True) as files:  # Ray's paths must be short
        environment = with_path(site) | {"RAY_TMPDIR": files, "RAY_USAGE_STATS_ENABLED": "0"}
        with serving(*options, "--replicas", "2", model=checkpoint, environment=environment) as served:
            assert answer_of(served.address) == "802"


def test_a_step_of_a_package_is_selected_by_name(tmp_path: Path) -> None:
    site = packaged(tmp_path / "site", {"outside.py": STEP}, {"steps": "loud = outside:Loud"})
    (tmp_path / "settings.toml").write_text('[model]\nstep_kind = "loud"\n')
    ran = spawn_command(
        "generate", "--prompt", "417+385=", "--config", "settings.toml", folder=tmp_path, **with_path(site)
    )
    assert "a loud step" in ran.stdout
    assert "802" in ran.stdout
    with pytest.raises(ArgumentError, match="step_kind quiet .*--load-module"):
        LLM("demo", step_kind="quiet")


def test_an_unknown_step_raises_before_weights_are_loaded_or_ranks_started(monkeypatch):
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("loaded or started first")

    monkeypatch.setattr(loading, "load_model", too_late)
    monkeypatch.setattr(loading, "start_ranks", too_late)
    for ranks in (1, 2):
        with pytest.raises(ArgumentError, match="step_kind quiet"):
            loading.load_engine("demo", EngineConfig(step_kind="quiet", tensor_parallel_size=ranks))
    with pytest.raises(ArgumentError, match="step_kind quiet"):
        loading.load_runner("demo", step_kind="quiet")


def test_a_package_that_fails_is_a_warning_and_none_is_imported_before_a_model_is_loaded(tmp_path: Path) -> None:
    broken = "print('imported')\nraise RuntimeError('no luck')"
    entries = dict.fromkeys(("families", "forms", "sources", "steps"), "broken = outside")
    site = packaged(tmp_path / "site", {"outside.py": broken}, entries)
    assert "imported" not in spawn_command("--version", **with_path(site)).stdout
    ran = spawn_command("generate", "--prompt", "417+385=", **with_path(site))
    assert "imported" in ran.stdout
    assert "802" in ran.stdout
    message = "entry point broken = outside of outside in graphdecode.families is left out: RuntimeError: no luck"
    assert message in ran.stderr


def test_a_module_that_is_an_entry_point_registers_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = packaged(tmp_path, {"outside_alone.py": "done = True"}, {"somewhere": "alone = outside_alone"})
    monkeypatch.syspath_prepend(site)
    arguments: list[str] = []
    EntryPoints("graphdecode.somewhere", lambda name, _: arguments.append(name), arguments).find()
    assert arguments == []
    assert sys.modules.pop("outside_alone").done


def test_a_class_whose_module_registers_it_may_be_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = ROOT / "tests" / "doors" / "ternary_format.py"
    entries = {"itself": "ternary = outside_ternary:Ternary"}
    monkeypatch.syspath_prepend(packaged(tmp_path, {"outside_ternary.py": file.read_text()}, entries))
    EntryPoints("graphdecode.itself", lambda _, format: register_format(format), FORMATS).find()
    assert FORMATS.pop("ternary").__module__ == "outside_ternary"
    assert caplog.messages == []
    del sys.modules["outside_ternary"]


def test_threads_wait_while_entry_points_are_imported(tmp_path, monkeypatch):
    slow = "import time\ntime.sleep(0.3)\nbrought = 'it'"
    monkeypatch.syspath_prepend(packaged(tmp_path, {"slow_outside.py": slow}, {"slowly": "a = slow_outside:brought"}))
    arguments: list[str] = []
    points = EntryPoints("graphdecode.slowly", lambda _, loaded: arguments.append(loaded), arguments)
    visible: list[int] = []

    def look() -> None:
        points.find()
        visible.append(len(arguments))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert visible == [1, 1, 1]


@pytest.mark.parametrize("end", ["1 / 0", "raise SystemExit(3)"])
def test_a_file_that_fails_registers_nothing_and_says_the_same_again(tmp_path: Path, end: str) -> None:
    file, existing = tmp_path / "half.py", dict(FAMILIES)
    text = FAMILY.replace("PlainForCausalLM", "HalfForCausalLM")
    file.write_text(f"{text}\nfrom graphdecode.models import register_family\nregister_family(Plain())\n{end}\n")
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"half.py:\d+: (ZeroDivisionError|SystemExit)"):
            load_modules([file])
        assert existing == FAMILIES


def test_a_module_file_is_loaded_once_and_its_errors_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "counted.py"
    file.write_text("import sys\nsys.counted = getattr(sys, 'counted', 0) + 1\n")
    load_modules([file, str(file)])
    load_modules([file])
    assert sys.counted == 1  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="load_modules .*none.py"):
        load_modules([tmp_path / "none.py"])
    (tmp_path / "wrong.py").write_text("a = 1\nb = a.c\n")
    with pytest.raises(ArgumentError, match=r"wrong.py:2: AttributeError"):
        LLM("demo", load_modules=[tmp_path / "wrong.py"])


def test_a_registered_name_is_refused_unless_it_is_to_be_replaced() -> None:
    existing, forms, sources = dict(FAMILIES), list(FORMS), list(SOURCES)

    class Int8Again(Int8PanelLinear):
        path = "mine"

    try:
        with pytest.raises(ArgumentError, match="LlamaForCausalLM.*replace=True"):
            register_family(Llama())
        with pytest.raises(ArgumentError, match="int8.*replace=True"):
            register_form(Int8Again)
        with pytest.raises(ArgumentError, match="plain.*replace=True"):
            register_form(UnquantizedLinear)
        with pytest.raises(ArgumentError, match="Checkpoint.*replace=True"):
            register_source(Checkpoint)
        register_step("mine", lambda _: pytest.fail("it is made"))
        with pytest.raises(ArgumentError, match="mine.*replace=True"):
            register_step("mine", STEPS["mine"])
        with pytest.raises(ArgumentError, match="family"):
            register_family(Llama)  # type: ignore[arg-type]
        assert (existing, forms, sources) == (FAMILIES, FORMS, SOURCES)
        family = Llama()
        register_family(family, replace=True)
        register_form(Int8Again, replace=True)
        register_source(Checkpoint, replace=True)
        assert FAMILIES["LlamaForCausalLM"] is family
        assert (FORMS[0], SOURCES[0]) == (Int8Again, Checkpoint)
    finally:
        FAMILIES.update(existing)
        FORMS[:], SOURCES[:] = forms, sources
        STEPS.clear()
