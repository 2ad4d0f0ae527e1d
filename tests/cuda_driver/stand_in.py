"""The stand-in for NVIDIA's driver, compiled here and loaded under the real bindings.

The bindings look for a library by the name of libcuda.so.1 and take one that is loaded already. So this can be had in a
process without a driver alone, and stays for the life of that process.

It is to be given nothing that the package does not call. What it takes for granted, and a first real run decides: the
order of child graphs' nodes, when a WHILE node reads its condition, that a child graph keeps its programmatic edges,
and that one call copies or fills memory that several calls have mapped.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver as cuda

from graphdecode.graphs import cuda_loop
from graphdecode.kernels.cuda import nvrtc

SOURCES = Path(__file__).parent
SONAME = "libcuda.so.1"
FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
WORD_BYTES = 8

Callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p))
HostCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def unavailable_reason() -> str | None:
    """Return why there is no stand-in here; None if there is one."""
    if torch.cuda.is_available():
        return "there is a real driver"
    if find_spec("triton") is None or not (include_folder() / "cuda.h").exists():
        return "no cuda.h, which comes with triton"
    return None if compiler() else "no C compiler"


def compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")


def include_folder() -> Path:
    spec = find_spec("triton")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "include"


def compiled(sources: Sequence[Path], *flags: str) -> Path:
    """Return a library made of C files; kept for the test run, for all its workers."""
    command = [str(compiler()), *FLAGS, *flags]
    key = " ".join(command).encode() + b"".join(path.read_bytes() for path in sources)
    folder = Path(os.environ.get("GRAPHDECODE_TEST_RUN", tempfile.gettempdir()))
    library = folder / f"{sources[0].stem}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        inputs = [str(path) for path in sources if path.suffix == ".c"]
        subprocess.run([*command, *inputs, "-ldl", "-lpthread", "-o", str(made)], check=True)
        made.replace(library)
    return library


class Driver:
    """What tests ask of the stand-in itself; everybody else talks to it through the bindings."""

    def __init__(self) -> None:
        sources = [*sorted(SOURCES.glob("*.c")), *sorted(SOURCES.glob("*.h"))]
        path = compiled(sources, f"-Wl,-soname,{SONAME}", f"-I{include_folder()}", "-Wno-unused-parameter")
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # kernels find what they call in it
        for name in ("complaints", "calls", "alive"):
            getattr(self._library, f"stand_in_{name}").restype = ctypes.c_char_p
        self._library.stand_in_kernel.restype = ctypes.c_void_p
        self._callbacks: list[object] = []

    def _text(self, name: str) -> list[str]:
        return getattr(self._library, f"stand_in_{name}")().decode().splitlines()

    def complaints(self) -> list[str]:
        """Return what the real driver leaves undefined, and was done."""
        return self._text("complaints")

    def calls(self) -> list[str]:
        """Return the names of all calls since the last `forget_calls`."""
        return self._text("calls")

    def forget_calls(self) -> None:
        self._library.stand_in_forget_calls()

    def alive(self) -> list[str]:
        """Return what was made and not given back."""
        return self._text("alive")

    def fail(self, call: str | None, code: int = 801, behind: int = 0) -> None:
        """Let a call fail after it came `behind` times; 801 is CUDA_ERROR_NOT_SUPPORTED."""
        self._library.stand_in_fail(call and call.encode(), code, behind)

    def seed(self, seed: int) -> None:
        """Let what is queued run late, in an order that a seed picks; 0: at once."""
        self._library.stand_in_seed(ctypes.c_uint64(seed))

    def set_version(self, version: int) -> None:
        self._library.stand_in_version(version)

    def begin(self) -> None:
        """Forget all handles and calls, and make the first device's context the current one."""
        self._library.stand_in_reset()
        self._callbacks.clear()
        assert int(cuda.cuInit(0)[0]) == 0
        _, context = cuda.cuDevicePrimaryCtxRetain(0)
        assert int(cuda.cuCtxSetCurrent(context)[0]) == 0
        self.forget_calls()

    def launch_host(self, stream: int, body: Callable[[], None]) -> None:
        """Queue a function of the host's; the bindings' own call frees what a graph would go on calling."""
        callback = HostCallback(lambda _data: body())
        self._callbacks.append(callback)
        assert self._library.launch_host(ctypes.c_void_p(stream), callback, None) == 0

    def kernel(self, name: str, body: Callable[[list[int]], None], num_words: int) -> int:
        """Return the handle of a kernel of 8-byte parameters that calls a function with them."""
        return self.kernel_of(name, body, [WORD_BYTES] * num_words)

    def kernel_of(self, name: str, body: Callable[[list[int]], None], sizes: Sequence[int]) -> int:
        """Return the handle of a kernel whose parameters have these bytes; the function gets the first 8 of each."""

        def called(values: ctypes.Array) -> None:
            body([ctypes.c_uint64.from_address(values[i]).value for i in range(len(sizes))])

        callback = Callback(called)
        self._callbacks.append(callback)
        return self._library.stand_in_kernel(name.encode(), callback, (ctypes.c_uint * 64)(*sizes), len(sizes))


@functools.cache
def loaded() -> Driver:
    """Load it, once for the process; skips the test where there is none."""
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return Driver()


def device_code(source: str, parameters: dict[str, list[int]], folder: Path) -> bytes:
    """Compile CUDA C for the stand-in's devices, which run what the host runs.

    Args:
        source: of kernels without any threads of their own.
        parameters: kernel -> bytes of each parameter, which a cubin would tell.
        folder: to compile in.
    """
    rows = {name: ", ".join(map(str, [*sizes, 0])) for name, sizes in parameters.items()}
    tables = "\n".join(f"const unsigned {name}_parameters[] = {{{row}}};" for name, row in rows.items())
    words = "#define __global__\n#define __device__\n"
    text = words + source.replace('extern "C" __device__', "extern").replace('extern "C" __global__', "") + tables
    path = folder / "kernels.c"
    path.write_text(text)
    return compiled([path], "-nostdlib").read_bytes()


def condition_code(folder: Path) -> bytes:
    """Return the loop's condition, from its own source, for the stand-in's devices."""
    source = (nvrtc.FOLDER / "loop_condition.cu").read_text()
    return device_code(source, {cuda_loop.CONDITION.decode(): [WORD_BYTES] * 6}, folder)
