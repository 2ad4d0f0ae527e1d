"""`tools/gpu_check`: whatever one test or part comes to, the others are run, and what was seen is kept."""

import json
import os
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import pytest

from gpu_checks import isolated as isolated_tests
from gpu_checks import running
from gpu_checks.absent import WITHOUT
from gpu_checks.archive import KernelCache
from gpu_checks.calls import CALLS
from gpu_checks.figures import Figures
from gpu_checks.part import ROOT, Part
from gpu_checks.running import CALL_S, run_call

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


def test_each_part_ends_at_its_limit_with_all_that_it_started_and_what_it_said_is_kept(tmp_path: Path) -> None:
    says = [sys.executable, "-c", "print('seen')"]
    # its child would hold the log open, and go on beside what comes next
    child = "import subprocess, time; print('begun', flush=True); subprocess.Popen(['sleep', '610']); time.sleep(600)"
    began = time.monotonic()
    parts = [
        Part("hangs", [sys.executable, "-c", child], 3.0, []),
        Part("fails", [sys.executable, "-c", "raise SystemExit(3)"], 200, []),
        Part("absent", ["no-such-program"], 200, []),
        Part("fine", says, 200, []),
        Part("rehearsed alone", [], 200, says),
    ]
    assert not run_call("A", lambda _scratch: parts, tmp_path, has_gpu=True)
    assert time.monotonic() - began < 150
    assert [part.state for part in parts] == ["over its 3 s", "failed (3)", "could not start", "ok", "not run"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["A.json", "A.tar.gz"]
    summary = json.loads((tmp_path / "A.json").read_text())
    assert [part["state"] for part in summary] == [part.state for part in parts]
    with tarfile.open(tmp_path / "A.tar.gz") as archive:
        logs = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
        assert logs["hangs.log"].read() == b"begun\n"  # type: ignore[union-attr]
        assert logs["fine.log"].read() == b"seen\n"  # type: ignore[union-attr]
        assert json.loads(logs["summary.json"].read()) == summary  # type: ignore[union-attr]


def test_a_call_ends_in_its_time_and_names_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LEAST_S", 1.0)
    parts = [Part(name, [], 600, ["sleep", "600"]) for name in ("first", "second")]
    began = time.monotonic()
    assert not run_call("B", lambda _scratch: parts, tmp_path, has_gpu=False, limit_s=2.0)
    assert time.monotonic() - began < 60
    assert [part.state for part in parts] == ["over its 2 s", "no time left"]
    assert [part["state"] for part in json.loads((tmp_path / "B.json").read_text())] == [part.state for part in parts]


def test_what_was_brought_to_an_end_is_not_run_again_and_a_rehearsal_is_no_run(tmp_path: Path) -> None:
    counts = "import pathlib; pathlib.Path('{0}').open('a').write('x')"

    def parts(_scratch: Path) -> list[Part]:
        runs = [sys.executable, "-c", counts.format(tmp_path / "ran")]
        return [Part("well", runs, 20, runs), Part("cut off", [*runs[:2], runs[2] + "; raise SystemExit(1)"], 20, runs)]

    for has_gpu, well in ((False, True), (True, False), (True, False)):
        assert run_call("A", parts, tmp_path, has_gpu=has_gpu) == well
    assert (tmp_path / "ran").read_text() == "xx" + "xx" + "x"


def test_what_is_not_permitted_or_not_there_is_no_failure(tmp_path: Path) -> None:
    refused = [sys.executable, "-c", "print('==ERROR== ERR_NVGPUCTRPERM'); raise SystemExit(1)"]
    parts = [Part(name, run, 20, [], is_optional=True) for name, run in (("a", refused), ("b", ["no-such-program"]))]
    assert run_call("C", lambda _scratch: parts, tmp_path, has_gpu=True)
    assert {part.state for part in parts} == {"not permitted"}


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


def test_kernels_are_given_back(tmp_path: Path) -> None:
    caches = [tmp_path / name for name in ("first", "second")]
    (caches[0] / "hash").mkdir(parents=True)
    (caches[0] / "hash" / "kernel.cubin").write_bytes(b"code")
    KernelCache(caches[0], tmp_path).keep()
    KernelCache(caches[1], tmp_path)
    assert (caches[1] / "hash" / "kernel.cubin").read_bytes() == b"code"


def test_no_part_touches_clocks_and_each_call_keeps_to_its_time(tmp_path: Path) -> None:
    for parts_in in CALLS.values():
        for part in parts_in(tmp_path):
            assert not {"nvidia-smi", "nvsmi"} & {Path(word).name for word in part.command}
            assert part.limit_s < CALL_S
    first = [part.name for part in CALLS["A"](tmp_path)]
    assert first[:3] == ["layer", "compile", "step llama-3.1-8b"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_headline_is_rehearsed_with_torch_triton_and_numpy_alone_and_goes_on_where_it_was_cut_off(tmp_path):
    """Nothing else can be imported. The second call measures what is not there, and nothing again."""
    environment = os.environ | {WITHOUT: "1"}
    command = [sys.executable, str(ROOT / "tools" / "gpu_check"), "A", str(tmp_path)]

    def keys_of_a_call() -> list[str]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return [json.loads(line)["key"] for line in (tmp_path / "figures.jsonl").read_text().splitlines()]

    keys = keys_of_a_call()
    assert len(keys) == len(set(keys))
    assert keys.index("layer, batch 1") < keys.index("step llama-3.1-8b, batch 1, context 16")
    assert {"step qwen3-0.6b, batch 1, context 32", "loop llama-3.2-1b, batch 2"} <= set(keys)

    lines = (tmp_path / "figures.jsonl").read_text().splitlines()
    left = [line for line, key in zip(lines, keys, strict=True) if not key.startswith("loop")]
    (tmp_path / "figures.jsonl").write_text("\n".join(left) + "\n")
    parts = json.loads((tmp_path / "A.json").read_text())
    parts[3]["state"] = "over its 220 s"
    (tmp_path / "A.json").write_text(json.dumps(parts))
    added = keys_of_a_call()[len(left) :]
    assert added == ["loop qwen3-0.6b, batch 1", "loop qwen3-0.6b, batch 2", "loops qwen3-0.6b"]


def test_the_calls_have_parts_of_different_names_and_leave_no_more_than_eight_files(tmp_path: Path) -> None:
    names = [part.name for parts_in in CALLS.values() for part in parts_in(tmp_path)]
    assert len(set(names)) == len(names)
    assert 2 * len(CALLS) <= 8
    assert CALL_S < 9 * 60
