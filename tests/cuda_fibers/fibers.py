"""CUDA C++ on a CPU: kernels that g++ compiles, whose threads are fibers in an order drawn from a seed.

What is not ordered is a fault, even where the values come out right: see `machine.h` and `shadow.h`. A driver (`*.cpp`)
launches kernels with the tensors and numbers of a case.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from graphdecode.kernels.native.library import FOLDER

HERE = Path(__file__).parent
CUDA = FOLDER.parent / "cuda"
_FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC", f"-I{HERE}", f"-I{CUDA}"]
_TEXT_BYTES = 1 << 16

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or os.uname().machine != "x86_64", reason="needs g++ on x86-64"
)


class Order(Enum):
    """What a call orders threads by; `machine.h` has the same."""

    WAIT, BLOCK_BARRIER, NAMED_BARRIER, WARP_SYNC, CLUSTER_BARRIER, MBARRIER, RELEASE, ACQUIRE, FENCE = range(9)
    ASYNC_WAIT = 9


class CallSite(NamedTuple):
    """A line of a source that orders threads."""

    order: Order
    place: str


class Memory(NamedTuple):
    """A tensor of a kernel, and whether it may be read before a kernel writes it, and be written."""

    tensor: Tensor
    is_written: bool = True
    is_constant: bool = False


class Outcome(NamedTuple):
    """Faults of one schedule, and the calls that ordered its threads."""

    faults: list[str]
    sites: list[CallSite]


@functools.cache
def build(driver: str, *defines: str) -> ctypes.CDLL:
    """Compile a driver of this folder, with macros `NAME=value`, once for all workers of a run."""
    sources = [*HERE.glob("*.h"), *HERE.glob("*.cpp"), *CUDA.glob("*.cu*")]
    digest = hashlib.sha256("".join(f"{file.name}{file.read_text()}" for file in sorted(sources)).encode())
    digest.update(repr((driver, defines)).encode())
    folder = Path(os.environ["GRAPHDECODE_TEST_RUN"], "fibers")
    folder.mkdir(exist_ok=True)
    library = folder / f"{Path(driver).stem}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        machine = folder / f"machine-{hashlib.sha256(_machine_text()).hexdigest()[:16]}.o"
        if not machine.exists():
            _compile(machine, ["-c", str(HERE / "machine.cpp")])
        _compile(
            library, ["-shared", "-Wl,-Bsymbolic", *(f"-D{each}" for each in defines), str(HERE / driver), str(machine)]
        )
    return ctypes.CDLL(str(library))


def _machine_text() -> bytes:
    return b"".join((HERE / name).read_bytes() for name in ("machine.cpp", "machine.h", "shadow.h"))


def _compile(target: Path, arguments: Sequence[str]) -> None:
    made = target.with_name(f"{os.getpid()}-{target.name}")
    subprocess.run(["g++", *_FLAGS, *arguments, "-o", str(made)], check=True)
    made.rename(target)


def run(
    library: ctypes.CDLL,
    driver: str,
    memory: Mapping[str, Memory | Tensor | None],
    numbers: Sequence[int] = (),
    floats: Sequence[float] = (),
    *,
    case: str = "",
    seed: int = 0,
    left_out: CallSite | None = None,
) -> Outcome:
    """Run one schedule of a driver's kernels, in which a call may be left out."""
    given = {name: Memory(each) if isinstance(each, Tensor) else each for name, each in memory.items()}
    library.fibers_reset(ctypes.c_uint64(seed))
    for name, each in given.items():
        if each is None:
            continue
        tensor, is_written, is_constant = each
        library.fibers_tensor(
            name.encode(), ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), tensor.itemsize,
            is_constant, is_written,
        )  # fmt: skip
    if left_out is not None:
        library.fibers_skip(left_out.order.value, left_out.place.encode())
    pointers = (ctypes.c_void_p * max(len(given), 1))(
        *(each.tensor.data_ptr() if each else None for each in given.values())
    )
    integers = (ctypes.c_int64 * max(len(numbers), 1))(*numbers)  # these three are read until the end
    reals = (ctypes.c_float * max(len(floats), 1))(*floats)
    getattr(library, driver)(case.encode(), pointers, integers, reals)
    library.fibers_run()
    sites = [line.split() for line in _lines(library.fibers_sites)]
    return Outcome(list(_lines(library.fibers_faults)), [CallSite(Order(int(order)), place) for order, place in sites])


def _lines(function: object) -> Iterator[str]:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    function(text, _TEXT_BYTES)  # type: ignore[operator]
    yield from text.value.decode().splitlines()
