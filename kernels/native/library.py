"""Kernels in C for the CPU: compiled once on the user's machine, by the compiler that Triton needs too.

A decode step on a CPU is bound by memory like one on a GPU, and between torch's operators more time is lost than in
them. The kernels of `*.c` read at the machine's bandwidth, and a recorded step runs a list of them in one call, with no
Python in between. They share their work among threads of their own (`native_threads.h`), as many as torch has.

Where there is no C compiler, `library()` is None and `why_not()` says why; torch's operators do the work then. The
environment variable GRAPHDECODE_NATIVE=0 has the same effect.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cache_folder import FOLDER_VARIABLE, cache_folder

LANES = 16  # values that the kernels take at once
ELEMENTS = {torch.float32: "f32", torch.bfloat16: "bf16"}
_FOLDER = Path(__file__).parent  # of the headers; the sources stand beside the operators that they serve
_FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-std=gnu11", "-Wno-psabi"),
    *("-pthread", "-fPIC", "-shared"),
)
_X86_FLAGS = ("-mprefer-vector-width=512",)  # the vectors of the kernels are that wide
_UNIT_END = (
    "void run_all(void (**kernels)(const arg *), const arg **args, int64_t count) {\n"
    "    for (int64_t i = 0; i < count; i++) kernels[i](args[i]);\n}\n"
)
_COMPILE_SECONDS = 120
_SWITCHED_OFF: ContextVar[bool] = ContextVar("switched_off", default=False)


class NativeCall:
    """One kernel over fixed memory; calling it runs it.

    Args:
        kernel: its name in the C source, without the element type.
        dtype: the element type, one of `ELEMENTS`; None for a kernel that has none.
        arguments: tensors (their addresses), None, ints and floats, in the kernel's order.
    """

    __slots__ = ("_args", "_function", "_held", "address")

    def __init__(self, kernel: str, dtype: torch.dtype | None, *arguments: Tensor | int | float | None) -> None:
        self._function = _function(kernel if dtype is None else f"{kernel}_{ELEMENTS[dtype]}")
        _function("use_threads")(torch.get_num_threads())
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value
        self._held = [argument for argument in arguments if isinstance(argument, Tensor)]
        self._args = (_Argument * len(arguments))(*map(_argument, arguments))

    def __call__(self) -> None:
        """Run the kernel."""
        self._function(self._args)


class NativeSequence:
    """Some kernels one after another, in one call.

    Args:
        calls: `NativeCall`s.
    """

    __slots__ = ("_addresses", "_args", "_calls", "_run_all")

    def __init__(self, calls: Sequence[Any]) -> None:
        self._calls = tuple(calls)
        self._run_all = _function("run_all")
        self._addresses = (ctypes.c_void_p * len(calls))(*(call.address for call in calls))
        self._args = (ctypes.c_void_p * len(calls))(*(ctypes.addressof(call._args) for call in calls))

    def __call__(self) -> None:
        """Run them."""
        self._run_all(self._addresses, self._args, len(self._calls))


def joined(calls: Iterable[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Return the same calls, neighbouring compiled ones as one `NativeSequence`."""
    result: list[Callable[[], Any]] = []
    for is_native, group in groupby(calls, lambda call: isinstance(call, NativeCall)):
        neighbours = list(group)
        result += [NativeSequence(neighbours)] if is_native else neighbours
    return result


class _Argument(ctypes.Union):
    _fields_ = (("i", ctypes.c_int64), ("d", ctypes.c_double), ("p", ctypes.c_void_p))


def _argument(value: Tensor | int | float | None) -> _Argument:
    if isinstance(value, Tensor):
        return _Argument(p=value.data_ptr())
    if isinstance(value, float):
        return _Argument(d=value)
    return _Argument(i=value or 0)


@contextmanager
def switched_off() -> Iterator[None]:
    """Let operators that are bound or run inside take torch's way, to measure what compiling is worth."""
    token = _SWITCHED_OFF.set(True)
    try:
        yield
    finally:
        _SWITCHED_OFF.reset(token)


def fits(*tensors: Tensor | None) -> bool:
    """Whether the kernels can take these: one element type that they know, in host memory; None counts as fitting."""
    given = [tensor for tensor in tensors if tensor is not None]
    dtype = given[0].dtype
    return dtype in ELEMENTS and all(t.dtype == dtype and t.is_cpu for t in given) and library() is not None


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, made at the first call; None if they cannot be had here, or are switched off."""
    return None if _SWITCHED_OFF.get() else _load()[0]


def why_not() -> str | None:
    """Return why there are no compiled kernels; None if there are."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return ctypes.CDLL(str(_compiled())), None
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)


@functools.cache
def _function(name: str) -> Any:
    loaded = _load()[0]
    if loaded is None:
        raise RuntimeError(f"there are no compiled kernels here: {why_not()}")
    function = getattr(loaded, name)
    function.restype = None
    if name == "run_all":
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    elif name == "use_threads":
        function.argtypes = (ctypes.c_int64,)
    return function


def _compiled() -> Path:
    """Return the library's file, compiled if no earlier process has done it."""
    if os.environ.get("GRAPHDECODE_NATIVE") == "0":
        raise OSError("GRAPHDECODE_NATIVE is 0")
    if platform.system() != "Linux":
        raise OSError(f"compiled kernels are made on Linux alone, this is {platform.system()}")
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise OSError("no C compiler was found: cc, gcc, clang, or what CC names")
    unit = _unit()
    flags = _FLAGS + (_X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ())
    command = [*shlex.split(compiler), *flags, f"-I{_FOLDER}", f"-I{_FOLDER.parent}", "-x", "c", "-", "-lm"]
    key = hashlib.sha256("\n".join([unit, *command, _processor(), _version(command[0])]).encode())
    for source in [*sorted(_FOLDER.glob("*.h")), *_sources()]:
        key.update(source.read_bytes())
    for folder in _cache_folders():
        target = folder / f"native-{key.hexdigest()[:24]}.so"
        if target.exists():
            return target
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / target.name
                _compile([*command, "-o", str(made)], unit)
                made.replace(target)
        except PermissionError:
            continue
        return target
    raise OSError(f"no folder for compiled kernels can be written; {FOLDER_VARIABLE} names one")


def _sources() -> list[Path]:
    return sorted(_FOLDER.parent.glob("*/*.c"))


def _unit() -> str:
    """Return one source text that holds every kernel once for each element type."""
    includes = "".join(f'#include "{source.parent.name}/{source.name}"\n' for source in _sources())
    return f"{includes}#define ELEMENT_BF16\n{includes}{_UNIT_END}"


def _compile(command: list[str], unit: str) -> None:
    done = subprocess.run(command, input=unit, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    if done.returncode != 0:
        raise OSError(f"{command[0]} could not compile the kernels: {done.stderr.strip()[-500:]}")


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout


def _processor() -> str:
    """Return what -march=native depends on."""
    described = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    told = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "\n".join(line for line in described if line.startswith(told))


def _cache_folders() -> list[Path]:
    if os.environ.get(FOLDER_VARIABLE):
        return [cache_folder()]
    return [cache_folder(), Path(tempfile.gettempdir()) / f"graphdecode-{os.getuid()}"]
