"""Compiles CUDA C++ by NVRTC for a GPU's architecture, which need not be here; compiled files are kept on disk.

NVRTC comes with torch's CUDA builds, or as the package `nvidia-cuda-nvrtc`; its bindings are in `cuda-bindings`.
Without it `unavailable_reason` says why, and Triton's kernels serve. GRAPHDECODE_NVRTC=0 does the same.
"""

import functools
import hashlib
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ..native.library import off_reason
from ..native.private_folder import FOLDER_VARIABLE, PrivateFolder, cache_folder

try:
    from cuda.bindings import nvrtc
except ImportError:
    nvrtc = None

FOLDER = Path(__file__).parent
SWITCH = "GRAPHDECODE_NVRTC"
_OPTIONS = ("--std=c++17",)
_WAIT_SECONDS = 120
_LEAST_CAPABILITY = (8, 0)  # products of 16-bit floats by 16 columns
Defines = Mapping[str, int | str]  # macros of a source: what its code is specialized for


class CompilationFailed(RuntimeError):
    """NVRTC refused a source; the message has its log."""


@functools.cache
def unavailable_reason() -> str | None:
    """Return why CUDA C++ cannot be compiled here; None if it can."""
    if (reason := off_reason(SWITCH)) is not None:
        return reason
    if nvrtc is None:
        return "cuda-bindings is not installed"
    try:
        version()
    except RuntimeError as error:  # the library is missing
        return f"NVRTC cannot be loaded, which the package nvidia-cuda-nvrtc has: {str(error).splitlines()[0]}"
    return None


def unknown_reason(capability: tuple[int, int]) -> str | None:
    """Return why the NVRTC here compiles no kernels for GPUs of a compute capability; None if it does."""
    if capability < _LEAST_CAPABILITY:
        return f"they need sm_80, and the GPU is {architecture(capability)}"
    if 10 * capability[0] + capability[1] not in known_architectures():
        return f"NVRTC {'.'.join(map(str, version()))} does not know {architecture(capability)}"
    return None


def architecture(capability: tuple[int, int]) -> str:
    """Return NVRTC's name of a compute capability, such as sm_90a for (9, 0)."""
    return f"sm_{capability[0]}{capability[1]}{'a' * (capability == (9, 0))}"


def compiled(source: str, defines: Defines, arch: str) -> bytes:
    """Return the machine code (cubin) of a source of this folder, such as "skinny_linear.cu".

    It is compiled once, and kept in the cache folder by a digest of sources, macros, architecture and NVRTC's version.

    Raises:
        CompilationFailed: NVRTC refuses.
        RuntimeError: there is no NVRTC.
    """
    if reason := unavailable_reason():
        raise RuntimeError(reason)
    options = [*_OPTIONS, f"--gpu-architecture={arch}", *(f"-D{name}={value}" for name, value in defines.items())]
    sources = {file.name: file.read_text() for file in [FOLDER / source, *sorted(FOLDER.glob("*.cuh"))]}
    key = "\n".join([str(version()), *options, *sources, *sources.values()])
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:24]}-{Path(source).stem}-{arch}.cubin"
    try:
        with closing(PrivateFolder(cache_folder() / "cuda")) as folder:
            return _kept(folder, name) or _made(folder, name, sources, options)
    except OSError as error:
        say(f"CUDA C++ kernels are compiled at each start ({error}; {FOLDER_VARIABLE} names a better folder)")
        return compile_sources(sources, options)


@functools.cache
def version() -> tuple[int, int]:
    """Return NVRTC's version; a RuntimeError without its library."""
    return _checked(nvrtc.nvrtcVersion())


@functools.cache
def known_architectures() -> list[int]:
    """Return the architectures that NVRTC compiles for, such as 90; a RuntimeError without its library."""
    _checked(nvrtc.nvrtcGetNumSupportedArchs())
    (numbers,) = _checked(nvrtc.nvrtcGetSupportedArchs())
    return [int(number) for number in numbers]


def _kept(folder: PrivateFolder, name: str) -> bytes | None:
    descriptor = folder.opened(name)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)  # its digest was read
        return file.read()


def _made(folder: PrivateFolder, name: str, sources: dict[str, str], options: list[str]) -> bytes:
    """Compile and keep a source; another process may have been faster."""
    with folder.locked(_WAIT_SECONDS):
        if code := _kept(folder, name):
            return code
        say(f"compiling CUDA C++ kernels by NVRTC, once; they are kept in {folder.path}")
        code = compile_sources(sources, options)
        with folder.scratch() as scratch:
            (scratch / name).write_bytes(code)
            folder.put(scratch / name, name)
    return code


@functools.cache
def say(line: str) -> None:
    """Write a line to standard error, once."""
    print(f"graphdecode: {line}", file=sys.stderr, flush=True)


def compile_sources(sources: dict[str, str], options: list[str]) -> bytes:
    """Return the machine code of the first source, which may include the others."""
    (name, text), *headers = sources.items()
    included = [each.encode() for each, _ in headers], [body.encode() for _, body in headers]
    (program,) = _checked(
        nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(headers), included[1], included[0])
    )
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(error) != 0:
            (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program))
            log = b" " * size
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise CompilationFailed(f"NVRTC refuses {name} with {' '.join(options)}: {log.decode(errors='replace')}")
        (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
        code = b" " * size
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"NVRTC: {error.name}")
    return tuple(values)
