"""Build the wheel, optionally with compiled kernels, so that it needs no C compiler.

    tools/make wheel --with-kernels --out dist

Kernels are made for all instruction sets of x86-64 and of 64-bit Arm, as far as there is a compiler: CC for this
processor's, `aarch64-linux-gnu-gcc` or `x86_64-linux-gnu-gcc` for the other's. A process loads the fastest set that its
processor has. They need a C library that is no older than the one here; elsewhere, and for changed sources, kernels are
compiled at first use, as without any.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from graphdecode.errors import ArgumentError
from graphdecode.kernels.native.compiler import PORTABLE_FLAGS, Compiler
from graphdecode.kernels.native.instructions import Instructions, sets_of_arm, sets_of_x86
from graphdecode.kernels.native.library import (
    CARRIED,
    FOLDER,
    UNITS,
    carried_name,
    check_sources,
    include_flags,
    source_text,
)
from harness import ROOT

FILES = ("pyproject.toml", "README.md", "LICENSE")
X86 = "avx avx2 fma f16c bmi1 bmi2 avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx512vbmi avx512_bf16"
SETS = {
    "x86_64": sets_of_x86({*X86.split(), "amx_tile", "amx_bf16"}),
    "aarch64": sets_of_arm({"asimd", "asimddp", "bf16"}),
}


def compiler_for(machine: str) -> list[str] | None:
    """Return the compiler for a processor; None if it is not installed."""
    if machine == {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine()):
        return shlex.split(os.environ.get("CC") or "cc")
    cross = f"{machine}-linux-gnu-gcc"
    return [cross] if shutil.which(cross) else None


def compile_kernels(folder: Path, words: list[str], made_for: Instructions) -> None:
    """Write the libraries of one instruction set into a folder."""
    flags = [flag for flag in made_for.flags if flag != "-mtune=native"]
    with tempfile.TemporaryDirectory() as scratch:
        texts = {Path(scratch) / carried_name(made_for, unit): source_text(*unit) for unit in UNITS}
        Compiler([*words, *flags, *PORTABLE_FLAGS], "", "").compile(texts, [*include_flags(), "-s"])
        check_sources()
        for made in texts:
            shutil.copyfile(made, folder / made.name)


def copy_sources(tree: Path) -> None:
    """Copy a wheel's sources; graphdecode/kernels is a link to kernels/."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", CARRIED.name)
    tree.mkdir()
    for name in FILES:
        shutil.copyfile(ROOT / name, tree / name)
    for name in ("graphdecode", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored, symlinks=True)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the wheel.")] = ROOT / "dist",
    with_kernels: Annotated[bool, typer.Option("--with-kernels", help="Compile the kernels into it.")] = False,
    only: Annotated[list[str] | None, typer.Option("--set", help="An instruction set; all if left out.")] = None,
) -> None:
    known = {name for sets in SETS.values() for name in sets}
    if only and not set(only) <= known:
        raise ArgumentError(f"--set must be one of {', '.join(sorted(known))}, got {', '.join(only)}")
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        copy_sources(tree)
        if with_kernels:
            folder = tree / "kernels" / FOLDER.name / CARRIED.name
            folder.mkdir()
            wanted = [
                (words, made_for)
                for machine, sets in SETS.items()
                if (words := compiler_for(machine)) is not None
                for made_for in sets.values()
                if not only or made_for.name in only
            ]
            for words, made_for in tqdm(wanted, desc="kernels", unit="set"):
                compile_kernels(folder, words, made_for)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
        subprocess.run([*command, str(tree)], check=True)
