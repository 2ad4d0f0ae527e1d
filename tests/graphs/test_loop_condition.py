"""The kernel that decides whether a loop goes on: compiled by NVRTC, or by nvcc with the toolkit's declarations."""

import re
import shutil
import subprocess
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from graphdecode.graphs import cuda_loop

pytest.importorskip("cuda.bindings.nvrtc")


class Code(IntEnum):
    """What NVRTC answers."""

    SUCCESS = 0
    REFUSED = 5


class FakeNvrtc:
    """NVRTC's calls, any of which can be made to fail."""

    def __init__(self, failing: str | None = None) -> None:
        self.calls: list[str] = []
        self.failing = failing

    def __getattr__(self, name: str) -> Callable[..., tuple]:
        answers = {"nvrtcCreateProgram": ("program",), "nvrtcGetCUBINSize": (6,)}

        def called(*arguments: Any) -> tuple:
            self.calls.append(name)
            if name == "nvrtcCompileProgram":
                assert arguments == ("program", 1, [b"--gpu-architecture=sm_120"])
            return (Code.REFUSED if name == self.failing else Code.SUCCESS, *answers.get(name, ()))

        return called


def test_the_condition_is_compiled_for_the_device_and_the_program_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeNvrtc()
    monkeypatch.setattr(cuda_loop, "nvrtc", fake)
    assert len(cuda_loop.compile_condition((12, 0))) == 6
    steps = ["nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN", "nvrtcDestroyProgram"]
    assert fake.calls == steps


@pytest.mark.parametrize("call", ["nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN"])
def test_a_compiler_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    fake = FakeNvrtc(failing=call)
    monkeypatch.setattr(cuda_loop, "nvrtc", fake)
    with pytest.raises(RuntimeError, match="NVRTC refused to compile the loop's condition: REFUSED"):
        cuda_loop.compile_condition((12, 0))
    assert ("nvrtcDestroyProgram" in fake.calls) == (call != "nvrtcCreateProgram")


def test_without_cuda_python_the_condition_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_loop, "nvrtc", None)
    with pytest.raises(RuntimeError, match="cuda-python is not installed"):
        cuda_loop.compile_condition((9, 0))


def has_nvrtc() -> bool:
    try:
        cuda_loop.nvrtc.nvrtcVersion()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_nvrtc_compiles_the_condition(capability: tuple[int, int]) -> None:
    if not has_nvrtc():
        pytest.skip("no NVRTC here")
    code = cuda_loop.compile_condition(capability)
    assert code.startswith(b"\x7fELF")
    assert cuda_loop.CONDITION in code


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_nvcc_compiles_the_condition_with_the_toolkits_own_declarations(arch: int, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc here")
    # the toolkit's header declares what the source declares for NVRTC; with both, they would have to agree
    source, cubin = tmp_path / "condition.cu", tmp_path / "condition.cubin"
    kernel = re.sub(rb'typedef.*?;\n|extern "C" __device__.*?;\n', b"", cuda_loop.CONDITION_SOURCE)
    source.write_bytes(kernel)
    command = [compiler, "-cubin", f"-arch=sm_{arch}", "-o", str(cubin), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert cuda_loop.CONDITION in cubin.read_bytes()
