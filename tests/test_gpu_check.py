"""`tools/gpu_check`: whatever one test or part comes to, the others are run, and what was seen is kept."""

import json
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import pytest

from gpu_checks import running
from gpu_checks.calls import CALLS
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
    "test_that_is_not_set_up": "failed",
}


def isolated(folder: Path, *options: str) -> tuple[int, dict[str, str]]:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "gpu_checks.isolated", "--out", str(folder / "out.json"), *options, "test_some.py"]
    environment = {"PYTHONPATH": str(ROOT / "tools"), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = json.loads((folder / "out.json").read_text())
    return done.returncode, {test.split("::")[1]: told["outcome"] for test, told in found.items()}


def test_a_hang_a_crash_or_an_illegal_address_ends_one_test_alone(tmp_path: Path) -> None:
    code, outcomes = isolated(tmp_path, "--test-limit", "3", "--processes", "1")
    assert outcomes == OUTCOMES
    assert code == 1


def test_at_the_limit_the_tests_that_were_not_run_are_named(tmp_path: Path) -> None:
    code, outcomes = isolated(tmp_path, "--limit", "6", "--processes", "1")
    assert code == 1
    assert outcomes["test_before"] == "passed"
    assert Counter(outcomes.values())["not run"] == len(OUTCOMES) - 1


def test_each_part_ends_at_its_limit_with_all_that_it_started_and_what_it_said_is_kept(tmp_path: Path) -> None:
    says = [sys.executable, "-c", "print('seen')"]
    # its child would hold the log open, and go on beside what comes next
    child = "import subprocess, time; print('begun', flush=True); subprocess.Popen(['sleep', '61']); time.sleep(60)"
    began = time.monotonic()
    parts = [
        Part("hangs", [sys.executable, "-c", child], 1.5, []),
        Part("fails", [sys.executable, "-c", "raise SystemExit(3)"], 20, []),
        Part("absent", ["no-such-program"], 20, []),
        Part("fine", says, 20, []),
        Part("rehearsed alone", [], 20, says),
    ]
    assert not run_call("A", lambda _scratch: parts, tmp_path, has_gpu=True)
    assert time.monotonic() - began < 30
    assert [part.state for part in parts] == ["over its 2 s", "failed (3)", "could not start", "ok", "not run"]
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
    parts = [Part(name, [], 60, ["sleep", "60"]) for name in ("first", "second")]
    began = time.monotonic()
    assert not run_call("B", lambda _scratch: parts, tmp_path, has_gpu=False, limit_s=2.0)
    assert time.monotonic() - began < 20
    assert [part.state for part in parts] == ["over its 2 s", "no time left"]
    assert [part["state"] for part in json.loads((tmp_path / "B.json").read_text())] == [part.state for part in parts]


def test_the_three_calls_have_parts_of_different_names_and_leave_no_more_than_eight_files(tmp_path: Path) -> None:
    names = [part.name for parts_in in CALLS.values() for part in parts_in(tmp_path)]
    assert len(set(names)) == len(names)
    assert 2 * len(CALLS) <= 8
    assert CALL_S < 9 * 60
