"""A wheel that carries compiled kernels: they are loaded without a compiler, and never with other sources."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import VARIABLE, available, instructions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.library() is None, reason=f"no compiled kernels: {native.unavailable_reason()}"),
]
ROOT = Path(__file__).parents[2]
ANSWERS = """
from graphdecode import LLM, SamplingParams
from graphdecode.kernels.native import library as native
print(native.unavailable_reason(), native._load().file)
for dtype in ("float32", "float16", "bfloat16"):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    print(LLM("demo", dtype=dtype).generate(["417+385="], params, use_tqdm=False)[0].outputs[0].text.strip())
"""
EXPECTED = ["802"] * 3


@pytest.fixture(scope="module")
def sets() -> list[str]:
    """The instruction sets that the wheel is made for: this processor's, and a lower one."""
    return list(dict.fromkeys([instructions().name, next(iter(available()))]))


@pytest.fixture(scope="module")
def wheel(sets: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel whose kernels were compiled without optimization."""
    folder = tmp_path_factory.mktemp("wheel")
    quickly = folder / "cc"
    quickly.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    quickly.chmod(0o755)
    chosen = [word for name in sets for word in ("--set", name)]
    command = [sys.executable, str(ROOT / "tools" / "make"), "wheel", "--with-kernels", *chosen, "--out", str(folder)]
    given = {"CC": str(quickly), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=os.environ | given, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


def answered(wheel: Path, folder: Path, change: str = "", **environment: str) -> tuple[list[str], str]:
    """Return what a process without a compiler prints that has the unpacked wheel, with a line behind one header."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    with (folder / "graphdecode" / "kernels" / "native" / "native.h").open("a") as header:
        header.write(change)
    given = {"PYTHONPATH": str(folder), "PATH": str(folder), "GRAPHDECODE_CACHE_DIR": str(folder / "cache"), "CC": ""}
    ran = subprocess.run(
        [sys.executable, "-c", ANSWERS],
        cwd=folder,
        env=os.environ | given | environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines(), ran.stderr


def test_without_a_compiler_the_carried_kernels_of_each_set_are_used(
    wheel: Path, sets: list[str], tmp_path: Path
) -> None:
    carried = tmp_path / "graphdecode" / "kernels" / "native" / "carried"
    for name in ("", *sets):
        (told, *answers), said = answered(wheel, tmp_path, **{VARIABLE: name})
        why, file = told.split(" ", 1)
        assert (why, answers) == ("None", EXPECTED)
        assert Path(file).parent == carried
        assert Path(file).name.startswith(f"{name or instructions().name}-")
        assert "compil" not in said
    assert len(list(carried.iterdir())) >= len(sets) * len(native.ELEMENTS)  # another processor may have a set's name
    assert not (tmp_path / "cache").exists()


def test_kernels_of_other_sources_are_never_loaded(wheel: Path, tmp_path: Path) -> None:
    (told, *answers), said = answered(wheel, tmp_path, change="\n")
    assert told.startswith("no C compiler was found")
    assert told.endswith(" None")
    assert answers == EXPECTED
    assert "no compiled kernels" in said


def test_kernels_that_cannot_be_loaded_are_no_error(wheel: Path, tmp_path: Path) -> None:
    answered(wheel, tmp_path)
    for file in (tmp_path / "graphdecode" / "kernels" / "native" / "carried").iterdir():
        file.write_bytes(b"of a newer system")
    given = {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path), "GRAPHDECODE_CACHE_DIR": str(tmp_path), "CC": ""}
    ran = subprocess.run(
        [sys.executable, "-c", ANSWERS], cwd=tmp_path, env=os.environ | given, capture_output=True, text=True
    )
    assert ran.stdout.splitlines()[1:] == EXPECTED
    assert "the kernels that the package carries cannot be loaded here" in ran.stderr
