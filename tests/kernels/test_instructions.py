"""Which instructions the compiled kernels use: a set by its name, never one that the processor lacks, nothing above."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from command_line import run_command, spawn_command
from compiled_kernels import compiled

from graphdecode.kernels.native import library as native
from graphdecode.kernels.native import system
from graphdecode.kernels.native.compiler import Compiler
from graphdecode.kernels.native.instructions import (
    VARIABLE,
    MissingInstructions,
    available,
    chosen,
    instructions,
    sets_of_arm,
    sets_of_x86,
)
from graphdecode.kernels.native.system import extensions_on_macos

ROOT = Path(__file__).parents[2]
HASWELL = {"avx", "avx2", "fma", "f16c", "bmi1", "bmi2"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
PROCESSORS = {
    "Core 2": (set(), ["portable"]),
    "Sandy Bridge": ({"avx"}, ["portable"]),
    "Haswell": (HASWELL, ["portable", "avx2"]),
    "Skylake": (SKYLAKE, ["portable", "avx2", "avx512"]),
    "Cascade Lake, whose VNNI is not used without VBMI": (SKYLAKE | {"avx512_vnni"}, ["portable", "avx2", "avx512"]),
    "Cooper Lake": (SKYLAKE | {"avx512_vnni", "avx512_bf16"}, ["portable", "avx2", "avx512", "avx512_bf16"]),
    "Ice Lake": (SKYLAKE | {"avx512_vnni", "avx512vbmi"}, ["portable", "avx2", "avx512", "avx512_vnni"]),
    "Zen 4": (
        SKYLAKE | {"avx512_vnni", "avx512vbmi", "avx512_bf16"},
        ["portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16"],
    ),
    "Sapphire Rapids": (
        SKYLAKE | {"avx512_vnni", "avx512vbmi", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
        ["portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"],
    ),
    "a virtual one that hides AVX-512": ({"amx_tile", "amx_bf16"} | HASWELL, ["portable", "avx2"]),
}
ABOVE = {  # what the compiler defines for the first extension that a set must not use
    "portable": "__AVX__",
    "avx2": "__AVX512F__",
    "avx512": "__AVX512VNNI__",
    "avx512_vnni": "__AVX512BF16__",
    "avx512_bf16": "__AMX_TILE__",
}
ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the sets are those of x86-64")


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_has_the_sets_whose_extensions_it_has(processor: str) -> None:
    extensions, names = PROCESSORS[processor]
    found = sets_of_x86(extensions)
    assert list(found) == names
    assert chosen(None, found).name == chosen("", found).name == names[-1]
    for name in names:
        assert chosen(name, found) is found[name]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_of_slow_pairs_the_set_is_not_the_fastest(processor: str) -> None:
    extensions, names = PROCESSORS[processor]
    found = sets_of_x86(extensions, has_slow_pairs=True)
    assert sorted(found) == sorted(names)
    fastest = names[-2] if names[-1] == "avx512_bf16" else names[-1]
    assert chosen(None, found).name == fastest


@ON_X86
@compiled
@pytest.mark.skipif("avx512_bf16" not in available(), reason="this processor has no pairs of bf16")
def test_pairs_are_slow_where_measurements_say_so(tmp_path: Path) -> None:
    made = tmp_path / "peaks.so"
    command = [Compiler.detect().command[0], *available()["avx512_bf16"].flags, "-O3", "-std=gnu11", "-shared", "-fPIC"]
    subprocess.run([*command, str(ROOT / "tools" / "benchmarks" / "peaks.c"), "-o", str(made)], check=True, timeout=60)
    library = ctypes.CDLL(str(made))
    library.float_peak.restype = library.pair_peak.restype = ctypes.c_double
    floats, pairs = (max(peak(1) for _ in range(3)) for peak in (library.float_peak, library.pair_peak))
    assert system.is_intel() == (pairs < floats)


ARM = {
    "a virtual one that tells of nothing": (set(), ["portable"]),
    "Cortex-A72": ({"asimd", "fp", "crc32"}, ["portable", "neon"]),
    "Neoverse N1": ({"asimd", "asimddp", "asimdhp"}, ["portable", "neon", "neon_dotprod"]),
    "Neoverse V1": ({"asimd", "asimddp", "bf16", "i8mm", "sve"}, ["portable", "neon", "neon_dotprod", "neon_bf16"]),
}


@pytest.mark.parametrize("processor", ARM)
def test_a_64_bit_arm_has_the_sets_whose_extensions_it_has(processor: str) -> None:
    extensions, names = ARM[processor]
    found = sets_of_arm(extensions)
    assert list(found) == names
    assert not any("native" in flag for each in found.values() for flag in each.flags)


def test_what_macos_tells_of_a_processor_has_the_names_of_linux() -> None:
    intel = """machdep.cpu.features: FPU SSE4.2 AVX1.0 FMA F16C RDRAND
machdep.cpu.leaf7_features: BMI1 AVX2 BMI2 AVX512F AVX512DQ AVX512CD AVX512BW AVX512VL
machdep.cpu.brand_string: Intel(R) Xeon(R) W-3245 CPU
hw.optional.avx2_0: 1
"""
    assert extensions_on_macos(intel) >= SKYLAKE
    apple = """hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_BF16: 0
hw.optional.arm.AdvSIMD: 1
hw.optional.neon: 1
machdep.cpu.brand_string: Apple M1
"""
    assert extensions_on_macos(apple) == {"asimd", "asimddp"}
    assert extensions_on_macos(apple.replace("FEAT_BF16: 0", "FEAT_BF16: 1")) == {"asimd", "asimddp", "bf16"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("amx", "this processor lacks; it"),
        ("neon", "this processor lacks; it"),
        ("sse9", "is none of portable, avx2, .*; this processor"),
    ],
)
def test_what_the_processor_lacks_is_refused_with_what_it_has(name: str, why: str) -> None:
    with pytest.raises(MissingInstructions, match=f"{VARIABLE} is '{name}', which {why} has portable, avx2, avx512$"):
        chosen(name, sets_of_x86(SKYLAKE))


def test_the_command_line_refuses_in_one_line(tmp_path: Path) -> None:
    result = spawn_command("generate", "--prompt", "1+1=", folder=tmp_path, **{VARIABLE: "sse9"})
    (line,) = result.stderr.splitlines()
    assert "GRAPHDECODE_ISA is 'sse9'" in line
    assert line.endswith(f"this processor has {', '.join(available())}")
    assert result.returncode == 2


@compiled
def test_the_set_that_kernels_use_is_printed_with_the_versions_and_nothing_is_compiled(tmp_path: Path) -> None:
    told = run_command("--version", "--debug").stdout
    assert f"instructions: {instructions().name}" in told.splitlines()
    assert re.search(
        rf"^compiled kernels: .* \(\d of {len(native.UNITS)} libraries; |, the package carries", told, re.MULTILINE
    )
    told = spawn_command("--version", "--debug", GRAPHDECODE_NATIVE="0").stdout
    assert "instructions: none" in told.splitlines()
    told = spawn_command("--version", "--debug", GRAPHDECODE_CACHE_DIR=str(tmp_path / "new")).stdout
    assert f"compiled kernels: {tmp_path / 'new' / 'native'} (not compiled yet; " in told
    assert f"instructions: {instructions().name}" in told.splitlines()
    assert not (tmp_path / "new").exists()


def test_a_set_that_there_is_not_is_a_line_of_the_versions_and_nothing_is_compiled(tmp_path: Path) -> None:
    environment = {VARIABLE: "sse9", "GRAPHDECODE_CACHE_DIR": str(tmp_path / "kernels")}
    told = spawn_command("--version", "--debug", **environment)
    assert (told.returncode, told.stderr) == (0, "")
    assert [line for line in told.stdout.splitlines() if line.startswith("error: GRAPHDECODE_ISA is 'sse9'")]
    assert f"torch: {metadata.version('torch')}" in told.stdout.splitlines()
    assert not (tmp_path / "kernels").exists()


def unavailable_sets() -> list[str]:
    everything = sets_of_x86(PROCESSORS["Sapphire Rapids"][0])
    return [name for name in everything if platform.machine() == "x86_64" and name not in available()]


@pytest.mark.parametrize("name", unavailable_sets())
@pytest.mark.parametrize("element", native.ELEMENTS.values())
@compiled
def test_the_kernels_of_a_set_that_this_processor_lacks_are_valid_c(name: str, element: str) -> None:
    """Nobody runs them here, so a compiler reads them at least: a mistake would leave such processors without any."""
    flags = sets_of_x86(PROCESSORS["Sapphire Rapids"][0])[name].flags
    compiler = Compiler.detect()
    words = [word for word in compiler.command if not word.startswith("-m")]
    checked = [*words, *(flag for flag in flags if flag != "-mtune=native"), *native.include_flags(), "-fsyntax-only"]
    text = native.source_text(element)
    subprocess.run([*checked, "-x", "c", "-"], input=text, text=True, check=True, capture_output=True, timeout=120)


@ON_X86
@compiled
@pytest.mark.parametrize("name", [name for name in available() if name in ABOVE])
def test_the_compiler_gets_no_flag_above_a_set(name: str) -> None:
    words = Compiler.detect().command[0]
    command = [words, *available()[name].flags, "-dM", "-E", "-x", "c", "/dev/null"]
    defined = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    at = list(ABOVE).index(name)
    assert not [macro for macro in list(ABOVE.values())[at:] if f" {macro} " in defined]
    assert all(f" {macro} " in defined for macro in list(ABOVE.values())[:at])


@ON_X86
@compiled
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_each_set_has_libraries_of_its_own_with_no_wider_vectors(tmp_path: Path) -> None:
    quickly = tmp_path / "cc"  # in a few seconds; the last level counts
    quickly.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    quickly.chmod(0o755)
    code = """if True:
        import torch
        from graphdecode.kernels.native import library
        library.library(torch.float32)
        print(library.unavailable_reason(), *(loaded.file for loaded in library.LOADED.values()))
    """
    files: dict[str, list[str]] = {}
    widest = {"portable": {"xmm"}, "avx2": {"xmm", "ymm"}}
    for name in [name for name in (*widest, instructions().name) if name in available()]:
        given = {"GRAPHDECODE_CACHE_DIR": os.environ["GRAPHDECODE_TEST_RUN"], "PYTHONPATH": str(ROOT), VARIABLE: name}
        given |= {"CC": str(quickly)} if name == "portable" else {}  # the others are there or made for other tests
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ | given, text=True)
        assert ran.stdout.startswith("None "), ran.stderr
        files[name] = ran.stdout.split()[1:]
        listing = subprocess.run(["objdump", "-d", *files[name]], capture_output=True, text=True).stdout
        used = set(re.findall(r"%([xyz]mm)\d", listing))
        assert used == widest.get(name, {"xmm", "ymm", "zmm"}), name
    assert len({file for of_set in files.values() for file in of_set}) == len(files) * len(native.PARTS)
