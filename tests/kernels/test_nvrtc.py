"""CUDA C++ is compiled once for an architecture, and kept on disk; without NVRTC there is a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphdecode.kernels.cuda import nvrtc
from graphdecode.kernels.native.private_folder import FOLDER_VARIABLE

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable_reason() is not None, reason=str(nvrtc.unavailable_reason()))
SOURCE = '#include "memory.cuh"\nKERNEL(32, 1) one(int *at) { store(at, VALUE); }'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources, and beside it the cache."""
    (tmp_path / "memory.cuh").write_text((nvrtc.FOLDER / "memory.cuh").read_text())
    (tmp_path / "one.cu").write_text(SOURCE)
    monkeypatch.setattr(nvrtc, "FOLDER", tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path


@needs_nvrtc
def test_a_source_is_compiled_once_for_its_macros_and_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = nvrtc.compiled("one.cu", {"VALUE": 1}, "sm_80")
    assert code != nvrtc.compiled("one.cu", {"VALUE": 2}, "sm_80")
    assert len([*folder.glob("cache/cuda/*.cubin")]) == 2
    with monkeypatch.context() as patched:
        patched.setattr(nvrtc, "compile_sources", lambda *_: pytest.fail("compiled again"))
        assert nvrtc.compiled("one.cu", {"VALUE": 1}, "sm_80") == code
    (folder / "memory.cuh").write_text((folder / "memory.cuh").read_text() + "\n#define MORE")
    nvrtc.compiled("one.cu", {"VALUE": 1}, "sm_80")
    assert len([*folder.glob("cache/cuda/*.cubin")]) == 3  # a header is a part of it


@needs_nvrtc
def test_a_damaged_file_is_compiled_again(folder: Path) -> None:
    code = nvrtc.compiled("one.cu", {"VALUE": 1}, "sm_80")
    (kept,) = folder.glob("cache/cuda/*.cubin")
    kept.write_bytes(code[:100])
    assert nvrtc.compiled("one.cu", {"VALUE": 1}, "sm_80") == code


@needs_nvrtc
def test_an_error_has_the_compilers_log(folder: Path) -> None:
    with pytest.raises(nvrtc.CompilationFailed, match="VALUE"):
        nvrtc.compiled("one.cu", {}, "sm_80")


def test_gpus_that_nvrtc_does_not_know_and_old_ones_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 4))
    monkeypatch.setattr(nvrtc, "known_architectures", lambda: [75, 80, 90])
    assert [nvrtc.unknown_reason(each) for each in ((8, 0), (9, 0))] == [None, None]
    assert "12.4" in (nvrtc.unknown_reason((10, 3)) or "")
    assert "sm_75" in (nvrtc.unknown_reason((7, 5)) or "")


@needs_nvrtc
def test_nvrtc_tells_the_architectures_that_it_compiles_for(folder: Path) -> None:
    assert {80, 90} <= set(nvrtc.known_architectures())
    assert all(nvrtc.compiled("one.cu", {"VALUE": 1}, f"sm_{each}") for each in nvrtc.known_architectures()[-2:])


@pytest.mark.parametrize("missing", ["bindings", "library", "switch"])
def test_without_nvrtc_there_is_a_reason(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("Failed to dlopen libnvrtc")

    monkeypatch.delenv(nvrtc.SWITCH, raising=False)
    if missing == "bindings":
        monkeypatch.setattr(nvrtc, "nvrtc", None)
    elif missing == "library":
        monkeypatch.setattr(nvrtc, "version", refuse)
    else:
        monkeypatch.setenv(nvrtc.SWITCH, "0")
    reason = nvrtc.unavailable_reason.__wrapped__()
    assert {"bindings": "cuda-bindings", "library": "nvidia-cuda-nvrtc", "switch": nvrtc.SWITCH}[missing] in reason
