"""A plugin of pytest: the compiled kernels are those of a 64-bit Arm, which qemu runs, whatever this processor is.

`pytest -p emulated_kernels` with GRAPHDECODE_ISA, the set of instructions, and EMULATED_FOLDER, where libraries are
kept. Each call of a kernel sends its arguments and their memory to one process, and takes the memory back.
"""

import atexit
import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphdecode.kernels.native import instructions as sets
from graphdecode.kernels.native import library, registration
from graphdecode.kernels.native.compiler import PORTABLE_FLAGS, Compiler

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
ROOT = "/usr/aarch64-linux-gnu"  # of the emulated processor's libraries
EVERYTHING = {"asimd", "asimddp", "bf16"}
DRIVER = Path(__file__).with_suffix(".c")
NAME_BYTES = 64


def is_there() -> bool:
    """Whether there are the cross compiler, the emulator and the libraries."""
    return all(map(shutil.which, (COMPILER, EMULATOR))) and Path(ROOT).is_dir()


class Emulator:
    """One emulated process with the libraries of all element types."""

    def __init__(self, flags: Sequence[str], folder: Path) -> None:
        compiler = Compiler([COMPILER, *flags, *PORTABLE_FLAGS], "", "")
        libraries = {folder / f"{kind}.so": library.source_text(kind) for kind in library.ELEMENTS.values()}
        driver = folder / "driver"
        if not driver.exists():
            folder.mkdir(parents=True, exist_ok=True)
            compiler.compile(libraries, library.include_flags())
            subprocess.run([COMPILER, "-O1", str(DRIVER), "-ldl", "-o", str(driver)], check=True)
        command = [EMULATOR, "-cpu", "max", "-L", ROOT, str(driver), *map(str, libraries)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self._process.communicate)

    def call(self, name: str, held: Sequence[Any], packed: bytes, threads: int) -> None:
        """Run a kernel over the memory of its tensors."""
        storages = [given.untyped_storage() for given in held if isinstance(given, torch.Tensor)]
        regions = {each.data_ptr(): each.nbytes() for each in storages if each.nbytes()}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        send = self._process.stdin.write
        send(struct.pack(f"3q{NAME_BYTES}s", len(packed), threads, len(regions), name.encode()) + packed)
        send(b"".join(struct.pack("2q", *region) for region in regions.items()))
        for region in regions.items():
            send(ctypes.string_at(*region))
        self._process.stdin.flush()
        for at, nbytes in regions.items():
            found = self._process.stdout.read(nbytes)
            if len(found) < nbytes:
                raise RuntimeError(f"{name} ended the emulated process: {self._process.wait()}")
            ctypes.memmove(at, found, nbytes)


class EmulatedLibrary:
    """What takes a library's place: its kernels are functions of (tensors, arguments, threads)."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    def __getattr__(self, name: str) -> Any:
        return partial(self._emulator.call, name)


class EmulatedCall(library.NativeCall):
    """A kernel over tensors that it knows."""

    def __init__(self, function: Any, packed: bytes, held: Sequence[Any]) -> None:
        super().__init__(partial(function, held), packed, held)


def pytest_configure() -> None:
    """Put the emulated kernels in the place of this processor's."""
    every = sets.sets_of_arm(EVERYTHING)
    name = os.environ[sets.VARIABLE]
    sets.available = lambda: every  # type: ignore[assignment]
    emulator = Emulator(every[name].flags, Path(os.environ["EMULATED_FOLDER"]) / name)
    loaded = library.LoadedLibrary(EmulatedLibrary(emulator), Path(name), None, None)  # type: ignore[arg-type]
    library.LOADED.update(dict.fromkeys(library.UNITS, loaded))
    registration.NativeCall = EmulatedCall  # type: ignore[misc]

    def begin(self: Any, calls: Sequence[Any]) -> None:
        self.calls = tuple(calls)

    def run(self: Any) -> None:
        for call in self.calls:
            call()

    library.NativeSequence.__init__ = begin  # type: ignore[assignment,method-assign]
    library.NativeSequence.__call__ = run  # type: ignore[method-assign]
