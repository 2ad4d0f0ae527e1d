"""What all tests share: where and when they run, and Triton's interpreter where there is no GPU."""

import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # must stand before the first import of triton

# a shell that starts the tests in the background lets them, and what they start, ignore Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: threads that wait for one another spin
os.environ.pop("COLUMNS", None)  # readline, which pytest imports, leaves 80 to the processes that it starts

# what one run or worker measures must not decide about another one; the folder of one that was killed is removed
_PREFIX = "graphdecode-choices-"
for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
    process = left.name.removeprefix(_PREFIX).partition("-")[0]
    if sys.platform == "linux" and process.isdecimal() and not Path("/proc", process).exists():
        shutil.rmtree(left, ignore_errors=True)
CHOICES = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-")
os.environ["GRAPHDECODE_CACHE_DIR"] = CHOICES.name
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not IS_WORKER:
    os.environ["GRAPHDECODE_TEST_RUN"] = CHOICES.name  # its workers meet there

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# beside other load an example may take any time
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# threads that wait for one another on busy cores take milliseconds for microseconds of work
torch.set_num_threads(1)


_KERNELS = Path(CHOICES.name, "native")
_UNFINISHED = shutil.ignore_patterns("lock", "making-*")
_MAX_KEPT = 40  # libraries: one for each part, element type and instruction set, of a few states of the sources


def pytest_configure(config: pytest.Config) -> None:
    """Begin with the kernels that earlier runs compiled: their names are digests of all that they are made of.

    Those that are missing are compiled once for all workers.
    """
    cache = None if IS_WORKER else getattr(config, "cache", None)
    if IS_WORKER and (made := Path(os.environ["GRAPHDECODE_TEST_RUN"], "native")).is_dir():
        shutil.copytree(made, _KERNELS, ignore=_UNFINISHED)
    if cache:
        kept = cache.mkdir("native")
        kept.chmod(0o700)
        shutil.copytree(kept, _KERNELS, dirs_exist_ok=True)
    if config.getoption("numprocesses", None):
        from graphdecode.kernels.native.library import library

        for element in (torch.float16, torch.bfloat16, torch.float32):
            library(element)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Keep what this run compiled, and the newest of earlier runs."""
    if not IS_WORKER and (cache := getattr(config, "cache", None)) and _KERNELS.is_dir():
        kept = cache.mkdir("native")
        shutil.copytree(_KERNELS, kept, ignore=_UNFINISHED, dirs_exist_ok=True)
        for old in sorted(kept.glob("*.so"), key=lambda file: file.stat().st_mtime)[:-_MAX_KEPT]:
            old.unlink()
            old.with_name(f"{old.name}.digest").unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that no worker is left alone with one; skip what needs a GPU."""
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)
    if not HAS_CUDA:
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):  # the keyword may be a folder's name
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test marked `alone` run while no other worker runs any; what it waits does not count as its time."""
    if not IS_WORKER:
        return (yield)
    import fcntl  # of POSIX; elsewhere the tests run without workers

    run = Path(os.environ["GRAPHDECODE_TEST_RUN"])
    with (run / "door").open("w") as door, (run / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)  # whoever waits for an empty room keeps the others from going in
        fcntl.flock(room, fcntl.LOCK_EX if "alone" in item.keywords else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # closing would not do while a process that was forked lives on


@pytest.fixture
def device() -> str:
    """The device that the operators run on here."""
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture
def of_whatever_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a GPU take a WHILE node, be it slower here than single launches."""
    from graphdecode.graphs import cuda_loop

    monkeypatch.setattr(cuda_loop.CudaLoops, "must_be_faster", lambda *_: None)


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """Let a test set torch's threads for itself alone."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tl.dot` of the interpreter widen bfloat16, which it keeps as 16-bit integers."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = (handle.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return TensorHandle(wide, tl.float32)

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
        return original(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def strict_launches(request: pytest.FixtureRequest, bfloat16_products: None) -> Iterator[object]:
    """Let the interpreter check addresses, and run programs in an order that follows from the test's name."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield None
        return
    from interpreted_launches import strict

    with strict(zlib.crc32(request.node.nodeid.encode())) as strictly:
        yield strictly
