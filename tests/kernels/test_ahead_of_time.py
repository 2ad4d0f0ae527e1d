"""Every kernel compiles for sm_90, and by `tools/kernel_matrix` for every GPU that we name, within its budget.

`budgets.json` holds, by architecture, case and kernel, the most registers of a thread and bytes of shared memory of a
program. Run this file as a script to write it anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
BUDGETS = HERE / "budgets.json"
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes a program can have
ARCHITECTURES = [int(arch) for arch in os.environ.get("GRAPHDECODE_ARCHITECTURES", "90").split(",")]
TENSOR_COLUMNS = 512  # of the tensor cores' own memory; with more, the compiler makes a kernel that only traps
REGISTER_SLACK = 8  # compilers of CUDA differ by a few; a spill is never allowed
# Tritons differ by more, so that of one that the budgets were not taken with it is asked that everything fits
IS_OF_BUDGETS = f"triton=={version('triton')}\n" in (HERE.parents[1] / "constraints.txt").read_text()
SHARED_SLACK = 1024
OF_ANGLES = 32  # bytes of a thread, not spilled: digits of 2 / pi where attention itself turns angles into sines
# bytes of a thread that sm_100 spills, so that three programs fit: no register limit does without
SPILLED = {"lists-none-float16-float8_e4m3fn/decode_attention_kernel": 8}
# bytes of a thread that CUDA 12.8's compiler, Triton 3.6's, spills at 128 registers: a row's numbers, which are stored
# once before a draw and read once behind it
SPILLED_ELSEWHERE = (
    {} if IS_OF_BUDGETS else {"sample-and-advance/choose_kernel": 16, "sample-and-follow/choose_kernel": 32}
)


def compile_for(arch: int, cache: Path) -> dict[str, dict[str, int]]:
    """Compile everything for one architecture, in a process of its own without the interpreter.

    `cache` is Triton's: what an earlier run compiled from the same sources is taken from there.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "ahead_of_time.py"), str(arch)],
        env={**environment, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"compiling for sm_{arch} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def arch(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def compiled(arch, pytestconfig, tmp_path_factory) -> dict[str, dict[str, int]]:
    kept = getattr(pytestconfig, "cache", None)
    return compile_for(arch, tmp_path_factory.mktemp("triton") if kept is None else kept.mkdir(f"triton-sm_{arch}"))


def faults(case: str, numbers: dict[str, int], allowed: dict[str, int], arch: int) -> Iterator[str]:
    """Say what a kernel takes too much of."""
    if numbers["stack"] > (SPILLED_ELSEWHERE | SPILLED).get(case, OF_ANGLES if "-rope_llama-" in case else 0):
        yield f"{numbers['stack']} bytes are spilled"
    slack = REGISTER_SLACK if IS_OF_BUDGETS else numbers["registers"]
    if numbers["registers"] > allowed["registers"] + slack:
        yield f"{numbers['registers']} registers in place of {allowed['registers']}"
    most = min(allowed["shared"] + SHARED_SLACK, SHARED_LIMIT[arch]) if IS_OF_BUDGETS else SHARED_LIMIT[arch]
    if numbers["shared"] > most:
        yield f"{numbers['shared']} bytes of shared memory, {most} are possible"
    if numbers.get("tensor_columns", 0) > TENSOR_COLUMNS:
        yield f"{numbers['tensor_columns']} columns of the tensor cores' memory, {TENSOR_COLUMNS} are there"


@pytest.mark.slow
@pytest.mark.timeout(900)  # forty seconds of a core, where that is not shared
def test_every_kernel_fits_its_budget_and_spills_nothing(compiled, arch):
    measured, budget = compiled, json.loads(BUDGETS.read_text())[f"sm_{arch}"]
    assert measured.keys() == budget.keys()
    wrong = [
        f"{case}: {fault}" for case, numbers in measured.items() for fault in faults(case, numbers, budget[case], arch)
    ]
    assert not wrong, "\n".join([f"for sm_{arch}", *wrong])


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch >= 90], indirect=True)
def test_a_kernel_that_starts_early_has_asked_for_what_is_there_before_it_waits(compiled, arch):
    marks = ("-pdl/", "embedding-norm/", "/choose_kernel")
    early = {case: found for case, found in compiled.items() if any(mark in case for mark in marks)}
    assert early
    for case, numbers in early.items():
        assert numbers.get("early_loads", 0) > 0, f"{case} for sm_{arch}: {numbers}"
    others = [numbers for case, numbers in compiled.items() if case not in early]
    assert not any(numbers.get("early_loads") for numbers in others)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch >= 90], indirect=True)
def test_each_line_is_asked_for_ahead_by_one_thread_alone(compiled):
    asked = {case: found["requests_per_line"] for case, found in compiled.items() if "requests_per_line" in found}
    assert {case.rpartition("/")[2] for case in asked} == {
        "append_attention_kernel", "dot_linear_kernel", "gemv_linear_kernel", "tiled_linear_kernel",
    }  # fmt: skip
    several = {case: count for case, count in asked.items() if count != 1.0}
    assert several == {"step-bfloat16-float8_e4m3fn-d256-pdl/append_attention_kernel": 2.0}  # half as many as threads


def test_budgets_cover_attention_at_every_head_dim():
    for cases in json.loads(BUDGETS.read_text()).values():
        for kind in ("decode", "step", "extend", "append"):
            for head_dim in (64, 128, 256):
                assert any(case.startswith(kind) and f"-d{head_dim}" in case for case in cases)


if __name__ == "__main__":
    lines = {}
    for number in SHARED_LIMIT:
        with tempfile.TemporaryDirectory() as folder:
            cases = compile_for(number, Path(folder))
        lines[f"sm_{number}"] = {
            case: {"registers": n["registers"], "shared": n["shared"]} for case, n in cases.items()
        }
    BUDGETS.write_text(
        json.dumps(lines, indent=1).replace("{\n   ", "{").replace(",\n   ", ", ").replace("\n  }", "}") + "\n"
    )
