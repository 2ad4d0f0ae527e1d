"""`tools/gpu_check`: whatever one test or part comes to, the others are run, and what was seen is kept."""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gpu_checks import isolated as isolated_tests
from gpu_checks import running
from gpu_checks.absent import WITHOUT
from gpu_checks.archive import KernelCache
from gpu_checks.clock import medians_of
from gpu_checks.constants import KERNELS, compile_constants
from gpu_checks.figures import Figures
from gpu_checks.part import ROOT, Part
from gpu_checks.plan import TOTAL_S, parts, planned
from gpu_checks.running import chosen_parts, folder_of, run_plan
from gpu_checks.traces import compile_traced, summary, traced_source
from graphdecode.kernels.cuda.nvrtc import FOLDER, unavailable_reason

needs_nvrtc = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

TESTS = """
import os, time
import pytest

STATE = []

def test_before():
    STATE.append("before")

def test_that_hangs():
    time.sleep(600)

def test_behind_a_hang():
    assert STATE == []

def test_that_crashes():
    os.abort()

def test_that_spoils_the_device():
    STATE.append("spoilt")
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_behind_an_illegal_address():
    assert STATE == []

def test_that_fails():
    assert STATE == ["something"]

@pytest.mark.skip(reason="not here")
def test_left_out():
    pass

def test_that_needs_a_package():
    import gguf
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType["Q8_0"]]

@pytest.fixture
def broken():
    raise ValueError("no fixture")

def test_that_is_not_set_up(broken):
    pass
"""
OUTCOMES = {
    "test_before": "passed",
    "test_that_hangs": "hung",
    "test_behind_a_hang": "passed",
    "test_that_crashes": "crashed",
    "test_that_spoils_the_device": "failed",
    "test_behind_an_illegal_address": "passed",
    "test_that_fails": "failed",
    "test_left_out": "skipped",
    "test_that_needs_a_package": "skipped",
    "test_that_is_not_set_up": "failed",
}


@pytest.fixture(autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the checks collect and give back away from the kernels that this process has loaded."""
    caches = tmp_path_factory.mktemp("caches")
    monkeypatch.setenv("GRAPHDECODE_CACHE_DIR", str(caches / "graphdecode"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(caches / "triton"))


def isolated(folder: Path, *options: str) -> tuple[int, dict[str, str]]:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "gpu_checks.isolated", "--out", str(folder / "out.json"), *options, "test_some.py"]
    environment = {"PYTHONPATH": str(ROOT / "tools"), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment[WITHOUT] = "1"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = json.loads((folder / "out.json").read_text())
    return done.returncode, {test.split("::")[1]: told["outcome"] for test, told in found.items()}


def test_a_hang_a_crash_or_an_illegal_address_ends_one_test_alone(tmp_path: Path) -> None:
    code, outcomes = isolated(tmp_path, "--test-limit", "4", "--processes", "1")
    assert outcomes == OUTCOMES
    assert code == 1


def test_at_the_limit_the_tests_that_were_not_run_are_named(tmp_path: Path) -> None:
    code, outcomes = isolated(tmp_path, "--limit", "8", "--processes", "1")
    assert code == 1
    assert outcomes["test_before"] == "passed"
    assert Counter(outcomes.values())["not run"] == len(OUTCOMES) - 1


def run(
    some: list[Part], folder: Path, *, has_gpu: bool = True, limit_s: float = 500, names: tuple[str, ...] = ()
) -> bool:
    return run_plan(lambda _scratch: some, folder, has_gpu=has_gpu, limit_s=limit_s, names=names)


def logs_of(folder: Path) -> dict[str, bytes]:
    with tarfile.open(folder / "logs.tar.gz") as archive:
        return {Path(each.name).name: archive.extractfile(each).read() for each in archive if each.isfile()}  # type: ignore[union-attr]


def test_each_part_ends_at_its_limit_with_all_that_it_started_and_what_it_said_is_kept(tmp_path: Path) -> None:
    says = [sys.executable, "-c", "print('seen')"]
    # its child would hold the log open, and go on beside what comes next
    child = "import subprocess, time; print('begun', flush=True); subprocess.Popen(['sleep', '610']); time.sleep(600)"
    began = time.monotonic()
    some = [
        Part("hangs", [sys.executable, "-c", child], 3.0, []),
        Part("fails", [sys.executable, "-c", "raise SystemExit(3)"], 200, []),
        Part("absent", ["no-such-program"], 200, []),
        Part("fine", says, 200, []),
        Part("rehearsed alone", [], 200, says),
    ]
    assert not run(some, tmp_path)
    assert time.monotonic() - began < 150
    assert [part.state for part in some] == ["over its 3 s", "failed (3)", "could not start", "ok", "not run"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["logs.tar.gz", "parts.json"]
    summary = json.loads((tmp_path / "parts.json").read_text())
    assert [part["state"] for part in summary] == [part.state for part in some]
    logs = logs_of(tmp_path)
    assert (logs["hangs.log"], logs["fine.log"]) == (b"begun\n", b"seen\n")


def test_a_call_ends_in_its_time_and_names_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LEAST_S", 1.0)
    some = [Part(name, [], 600, ["sleep", "600"]) for name in ("first", "second")]
    began = time.monotonic()
    assert not run(some, tmp_path, has_gpu=False, limit_s=2.0)
    assert time.monotonic() - began < 60
    assert [part.state for part in some] == ["over its 2 s", "no time left"]
    kept = json.loads((tmp_path / "parts.json").read_text())
    assert [part["state"] for part in kept] == [part.state for part in some]


def test_what_was_brought_to_an_end_is_not_run_again_and_a_rehearsal_is_no_run(tmp_path: Path) -> None:
    counts = "import pathlib; pathlib.Path('{0}').open('a').write('x')"
    runs = [sys.executable, "-c", counts.format(tmp_path / "ran")]
    fails = [*runs[:2], runs[2] + "; raise SystemExit(1)"]
    for has_gpu, well in ((False, True), (True, False), (True, False)):
        some = [Part("well", runs, 20, runs), Part("cut off", fails, 20, runs)]
        assert run(some, tmp_path, has_gpu=has_gpu) == well
        assert some[0].state == "ok"
    assert (tmp_path / "ran").read_text() == "xx" + "xx" + "x"
    assert logs_of(tmp_path).keys() == {"well.log", "cut-off.log"}


def test_a_call_that_is_killed_loses_nothing_and_the_next_goes_on(tmp_path: Path) -> None:
    """Figures of the part that was cut off are kept, and those before it are not measured again."""
    begun = tmp_path / "begun"
    part = f"""
import os, pathlib, sys, time
from gpu_checks.figures import Figures
figures, call = Figures(), os.getppid()
for key in sys.argv[2:]:
    if key not in figures:
        figures.add(key, by=sys.argv[1])
        if key == "c" and not pathlib.Path({str(begun)!r}).exists():
            pathlib.Path({str(begun)!r}).touch()
            while os.getppid() == call:  # a machine that is taken away ends it, too
                time.sleep(0.05)
            sys.exit()
"""
    call = f"""
import sys
from pathlib import Path
from gpu_checks.part import Part
from gpu_checks.running import run_plan
name, folder = sys.argv[1], Path({str(tmp_path)!r})
command = [sys.executable, "-c", {part!r}, name]
parts = [Part("first", [*command, "a"], 60, []), Part("second", [*command, "b", "c", "d"], 60, [])]
sys.exit(not run_plan(lambda scratch: parts, folder, has_gpu=True, limit_s=100))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tools"), "GPU_CHECK_FIGURES": str(tmp_path / "figures.jsonl")}
    killed = subprocess.Popen([sys.executable, "-c", call, "killed"], env=environment, start_new_session=True)
    until = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < until:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    states = {each["name"]: each["state"] for each in json.loads((tmp_path / "parts.json").read_text())}
    assert states == {"first": "ok", "second": "not run"}
    subprocess.run([sys.executable, "-c", call, "next"], env=environment, check=True)
    lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [(line["key"], line["by"]) for line in lines] == [
        ("a", "killed"), ("b", "killed"), ("c", "killed"), ("d", "next"),
    ]  # fmt: skip


def test_what_is_not_permitted_or_not_there_is_no_failure(tmp_path: Path) -> None:
    refused = [sys.executable, "-c", "print('==ERROR== ERR_NVGPUCTRPERM'); raise SystemExit(1)"]
    some = [Part(name, run, 20, [], is_optional=True) for name, run in (("a", refused), ("b", ["no-such-program"]))]
    assert run(some, tmp_path)
    assert {part.state for part in some} == {"not permitted"}


def test_the_planned_parts_come_first_and_the_others_when_these_are_done() -> None:
    known = parts(Path())
    first = [part.name for part in known if part.is_planned]
    assert [part.name for part in chosen_parts(known, (), ())] == first
    assert [part.name for part in chosen_parts(known, (), first[:-1])] == first[-1:]
    assert {part.is_planned for part in chosen_parts(known, (), first)} == {False}
    assert [part.name for part in chosen_parts(known, ("prompts",), first)] == ["prompts"]


def test_results_of_each_device_are_in_a_folder_of_their_own() -> None:
    assert folder_of("NVIDIA H200") == "gpu-h200"
    assert folder_of("NVIDIA H100 80GB HBM3") == "gpu-h100-80gb-hbm3"
    assert folder_of(None) == "rehearsal"


def test_a_file_that_cannot_be_collected_is_an_exit_status(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_package\n")
    (tmp_path / "test_some.py").write_text("def test_fine():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "gpu_checks.isolated", "--processes", "1", "."]
    environment = {"PYTHONPATH": str(ROOT / "tools"), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == isolated_tests.COLLECTION_FAILED
    assert "no_such_package" in done.stdout


def test_figures_outlive_a_machine_that_is_taken_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.jsonl"
    Figures(file).add("step", step_ms=1.5)
    with file.open("a") as cut_off:
        cut_off.write('{"key": "next", "step')
    later = Figures(file)
    assert later.known == {"step": {"step_ms": 1.5}}
    assert json.loads(capsys.readouterr().out) == {"key": "step", "step_ms": 1.5}


def test_compiled_kernels_and_choices_are_given_back(tmp_path: Path) -> None:
    first, second = ([(tmp_path / name / kind, kind) for kind in ("triton", "graphdecode")] for name in "ab")
    for file in (
        first[0][0] / "hash" / "kernel.cubin",
        first[1][0] / "cuda" / "key.cubin",
        first[1][0] / "choices.json",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    KernelCache(first, tmp_path).keep()
    loaded = second[1][0] / "cuda" / "key.cubin"
    loaded.parent.mkdir(parents=True)
    loaded.write_text("loaded")
    with loaded.open() as mapping:  # another file takes its name; what a process has of it stays
        KernelCache(second, tmp_path)
        assert mapping.read() == "loaded"
    assert (second[0][0] / "hash" / "kernel.cubin").read_text() == "kernel.cubin"
    assert (second[1][0] / "cuda" / "key.cubin").read_text() == "key.cubin"
    assert (second[1][0] / "choices.json").read_text() == "choices.json"


def test_the_plan_fits_its_time_tests_before_it_times_and_touches_no_clocks(tmp_path: Path) -> None:
    first = planned(tmp_path)
    assert sum(part.limit_s for part in first) <= TOTAL_S <= 550
    names = [part.name for part in parts(tmp_path)]
    assert len(set(names)) == len(names)
    assert names[:4] == ["new kernels", "memcheck", "racecheck", "constants"]
    subjects = {
        "steps 8B",
        "steps 8B quantized",
        "steps 0.6B",
        "steps 1B",
        "programs",
        "products",
        "prompts",
        "serving",
    }
    assert subjects <= set(names)
    for part in parts(tmp_path):
        assert part.limit_s < TOTAL_S
        assert not {"nvidia-smi", "nvsmi"} & {Path(word).name for word in part.command}
        modules = [word for word in part.command if word.startswith("gpu_checks.")]
        assert all((ROOT / "tools" / f"{module.replace('.', '/')}.py").exists() for module in modules)
        tests = [word for word in part.command if word.startswith("tests/")]
        assert all((ROOT / test).exists() for test in tests)
    assert all(part.rehearsal for part in first)


def test_the_clock_under_load_is_the_median_of_whole_samples() -> None:
    assert medians_of("1980, 3201, 400.5, 40\n1755, 3201, 690.0, 50\n1740, 3201, 695.0, 52\n17") == {
        "sm_mhz": 1755, "memory_mhz": 3201, "watts": 690.0, "celsius": 50,
    }  # fmt: skip
    assert medians_of("") == {}


@needs_nvrtc
def test_the_kernels_of_the_constants_compile() -> None:
    code = compile_constants("sm_90a")
    assert all(name.encode() in code for name in KERNELS)


@needs_nvrtc
def test_kernels_that_note_where_and_when_their_blocks_ran_compile() -> None:
    sizes = {
        "WARPS": 4,
        "TILES": 1,
        "AHEAD": 8,
        "PROGRAMS": 8,
        "ROWS": 1,
        "COLUMNS": 4096,
        "DEPTH": 4096,
        "WIDTH": 4096,
    }
    kinds = {"IS_BFLOAT": 1, "IS_FLOAT_OUT": 0, "IS_NORMED": 1, "EPILOGUE": "SILU", "STEP": 128}
    defines = {f"SET_{name}": value for name, value in (sizes | kinds).items()}
    assert b"traced" in compile_traced("skinny_linear.cu", defines, "sm_90a")


def test_every_kernel_in_cuda_cpp_can_be_traced() -> None:
    sources = {file.name: file.read_text() for file in FOLDER.glob("*.cu")}
    of_steps = {name: text for name, text in sources.items() if "KERNEL(" in text}
    assert {"skinny_linear.cu", "wide_linear.cu", "decode_attention.cu"} <= of_steps.keys()
    for text in of_steps.values():
        assert re.search(r"^traced\(.*, u64 \*trace\) \{$", traced_source(text), re.MULTILINE | re.DOTALL)


def test_a_launch_is_summed_up_by_the_times_and_places_of_its_blocks() -> None:
    records = np.array([[0, 1000, 3000], [0, 1500, 3500], [1, 1000, 5000]])
    found = summary("product", records, 500)
    times = {"first_begin": 0.5, "last_begin": 1.0, "first_end": 2.5, "last_end": 4.5, "block_us": 2.0}
    places = {"processors": 2, "most_of_one": 2, "fewest_of_one": 1}
    assert found == {"kernel": "product", "blocks": 3} | times | places


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_parts_are_rehearsed_with_torch_triton_and_numpy_alone_and_go_on_where_they_were_cut_off(tmp_path):
    """Nothing else can be imported. The second call measures what is not there, and nothing again."""
    environment = os.environ | {WITHOUT: "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    del environment["PYTEST_CURRENT_TEST"]  # the parts' own tests begin anew
    command = [sys.executable, str(ROOT / "tools" / "gpu_check"), "--out", str(tmp_path), "--seconds", "700"]
    folder = tmp_path / "rehearsal"

    def keys_of_a_call(*names: str) -> list[str]:
        done = subprocess.run([*command, *names], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return [json.loads(line)["key"] for line in (folder / "figures.jsonl").read_text().splitlines()]

    keys = keys_of_a_call()
    assert len(keys) == len(set(keys))
    assert {each["state"] for each in json.loads((folder / "parts.json").read_text()) if each["is_planned"]} == {"ok"}
    assert {"step qwen3-0.6b, batch 1, context 16", "step llama-3.1-8b:int8, batch 2, context 16"} <= set(keys)
    assert {"environment", "prompt qwen3-0.6b, 24 tokens", "trace qwen3-0.6b, batch 1, context 512"} <= set(keys)
    assert len(list(folder.iterdir())) <= 8

    lines = (folder / "figures.jsonl").read_text().splitlines()
    left = [line for line, key in zip(lines, keys, strict=True) if not key.startswith("operator top")]
    (folder / "figures.jsonl").write_text("\n".join(left) + "\n")
    assert keys_of_a_call("operators")[len(left) :] == [key for key in keys if key.startswith("operator top")]
